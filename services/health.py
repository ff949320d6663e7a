"""What a service says of itself: lifecycle, open waits with their culprits, counters, event-loop lag; as heartbeat,
log and HTTP. A server that is gone and a stream that is full are waits as well."""

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

from schemas.codec import encode
from schemas.health import ALARM, SEEN, Heartbeat, Lifecycle, Wait
from services.bus import Bus
from services.items import BusError
from services.outages import full_streams, room_in, server_names, utc

log = structlog.get_logger()
_LAG_PROBE_S = 0.1
_LOOK_S = 0.5
_NAME_AFTER_S = 10.0  # an ordinary wait is over before
RAISE_LIMIT = "raise nats.store_bytes and run `headrace provision`"


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
        self._named: set[int] = set()
        self._gone: int | None = None  # key of the wait for the server
        self._full: dict[str, int] = {}  # stream -> key of the wait for room in it
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
        key = self._begin_wait(what, culprit, time.time_ns(), timeout_s, at_deadline)
        try:
            yield
        finally:
            self._end_wait(key)

    def _begin_wait(self, what: str, culprit: str, since_ns: int, timeout_s: float, at_deadline: str) -> int:
        key, self._next = self._next, self._next + 1
        deadline_ns = since_ns + int(timeout_s * 1e9)
        self._waits[key] = Wait(what=what, culprit=culprit, since_ns=since_ns, deadline_ns=deadline_ns, at_deadline=at_deadline)
        return key

    def _end_wait(self, key: int) -> float:
        """Seconds that it lasted."""
        self._named.discard(key)
        return (time.time_ns() - self._waits.pop(key).since_ns) / 1e9

    def snapshot(self) -> Heartbeat:
        longest = sorted(self._waits.values(), key=lambda wait: wait.since_ns)[:8]
        return Heartbeat(
            run=self._bus.run,
            service=str(self._bus.role),
            instance=self._bus.instance,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=self.phase,
            waits=tuple(longest),
            counters={**self.counters, **self._of_the_bus(), "waits": float(len(self._waits))},
            loop_lag_s=self.loop_lag_s,
            started_ns=self._started_ns,
            at_ns=time.time_ns(),
        )

    def _of_the_bus(self) -> dict[str, float]:
        """Alarms by kind, and how far this process knows each log to reach, so that a log that was cut short is noticed."""
        alarms = {f"{ALARM}{kind}": float(count) for kind, count in self._bus.alarms.items()}
        return alarms | {f"{SEEN}{stream}": float(seq) for stream, seq in self._bus.seen.items()}

    async def beat(self, stop: asyncio.Event) -> None:
        """Publish heartbeats until `stop`, and say in the log what is waited for, whether or not anything can be published.

        A heartbeat that is not stored at once is given up: the next one says more. Raises `BusError` on a closed connection.
        """
        subject = self._bus.subjects.service_heartbeat(self._bus.role, self._bus.instance)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(stop), name="waits")
            while not stop.is_set():
                if self._bus.client.is_connected:
                    await self._publish(subject)
                elif self._bus.client.is_closed:
                    raise BusError(f"{subject}: the connection is closed")
                await pause(stop, self._period_s)

    async def _publish(self, subject: str) -> None:
        try:
            await self._bus.store(subject, encode(self.snapshot()), {}, give_up_s=0.0)
        except BusError as error:
            if self._bus.client.is_closed:
                raise
            log.info("heartbeat not stored", reason=str(error))

    async def _watch(self, stop: asyncio.Event) -> None:
        """Notice a server that is gone and streams that are full; log a wait that has lasted ten seconds, once."""
        while not await pause(stop, _LOOK_S):
            self._look_at_server()
            await self._look_at_streams()
            for key, wait in list(self._waits.items()):
                if key not in self._named and time.time_ns() - wait.since_ns > _NAME_AFTER_S * 1e9:
                    self._named.add(key)
                    left = (wait.deadline_ns - time.time_ns()) / 1e9
                    log.info("waiting", what=wait.what, culprit=wait.culprit, deadline_in_s=round(left), then=wait.at_deadline)

    def _look_at_server(self) -> None:
        client = self._bus.client
        if self._gone is None and not client.is_connected and not client.is_closed:
            server, then = server_names(client), "what was held back is given up, and the service starts again"
            self._gone = self._begin_wait("the server", f"nats-server {server}", time.time_ns(), self._bus.give_up_s, then)
            self._named.add(self._gone)
            log.warning("the server is gone", server=server, held_for_s=round(self._bus.give_up_s), then=then)
        elif self._gone is not None and client.is_connected:
            key, self._gone = self._gone, None
            log.info("the server is back", server=server_names(client), after_s=round(self._end_wait(key), 1))

    async def _look_at_streams(self) -> None:
        full = full_streams(self._bus)
        for stream in [stream for stream in self._full if stream not in full]:
            log.info("the stream has room again", stream=stream, after_s=round(self._end_wait(self._full.pop(stream)), 1))
        for stream, refused in full.items():
            if stream in self._full:
                continue
            room = await room_in(self._bus, stream)
            then = "the service starts again, and tries on"
            self._full[stream] = self._begin_wait(
                f"room in stream {stream}", f"{room}; {RAISE_LIMIT}", refused.since_ns, self._bus.give_up_s, then
            )
            self._named.add(self._full[stream])
            log.warning("the stream is full", stream=stream, room=room, since=utc(refused.since_ns), fix=RAISE_LIMIT)

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
