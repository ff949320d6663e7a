"""How far each log is known to reach: heartbeats say what their services have stored or read, so a log that ends earlier was
cut short, even when everything was started anew meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.codec import CodecError, decode_any
from schemas.health import SEEN, Heartbeat
from schemas.permissions import visible_streams
from schemas.table import Stream, spec_of
from services.bus import Bus
from services.consume import read_events
from services.continuity import Hole
from services.pull import Damaged


def high_water(beats: Iterable[Heartbeat]) -> dict[Stream, int]:
    """The highest sequence of each log that a heartbeat tells of."""
    found: dict[Stream, int] = {}
    for beat in beats:
        for name, value in beat.counters.items():
            stream = name.removeprefix(SEEN)
            if name.startswith(SEEN) and stream in Stream.__members__:
                found[Stream(stream)] = max(found.get(Stream(stream), 0), int(value))
    return found


async def cut_short(bus: Bus) -> list[Hole]:
    """The logs of the table that end before what somebody has seen of them."""
    beats: list[Heartbeat] = []
    for event in await read_events(bus, Stream.REGISTRY, "reg.service.*.*"):
        if isinstance(event, (Damaged, Hole)):
            continue
        try:
            message = decode_any(event.data)
        except CodecError:
            continue
        if isinstance(message, Heartbeat):
            beats.append(message)
    holes = []
    for stream, seen in sorted(high_water(beats).items()):
        if stream in visible_streams(bus.role) and spec_of(stream).deny_delete:
            last = await bus.last_sequence(stream)
            if last < seen:
                holes.append(Hole(stream, last + 1, seen, "truncated"))
    return holes
