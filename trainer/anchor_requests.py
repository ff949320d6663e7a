"""Anchors on demand: the synchronizer cannot reproduce a version, and the living trainer holds the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import structlog

from param_sync.patch.container import Encoded
from schemas.table import Stream
from services import blobs
from services.consume import fold
from services.health import pause
from services.ownership import Ownership
from services.runtime import ServiceContext
from trainer.learner import Learner
from trainer.weight_shards import Name

log = structlog.get_logger()
T = TypeVar("T")
_LOOK_S = 1.0


class Work(Protocol):
    """Run a blocking call on the learner's thread."""

    def __call__(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Its result, once it is there."""


class AnchorRequests:
    """Consumes: `policy.wanted.anchor`, on every rank. Produces: the anchor's object, on rank 0. All ranks serve it together.

    A request that was there before the ranks started is not served: whoever still needs an anchor asks again.
    """

    def __init__(self, context: ServiceContext, ownership: Ownership | None, work: Work) -> None:
        self._bus, self._stop = context.bus, context.stop
        self._ownership = ownership
        self._work = work
        self._newest = 0  # stream sequence of the last request that this rank has seen
        self._served = 0  # of the last that all ranks have served

    async def begin(self, learner: Learner) -> None:
        """Agree with the other ranks on the requests that are there already."""
        item = await self._bus.last(self._bus.subjects.wanted())
        (self._served,) = await self._work(partial(learner.agree_on, [0 if item is None else item.seq]))

    async def follow(self, ended: asyncio.Event) -> None:
        """Take in requests until `ended`."""
        async for item in fold(self._bus, Stream.POLICY, "policy.wanted.anchor", stop=ended, latest_per_subject=True):
            if item is not None:
                self._newest = max(self._newest, item.seq)

    def pending(self) -> bool:
        """Whether this rank has seen a request that was not served."""
        return self._newest > self._served

    async def meet(self, learner: Learner, *, ready: bool) -> tuple[bool, bool]:
        """All ranks meet: (whether one was told to stop, whether they served a request that one has seen).

        A rank comes here because it is ready for the next step, because it has seen a request, or because it is to stop. Each
        sees the requests and the batches that the others see, so none is waited for here for long.
        """
        asked = self._newest if self.pending() else 0
        stopping = not ready and (self._stop.is_set() or not asked)
        stop, asked = await self._work(partial(learner.agree_on, [int(stopping), asked]))
        if asked and not stop:
            self._served = max(self._served, asked)
            await self._store(learner.weights, await self._work(learner.anchor))
        return bool(stop), bool(asked)

    async def stay(self, learner: Learner) -> None:
        """All steps are done: serve requests until a rank is told to stop."""
        while True:
            while not self._stop.is_set() and not self.pending():
                await pause(self._stop, _LOOK_S)
            if (await self.meet(learner, ready=False))[0]:
                return

    async def _store(self, name: Name, anchor: Encoded | None) -> None:
        """What all ranks made of the weights `name`; only rank 0 has it."""
        if self._ownership is None or anchor is None:
            return
        await self._ownership.confirm()
        data = await asyncio.to_thread(anchor.tobytes)
        reference = await blobs.put(self._bus, f"anchor-{name.incarnation}-{name.version}-{name.digest[:16]}", data)
        log.warning("anchor on demand", version=name.version, incarnation=name.incarnation, size_bytes=reference.size_bytes)
