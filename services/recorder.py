"""Recording a run's streams from its server into one file, as far as they reach at one moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from schemas.codec import CODEC_VERSION, CodecError, decode_any
from schemas.message import SCHEMA_VERSION, Message
from schemas.table import Stream
from services.bus import Bus
from services.consume import BATCH, events
from services.continuity import Hole
from services.items import Item
from services.pull import Damaged
from services.recorded_range import Cut, Range, cut_of
from services.recording import RECORDED, Form, Manifest, Record
from services.recording_items import items_of
from services.recording_writer import RecordingWriter

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
    cut = await cut_of(bus, asked, states)
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


async def _stream(bus: Bus, writer: RecordingWriter, stream: Stream, cut: Cut, end: int, slim: Slim | None) -> None:
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
            if item.seq > last or cut.ends_before(stream, item):
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
