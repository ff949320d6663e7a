"""A server whose disk was full does not write again by itself when there is room; one that we run is then started again.

A stream whose write failed stays as it is until the server restarts: it answers, and acknowledges nothing. The server says so
only on its monitoring address, whose `/healthz` names the stream, the file and the error.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import structlog

from services.health import pause

log = structlog.get_logger()
ROOM_BYTES = 16 * 2**20  # two of the largest messages; with less, the next write would fail at once
_LOOK_S = 1.0
_SAY_AGAIN_S = 30.0
_NO_ROOM = ("no space left on device", "disk quota exceeded")


def no_room(health: str) -> str:
    """The server's words when a write failed for want of room, out of its answer to `/healthz`; empty otherwise."""
    try:
        error = str(json.loads(health).get("error", ""))
    except (ValueError, AttributeError):
        return ""
    return error if any(words in error for words in _NO_ROOM) else ""


def disk_of(path: Path) -> Path:
    """The mount point that a path lies on."""
    path = path.resolve()
    while not path.is_mount():
        path = path.parent
    return path


class DiskWatch:
    """Looks at one server every second.

    Waits for: a failed write; then for room on the disk of `store`, without a deadline, saying again every 30 s for how long
    and how many bytes are missing. Then `restart`. Nothing acknowledged is lost: what was not written was not acknowledged.
    """

    def __init__(
        self, label: str, store: Path, monitor: str, *, say: Callable[[str], None], restart: Callable[[], None]
    ) -> None:
        self._label = label
        self._store = store
        self._url = f"http://{monitor}/healthz"
        self._say = say
        self._restart = restart
        self.restarts = 0

    async def run(self, stop: asyncio.Event) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while not await pause(stop, _LOOK_S):
                error = no_room(await self._health(session))
                if error and await self._room(error, stop):
                    self._restart()
                    self.restarts += 1

    async def _health(self, session: aiohttp.ClientSession) -> str:
        try:
            async with session.get(self._url) as answer:
                return await answer.text()
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return ""  # it starts, or its supervisor looks after it

    async def _room(self, error: str, stop: asyncio.Event) -> bool:
        """Wait until the disk has room again; false if `stop` came first."""
        since, said = time.monotonic(), -_SAY_AGAIN_S
        while True:
            disk, free = disk_of(self._store), shutil.disk_usage(self._store).free
            age_s = time.monotonic() - since
            where = f"the store under {self._store} (disk {disk})"
            facts = {"server": self._label, "disk": str(disk), "path": str(self._store), "free_bytes": free}
            if free >= ROOM_BYTES:
                log.warning("disk has room again", **facts, full_for_s=round(age_s))
                self._say(f"{where} has room again: {free} bytes free; starting {self._label} again, which no longer writes")
                return True
            if age_s - said >= _SAY_AGAIN_S:
                said = age_s
                log.error("disk full", **facts, needed_bytes=ROOM_BYTES, for_s=round(age_s), error=error)
                needs = f"{free} bytes free, {ROOM_BYTES} needed"
                self._say(
                    f"{where} is full: {needs}; {self._label} stores nothing, for {age_s:.0f} s; make room. It says: {error}"
                )
            if await pause(stop, _LOOK_S):
                return False
