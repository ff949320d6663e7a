"""Which sandbox hosts live, by their heartbeats in the registry.

Silence is counted in this process's own heartbeats, as they come back from the registry: as long as none of them is stored, for
the server is away or cannot write, nobody's silence means anything. A host that was silent for less than the deadline goes on
with its sandboxes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import structlog

from schemas.ownership import OWNER
from schemas.table import Role, Stream
from services.bus import Bus
from services.consume import fold
from services.health import Health

log = structlog.get_logger()
_AT_LEAST_BEATS = 3


class Hosts:
    """Consumes: `reg.service.sandbox.*`, and of `reg.service.<role>.*` the heartbeats of this process. On error: a host that
    was heard and fell silent is reported once through `on_gone`, with the reason.

    `silent_s`: silence after which a host counts as gone; at least three heartbeats, which all services send every `period_s`.
    """

    def __init__(
        self, bus: Bus, health: Health, on_gone: Callable[[str, str], None], *, silent_s: float, period_s: float
    ) -> None:
        self._bus = bus
        self._health = health
        self._on_gone = on_gone
        self._period_s = period_s
        self._beats_allowed = max(_AT_LEAST_BEATS, math.ceil(silent_s / period_s))
        self._missed: dict[str, int] = {}  # host -> our heartbeats since its last one
        self._heard_ns: dict[str, int] = {}  # the server's time of that
        self._last_s = -math.inf  # monotonic, of our last heartbeat that was counted

    async def watch(self, stop: asyncio.Event) -> None:
        """Follow the heartbeats until `stop`."""
        sandboxes = f"reg.service.{Role.SANDBOX}.*"
        ours = self._bus.subjects.service_heartbeat(self._bus.role, self._bus.instance)
        patterns = (sandboxes, ours.removeprefix(self._bus.subjects.prefix))
        async for item in fold(self._bus, Stream.REGISTRY, *patterns, stop=stop, latest_per_subject=True):
            if item is None:
                continue
            host = item.subject.rpartition(".")[2]
            if item.subject == ours:
                self.counted(time.monotonic())
            elif host != OWNER:
                self.heard(host, item.time_ns)

    def heard(self, host: str, stored_ns: int) -> None:
        """A host's heartbeat. One that was stored before others that we know says nothing new."""
        if stored_ns <= self._heard_ns.get(host, 0):
            return
        if self._is_gone(host):
            log.info("sandbox host is back", host=host)
        self._missed[host], self._heard_ns[host] = 0, stored_ns

    def counted(self, now_s: float) -> None:
        """One of our own heartbeats was stored. Several that come at once, after a stall, count as one."""
        if now_s - self._last_s < self._period_s / 2:
            return
        self._last_s = now_s
        for host in self._missed:
            self._missed[host] += 1
            if self._missed[host] == self._beats_allowed:
                log.warning("sandbox host is silent", host=host, for_s=self._silence_s())
                self._health.count("sandbox_hosts_gone")
                self._on_gone(host, self.gone(host))

    def gone(self, host: str) -> str:
        """Why a host counts as gone; empty while it does not, or nothing is known of it."""
        return f"sandbox host {host} is silent for {self._silence_s():g} s" if self._is_gone(host) else ""

    def names(self) -> tuple[str, ...]:
        """Every host that was ever heard, living or not."""
        return tuple(sorted(self._missed))

    def _is_gone(self, host: str) -> bool:
        return self._missed.get(host, 0) >= self._beats_allowed

    def _silence_s(self) -> float:
        return self._beats_allowed * self._period_s
