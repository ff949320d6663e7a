"""Does a recording give its own decisions again? The bank's joining over EPISODES against READY, the gates over READY against
LEDGER: the same pure code as in the services, in virtual time, compared bit for bit.

What timing decided and no log says is taken from the record: that a group was given up for an item that is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from admission import recorded
from admission.gates import GateSettings
from admission.joining import Bank, EpisodeFact, VerdictFact
from admission.losses import Evidence
from admission.replay import Difference, replay
from schemas.codec import encode
from schemas.group import LOST, LOST_EPISODE, ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import LedgerEntry
from schemas.message import Message
from schemas.table import Stream
from services.recording_reader import RecordingReader


@dataclass(frozen=True, slots=True)
class BankDifference:
    """The first ready entry that the bank does not give again."""

    seq: int
    recorded: ReadyGroup
    replayed: ReadyGroup | None
    why: str
    inputs: tuple[EpisodeFact | VerdictFact, ...]


@dataclass(frozen=True, slots=True)
class BankCheck:
    """`unchecked`: groups of which the recording does not hold every item."""

    groups: int
    unchecked: int
    difference: BankDifference | None


@dataclass(frozen=True, slots=True)
class AdmissionCheck:
    """`inputs`: what the entry that differs was decided from."""

    entries: int
    settings: tuple[GateSettings, ...]
    unknown_settings: tuple[str, ...]
    difference: Difference | None
    inputs: tuple[tuple[str, Message], ...] = ()


def verify_bank(reader: RecordingReader) -> BankCheck:
    """Join the recorded episodes and verdicts again."""
    written = {group.group: (record.seq, group) for record, group in recorded.ready(reader)}
    part = reader.manifest.parts.get(str(Stream.EPISODES))
    whole = part is not None and part.whole
    out = _joined((lease for _, lease in recorded.leases(reader)), recorded.facts(reader), written)
    produced = {group.group: group for group in out}
    checked, unchecked = 0, 0
    at = 0  # READY sequence of the last group that came out, and must come in this order
    order = {name: place for place, name in enumerate(produced)}
    for name, (seq, group) in written.items():
        again = produced.get(name)
        if again is None and not whole:
            unchecked += 1
            continue
        checked += 1
        if why := _unlike(group, again):
            return BankCheck(checked, unchecked, BankDifference(seq, group, again, why, _inputs(reader, name)))
        lost = any(sibling.status in LOST for sibling in group.siblings)
        if not lost and order[name] < at:
            why = "it became whole before the group that READY has before it"
            return BankCheck(checked, unchecked, BankDifference(seq, group, again, why, _inputs(reader, name)))
        at = order[name] if not lost else at
    return BankCheck(checked, unchecked, None)


def _joined(
    leases: Iterable[GroupLease], facts: Iterable[EpisodeFact | VerdictFact], written: dict[str, tuple[int, ReadyGroup]]
) -> Iterator[ReadyGroup]:
    """The bank's output: a lease always precedes its episodes, so all leases may come first."""
    bank = Bank()
    for lease in leases:
        bank.lease(lease)
    for fact in facts:
        group = bank.episode(fact) if isinstance(fact, EpisodeFact) else bank.verdict(fact)
        if group is not None:
            yield group
    for name in bank.open_groups():  # what is missing was given up at some time, which READY alone says
        for fact in _given_up(written[name][1]) if name in written else []:
            group = bank.episode(fact) if isinstance(fact, EpisodeFact) else bank.verdict(fact)
            if group is not None:
                yield group


def _given_up(group: ReadyGroup) -> Iterator[EpisodeFact | VerdictFact]:
    for s in group.siblings:
        if s.status == LOST_EPISODE and not s.episode_seq:
            yield EpisodeFact(group=group.group, slot=s.slot, seq=0, digest="", readable=False)
        elif s.status in LOST and s.episode_seq and not s.verdict_seq:
            yield VerdictFact(group=group.group, slot=s.slot, seq=0, digest="", readable=False)


def _unlike(recorded_group: ReadyGroup, again: ReadyGroup | None) -> str:
    if again is None:
        return "the replay does not see it become whole"
    if encode(again) == encode(recorded_group):
        return ""
    for field in again.__struct_fields__:
        before, after = getattr(recorded_group, field), getattr(again, field)
        if before != after and field != "siblings":
            return f"{field}: recorded {before!r}, replayed {after!r}"
    for old, new in zip(recorded_group.siblings, again.siblings, strict=False):
        for field in old.__struct_fields__:
            before, after = getattr(old, field), getattr(new, field)
            if before != after:
                return f"slot {old.slot}, {field}: recorded {before!r}, replayed {after!r}"
    return "equal fields, other bytes"


def _inputs(reader: RecordingReader, group: str) -> tuple[EpisodeFact | VerdictFact, ...]:
    found = [recorded.fact_of(r, reader.path) for _, r in reader.about([group], [Stream.EPISODES])]
    return tuple(fact for fact in found if fact is not None and fact.group == group)


def verify_admission(reader: RecordingReader) -> AdmissionCheck:
    """Decide every recorded entry of the ledger again. That items outside of the range were lost is taken on trust."""
    entries = recorded.ledger(reader)
    found = recorded.settings_of((entry for _, entry in entries), recorded.gates_of(recorded.run_config(reader)))
    has_losses = any(getattr(entry, "lost", None) for _, entry in entries)
    evidence = Evidence(
        families={lease.group: lease.family for _, lease in recorded.leases(reader) if lease.purpose == "train"},
        episodes={r.seq: r.digest for r in reader.records(Stream.EPISODES)} if has_losses else None,
    )
    ready = ((record.seq, group) for record, group in recorded.ready(reader))
    train = ((record.seq, message) for record, message in recorded.messages(reader, Stream.TRAIN))
    difference = replay(ready, train, entries, *found.known, evidence=evidence, background=recorded.background(reader))
    inputs = _decided_from(reader, difference) if difference is not None else ()
    return AdmissionCheck(len(entries), tuple(found.known), tuple(found.unknown), difference, inputs)


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
