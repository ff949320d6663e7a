"""Taking a recording: which stored messages belong to it, and reading them from a run's logs into the file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from admission.outline import fact_of, has_body, outline, pack_fact
from schemas.codec import CodecError, decode_any
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, QuarantineEntry
from schemas.message import Message
from schemas.policy import ApplyOrder, EngineState, FleetVersions
from schemas.table import Stream
from schemas.trajectory import Episode, Verdict
from services.bus import Bus, Item
from services.consume import events, read_events
from services.continuity import Hole
from services.pull import Damaged
from services.recording import DAMAGED, HOLE, OUTLINE, WIRE, Record, RecordingError, StreamFacts, group_key
from services.recording_writer import RecordingWriter

RECORDED = (
    Stream.LEDGER,  # first, so that what it names has been written before the other logs are read
    Stream.TRAIN,
    Stream.READY,
    Stream.POLICY,
    Stream.DEAD,
    Stream.EPISODES,
    Stream.TURNS,
    Stream.TASKS,
)
_OF_GROUPS = ("turn", "episode", "verdict", "ready", "graded")
Span = tuple[int, int]  # both included
_AROUND_NS = 60 * 10**9  # of POLICY, whose items belong to no group, so much is taken before and after


@dataclass(frozen=True, kw_only=True)
class Range:
    """What somebody asked for; each part narrows nothing but adds: what any part takes in is recorded."""

    steps: Span | None = None
    times_ns: Span | None = None
    sequences: dict[Stream, Span] = field(default_factory=dict)

    def is_all(self) -> bool:
        return self.steps is None and self.times_ns is None and not self.sequences

    def words(self) -> str:
        """For the header."""
        parts = [f"steps {self.steps[0]} to {self.steps[1]}"] if self.steps else []
        parts += [f"times {self.times_ns[0]} to {self.times_ns[1]} ns"] if self.times_ns else []
        return ", ".join(parts + [f"{stream} {a} to {b}" for stream, (a, b) in self.sequences.items()])


@dataclass(frozen=True)
class Selection:
    """A range, made out: the groups that its ledger entries close, the steps, and whatever was stored in its window.

    Everything of a chosen group is recorded, also what was stored before the window, so that decisions can be repeated.
    """

    groups: frozenset[str] = frozenset()
    steps: frozenset[int] = frozenset()
    demands: frozenset[int] = frozenset()  # sequences of TRAIN that the ledger entries name
    window_ns: Span | None = None
    fleet_ns: Span | None = None  # for POLICY, whose items belong to no group
    sequences: dict[Stream, Span] = field(default_factory=dict)

    def takes(self, stream: Stream, seq: int, time_ns: int, groups: Iterable[str], steps: Iterable[int]) -> bool:
        """Whether an item is in it."""
        window = self.fleet_ns if stream is Stream.POLICY and self.fleet_ns else self.window_ns
        return (
            (window is not None and window[0] <= time_ns <= window[1])
            or (stream in self.sequences and self.sequences[stream][0] <= seq <= self.sequences[stream][1])
            or (stream is Stream.TRAIN and seq in self.demands)
            or any(group in self.groups for group in groups)
            or any(step in self.steps for step in steps)
        )


def found_by(name: str, message: Message | None) -> tuple[set[str], set[int]]:
    """The groups and steps that an item belongs to; `name` is its subject below `hr.<run>.`."""
    words = name.split(".")
    if words[0] in _OF_GROUPS:
        return {words[1]}, set()
    if words[0] == "ledger":
        if words[1] != "batch":
            return {words[2]}, set()
        return closed_by(message) if isinstance(message, BatchEntry) else set(), _number(words[2], 0)
    if isinstance(message, GroupLease):
        return {message.group}, set()
    if words[0] == "train" and words[1] != "eval":
        return set(), _number(words[2], 0)
    if words[0] == "policy" and words[1] in ("staged", "anchor"):
        return set(), _number(words[2], -1)
    if isinstance(message, ApplyOrder | EngineState):
        return set(), {message.version - 1}
    if isinstance(message, FleetVersions):
        return set(), {message.target - 1}
    return set(), set()


def _number(word: str, add: int) -> set[int]:
    head = word.partition("-")[0]
    return {int(head) + add} if head.isdecimal() else set()


async def make_out(bus: Bus, wanted: Range) -> Selection:
    """Read the ledger, and headers of what sequences are asked of. Raises `RecordingError` when the range holds nothing."""
    groups: set[str] = set()
    steps: set[int] = set(range(wanted.steps[0], wanted.steps[1] + 1)) if wanted.steps else set()
    times: list[int] = []
    entries: list[LedgerEntry] = []
    after_step = -1
    for event in await read_events(bus, Stream.LEDGER):
        entry = _message(event) if isinstance(event, Item) else None
        if not isinstance(event, Item) or not isinstance(entry, BatchEntry | QuarantineEntry | AbandonEntry):
            continue
        entries.append(entry)
        # what is turned away on the way to a batch belongs to its step
        at_step = entry.step if isinstance(entry, BatchEntry) else after_step + 1
        after_step = max(after_step, at_step) if isinstance(entry, BatchEntry) else after_step
        in_place = _in(wanted.sequences.get(Stream.LEDGER), event.seq)
        if in_place or _in(wanted.steps, at_step) or _in(wanted.times_ns, event.time_ns):
            groups |= closed_by(entry)
            times.append(event.time_ns)
    for stream, (first, last) in wanted.sequences.items():
        for event in await read_events(bus, stream, start=first, bodies=stream in (Stream.TASKS, Stream.POLICY)):
            if isinstance(event, Item) and event.seq <= last:
                own, of_steps = found_by(_name(bus, event), _message(event) if event.data else None)
                groups, steps = groups | own, steps | of_steps
                times.append(event.time_ns)
    if not times:
        raise RecordingError(f"{wanted.words()}: the run has nothing there; `headrace status` shows how far it is")
    demands: set[int] = set()
    for entry in entries:
        if groups & closed_by(entry):  # an entry is decided again only with all that it names
            groups |= closed_by(entry)
            steps |= {entry.step} if isinstance(entry, BatchEntry) else set()
            demands |= {entry.demand_seq} if isinstance(entry.demand_seq, int) else set()
    fleet = (min(times) - _AROUND_NS, max(times) + _AROUND_NS) if wanted.times_ns is None else wanted.times_ns
    return Selection(frozenset(groups), frozenset(steps), frozenset(demands), wanted.times_ns, fleet, wanted.sequences)


def closed_by(entry: LedgerEntry) -> set[str]:
    """The groups that an entry closes."""
    return {member.group for member in entry.groups} if isinstance(entry, BatchEntry) else {entry.group}


def _in(span: Span | None, value: int) -> bool:
    return span is not None and span[0] <= value <= span[1]


def _name(bus: Bus, item: Item) -> str:
    return item.subject.removeprefix(bus.subjects.prefix)


def _message(item: Item) -> Message | None:
    try:
        return decode_any(item.data)
    except CodecError:
        return None


class Taker:
    """Reads logs into a writer."""

    def __init__(self, bus: Bus, writer: RecordingWriter, *, bodies: bool, selection: Selection | None) -> None:
        self._bus = bus
        self._writer = writer
        self._bodies = bodies
        self._selection = selection

    async def take(self, stop: asyncio.Event, *, follow: bool) -> None:
        """Every log to its present end; with `follow` first along with the run until `stop`, then what came meanwhile.

        The end is read in the order of `RECORDED`, so that whatever an item names is in the file too. Raises `Rewound` when
        what was read no longer stands in a log.
        """
        if follow:
            async with asyncio.TaskGroup() as group:
                for stream in RECORDED:
                    group.create_task(self._stream(stream, stop, live=True))
        for stream in RECORDED:
            await self._stream(stream, asyncio.Event(), live=False)

    async def _stream(self, stream: Stream, stop: asyncio.Event, *, live: bool) -> None:
        facts = self._writer.streams.setdefault(stream, StreamFacts())
        facts.created = (await self._bus.stream_state(stream)).created
        async for event in events(self._bus, stream, start=facts.last_seq + 1, stop=stop, live=live, batch=1024):
            if isinstance(event, Hole):
                record = Record(event.first, 0, "", b"", event.last, HOLE, event.how.encode())
                self._writer.add(stream, record, set(), set())
                facts.last_seq = max(facts.last_seq, event.last)
            elif event is not None:
                self._item(stream, event, facts)

    def _item(self, stream: Stream, event: Item | Damaged, facts: StreamFacts) -> None:
        item = event.item if isinstance(event, Damaged) else event
        name = _name(self._bus, item)
        message = None if isinstance(event, Damaged) else _message(item)
        facts.last_seq = max(facts.last_seq, item.seq)
        groups, steps = found_by(name, message)
        if self._selection is not None and not self._selection.takes(stream, item.seq, item.time_ns, groups, steps):
            facts.whole = False
            return
        keys = {group_key(group) for group in groups}
        reason = event.reason if isinstance(event, Damaged) else "" if message is not None else "its bytes are no message"
        self._writer.add(stream, record_of(item, name, message, reason, bodies=self._bodies), keys, steps)


def record_of(item: Item, name: str, message: Message | None, reason: str, *, bodies: bool) -> Record:
    """How one item is recorded. A message that cannot be used keeps its bytes, and the reason."""
    at = (item.seq, item.time_ns, name, bytes.fromhex(item.digest), len(item.data))
    if message is None:
        return Record(*at, DAMAGED, item.data, reason.encode())
    if bodies or not has_body(message):
        return Record(*at, WIRE, item.data)
    fact = fact_of(name, item.seq, item.digest, message) if isinstance(message, Episode | Verdict) else None
    return Record(*at, OUTLINE, outline(message), b"" if fact is None else pack_fact(fact))
