"""Recording a run's streams from its server into one file, as far as they reach at one moment.

Decisions are folds from the beginning, so TASKS, READY, LEDGER, TRAIN and POLICY are always recorded from sequence 1; a range
ends them, and cuts TURNS and EPISODES, which are most of the bytes, on both sides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from schemas.codec import CODEC_VERSION, CodecError, decode_any
from schemas.ledger import BatchEntry, QuarantineEntry
from schemas.message import SCHEMA_VERSION, Message
from schemas.table import Stream
from schemas.training import StepCommit
from services.bus import Bus
from services.consume import BATCH, events, read_all
from services.continuity import Hole, missing
from services.items import BusError, Item, StreamState
from services.pull import Damaged
from services.recording import RECORDED, Form, Manifest, Part, Record
from services.recording_items import items_of
from services.recording_writer import RecordingWriter

DECIDED_FROM = (Stream.TASKS, Stream.READY, Stream.LEDGER, Stream.TRAIN, Stream.POLICY)
_CAUSES_LAST = (  # ends are taken in this order, so that what an entry came from is never behind it
    Stream.LEDGER,
    Stream.READY,
    Stream.TRAIN,
    Stream.POLICY,
    Stream.EPISODES,
    Stream.TURNS,
    Stream.TASKS,
    Stream.DEAD,
)
Slim = Callable[[Item, Message], bytes | None]


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
class Recorded:
    """What was written."""

    path: Path
    records: Mapping[Stream, int]
    size_bytes: int
    seconds: float


async def record(
    bus: Bus, path: Path, *, asked: Range, slim: Slim | None, config: str, source: str, say: Callable[[str], None]
) -> Recorded:
    """Write the run's streams to `path`. `slim` gives what stands in the place of a body; `None` keeps all bodies.

    Raises `RecordingError` when the file cannot be written, and `RangeError` for a range that the run does not have.
    """
    begun = time.monotonic()
    states = {stream: await bus.stream_state(stream) for stream in _CAUSES_LAST}
    cut = await _cut(bus, asked, states)
    manifest = Manifest(
        run=bus.run,
        headrace=_version(),
        codec_version=CODEC_VERSION,
        schema_version=SCHEMA_VERSION,
        bodies=slim is None,
        made_ns=time.time_ns(),
        source=source,
        asked=str(asked),
        config=config,
        parts={str(stream): cut.part(stream, states[stream]) for stream in RECORDED},
    )
    counts: dict[Stream, int] = {}
    with RecordingWriter(path, manifest) as writer:
        for stream in RECORDED:
            before = writer.records
            await _stream(bus, writer, stream, cut, states[stream].last_seq, slim)
            counts[stream] = writer.records - before
            say(f"{stream}: {counts[stream]} messages")
    return Recorded(path, counts, path.stat().st_size, time.monotonic() - begun)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A range, worked out: first and last sequence and time of each stream, and the groups whose items are wanted."""

    seqs: Mapping[Stream, tuple[int, int]]
    since_ns: int
    until_ns: int
    groups: Collection[str] | None = None

    def part(self, stream: Stream, state: StreamState) -> Part:
        first, last = self.seqs.get(stream, (1, 0))
        last = min(last or state.last_seq, state.last_seq)
        narrowed = stream not in DECIDED_FROM and (self.since_ns or self.groups is not None or first > 1)
        holes = tuple((a, min(b, last)) for a, b in missing(state, first) if a <= last)
        return Part(first=first, last=last, whole=not narrowed, created=state.created, holes=holes)

    def wants(self, stream: Stream, item: Item) -> bool:
        if stream in DECIDED_FROM:
            return True
        group = item.subject.split(".")[3] if stream in (Stream.TURNS, Stream.EPISODES) else ""
        return item.time_ns >= self.since_ns and (self.groups is None or not group or group in self.groups)


