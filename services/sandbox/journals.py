"""The journals of one host: of the sandboxes that live, and of a bounded number of those that are gone."""

from __future__ import annotations

import asyncio
import os

from services.sandbox.host import Host
from services.sandbox.journal import Journal


class Journals:
    """A folder of `<sandbox>.log`. Belongs to one event loop; its files are read and removed in the host's threads."""

    def __init__(self, host: Host, *, kept: int, kept_bytes: int, prune_every: int) -> None:
        self._host, self._kept, self._kept_bytes, self._prune_every = host, kept, kept_bytes, prune_every
        self._closed = 0  # sandboxes since the last pass
        self._pruning = asyncio.Lock()

    async def load(self, sandbox_id: str) -> Journal:
        """The journal of a sandbox that does not live; empty if there is none. (A live one is its resident's alone.)"""
        path = self._path(sandbox_id)
        return await asyncio.get_running_loop().run_in_executor(self._host.pool, lambda: Journal.load(path))

    async def one_more_closed(self, live: frozenset[str]) -> None:
        """Prune once in a while and one at a time: each pass looks at every journal that is kept."""
        self._closed += 1
        if self._closed < self._prune_every or self._pruning.locked():
            return
        async with self._pruning:
            self._closed = 0
            paths = frozenset(self._path(sandbox_id) for sandbox_id in live)
            await asyncio.get_running_loop().run_in_executor(self._host.pool, lambda: self._prune(paths))

    def _prune(self, live: frozenset[str]) -> None:
        """Forget the oldest of the sandboxes that are gone, beyond what is to be kept. Journals are removed only here."""
        gone = [(item.stat(), item.path) for item in os.scandir(self._host.path("journal")) if item.path not in live]
        room = self._kept_bytes
        for rank, (stat, path) in enumerate(sorted(gone, key=lambda found: found[0].st_mtime_ns, reverse=True)):
            room -= stat.st_size
            if rank >= self._kept or room < 0:
                os.remove(path)

    def _path(self, sandbox_id: str) -> str:
        return self._host.path("journal", f"{sandbox_id}.log")
