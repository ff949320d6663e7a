"""Does a recording give its own decisions again? The bank's joining over EPISODES against READY, the gates over READY against
LEDGER: the same pure code as in the services, in virtual time, compared bit for bit, in one pass over the recording.

What timing decided and no log says is taken from the record: that a group was given up for an item that is missing. What the
recording does not have, since the store lost it or the range left it out, is not checked, and counted apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from admission import recorded
from admission.gates import GateSettings
from admission.joining import Bank, EpisodeFact, VerdictFact
from admission.losses import Evidence
from admission.replay import Difference, Reach, Replay
from schemas.codec import encode
from schemas.group import LOST_EPISODE, LOST_VERDICT, ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, LedgerEntry, LostItem
from schemas.message import Message
from schemas.table import Stream
from services.recording import Form, Record
from services.recording_reader import RecordingReader

Fact = EpisodeFact | VerdictFact


@dataclass(frozen=True, slots=True)
class BankDifference:
    """The first ready entry that the bank does not give again."""

    seq: int
    recorded: ReadyGroup
    replayed: ReadyGroup | None
    why: str
    inputs: tuple[Fact, ...]


@dataclass
class BankCheck:
    """`groups`: joined again. Not checked are groups of which an item is `lost` or `outside` of the range. `unfinished`: whole,
    and not yet in READY when it was recorded."""

    groups: int = 0
    lost: int = 0
    outside: int = 0
    unfinished: int = 0
    difference: BankDifference | None = None


@dataclass(frozen=True, slots=True)
class AdmissionCheck:
    """`inputs`: what the entry that differs was decided from. `trusted`: LEDGER sequences that could not be decided from what
    is left, and why."""

    entries: int
    settings: tuple[GateSettings, ...]
    unknown_settings: tuple[str, ...]
    difference: Difference | None
    trusted: tuple[tuple[int, str], ...] = ()
    inputs: tuple[tuple[str, Message], ...] = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """Both checks. `gone`: what each log lacks, in words."""

    bank: BankCheck
    admission: AdmissionCheck
    gone: dict[str, str]

    @property
    def same(self) -> bool:
        return self.bank.difference is None and self.admission.difference is None

    @property
    def whole(self) -> bool:
        """Whether every decision could be checked."""
        return not (self.bank.lost or self.bank.outside or self.admission.trusted)


def verify(reader: RecordingReader) -> Verified:
    """Decide everything again. Raises `RecordingError` for a file that is damaged, or of which the ledger has a hole."""
    entries = recorded.ledger(reader)
    found = recorded.settings_of((entry for _, entry in entries), recorded.gates_of(recorded.run_config(reader)))
    leases = [lease for _, lease in recorded.leases(reader)]
    gone = {stream: recorded.Gone(reader, stream) for stream in (Stream.READY, Stream.TRAIN)}
    joined = _Joined(reader, leases, gone[Stream.READY])
    ready = joined.over()
    lost = [entry.lost for _, entry in entries if isinstance(entry, AbandonEntry) and isinstance(entry.lost, LostItem)]
    seqs = [item.seq for item in lost if item.stream == Stream.EPISODES]
    evidence = Evidence(
        families={lease.group: lease.family for lease in leases if lease.purpose == "train"},
        episodes={r.seq: r.digest for r in reader.at(Stream.EPISODES, seqs)},
    )
    train = [(record.seq, message) for record, message in recorded.messages(reader, Stream.TRAIN)]
    reach = Reach(gone[Stream.READY], gone[Stream.TRAIN], lambda group, item: _outside(reader, group, item))
    again = Replay(ready, recorded.ReadyLog(reader), train, entries, found.known, evidence, reach)
    difference = again.run()
    for _ in ready:  # what the ledger did not need
        pass
    joined.finish()
    inputs = _decided_from(reader, difference) if difference is not None else ()
    admitted = AdmissionCheck(len(entries), tuple(found.known), tuple(found.unknown), difference, tuple(again.trusted), inputs)
    return Verified(joined.check, admitted, {str(stream): str(runs) for stream, runs in gone.items() if runs.runs})


class _Joined:
    """READY as the bank makes it out of EPISODES, each entry held against the recorded one before it is given on."""

    def __init__(self, reader: RecordingReader, leases: list[GroupLease], gone: recorded.Gone) -> None:
        self.check = BankCheck()
        self._reader = reader
        self._in_order = not gone.runs  # what READY has lost is written anew, behind what came later
        part = reader.manifest.parts.get(str(Stream.EPISODES))
        self._all_episodes = part is not None and part.whole
        self._leased, self._tasks_gone = {lease.group for lease in leases}, recorded.Gone(reader, Stream.TASKS)
        self._cut_off = recorded.lost_ranges(reader, Stream.EPISODES)
        self._bank = Bank()
        for lease in leases:  # a lease always precedes its episodes, so all leases may come first
            self._bank.lease(lease)
        self._facts = recorded.facts(reader)
        self._next: Fact | None = next(self._facts, None)
        self._items: dict[str, set[tuple[int, str]]] = {}  # what is recorded of groups that READY has not come to
        self._made: dict[str, ReadyGroup] = {}

    def over(self) -> Iterator[tuple[int, ReadyGroup]]:
        """READY as recorded. The first difference is kept, and nothing is joined after it."""
        for record, group in recorded.ready(self._reader):
            if self.check.difference is None:
                self._hold_against(record, group)
            yield record.seq, group

    def finish(self) -> None:
        """Fold what is left, and count."""
        if self.check.difference is None:
            self._take(1 << 62)
            self.check.unfinished = len(self._made)

    def _hold_against(self, record: Record, group: ReadyGroup) -> None:
        named = {(s.episode_seq, s.episode_digest) for s in group.siblings if s.episode_seq}
        named |= {(s.verdict_seq, s.verdict_digest) for s in group.siblings if s.verdict_seq}
        self._take(max((seq for seq, _ in named), default=0))
        for fact in _given_up(group):
            self._fold(fact)
        again = self._made.pop(group.group, None)
        items = self._items.pop(group.group, set())
        if again is not None and encode(again) == record.data:
            self.check.groups += 1
            if self._made and self._in_order:
                earlier = next(iter(self._made))
                self._differs(record, group, again, f"{earlier} became whole before it")
            return
        self._bank.close(group.group)
        if self._lease_is_gone(group.group) or self._are_gone(named - items):
            self.check.lost += 1
        elif named - items and not self._all_episodes:
            self.check.outside += 1
        else:
            self._differs(record, group, again, _unlike(group, again))

    def _lease_is_gone(self, group: str) -> bool:
        return group not in self._leased and bool(self._tasks_gone.runs)

    def _are_gone(self, items: set[tuple[int, str]]) -> bool:
        """Whether the store has lost every one of these items; a range that left them out has not."""
        seqs = [seq for seq, _ in items]
        if not self._all_episodes or not seqs:
            return False
        stand = [r.seq for r in self._reader.at(Stream.EPISODES, seqs) if r.form != Form.DAMAGED]
        return all(any(first <= seq <= last for first, last in self._cut_off) for seq in stand)

    def _differs(self, record: Record, group: ReadyGroup, again: ReadyGroup | None, why: str) -> None:
        self.check.difference = BankDifference(record.seq, group, again, why, _inputs(self._reader, group.group))

    def _take(self, up_to: int) -> None:
        while self._next is not None and self._next.seq <= up_to:
            fact = self._next
            if self._bank.is_open(fact.group):
                self._items.setdefault(fact.group, set()).add((fact.seq, fact.digest))
            self._fold(fact)
            self._next = next(self._facts, None)

    def _fold(self, fact: Fact) -> None:
        whole = self._bank.episode(fact) if isinstance(fact, EpisodeFact) else self._bank.verdict(fact)
        if whole is not None:
            self._made[whole.group] = whole


def _given_up(group: ReadyGroup) -> Iterator[Fact]:
    """What the bank knew to be missing: sequence 0 in the entry itself says so, since when it looked is nobody's decision."""
    for s in group.siblings_by_slot():
        if s.status == LOST_EPISODE and not s.episode_seq:
            yield EpisodeFact(group=group.group, slot=s.slot, seq=0, digest="", readable=False)
        elif s.status == LOST_VERDICT and not s.verdict_seq:
            yield VerdictFact(group=group.group, slot=s.slot, seq=0, digest="", readable=False)


