"""The door of an engine: counts the generations inside and holds new ones while the weights change.

Why a door of our own: the boundary of a weight switch is a promise of this engine, whatever its backend does with its queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.engine.protocol import DrainTimeout, RequestRefused


class Gate:
    """Open: requests pass. Closed: they wait outside; those inside are counted and can be waited for."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._open = True
        self._inside: set[str] = set()
        self._outside: dict[str, bool] = {}  # waiting ids; True: aborted while waiting

    @property
    def inside(self) -> int:
        return len(self._inside)

    @property
    def outside(self) -> int:
        return len(self._outside)

    @asynccontextmanager
    async def admit(self, request_id: str) -> AsyncIterator[bool]:
        """Wait for the door, then hold a place until the block ends. Yields False if the request was aborted while it waited.

        Raises `RequestRefused` when `request_id` is already inside or waiting.
        """
        if request_id in self._inside or request_id in self._outside:
            raise RequestRefused(f"request id {request_id!r} is already in flight; ids must be unique")
        if not self._open:
            self._outside[request_id] = False
            try:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._open or self._outside[request_id])
            finally:
                aborted = self._outside.pop(request_id)
            if aborted:
                yield False
                return
        self._inside.add(request_id)
        try:
            yield True
        finally:
            self._inside.discard(request_id)
            async with self._changed:
                self._changed.notify_all()

    async def abort_waiting(self, request_id: str) -> bool:
        """True if `request_id` was waiting outside; it then leaves without having been admitted."""
        if request_id not in self._outside:
            return False
        async with self._changed:
            self._outside[request_id] = True
            self._changed.notify_all()
        return True

    async def abort_all_waiting(self) -> None:
        async with self._changed:
            self._outside.update(dict.fromkeys(self._outside, True))
            self._changed.notify_all()

    def close(self) -> None:
        self._open = False

    async def reopen(self) -> None:
        async with self._changed:
            self._open = True
            self._changed.notify_all()

    async def quiet(self, grace_s: float) -> bool:
        """Wait until nobody is inside, at most `grace_s`; says whether it is so."""
        try:
            await self.drained(grace_s)
        except DrainTimeout:
            return False
        return True

    async def drained(self, timeout_s: float) -> float:
        """Wait until nobody is inside; seconds waited. Raises `DrainTimeout` naming how many are left."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: not self._inside)
        except TimeoutError:
            raise DrainTimeout(
                f"{len(self._inside)} generation(s) still running after {timeout_s} s: {sorted(self._inside)[:4]}"
            ) from None
        return time.monotonic() - began
