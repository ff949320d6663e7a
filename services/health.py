"""What a service says of itself: lifecycle, open waits with their culprits, counters, event-loop lag; as heartbeat,
log and HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import structlog
from aiohttp import web

from schemas.health import ALARM, SEEN, Heartbeat, Lifecycle, Wait
from services.bus import Bus

log = structlog.get_logger()
_LAG_PROBE_S = 0.1


class Health:
    """One service's state, published every few seconds on its registry subject."""

    def __init__(self, bus: Bus, period_s: float) -> None:
        self._bus = bus
        self._period_s = period_s
        self.phase: Lifecycle = "starting"
        self.counters: dict[str, float] = {}
        self.loop_lag_s = 0.0
        self._waits: dict[int, Wait] = {}
        self._next = 0
        self._started_ns = time.time_ns()

    def count(self, name: str, by: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    def set(self, name: str, value: float) -> None:
        self.counters[name] = value

    def enter(self, phase: Lifecycle) -> None:
        """Move the lifecycle on: starting, ready, draining, stopped."""
        self.phase = phase
        log.info(phase)

    @contextmanager
    def waiting(self, what: str, culprit: str, timeout_s: float, at_deadline: str) -> Iterator[None]:
        """Name a wait while it lasts: for what, for whom, until when, and what happens then (invariant 11)."""
        key, self._next = self._next, self._next + 1
        now = time.time_ns()
        self._waits[key] = Wait(
            what=what, culprit=culprit, since_ns=now, deadline_ns=now + int(timeout_s * 1e9), at_deadline=at_deadline
        )
        try:
            yield
        finally:
            del self._waits[key]

    def snapshot(self) -> Heartbeat:
        held = self._bus.holds.wait()
        waits = [*self._waits.values(), *([held] if held else [])]
        longest = sorted(waits, key=lambda wait: wait.since_ns)[:8]
        return Heartbeat(
            run=self._bus.run,
            service=str(self._bus.role),
            instance=self._bus.instance,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=self.phase,
            waits=tuple(longest),
            counters={**self.counters, **self._of_the_bus(), "waits": float(len(waits))},
            loop_lag_s=self.loop_lag_s,
            started_ns=self._started_ns,
            at_ns=time.time_ns(),
        )

    def _of_the_bus(self) -> dict[str, float]:
        """Alarms by kind, and how far this process knows each log to reach, so that a log that was cut short is noticed."""
        alarms = {f"{ALARM}{kind}": float(count) for kind, count in self._bus.alarms.items()}
        return alarms | {f"{SEEN}{stream}": float(seq) for stream, seq in self._bus.seen.items()}

    async def beat(self, stop: asyncio.Event) -> None:
        """Publish heartbeats until `stop`; a wait that has lasted ten seconds is logged with its culprit, once."""
        subject = self._bus.subjects.service_heartbeat(self._bus.role, self._bus.instance)
        named: set[int] = set()
        while not stop.is_set():
            for key, wait in list(self._waits.items()):
                if key not in named and time.time_ns() - wait.since_ns > 10e9:
                    named.add(key)
                    left = (wait.deadline_ns - time.time_ns()) / 1e9
                    log.info("waiting", what=wait.what, culprit=wait.culprit, deadline_in_s=round(left), then=wait.at_deadline)
            await self._bus.publish(subject, self.snapshot())
            await pause(stop, self._period_s)

    async def measure_lag(self, stop: asyncio.Event) -> None:
        """Largest delay of a short sleep since the last heartbeat: time that something blocked the event loop."""
        while not stop.is_set():
            worst, until = 0.0, time.monotonic() + self._period_s
            while time.monotonic() < until and not stop.is_set():
                begun = time.monotonic()
                await asyncio.sleep(_LAG_PROBE_S)
                worst = max(worst, time.monotonic() - begun - _LAG_PROBE_S)
            self.loop_lag_s = worst

    async def serve_http(self, port: int, stop: asyncio.Event) -> None:
        """`/healthz` (200 when ready, 503 otherwise) and `/status` (the heartbeat as JSON)."""

        async def healthz(_: web.Request) -> web.Response:
            return web.Response(text=self.phase, status=200 if self.phase == "ready" else 503)

        async def status(_: web.Request) -> web.Response:
            return web.Response(body=msgspec.json.encode(self.snapshot()), content_type="application/json")

        app = web.Application()
        app.router.add_get("/healthz", healthz)
        app.router.add_get("/status", status)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "0.0.0.0", port).start()
            await stop.wait()
        finally:
            await runner.cleanup()


async def pause(stop: asyncio.Event, seconds: float) -> bool:
    """Sleep that ends early when `stop` is raised; true if it was."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except asyncio.TimeoutError:
        return False
    return True
