"""Does a recording give its own decisions again? The bank's groups out of EPISODES, the ledger out of READY and the demands."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from admission.gates import GateSettings
from admission.joining import Bank, EpisodeFact, VerdictFact
from admission.losses import Evidence
from admission.recorded import facts, known_settings, ledger, messages, ready_groups
from admission.replay import Difference, first_field, replay
from schemas.codec import encode
from schemas.group import LOST, LOST_EPISODE, LOST_VERDICT, ReadyGroup, Sibling
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, LostItem, QuarantineEntry
from schemas.message import Message
from schemas.table import Stream
from services.recording import DAMAGED, HOLE, Recording


@dataclass(frozen=True, slots=True)
class BankDifference:
    """The first ready group that the bank does not make again, and the facts that it was made from."""

    seq: int
    group: str
    recorded: ReadyGroup
    replayed: ReadyGroup | None
    why: str


@dataclass
class Verified:
    """What was decided again. `skipped`: groups whose episodes or verdicts the recording lacks, which are taken as recorded."""

    groups: int = 0
    skipped: int = 0
    entries: int = 0
    batches: int = 0
    quarantined: int = 0
    abandoned: int = 0
    unfinished: int = 0  # whole groups that READY did not hold yet when it was recorded
    counters: dict[str, int] = field(default_factory=dict)
    difference: Difference | BankDifference | None = None

    @property
    def holds(self) -> bool:
        return self.difference is None


def verify(recording: Recording, *more: GateSettings) -> Verified:
    """Run bank and admission over a recording, in one pass; `more` are settings besides those that it names.

    Raises `RecordingError` when the file is damaged.
    """
    out = Verified()
    joined = _Joined(recording, out)
    train = [(record.seq, message) for record, message in messages(recording, Stream.TRAIN)]
    evidence = _evidence(recording, joined.leases)
    try:
        difference = replay(
            joined.groups(),
            train,
            _counted(recording, out),
            *known_settings(recording),
            *more,
            evidence=evidence,
        )
        if difference is None:
            for _ in joined.groups():  # what the ledger did not need
                pass
        out.difference = difference
    except _BankDiffers as found:
        out.difference = found.difference
    joined.finish()
    return out


class _BankDiffers(Exception):
    """Carries the difference through the replay that asked for the next group."""

    def __init__(self, difference: BankDifference) -> None:
        super().__init__(difference.why)
        self.difference = difference


def _counted(recording: Recording, out: Verified) -> Iterator[tuple[int, LedgerEntry]]:
    for record, entry in ledger(recording):
        yield record.seq, entry
        out.entries += 1
        out.batches += isinstance(entry, BatchEntry)
        out.quarantined += isinstance(entry, QuarantineEntry)
        out.abandoned += isinstance(entry, AbandonEntry)


def _evidence(recording: Recording, leases: list[tuple[int, GroupLease]]) -> Evidence:
    """EPISODES is indexed only where an entry closes a group because of an item of it."""
    families = {lease.group: lease.family for _, lease in leases if lease.purpose == "train"}
    named = {
        entry.lost.seq
        for _, entry in ledger(recording)
        if isinstance(entry, AbandonEntry) and isinstance(entry.lost, LostItem) and entry.lost.stream == Stream.EPISODES
    }
    if not named:
        return Evidence(families)
    stand = {record.seq: record.digest.hex() for record in recording.records(Stream.EPISODES) if record.seq in named}
    return Evidence(families, stand)


class _Joined:
    """READY as the bank makes it out of EPISODES, each entry held against the recorded one before it is given on."""

    def __init__(self, recording: Recording, out: Verified) -> None:
        self.leases = [
            (record.seq, message) for record, message in messages(recording, Stream.TASKS) if isinstance(message, GroupLease)
        ]
        self._out = out
        self._whole = recording.facts(Stream.READY)
        self._bank = Bank()
        for seq, lease in self.leases:
            self._bank.lease(lease, seq)
        self._facts = facts(recording)
        self._next = next(self._facts, None)
        self._made: dict[str, ReadyGroup] = {}
        self._episodes_whole = recording.facts(Stream.EPISODES).whole
        self._gone = _gone(recording)
        self._entries = ready_groups(recording)
        self._groups = self._over()

    def groups(self) -> Iterator[tuple[int, ReadyGroup]]:
        """Continues where it was left."""
        return self._groups

    def _over(self) -> Iterator[tuple[int, ReadyGroup]]:
        for record, recorded in self._entries:
            self._take(max(max(s.episode_seq, s.verdict_seq) for s in recorded.siblings) if recorded.siblings else 0)
            for fact in _missing(recorded):
                self._fold(fact)
            replayed = self._made.pop(recorded.group, None)
            if self._lost_since(recorded) or (replayed is None and not self._has_items(recorded.group)):
                self._bank.close(recorded.group)
                self._out.skipped += 1
            elif replayed is None or hashlib.sha256(encode(replayed)).digest() != record.digest:
                why = "the bank makes no group here" if replayed is None else _first_difference(recorded, replayed)
                raise _BankDiffers(BankDifference(record.seq, recorded.group, recorded, replayed, why))
            else:
                self._out.groups += 1
                if self._made and self._whole.whole and not self._whole.holes and not self._whole.damaged:
                    earlier = next(iter(self._made))
                    why = f"the bank makes {earlier} before it"
                    raise _BankDiffers(BankDifference(record.seq, recorded.group, recorded, replayed, why))
            yield record.seq, recorded

    def _has_items(self, group: str) -> bool:
        """Whether a group can be joined again: a range may lack the lease or the episodes of one that it does not close."""
        return self._bank.knows(group) and (self._episodes_whole or not self._bank.is_open(group))

    def _lost_since(self, group: ReadyGroup) -> bool:
        """Whether an item that the bank had read was damaged or missing when the recording was made."""
        trusted = [s.episode_seq for s in group.siblings if s.status != LOST_EPISODE]
        trusted += [s.verdict_seq for s in group.siblings if s.status not in LOST]
        return any(first <= seq <= last for first, last in self._gone for seq in trusted)

    def finish(self) -> None:
        """Fold what is left, and count."""
        self._take(1 << 63)
        self._out.unfinished = len(self._made)
        self._out.counters = {name: count for name, count in self._bank.counters.items() if count}

    def _take(self, up_to: int) -> None:
        while self._next is not None and self._next.seq <= up_to:
            self._fold(self._next)
            self._next = next(self._facts, None)

    def _fold(self, fact: EpisodeFact | VerdictFact) -> None:
        ready = self._bank.episode(fact) if isinstance(fact, EpisodeFact) else self._bank.verdict(fact)
        if ready is not None:
            self._made[ready.group] = ready


def _gone(recording: Recording) -> list[tuple[int, int]]:
    """Spans of EPISODES, both ends included, that are damaged or missing."""
    known = recording.facts(Stream.EPISODES)
    if not known.holes and not known.damaged:
        return []
    bad = (record for record in recording.records(Stream.EPISODES) if record.form in (DAMAGED, HOLE))
    return [(record.seq, record.size if record.form == HOLE else record.seq) for record in bad]


def _missing(group: ReadyGroup) -> Iterator[EpisodeFact | VerdictFact]:
    """What the bank knew to be missing: sequence 0 in the entry itself says so, since when it looked is nobody's decision."""
    for sibling in sorted(group.siblings, key=lambda s: s.slot):
        if sibling.status == LOST_EPISODE and not sibling.episode_seq:
            yield EpisodeFact(group=group.group, slot=sibling.slot, seq=0, digest="", readable=False)
        elif sibling.status == LOST_VERDICT and not sibling.verdict_seq:
            yield VerdictFact(group=group.group, slot=sibling.slot, seq=0, digest="", readable=False)