async def _cut(bus: Bus, asked: Range, states: Mapping[Stream, StreamState]) -> _Cut:
    for stream, (first, last) in asked.seqs.items():
        if stream not in RECORDED:
            raise RangeError(f"--seq {stream}: is not recorded; use one of {', '.join(RECORDED)}")
        if first > 1 and stream in DECIDED_FROM:
            raise RangeError(
                f"--seq {stream}={first}-{last or ''}: decisions are folds, so {stream} begins at 1; give its end alone"
            )
        if first > max(1, states[stream].last_seq) or (last and last < first):
            raise RangeError(f"--seq {stream}={first}-{last or ''}: {stream} has sequences 1 to {states[stream].last_seq}")
    if asked.from_step is None and asked.to_step is None:
        return _Cut(asked.seqs, asked.since_ns, asked.until_ns)
    return await _steps(bus, asked)


async def _steps(bus: Bus, asked: Range) -> _Cut:
    """A range of steps: the ledger to the last one's batch, its commit, and the items of the groups decided in between."""
    ledger = [(item, decode_any(item.data)) for item in await read_all(bus, Stream.LEDGER)]
    commits = [(item, decode_any(item.data)) for item in await read_all(bus, Stream.TRAIN, "train.step.*")]
    batches = {entry.step: item.seq for item, entry in ledger if isinstance(entry, BatchEntry)}
    first, last = asked.from_step or 0, asked.to_step if asked.to_step is not None else max(batches, default=-1)
    if first not in batches or last not in batches or first > last:
        held = f"0 to {max(batches)}" if batches else "none"
        raise RangeError(f"steps {first} to {last}: the ledger has batches {held}")
    after, end = batches.get(first - 1, 0), batches[last]
    groups: set[str] = set()
    for item, entry in ledger:
        if after < item.seq <= end:
            groups.update([m.group for m in entry.groups] if isinstance(entry, BatchEntry) else [_group(entry)])
    times = [item.time_ns for item, commit in commits if isinstance(commit, StepCommit) and commit.step == last]
    until = max(times, default=next(item.time_ns for item, _ in ledger if item.seq == end))
    return _Cut({**asked.seqs, Stream.LEDGER: (1, end)}, asked.since_ns, asked.until_ns or until, groups)


def _group(entry: Message) -> str:
    return entry.group if isinstance(entry, QuarantineEntry) else str(getattr(entry, "group", ""))


async def _stream(bus: Bus, writer: RecordingWriter, stream: Stream, cut: _Cut, end: int, slim: Slim | None) -> None:
    first, last = cut.seqs.get(stream, (1, 0))
    last = min(last or end, end)
    if last < first:
        return
    found = events(bus, stream, start=first, stop=asyncio.Event(), live=False, batch=4 * BATCH)
    async with aclosing(found):
        async for event in found:
            if event is None or isinstance(event, Hole):
                continue
            item = event.item if isinstance(event, Damaged) else event
            if item.seq > last or (cut.until_ns and item.time_ns > cut.until_ns):
                return
            if cut.wants(stream, item):
                _add(writer, bus.subjects.prefix, stream, item, isinstance(event, Damaged), slim)
            if item.seq == last:
                return


def _add(writer: RecordingWriter, prefix: str, stream: Stream, item: Item, damaged: bool, slim: Slim | None) -> None:
    name = item.subject.removeprefix(prefix)
    message: Message | None = None
    if not damaged:
        try:
            message = decode_any(item.data)
        except CodecError:
            message = None  # kept whole, as it stands in the stream: a replay meets it as the services did
    slimmed = slim(item, message) if slim is not None and message is not None else None
    if damaged:
        record = Record(item.seq, item.time_ns, name, Form.DAMAGED, item.data)
    elif slimmed is not None:
        record = Record(item.seq, item.time_ns, name, Form.SLIM, slimmed, bytes.fromhex(item.digest))
    else:
        record = Record(item.seq, item.time_ns, name, Form.WHOLE, item.data)
    writer.add(stream, record, items_of(stream, name, message))


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "(not installed)"
