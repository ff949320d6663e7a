"""Watches whether an embedded server can still write its store, and starts it again when its disk has room.

A server whose write failed does not write to that stream again until it is restarted, and answers nothing to whoever publishes
there; its health report is where it says so. Publishers hold meanwhile, and what was acknowledged is on disk.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import structlog

from services.health import pause

log = structlog.get_logger()
_LOOK_S = 1.0
_ASK_S = 3.0
_BETWEEN_RESTARTS_S = 10.0
_SIGNS = ("write error", "has been disabled", "not enabled")  # of a store that takes nothing more until a restart
_LEAST_BYTES, _MOST_BYTES = 2**20, 2**28


@dataclass(frozen=True, kw_only=True)
class Disk:
    """What is left of the file system under a store; bytes."""

    free: int
    size: int

    @property
    def has_room(self) -> bool:
        """Whether a restart is worth while: a twentieth of the disk is free, at least 1 MiB; 256 MiB are always enough."""
        return self.free >= min(max(self.size // 20, _LEAST_BYTES), _MOST_BYTES)


def disk_under(path: Path) -> Disk:
    """Raises `OSError`."""
    found = os.statvfs(path)
    return Disk(free=found.f_bavail * found.f_frsize, size=found.f_blocks * found.f_frsize)


class StoreWatch:
    """One server's store.

    Consumes: the server's health report on `monitor` (host:port). Produces: a line when the server cannot write and one when it
    is started again, by `restart`. Waits for: room on the disk, named in the line, for as long as it takes. On stop: returns.
    """

    def __init__(
        self, label: str, monitor: str, store: Path, *, restart: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self._label = label
        self._url = f"http://{monitor}/healthz"
        self._store = store
        self._restart = restart
        self._say = say
        self._said = ""  # the reason that was said last
        self._restarted_s = -_BETWEEN_RESTARTS_S

    async def run(self, stop: asyncio.Event) -> None:
        """Look every second until `stop`."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_S)) as session:
            while not await pause(stop, _LOOK_S):
                self._act(await self._why_not_writing(session))

    async def _why_not_writing(self, session: aiohttp.ClientSession) -> str:
        """The server's own words; empty when it writes, and when it does not answer, which others look after."""
        try:
            async with session.get(self._url) as answer:
                report = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return ""
        error = str(report.get("error", "")) if isinstance(report, dict) else ""
        return error if any(sign in error for sign in _SIGNS) else ""

    def _act(self, reason: str) -> None:
        if not reason:
            self._said = ""
            return
        disk = disk_under(self._store)
        left = f"{disk.free / 2**20:.1f} of {disk.size / 2**20:.0f} MiB are free under {self._store}"
        if not self._said:
            self._said = reason
            log.warning("the store cannot be written", server=self._label, reason=reason, free_bytes=disk.free)
            self._say(f"{self._label} cannot write: {reason}; {left}. Services hold what they have; make room, and it goes on")
        if disk.has_room and time.monotonic() - self._restarted_s > _BETWEEN_RESTARTS_S:
            self._restarted_s = time.monotonic()
            log.info("restarting the server, which does not write again by itself", server=self._label, free_bytes=disk.free)
            self._say(f"{self._label} is started again, since there is room now: {left}")
            self._restart()
