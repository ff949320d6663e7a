"""The ledger's batches: asked for by the owner, followed by every rank."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import structlog

from schemas.ledger import AbandonEntry, LostItem
from schemas.lineage import Lineage
from schemas.table import Stream
from schemas.training import BatchDemand
from services.bus import Item, OnceConflict
from services.consume import fold
from services.ownership import Ownership
from services.runtime import ServiceContext

log = structlog.get_logger()
_NAMED_WAIT_S = 600.0
_ASK_AGAIN_S = 30.0  # the store may have lost a request before admission saw it; a repeat of one that stands changes nothing


class Batches:
    """Consumes: `ledger.batch.<s>`. Produces: `train.demand.<s>`, where this rank owns the role and the ledger has no batch."""

    def __init__(self, context: ServiceContext, ownership: Ownership | None, line: Lineage) -> None:
        self._context = context
        self._ownership = ownership
        self._line = line
        self._entries: dict[int, Item] = {}
        self._taken_out: dict[int, dict[str, LostItem]] = {}
        self._ledger_read = False
        self._arrived = asyncio.Event()

    async def follow(self, start: int, ended: asyncio.Event) -> None:
        """Take in the batches from step `start` on, and what was lost out of them, until `ended`."""
        async for item in fold(self._context.bus, Stream.LEDGER, "ledger.batch.*", "ledger.abandon.*", stop=ended):
            if item is None:
                self._ledger_read = True
            elif ".abandon." in item.subject:
                entry = item.decode(AbandonEntry)
                if isinstance(entry.step, int) and isinstance(entry.lost, LostItem):
                    self._taken_out.setdefault(entry.step, {})[entry.group] = entry.lost
            elif (number := int(item.subject.rsplit(".", 1)[1])) >= start:
                self._entries[number] = item
            self._arrived.set()

    async def take(self, step: int, ahead: int, last: int, *, unless: Callable[[], bool] = lambda: False) -> Item | None:
        """The entry for `step`, asked for if need be, as are `ahead` further ones below step `last` (0: without end).

        `None` when the service is told to stop, or `unless` something else is to be done first.
        """
        asked, asked_s = False, 0.0
        with self._context.health.waiting(f"batch {step}", "admission", _NAMED_WAIT_S, "keeps waiting"):
            while not self._context.stop.is_set() and not unless():
                if self._ledger_read and (not asked or self._may_ask_again(asked_s)):
                    for wanted in range(step, step + ahead + 1):
                        if wanted not in self._entries and (not last or wanted < last):
                            await self._ask(wanted)
                    asked, asked_s = True, time.monotonic()
                if asked and step in self._entries:
                    return self._entries.pop(step)
                self._arrived.clear()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), 0.5)
        return None

    def taken_out(self, step: int) -> dict[str, LostItem]:
        """The groups that the ledger abandoned out of the step's batch."""
        return self._taken_out.get(step, {})

    def _may_ask_again(self, asked_s: float) -> bool:
        """A repeat is no reason to wait for an ownership that is in doubt."""
        certain = self._ownership is not None and self._ownership.certain
        return certain and time.monotonic() - asked_s > _ASK_AGAIN_S

    async def _ask(self, step: int) -> None:
        if self._ownership is None:
            return
        bus, incarnation = self._context.bus, self._line.incarnation
        demand = BatchDemand(
            run=bus.run,
            step=step,
            version=step,
            incarnation=incarnation,
            groups=self._context.config.admission.groups_per_batch,
            branches=self._line.branches() or msgspec.UNSET,
        )
        await self._ownership.confirm()
        try:
            await bus.publish_once(bus.subjects.demand(step, incarnation), demand)
        except OnceConflict:
            log.warning("the batch was asked for with another size before, which stands", step=step)
