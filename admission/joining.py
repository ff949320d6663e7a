"""The bank's core: siblings and verdicts joined into groups; a group is whole the moment its last sibling is judged.

A pure function of the leases and of the order of EPISODES: no clock, no randomness. Folding the same items again gives the same
groups in the same order, so a restart is a fold, and two banks can only write the same bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import msgspec

from schemas.group import LOST_EPISODE, LOST_VERDICT, IncarnationSpan, ReadyGroup, Sibling
from schemas.lease import GroupLease
from schemas.termination import Termination
from schemas.trajectory import Episode, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFact:
    """What the bank keeps of one sealed episode.

    Where it is lost (`readable` false), nothing else is known: its bytes are no episode of this slot, or it is missing from the
    log, which sequence 0 says.
    """

    group: str
    slot: int
    seq: int
    digest: str
    readable: bool = True
    finite: bool = True
    termination: Termination = Termination.INFRA_ABORT
    oldest_version: int = -1
    newest_version: int = -1
    incarnation: int = 0  # the oldest
    incarnations: tuple[IncarnationSpan, ...] | msgspec.UnsetType = msgspec.UNSET
    sampled_tokens: int = 0
    total_tokens: int = 0
    turns: int = 0
    manifest: str = ""
    task_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictFact:
    """What the bank keeps of one verdict. It is lost in the same ways as an episode."""

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
        incarnations=_incarnations(episode),
        sampled_tokens=sampled_tokens,
        total_tokens=episode.ids.shape[0] if episode.ids.shape else 0,
        turns=episode.turns,
        manifest=episode.manifest,
        task_id=episode.task_id,
        readable=(episode.group, episode.slot) == (group, slot),
    )


def _incarnations(episode: Episode) -> tuple[IncarnationSpan, ...] | msgspec.UnsetType:
    """The newest version of each incarnation, where the episode has tokens of several."""
    newest: dict[int, int] = {}
    for span in episode.versions:
        newest[span.incarnation] = max(newest.get(span.incarnation, -1), span.version)
    return tuple(IncarnationSpan(*item) for item in sorted(newest.items())) if len(newest) > 1 else msgspec.UNSET


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
        readable=(verdict.group, verdict.slot) == (group, slot),
    )


@dataclass(slots=True)
class _Open:
    lease: GroupLease
    lease_seq: int = 0
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
    has), `orphans` (facts of groups that nobody leased), `mismatched` (verdicts on other bytes than the sealed episode's),
    `lost_items` (episodes and verdicts that are damaged or missing).
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

    def lost(self, leases_done: int, episodes_done: int) -> list[EpisodeFact | VerdictFact]:
        """What is missing of the open groups though it was written: of every lease up to TASKS sequence `leases_done` all
        episodes were sealed, of every episode up to EPISODES sequence `episodes_done` the verdict was given.
        """
        facts: list[EpisodeFact | VerdictFact] = []
        for name, group in self._open.items():
            for slot in range(group.lease.group_size):
                episode = group.episodes.get(slot)
                if episode is None and 0 < group.lease_seq <= leases_done:
                    facts.append(EpisodeFact(group=name, slot=slot, seq=0, digest="", readable=False))
                elif episode is not None and slot not in group.verdicts and 0 < episode.seq <= episodes_done:
                    facts.append(VerdictFact(group=name, slot=slot, seq=0, digest="", readable=False))
        return facts

    def lease(self, lease: GroupLease, seq: int = 0) -> None:
        """A group was leased, at sequence `seq` of TASKS. A repeat changes nothing."""
        if self.knows(lease.group):
            self.counters["duplicates"] += lease.group in self._open
            return
        self._open[lease.group] = _Open(lease, seq)

    def episode(self, fact: EpisodeFact) -> ReadyGroup | None:
        """An episode was sealed. Gives the group if that made it whole."""
        group = self._at(fact.group, fact.slot)
        if group is None:
            return None
        if fact.slot in group.episodes:
            self.counters["duplicates"] += 1
            return None
        if fact.readable and fact.task_id != group.lease.task_id:  # of another lease of this name
            fact = replace(fact, readable=False)
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
        whole = episode.readable and judged.readable
        trusted = whole and judged.episode_digest == episode.digest
        lost = LOST_EPISODE if not episode.readable else LOST_VERDICT
        self.counters["mismatched"] += whole and not trusted
        self.counters["lost_items"] += not whole
        return Sibling(
            slot=episode.slot,
            episode_seq=episode.seq,
            episode_digest=episode.digest,
            verdict_seq=judged.seq,
            verdict_digest=judged.digest,
            termination=episode.termination,
            status=(judged.status if trusted else "verifier_error") if whole else lost,
            reward=judged.reward if trusted else None,
            success=judged.success if trusted else None,
            oldest_version=episode.oldest_version,
            newest_version=episode.newest_version,
            incarnation=episode.incarnation,
            incarnations=episode.incarnations,
            sampled_tokens=episode.sampled_tokens,
            total_tokens=episode.total_tokens,
            turns=episode.turns,
            manifest=episode.manifest,
            finite=episode.finite and episode.readable,
        )