def _first_difference(recorded: ReadyGroup, replayed: ReadyGroup) -> str:
    for before, after in zip(recorded.siblings, replayed.siblings, strict=False):
        if before != after:
            return f"slot {before.slot}: {_first_of(before, after)}"
    return first_field(recorded, replayed)


def _first_of(before: Sibling, after: Sibling) -> str:
    for name in before.__struct_fields__:
        if getattr(before, name) != getattr(after, name):
            return f"{name}: recorded {getattr(before, name)!r}, replayed {getattr(after, name)!r}"
    return "other bytes"


def lines_of(found: Difference | BankDifference) -> list[str]:
    """The difference with its inputs, as a person reads it."""
    if isinstance(found, BankDifference):
        lines = [f"READY {found.seq}, {found.group}: {found.why}", "made from:"]
        return lines + [f"  {_of_sibling(s)}" for s in found.recorded.siblings]
    kind = type(found.recorded).__name__.removesuffix("Entry").lower()
    name = f"step {found.recorded.step}" if isinstance(found.recorded, BatchEntry) else found.recorded.group
    lines = [f"LEDGER {found.seq}, {kind} of {name}: {found.why}", f"recorded:  {_as_text(found.recorded)}"]
    lines.append(f"replayed:  {_as_text(found.replayed) if found.replayed is not None else 'nothing'}")
    lines.append("decided from:")
    if found.demand is not None:
        seq, demand = found.demand
        lines.append(f"  demand    TRAIN {seq}: step {demand.step}, version {demand.version}, {demand.groups} groups")
    if found.settings is not None:
        lines.append(f"  settings  {_as_text(found.settings)}")
    for seq, group in found.waiting:
        rewards = " ".join("-" if reward is None else f"{reward:g}" for reward in group.rewards())
        versions = f"versions {group.oldest_version()} to {group.newest_version()}"
        lines.append(f"  READY {seq:<6} {group.group}  {versions}  rewards {rewards}  {group.family}")
    return lines


def _of_sibling(s: Sibling) -> str:
    return (
        f"slot {s.slot}: EPISODES {s.episode_seq} and {s.verdict_seq}, {s.termination}, {s.status}, reward {s.reward},"
        f" versions {s.oldest_version} to {s.newest_version}, {s.sampled_tokens} tokens"
    )


def _as_text(value: Message | GateSettings | msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
