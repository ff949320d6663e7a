"""Every closing decision, with the inputs that it was made from.

Producer: admission alone, each append fenced by the stream's expected last sequence. Consumers: trainer, sampler,
replay, audit.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from schemas.message import Message


class QuarantineReason(StrEnum):
    """Why a complete group will not be trained on. It stays readable in READY and EPISODES."""

    STALE = "stale"
    MIXED_VERSIONS = "mixed_versions"
    VERSION_SPAN = "version_span"
    MANIFEST = "manifest"
    LOGPROBS = "logprobs"
    TAMPERED = "tampered"
    VERIFIER_ERROR = "verifier_error"
    TOO_FEW_REWARDS = "too_few_rewards"
    ZERO_VARIANCE = "zero_variance"
    INCOMPLETE = "incomplete"
    INCARNATION = "incarnation"
    DEAD_BRANCH = "dead_branch"
    RUN_ENDED = "run_ended"


class AbandonReason(StrEnum):
    """Why a leased group never became a trainable one."""

    INFRA_ABORT = "infra_abort"
    POISON = "poison"
    LEASE_EXPIRED = "lease_expired"
    RUN_ENDED = "run_ended"
    LOST_ITEM = "lost_item"  # an episode, a verdict or the ready entry is damaged or missing; `detail` names it


class LostItem(msgspec.Struct, frozen=True, array_like=True):
    """The item that a group lost after it was written, or `ready.<group>` itself: what stands at this sequence is not it."""

    stream: str  # EPISODES or READY
    seq: int
    digest: str  # by which READY names it; empty for READY


class BatchGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a batch: where it stands in READY, and its lag at hand-over.

    The rest stands here only where a setting asks for it, so that entries made without keep their bytes.
    """

    group: str
    ready_seq: int
    oldest_version: int
    newest_version: int
    lag: int
    aged_ns: int | msgspec.UnsetType = msgspec.UNSET  # from its lease to the demand; set: taken before its turn for its age
    zero_variance: bool | msgspec.UnsetType = msgspec.UNSET  # set: every reward is the same, and that is to be counted


class BatchEntry(Message, frozen=True, kw_only=True, tag="batch"):
    """Batch `step`, once on `ledger.batch.<step>`: it updates policy `version` to `version + 1`."""

    run: str
    step: int
    version: int
    incarnation: int
    groups: tuple[BatchGroup, ...]
    ready_high_water: int  # last READY sequence that the decision looked at
    demand_seq: int  # TRAIN sequence of the demand that this answers
    settings_hash: str
    max_lag: int


class QuarantineEntry(Message, frozen=True, kw_only=True, tag="quarantine"):
    """Once on `ledger.quarantine.<group>`."""

    run: str
    group: str
    ready_seq: int
    reason: QuarantineReason
    detail: str
    at_version: int
    oldest_version: int
    lag: int
    family: str
    mean_reward: float | None
    sampled_tokens: int
    demand_seq: int
    settings_hash: str


class AbandonEntry(Message, frozen=True, kw_only=True, tag="abandon"):
    """Once on `ledger.abandon.<group>`."""

    run: str
    group: str
    ready_seq: int  # 0 when no READY entry exists
    reason: AbandonReason
    detail: str
    family: str
    settings_hash: str
    demand_seq: int | msgspec.UnsetType = msgspec.UNSET  # TRAIN sequence of the demand that met it; unset: closed beside any
    lost: LostItem | msgspec.UnsetType = msgspec.UNSET  # the evidence, where READY does not tell of the loss
    step: int | msgspec.UnsetType = (
        msgspec.UNSET
    )  # of the batch out of which it was lost, as the step's commit says; unset: none


LedgerEntry = BatchEntry | QuarantineEntry | AbandonEntry
