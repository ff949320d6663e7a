"""What this process knows of the serving engines: a thin watcher around the pure routing rules."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from rollouter.routing import choose
from schemas.policy import EngineState
from schemas.table import Stream
from services.bus import Bus
from services.consume import fold
from services.health import Health, pause

STALE_S = 10.0
_TICK_S = 1.0
_GONE = ("starting", "failed")  # a generation given to such an engine has no future; `draining` ones still end


class NoEngine(Exception):
    """No engine served until the deadline."""


@dataclass
class _Known:
    state: EngineState
    seen: float  # monotonic, when its last heartbeat was written


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
        self._gone: set[str] = set()
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
        now = time.monotonic()
        return {
            name: self._in_flight.get(name, 0)
            for name, known in self._known.items()
            if known.state.phase == "serving" and now - known.seen <= STALE_S
        }

    def observe(self, state: EngineState, written_ns: int, *, beat: bool) -> None:
        """Take over one announcement; an older one than the last is ignored."""
        known = self._known.get(state.engine)
        seen = time.monotonic() - max(0.0, (time.time_ns() - written_ns) / 1e9)
        if known is None:
            self._known[state.engine] = _Known(state, seen if beat else 0.0)
        else:
            if state.at_ns >= known.state.at_ns:
                known.state = state
            if beat:
                known.seen = max(known.seen, seen)
        self._report_gone()
        self._changed.set()
        self._changed.clear()

    async def _follow(self, stream: Stream, pattern: str, stop: asyncio.Event, *, beats: bool) -> None:
        async for item in fold(self._bus, stream, pattern, stop=stop, latest_per_subject=True):
            if item is not None:
                self.observe(item.decode(EngineState), item.time_ns, beat=beats)

    async def _tick(self, stop: asyncio.Event) -> None:
        while not await pause(stop, _TICK_S):
            self._report_gone()
            serving = self.serving()
            self._health.set("engines_serving", len(serving))
            self._health.set("turns_in_flight", sum(self._in_flight.values()))

    def _report_gone(self) -> None:
        now = time.monotonic()
        for name, known in self._known.items():
            silent_s = now - known.seen
            reason = f"it is {known.state.phase}" if known.state.phase in _GONE else f"it is silent since {silent_s:.0f} s"
            gone = known.state.phase in _GONE or silent_s > STALE_S
            if gone and name not in self._gone:
                self._gone.add(name)
                self._health.count("engines_gone")
                self._on_gone(name, reason)
            elif not gone:
                self._gone.discard(name)

    def _describe(self) -> str:
        now = time.monotonic()
        known = (f"{name} is {k.state.phase}, heard {now - k.seen:.0f} s ago" for name, k in sorted(self._known.items()))
        return "; ".join(known) or "no engine has announced itself"
