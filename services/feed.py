"""Several logs followed at once, as one bounded sequence of arrivals for a service's loop. Damage arrives as data."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from schemas.table import Stream
from services.bus import Bus
from services.consume import events
from services.continuity import Hole
from services.items import Item
from services.pull import Damaged

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Source:
    """One log to follow: all of it, the subjects of some table patterns, or only the newest message of each subject."""

    stream: Stream
    patterns: tuple[str, ...] = ()
    latest_per_subject: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message of one log, or what is there in its place; neither when the log has just been read up to its present end."""

    stream: Stream
    item: Item | None
    damage: Damaged | Hole | None = None


class Feed:
    """Follows each source in its own order; says nothing of the order between two sources.

    At most `limit` arrivals wait for the reader; the followers stop pulling beyond it.
    """

    def __init__(self, bus: Bus, sources: Sequence[Source], *, limit: int = 512) -> None:
        self._bus = bus
        self._sources = tuple(sources)
        self._limit = limit
        self._arrived: deque[Arrival] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._behind = {source.stream for source in sources}

    @property
    def complete(self) -> bool:
        """True once every log was read up to the end that it had, so that a fold over them is a whole state."""
        return not self._behind

    def behind(self) -> str:
        """The logs that are not read up yet, by name."""
        return ", ".join(sorted(self._behind))

    async def run(self, stop: asyncio.Event) -> None:
        """Follow every source until `stop`. Raises `Rewound` when what was read no longer stands in a log."""
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(self._follow(source, stop), name=f"follow-{source.stream}")

    async def _follow(self, source: Source, stop: asyncio.Event) -> None:
        found = events(self._bus, source.stream, *source.patterns, stop=stop, latest_per_subject=source.latest_per_subject)
        async for event in found:
            while len(self._arrived) >= self._limit and not stop.is_set():
                self._room.clear()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._room.wait(), _POLL_S)
            damage = event if isinstance(event, (Damaged, Hole)) else None
            self._arrived.append(Arrival(source.stream, event if isinstance(event, Item) else None, damage))
            self._wake.set()

    async def take(self, timeout_s: float) -> list[Arrival]:
        """Everything that has arrived, at once if there is something; empty when nothing came within `timeout_s`."""
        if not self._arrived:
            self._wake.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), timeout_s)
        taken = list(self._arrived)
        self._arrived.clear()
        self._room.set()
        self._behind -= {arrival.stream for arrival in taken if arrival.item is None and arrival.damage is None}
        return taken