def _outside(reader: RecordingReader, group: str, item: LostItem) -> bool:
    """Whether a range left out the place where a lost item would stand: all that is recorded of its group lies elsewhere."""
    part = reader.manifest.parts.get(str(Stream.EPISODES))
    if part is not None and part.whole:
        return False
    seqs = [fact.seq for fact in _inputs(reader, group)]
    return not seqs or not part or item.seq < part.first or item.seq > reader.last(Stream.EPISODES)


def _unlike(recorded_group: ReadyGroup, again: ReadyGroup | None) -> str:
    if again is None:
        return "the replay does not see it become whole"
    if why := _first_field(recorded_group, again, without="siblings"):
        return why
    for old, new in zip(recorded_group.siblings, again.siblings, strict=False):
        if why := _first_field(old, new):
            return f"slot {old.slot}, {why}"
    return "equal fields, other bytes"


def _first_field(old: msgspec.Struct, new: msgspec.Struct, without: str = "") -> str:
    for name in old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if before != after and name != without:
            return f"{name}: recorded {before!r}, replayed {after!r}"
    return ""


def _inputs(reader: RecordingReader, group: str) -> tuple[Fact, ...]:
    found = [recorded.fact_of(r, reader.path) for _, r in reader.about([group], [Stream.EPISODES])]
    return tuple(fact for fact in found if fact is not None and fact.group == group)


def _decided_from(reader: RecordingReader, difference: Difference) -> tuple[tuple[str, Message], ...]:
    """The demand and the ready entries of the groups that the recorded and the replayed entry name."""
    wanted: dict[str, int] = {}
    for entry in (difference.recorded, difference.replayed):
        wanted |= _named(entry) if entry is not None else {}
    out: list[tuple[str, Message]] = []
    demand_seq = difference.recorded.demand_seq
    for record, message in recorded.messages(reader, Stream.TRAIN):
        if record.seq == demand_seq:
            out.append((f"TRAIN {record.seq}", message))
    seen: set[int] = set()
    for _, record in reader.about(wanted, [Stream.READY]):
        message_found = recorded.message_of(record)
        if isinstance(message_found, ReadyGroup) and message_found.group in wanted and record.seq not in seen:
            seen.add(record.seq)
            out.append((f"READY {record.seq}", message_found))
    return tuple(out)


def _named(entry: LedgerEntry) -> dict[str, int]:
    members = getattr(entry, "groups", None)
    if members is not None:
        return {member.group: member.ready_seq for member in members}
    return {getattr(entry, "group", ""): getattr(entry, "ready_seq", 0)}
