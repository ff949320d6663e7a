"""Which part of a run to record: by sequence, time or step, worked out so that what is decided in it can be decided again.

Decisions are folds from the beginning, so TASKS, READY, LEDGER, TRAIN and POLICY begin at sequence 1. A range ends LEDGER
first; READY and TRAIN then reach at least as far as its last entry looked. TURNS and EPISODES, which are most of the bytes,
are cut on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from schemas.codec import CodecError, decode_any
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, LostItem, QuarantineEntry
from schemas.policy import FleetVersions
from schemas.table import Stream
from schemas.training import StepCommit
from services.bus import Bus
from services.consume import read_all
from services.continuity import missing
from services.items import BusError, Item, StreamState
from services.recording import RECORDED, Part

DECIDED_FROM = (Stream.TASKS, Stream.READY, Stream.LEDGER, Stream.TRAIN, Stream.POLICY)
Entries = list[tuple[Item, LedgerEntry]]


class RangeError(BusError):
    """A range that cannot be recorded; the text says what to give instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What to record; the default is everything. Times are of the server, steps are the trainer's.

    `seqs`: first and last sequence of single streams (last 0: to the end).
    """

    seqs: Mapping[Stream, tuple[int, int]] = field(default_factory=dict)
    since_ns: int = 0
    until_ns: int = 0
    from_step: int | None = None
    to_step: int | None = None

    def __str__(self) -> str:
        parts = [f"{stream}={first}-{last or ''}" for stream, (first, last) in self.seqs.items()]
        parts += [f"since {self.since_ns} ns"] if self.since_ns else []
        parts += [f"until {self.until_ns} ns"] if self.until_ns else []
        if self.from_step is not None or self.to_step is not None:
            parts.append(f"steps {self.from_step or 0} to {'the end' if self.to_step is None else self.to_step}")
        return ", ".join(parts) or "everything"


@dataclass(frozen=True, slots=True)
class Cut:
    """A range, worked out: first and last sequence of each stream, times, and of which groups the items are wanted.

    `needed`: sequences up to which a stream is wanted whatever the time, since decisions came from them.
    """

    seqs: Mapping[Stream, tuple[int, int]]
    since_ns: int = 0
    until_ns: int = 0
    needed: Mapping[Stream, int] = field(default_factory=dict)
    wanted: Callable[[str], bool] | None = None  # none: every group

    def part(self, stream: Stream, state: StreamState) -> Part:
        """What the recording will hold of a stream."""
        first, last = self.seqs.get(stream, (1, 0))
        last = min(last or state.last_seq, state.last_seq)
        narrowed = stream not in DECIDED_FROM and (self.since_ns or self.wanted is not None or first > 1)
        ended = self.until_ns or last < state.last_seq
        holes = tuple((a, min(b, last)) for a, b in missing(state, first) if a <= last)
        return Part(first=first, last=last, whole=not (narrowed or ended), created=state.created, holes=holes)

    def ends_before(self, stream: Stream, item: Item) -> bool:
        """Whether this item and all behind it are outside."""
        return bool(self.until_ns) and item.time_ns > self.until_ns and item.seq > self.needed.get(stream, 0)

    def wants(self, stream: Stream, item: Item) -> bool:
        """Whether an item within the sequences is inside."""
        if stream in DECIDED_FROM:
            return True
        if item.time_ns < self.since_ns:
            return False
        of_group = stream in (Stream.TURNS, Stream.EPISODES) and self.wanted is not None
        return not of_group or self.wanted is None or self.wanted(item.subject.split(".")[3])


async def cut_of(bus: Bus, asked: Range, states: Mapping[Stream, StreamState]) -> Cut:
    """Work a range out. Raises `RangeError` for one that the run does not have, or that could not be decided again."""
    for stream, (first, last) in asked.seqs.items():
        _check(stream, first, last, states)
    by_steps = asked.from_step is not None or asked.to_step is not None
    if not (asked.seqs or asked.until_ns or by_steps):
        return Cut({}, asked.since_ns)
    ledger: Entries = []
    for item in await read_all(bus, Stream.LEDGER):
        entry = decode_any(item.data)
        if isinstance(entry, BatchEntry | QuarantineEntry | AbandonEntry):
            ledger.append((item, entry))
    if by_steps:
        cut = await _steps(bus, asked, ledger)
    else:
        end = asked.seqs.get(Stream.LEDGER, (1, 0))[1]
        inside = [(i, e) for i, e in ledger if i.seq <= (end or i.seq) and i.time_ns <= (asked.until_ns or i.time_ns)]
        cut = Cut(asked.seqs, asked.since_ns, asked.until_ns, _needed(inside))
    for stream, (_, last) in asked.seqs.items():
        if last and last < cut.needed.get(stream, 0):
            raise RangeError(
                f"--seq {stream}=1-{last}: the ledger's entries were decided from {stream} up to {cut.needed[stream]}; give "
                f"{stream}=1-{cut.needed[stream]} or more, or end LEDGER earlier as well"
            )
    return cut


def _check(stream: Stream, first: int, last: int, states: Mapping[Stream, StreamState]) -> None:
    named = f"--seq {stream}={first}-{last or ''}"
    if stream not in RECORDED:
        raise RangeError(f"--seq {stream}: is not recorded; use one of {', '.join(RECORDED)}")
    if stream is Stream.TASKS:
        raise RangeError(f"{named}: leases are always recorded, as every decision needs them; leave it out")
    if first > 1 and stream in DECIDED_FROM:
        raise RangeError(f"{named}: decisions are folds, so {stream} begins at 1; give its end alone")
    if first > max(1, states[stream].last_seq) or (last and last < first):
        raise RangeError(f"{named}: {stream} has sequences 1 to {states[stream].last_seq}")


def _needed(ledger: Entries) -> dict[Stream, int]:
    """How far READY and TRAIN were looked at for these entries."""
    ready = [e.ready_high_water if isinstance(e, BatchEntry) else e.ready_seq for _, e in ledger]
    asked = [e.demand_seq for _, e in ledger if isinstance(e.demand_seq, int)]
    end = max((item.seq for item, _ in ledger), default=0)
    return {Stream.LEDGER: end, Stream.READY: max(ready, default=0), Stream.TRAIN: max(asked, default=0)}


async def _steps(bus: Bus, asked: Range, ledger: Entries) -> Cut:
    """A range of steps: the ledger to the last one's batch, its commit, and the items of the groups decided in between. Groups
    that lost an item are always inside, so that the loss can be seen."""
    batches = {entry.step: item.seq for item, entry in ledger if isinstance(entry, BatchEntry)}
    first, last = asked.from_step or 0, asked.to_step if asked.to_step is not None else max(batches, default=-1)
    if first not in batches or last not in batches or first > last:
        held = f"0 to {max(batches)}" if batches else "none"
        raise RangeError(f"steps {first} to {last}: the ledger has batches {held}; give --from-step and --to-step among them")
    before = {name for item, e in ledger if item.seq <= batches.get(first - 1, 0) for name in _groups(e)}
    lost = {e.group for _, e in ledger if isinstance(e, AbandonEntry) and isinstance(e.lost, LostItem)}
    if asked.to_step is None:
        return Cut(asked.seqs, asked.since_ns, asked.until_ns, {}, lambda group: group not in before or group in lost)
    taken_out = [i.seq for i, e in ledger if isinstance(e, AbandonEntry) and isinstance(e.step, int) and e.step <= last]
    end = max([batches[last], *taken_out])
    inside = [(item, e) for item, e in ledger if item.seq <= end]
    groups = {name for _, e in inside for name in _groups(e)} - before
    needed = _needed(inside)
    commits = [(i.seq, c) for i, c in await _decoded(bus, Stream.TRAIN, "train.step.*") if isinstance(c, StepCommit)]
    groups |= lost | {left.group for _, commit in commits if commit.step <= last for left in commit.left_out()}
    train = max([needed[Stream.TRAIN], *(seq for seq, commit in commits if commit.step == last)])
    fleet = [(i.seq, f) for i, f in await _decoded(bus, Stream.POLICY, "policy.active") if isinstance(f, FleetVersions)]
    served = min((seq for seq, versions in fleet if versions.oldest > last), default=0)
    ends = {Stream.LEDGER: end, Stream.READY: needed[Stream.READY], Stream.TRAIN: train, Stream.POLICY: served}
    seqs = {stream: (1, seq) for stream, seq in ends.items()} | dict(asked.seqs)
    return Cut(seqs, asked.since_ns, asked.until_ns, needed, groups.__contains__)


def _groups(entry: LedgerEntry) -> Collection[str]:
    return [member.group for member in entry.groups] if isinstance(entry, BatchEntry) else [entry.group]


async def _decoded(bus: Bus, stream: Stream, pattern: str) -> Iterable[tuple[Item, object]]:
    out = []
    for item in await read_all(bus, stream, pattern):
        try:
            out.append((item, decode_any(item.data)))
        except CodecError:
            continue  # readers of the run passed over it as well
    return out
