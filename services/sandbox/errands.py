"""Work that has to finish although whoever asked for it may have gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Errands:
    """Owns its tasks: askers wait for them behind a shield, and `drain` waits for all that are left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def finish(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Run `work` to its end; cancelling the caller does not cancel it."""
        return await asyncio.shield(self.start(work, name))

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its askers got it; if all have gone, there is nobody to tell
