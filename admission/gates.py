"""The gates: may this group update policy version `v`? The one place that decides staleness and eligibility.

Lag is (version about to be updated) - (oldest version among the group's sampled tokens), counted when the group is handed over,
so that time in queues counts. Each gate has a reason of its own, under which the ledger, the counters and the report count it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import msgspec

from schemas.group import LOST, LOST_EPISODE, ReadyGroup, Sibling
from schemas.ledger import AbandonReason, QuarantineReason
from schemas.lineage import on_line
from schemas.manifest import PolicyManifest, drift
from schemas.termination import UNPLAYED, Termination
from schemas.training import Branch


class GateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a decision depends on besides what stands in the logs.

    A setting that came later names in `_WITHOUT` the value under which everything is decided as before it: so a ledger that
    knew nothing of it keeps its hash, and is decided again under the same settings.
    """

    max_lag: int
    versions: Literal["mixed", "homogeneous"] = "mixed"
    zero_variance: Literal["keep", "skip", "count"] = "keep"
    min_rewards: int = 2
    manifest: str = (
        ""  # the behaviour manifest that every group must have; empty: each group must only agree with its own lease
    )
    max_span: int = 0  # newest - oldest version of one group; 0: no bound
    max_age_s: float = 0.0  # from the lease to the demand; what is older is taken first; 0: nothing is

    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 over the canonical encoding; stands in every ledger entry."""
        told = {name: value for name, value in msgspec.to_builtins(self).items() if _WITHOUT.get(name, _TOLD) != value}
        return hashlib.sha256(msgspec.msgpack.encode(told)).hexdigest()[:16]


_TOLD = object()
_WITHOUT: Mapping[str, object] = {"max_span": 0, "max_age_s": 0.0}


@dataclass(frozen=True, slots=True)
class Eligible:
    """The group may enter the batch. `flat`: every reward is the same, so it carries no signal."""

    lag: int
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A whole group that must not be trained on."""

    reason: QuarantineReason
    detail: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """A group that infrastructure kept from becoming a trainable one."""

    reason: AbandonReason
    detail: str


Decision = Eligible | Quarantine | Abandon


def lag_of(group: ReadyGroup, version: int) -> int:
    """Lag of a group that would update policy `version`; a group without sampled tokens counts from version -1."""
    return version - group.oldest_version()


def judge(
    group: ReadyGroup,
    version: int,
    branches: Sequence[Branch],
    settings: GateSettings,
    *,
    trained_under: PolicyManifest | None = None,
    known: Mapping[str, PolicyManifest] = MappingProxyType({}),
) -> Decision:
    """Decide one group for the batch that updates `version` of the line that `branches` lead to.

    The first gate that refuses gives the reason. `trained_under`: the trainer's manifest, where its demand says it; `known`:
    manifests by their hashes, so that a refusal can name what differs.
    """
    return (
        _lost(group)
        or _infrastructure(group)
        or _trust(group)
        or _alignment(group)
        or _manifest(group, settings, trained_under, known)
        or _branch(group, version, branches)
        or _freshness(group, version, settings)
        or _signal(group, settings)
        or Eligible(lag_of(group, version), flat=len(set(_rewards(group))) == 1)
    )


def _lost(group: ReadyGroup) -> Abandon | None:
    lost: list[str] = []
    for s in group.siblings:
        if s.status in LOST:
            what, seq = ("episode", s.episode_seq) if s.status == LOST_EPISODE else ("verdict", s.verdict_seq)
            why = f"at EPISODES {seq} cannot be used" if seq else "is missing from EPISODES"
            lost.append(f"slot {s.slot}: its {what} {why}")
    return Abandon(AbandonReason.LOST_ITEM, "; ".join(lost)) if lost else None


def _infrastructure(group: ReadyGroup) -> Abandon | None:
    lost = [f"slot {s.slot}: {s.termination}" for s in group.siblings if s.termination in UNPLAYED]
    poison = any(s.termination is Termination.POISON for s in group.siblings)
    return Abandon(AbandonReason.POISON if poison else AbandonReason.INFRA_ABORT, "; ".join(lost)) if lost else None


