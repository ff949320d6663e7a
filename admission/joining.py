"""The bank's core: siblings and verdicts joined into groups; a group is whole the moment its last sibling is judged.

A pure function of the leases and of the order of EPISODES: no clock, no randomness. Folding the same items again gives the same
groups in the same order, so a restart is a fold, and two banks can only write the same bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from schemas.group import ReadyGroup, Sibling
from schemas.lease import GroupLease
from schemas.termination import Termination
from schemas.trajectory import Episode, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFact:
    """What the bank keeps of one sealed episode. If its bytes are no episode (`readable` false), nothing else is known."""

    group: str
    slot: int
    seq: int
    digest: str
    readable: bool = True
    finite: bool = True
    termination: Termination = Termination.INFRA_ABORT
    oldest_version: int = -1
    newest_version: int = -1
    incarnation: int = 0
    sampled_tokens: int = 0
    total_tokens: int = 0
    turns: int = 0
    manifest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictFact:
    """What the bank keeps of one verdict. An unreadable one counts as a verifier error, so that its group still ends."""

    group: str
    slot: int
    seq: int
    digest: str
    episode_digest: str = ""
    status: str = "verifier_error"
    reward: float | None = None
    success: bool | None = None
    readable: bool = True


def episode_fact(group: str, slot: int, seq: int, digest: str, episode: Episode) -> EpisodeFact:
    """The facts of a decoded episode; `finite` says whether ids, mask, log-probs and versions line up."""
    sampled_tokens = episode.sampled_tokens
    try:
        sampled_tokens = int(episode.checked().mask.numpy("mask").sum())
        finite = True
    except ValueError:
        finite = False
    return EpisodeFact(
        group=group,
        slot=slot,
        seq=seq,
        digest=digest,
        finite=finite,
        termination=episode.termination,
        oldest_version=episode.oldest_version(),
        newest_version=episode.newest_version(),
        incarnation=min((span.incarnation for span in episode.versions), default=0),
        sampled_tokens=sampled_tokens,
        total_tokens=episode.ids.shape[0] if episode.ids.shape else 0,
        turns=episode.turns,
        manifest=episode.manifest,
    )


def verdict_fact(group: str, slot: int, seq: int, digest: str, verdict: Verdict) -> VerdictFact:
    """The facts of a decoded verdict."""
    return VerdictFact(
        group=group,
        slot=slot,
        seq=seq,
        digest=digest,
        episode_digest=verdict.episode_digest,
        status=verdict.status,
        reward=verdict.reward,
        success=verdict.success,
    )


@dataclass(slots=True)
class _Open:
    lease: GroupLease
    episodes: dict[int, EpisodeFact] = field(default_factory=dict)
    verdicts: dict[int, VerdictFact] = field(default_factory=dict)

    def whole(self) -> bool:
        return all(self._judged(slot) for slot in range(self.lease.group_size))

    def _judged(self, slot: int) -> bool:
        episode = self.episodes.get(slot)
        return episode is not None and (slot in self.verdicts or not episode.readable)


class Bank:
    """Open groups only; of a closed group nothing is kept but its name.

    `counters`: `duplicates` (a slot told twice; harmless), `settled` (facts of closed groups), `strays` (slots that no lease
    has), `orphans` (facts of groups that nobody leased), `mismatched` (verdicts on other bytes than the sealed episode's).
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._closed: set[str] = set()
        self.counters: Counter[str] = Counter()

    def open_groups(self) -> tuple[str, ...]:
        """Leased groups that are not whole yet, oldest lease first."""
        return tuple(self._open)

    def is_open(self, group: str) -> bool:
        """Whether the group is leased and not whole yet."""
        return group in self._open

    def missing(self, group: str) -> str:
        """Who has not delivered for an open group: the rollouter's slots, else the verifier's."""
        found = self._open[group]
        running = [slot for slot in range(found.lease.group_size) if slot not in found.episodes]
        unjudged = [slot for slot in found.episodes if slot not in found.verdicts and found.episodes[slot].readable]
        if running:
            return f"rollouter, slots {running}"
        return f"verifier, slots {sorted(unjudged)}"

    def knows(self, group: str) -> bool:
        """Whether the group's lease has been folded, or its ready entry."""
        return group in self._open or group in self._closed

    def close(self, group: str) -> None:
        """READY holds this group already."""
        self._open.pop(group, None)
        self._closed.add(group)

    def lease(self, lease: GroupLease) -> None:
        """A group was leased. A repeat changes nothing."""
        if self.knows(lease.group):
            self.counters["duplicates"] += lease.group in self._open
            return
        self._open[lease.group] = _Open(lease)

    def episode(self, fact: EpisodeFact) -> ReadyGroup | None:
        """An episode was sealed. Gives the group if that made it whole."""
        group = self._at(fact.group, fact.slot)
        if group is None:
            return None
        if fact.slot in group.episodes:
            self.counters["duplicates"] += 1
            return None
        group.episodes[fact.slot] = fact
        return self._finished(group)

    def verdict(self, fact: VerdictFact) -> ReadyGroup | None:
        """A sealed episode was judged. Gives the group if that made it whole."""
        group = self._at(fact.group, fact.slot)
        if group is None:
            return None
        if fact.slot in group.verdicts:
            self.counters["duplicates"] += 1
            return None
        group.verdicts[fact.slot] = fact
        return self._finished(group)

    def _at(self, group: str, slot: int) -> _Open | None:
        found = self._open.get(group)
        if found is None:
            self.counters["settled" if group in self._closed else "orphans"] += 1
        elif not 0 <= slot < found.lease.group_size:
            self.counters["strays"] += 1
            return None
        return found

    def _finished(self, group: _Open) -> ReadyGroup | None:
        if not group.whole():
            return None
        self.close(group.lease.group)
        lease = group.lease
        siblings = tuple(self._sibling(group.episodes[slot], group.verdicts.get(slot)) for slot in range(lease.group_size))
        return ReadyGroup(
            run=lease.run,
            group=lease.group,
            ordinal=lease.ordinal,
            purpose=lease.purpose,
            task_id=lease.task_id,
            family=lease.family,
            template=lease.template,
            split=lease.split,
            manifest=lease.manifest,
            group_size=lease.group_size,
            siblings=siblings,
            eval_point=lease.eval_point,
        )

    def _sibling(self, episode: EpisodeFact, verdict: VerdictFact | None) -> Sibling:
        judged = verdict or VerdictFact(group=episode.group, slot=episode.slot, seq=0, digest="")
        trusted = episode.readable and judged.readable and judged.episode_digest == episode.digest
        self.counters["mismatched"] += verdict is not None and not trusted
        return Sibling(
            slot=episode.slot,
            episode_seq=episode.seq,
            episode_digest=episode.digest,
            verdict_seq=judged.seq,
            verdict_digest=judged.digest,
            termination=episode.termination,
            status=judged.status if trusted else "verifier_error",
            reward=judged.reward if trusted else None,
            success=judged.success if trusted else None,
            oldest_version=episode.oldest_version,
            newest_version=episode.newest_version,
            incarnation=episode.incarnation,
            sampled_tokens=episode.sampled_tokens,
            total_tokens=episode.total_tokens,
            turns=episode.turns,
            manifest=episode.manifest,
            finite=episode.finite and episode.readable,
        )
