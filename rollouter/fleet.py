"""What this process knows of the serving engines: a thin watcher around the pure routing rules."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from rollouter.routing import choose
from schemas.codec import CodecError
from schemas.policy import EngineState
from schemas.table import Stream
from services.bus import Bus
from services.consume import fold
from services.health import Health, pause

log = structlog.get_logger()
STALE_S = 10.0
_TICK_S = 1.0
_GONE = ("starting", "failed")  # a generation given to such an engine has no future; `draining` ones still end


class NoEngine(Exception):
    """No engine served until the deadline."""


@dataclass
class _Known:
    state: EngineState
    written_ns: int = 0  # by the server's clock, the one that all announcements share
    beat_ns: int = 0
    seen: float = -math.inf  # monotonic, of the last heartbeat

    def silent_s(self) -> float:
        return time.monotonic() - self.seen

    def alive(self) -> bool:
        return self.state.phase not in _GONE and self.silent_s() <= STALE_S


class Fleet:
    """Engines by heartbeat, our exact counts of turns in flight, and who holds which conversation.

    Consumes: `reg.engine.*` (heartbeats) and `policy.engine.*` (confirmed changes, which come sooner). Waits for: an engine
    that serves, until the caller's deadline. On error: a silent or failed engine is reported once through `on_gone`.
    """

    def __init__(self, bus: Bus, health: Health, on_gone: Callable[[str, str], None]) -> None:
        self._bus = bus
        self._health = health
        self._on_gone = on_gone
        self._known: dict[str, _Known] = {}
        self._in_flight: dict[str, int] = {}
        self._sessions: dict[str, str] = {}
        self._alive: set[str] = set()
        self._changed = asyncio.Event()

    async def watch(self, stop: asyncio.Event) -> None:
        """Follow the engines until `stop`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(Stream.REGISTRY, "reg.engine.*", stop, beats=True))
            group.create_task(self._follow(Stream.POLICY, "policy.engine.*", stop, beats=False))
            group.create_task(self._tick(stop))

    async def engine_for(self, session: str, group: str, avoid: frozenset[str], timeout_s: float) -> str:
        """Choose an engine for one turn and count the turn as in flight there; `release` ends that. Raises `NoEngine`."""
        deadline = time.monotonic() + timeout_s
        choice = choose(self.serving(), group, self._sessions.get(session), avoid)
        if choice is None:
            at_deadline = "the slot is an infrastructure abort"
            with self._health.waiting("an engine that serves", self._describe(), timeout_s, at_deadline):
                while choice is None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise NoEngine(f"no engine served within {timeout_s:.0f} s; known: {self._describe()}")
                    await pause(self._changed, min(left, _TICK_S))
                    choice = choose(self.serving(), group, self._sessions.get(session), avoid)
        self._sessions[session] = choice.engine
        self._in_flight[choice.engine] = self._in_flight.get(choice.engine, 0) + 1
        self._health.count(f"route_{choice.reason}")
        return choice.engine

    def release(self, engine: str) -> None:
        """A turn on `engine` has ended, one way or the other."""
        self._in_flight[engine] -= 1

    def forget(self, session: str) -> None:
        """A conversation has ended."""
        self._sessions.pop(session, None)

    def serving(self) -> dict[str, int]:
        """Engines that serve now, with our turns in flight on each."""
        return {
            name: self._in_flight.get(name, 0)
            for name, known in self._known.items()
            if known.state.phase == "serving" and known.alive()
        }

    def observe(self, state: EngineState, written_ns: int, *, beat: bool, age_s: float = 0.0) -> None:
        """Take over one announcement, stored at `written_ns` and `age_s` old; older ones than the last change nothing."""
        known = self._known.setdefault(state.engine, _Known(state))
        if written_ns > known.written_ns:
            known.state, known.written_ns = state, written_ns
        if beat and written_ns > known.beat_ns:
            known.seen, known.beat_ns = time.monotonic() - age_s, written_ns
        self._report_gone()
        self._changed.set()
        self._changed.clear()

    async def _follow(self, stream: Stream, pattern: str, stop: asyncio.Event, *, beats: bool) -> None:
        """What was there before us is as old as the clocks say; what comes later is new, whatever the clocks say."""
        live = False
        async for item in fold(self._bus, stream, pattern, stop=stop, latest_per_subject=True):
            if item is None:
                live = True
                continue
            try:
                state = item.decode(EngineState)
            except CodecError as error:
                log.error("unreadable announcement", subject=item.subject, error=str(error))
                continue
            age_s = 0.0 if live else max(0.0, (time.time_ns() - item.time_ns) / 1e9)
            self.observe(state, item.time_ns, beat=beats, age_s=age_s)

    async def _tick(self, stop: asyncio.Event) -> None:
        while not await pause(stop, _TICK_S):
            self._report_gone()
            serving = self.serving()
            self._health.set("engines_serving", len(serving))
            self._health.set("turns_in_flight", sum(self._in_flight.values()))

    def _report_gone(self) -> None:
        for name, known in self._known.items():
            if known.alive():
                self._alive.add(name)
            elif name in self._alive:
                self._alive.remove(name)
                self._health.count("engines_gone")
                failed = known.state.phase in _GONE
                self._on_gone(name, f"it is {known.state.phase}" if failed else f"it is silent for {known.silent_s():.0f} s")

    def _describe(self) -> str:
        known = (f"{name} is {k.state.phase}, heard {k.silent_s():.0f} s ago" for name, k in sorted(self._known.items()))
        return "; ".join(known) or "no engine has announced itself"