def _trust(group: ReadyGroup) -> Quarantine | None:
    for status, reason in (("tampered", QuarantineReason.TAMPERED), ("verifier_error", QuarantineReason.VERIFIER_ERROR)):
        if slots := [s.slot for s in group.siblings if s.status == status]:
            return Quarantine(reason, f"slots {slots}")
    return None


def _alignment(group: ReadyGroup) -> Quarantine | None:
    slots = sorted(s.slot for s in group.siblings)
    if slots != list(range(group.group_size)):
        return Quarantine(QuarantineReason.INCOMPLETE, f"slots {slots} of {group.group_size}")
    if not _sampled(group):
        return Quarantine(QuarantineReason.INCOMPLETE, "no sibling has a sampled token")
    if broken := [s.slot for s in group.siblings if not s.finite]:
        return Quarantine(QuarantineReason.LOGPROBS, f"slots {broken}: log-probabilities missing, not finite or not aligned")
    return None


def _manifest(
    group: ReadyGroup, settings: GateSettings, trained_under: PolicyManifest | None, known: Mapping[str, PolicyManifest]
) -> Quarantine | None:
    leased = known.get(group.manifest)
    other = [
        f"slot {s.slot}: {s.manifest}{drift(leased, known.get(s.manifest))}"
        for s in group.siblings
        if s.manifest != group.manifest
    ]
    if other:
        return Quarantine(QuarantineReason.MANIFEST, f"leased under {group.manifest}; {'; '.join(other)}")
    wanted = trained_under.hash() if trained_under is not None else settings.manifest
    if wanted and group.manifest != wanted:
        differs = drift(leased, trained_under or known.get(wanted))
        return Quarantine(
            QuarantineReason.MANIFEST, f"leased under {group.manifest}, the trainer works under {wanted}{differs}"
        )
    return None


def _branch(group: ReadyGroup, version: int, branches: Sequence[Branch]) -> Quarantine | None:
    """Tokens of a dead branch come from weights that are no ancestor of those to be updated, so no lag measures their age."""
    for sibling in _sampled(group):
        for name in sibling.names():
            if not on_line(branches, name.incarnation, name.newest_version):
                left = min(b.version for b in branches if b.incarnation > name.incarnation)
                detail = f"slot {sibling.slot}: version {name.newest_version} of incarnation {name.incarnation}, left at {left}"
                return Quarantine(QuarantineReason.DEAD_BRANCH, detail)
    if group.newest_version() > version:
        detail = f"sampled under version {group.newest_version()}, which the trainer at {version} has not made"
        return Quarantine(QuarantineReason.INCARNATION, detail)
    return None


def _freshness(group: ReadyGroup, version: int, settings: GateSettings) -> Quarantine | None:
    oldest, newest = group.oldest_version(), group.newest_version()
    if settings.versions == "homogeneous" and oldest != newest:
        return Quarantine(QuarantineReason.MIXED_VERSIONS, f"versions {oldest} to {newest}")
    if settings.max_span and newest - oldest > settings.max_span:
        span = f"versions {oldest} to {newest} span {newest - oldest}, more than {settings.max_span}"
        return Quarantine(QuarantineReason.VERSION_SPAN, span)
    if lag_of(group, version) > settings.max_lag:
        return Quarantine(QuarantineReason.STALE, f"lag {lag_of(group, version)} exceeds {settings.max_lag}")
    return None


def _signal(group: ReadyGroup, settings: GateSettings) -> Quarantine | None:
    rewards = _rewards(group)
    if len(rewards) < settings.min_rewards:
        return Quarantine(
            QuarantineReason.TOO_FEW_REWARDS, f"{len(rewards)} rewarded siblings of {settings.min_rewards} needed"
        )
    if settings.zero_variance == "skip" and len(set(rewards)) == 1:
        return Quarantine(QuarantineReason.ZERO_VARIANCE, f"every reward is {rewards[0]}")
    return None


def _rewards(group: ReadyGroup) -> list[float]:
    return [reward for reward in group.rewards() if reward is not None]


def _sampled(group: ReadyGroup) -> list[Sibling]:
    return [s for s in group.siblings if s.sampled_tokens]
