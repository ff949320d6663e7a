"""Work consumers: a handler over a durable consumer's messages, with credit, heartbeats and dead letters.

Credit is counted back from the server's own status messages, so that a pull that got lost does not take capacity along.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import structlog
from nats.aio.msg import Msg

from schemas.codec import CodecError, decode_any
from schemas.dead_letter import DeadReason
from schemas.table import consumer_of
from services.bus import Bus
from services.dead_letters import bury
from services.items import BusError, IntegrityError, Item, Unreadable
from services.pull import (
    EXPIRES_S,
    Damaged,
    Inbox,
    Position,
    acknowledge,
    consumer_is_gone,
    position_in,
    position_of,
    send_pull,
    status_of,
    to_item,
)

log = structlog.get_logger()
_DAMAGE_RETRY_S = 5.0
_HEARTBEATS = 4  # of a message in work within its `ack_wait_s`: two may be late or lost
_MAX_TRIES = 20  # deliveries of a whole message whose handler keeps failing over something else


class Retry(Exception):
    """Raised by a handler that cannot do its work now; the message comes back after `delay_s`."""

    def __init__(self, reason: str, delay_s: float = 1.0) -> None:
        super().__init__(reason)
        self.delay_s = delay_s


class Refused(Exception):
    """Raised by a handler for a message that it can read and will never be able to carry out; it becomes a dead letter."""


Handler = Callable[[Item], Awaitable[None]]


class WorkConsumer:
    """Runs a handler over a durable consumer's messages, at most `capacity` at a time.

    Consumes: the consumer's messages. Acks: after the handler returned, so its publishes are confirmed first. While a handler
    works, its message is kept by in-progress heartbeats. A handler's `Retry` hands the message back. A damaged message, one
    that the handler refuses for good, and one whose handler failed at every one of many deliveries go to DEAD and are
    terminated, in this order, and the work goes on. Any other failure of a handler ends the consumer. On stop: no more pulls,
    running handlers end within `drain_s`, the rest are handed back at once. `inactive_s` lets the server drop a consumer that
    nobody has pulled from for that long, for instances whose name never comes back; should it be dropped while its owner
    lives, it is created again.
    """

    def __init__(
        self,
        bus: Bus,
        template: str,
        *,
        x: str = "",
        lane: str = "",
        capacity: int,
        drain_s: float = 20.0,
        inactive_s: float = 0.0,
    ) -> None:
        self.spec = consumer_of(template)
        self._bus = bus
        self.name = self.spec.name.format(x=x, lane=lane)
        self.filter = bus.subjects.pattern(self.spec.filter.format(x=x, lane=lane))
        self.stream = bus.subjects.stream(self.spec.stream)
        self.capacity = capacity
        self.drain_s = drain_s
        self.inactive_s = inactive_s
        self.running = 0
        self.done = 0
        self._outstanding = 0

    async def create(self) -> None:
        """Create the durable consumer, or verify that the server's equals the table's. Raises `BusError` naming differences."""
        config: dict[str, Any] = {
            "durable_name": self.name,
            "name": self.name,
            "filter_subject": self.filter,
            "ack_policy": "explicit",
            "ack_wait": int(self.spec.ack_wait_s * 1e9),
            "max_ack_pending": self.spec.max_ack_pending,
            "max_deliver": -1,
            "deliver_policy": "all",
            "max_waiting": 64,
        }
        if self.inactive_s:
            config["inactive_threshold"] = int(self.inactive_s * 1e9)
        api = f"CONSUMER.CREATE.{self.stream}.{self.name}.{self.filter}"
        reply = await self._bus.request(api, {"stream_name": self.stream, "config": config})
        wrong = {k: (v, reply["config"].get(k)) for k, v in config.items() if reply["config"].get(k, v) != v}
        if wrong:
            raise BusError(f"consumer {self.name} differs from the table (wanted, found): {wrong}")

    async def hand_back(self, deliveries: Iterable[str]) -> int:
        """Give back deliveries of this consumer that a process which is gone has not acknowledged; says how many.

        The server ignores a word about what was acknowledged meanwhile. Raises `BusError`.
        """
        info = await self._bus.api(f"CONSUMER.INFO.{self.stream}.{self.name}", {})
        settled = int(info.get("ack_floor", {}).get("stream_seq", 0))
        ours = [d for d in deliveries if f".{self.stream}.{self.name}." in d and position_in(d).seq > settled]
        for delivery in ours if info.get("num_ack_pending") else []:
            await self._bus.client.publish(delivery, b"-NAK")
        return len(ours)

    async def run(self, handler: Handler, stop: asyncio.Event) -> None:
        """Work until `stop`, then drain."""
        await self.create()
        inbox = await Inbox.open(self._bus)
        tasks: set[asyncio.Task[None]] = set()
        failures: list[BaseException] = []

        def finished(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            self.running = len(tasks)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                failures.append(error)
            inbox.wake.set()

        silent_since = time.monotonic()
        reconnected = self._bus.reconnected
        try:
            while not stop.is_set() and not failures:
                if reconnected.is_set() or time.monotonic() - silent_since > EXPIRES_S + 2.0:
                    reconnected = self._bus.reconnected
                    self._outstanding = 0
                    silent_since = time.monotonic()
                room = self.capacity - len(tasks) - self._outstanding
                # Few and large pulls: each waits on the server until it is used up, and the server refuses too many waiting.
                if room > 0 and (self._outstanding == 0 or room >= self.capacity // 4):
                    await send_pull(self._bus, self.stream, self.name, inbox.subject, room)
                    self._outstanding += room
                await inbox.wait(0.5)
                while inbox.arrived:
                    silent_since = time.monotonic()
                    message = inbox.arrived.popleft()
                    if status_of(message) is not None:
                        await self._on_status(message)
                        continue
                    self._outstanding = max(0, self._outstanding - 1)
                    task = asyncio.create_task(self._handle(message, handler))
                    tasks.add(task)
                    self.running = len(tasks)
                    task.add_done_callback(finished)
            await inbox.drain()  # first, or a waiting pull of ours would get what is handed back
            for message in inbox.arrived:
                if status_of(message) is None:
                    await acknowledge(message, b"-NAK")
            if tasks:
                await asyncio.wait(tasks, timeout=self.drain_s)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=2)
            await inbox.close()
        if failures:
            raise failures[0]

    async def _on_status(self, message: Msg) -> None:
        """The server's word about a pull: the credit that it gives back, or that the consumer is gone."""
        status = status_of(message) or ""
        left = int((message.headers or {}).get("Nats-Pending-Messages", "0") or 0)
        self._outstanding = max(0, self._outstanding - left) if status in ("404", "408", "409") else 0
        if consumer_is_gone(message, status):
            log.warning("consumer is gone, creating it again", consumer=self.name)
            await asyncio.sleep(0.5)
            await self.create()
            self._outstanding = 0

    async def _handle(self, message: Msg, handler: Handler) -> None:
        position = position_of(message)
        found = to_item(self.stream, message, position)
        if isinstance(found, Damaged):
            return await self._refuse(message, position, found.item, DeadReason.DIGEST_MISMATCH, found.reason, found.declared)
        found = replace(found, delivery=message.reply)
        keeper = asyncio.create_task(self._keep(message))
        try:
            await handler(found)
            await acknowledge(message, b"+ACK")
            self.done += 1
        except Retry as retry:
            log.info("handed back", consumer=self.name, subject=message.subject, reason=str(retry))
            await self._hand_back(message, retry.delay_s)
        except Refused as refusal:
            await self._refuse(message, position, found, DeadReason.REFUSED, str(refusal))
        except (CodecError, IntegrityError) as error:
            await self._damage_met(message, position, found, error)
        except asyncio.CancelledError:
            await acknowledge(message, b"-NAK")
            raise
        except BusError:
            raise
        except Exception as error:  # a message that ends its worker at every delivery must not do so for ever
            if position.delivered < _MAX_TRIES:
                raise
            reason = f"its handler failed at each of {position.delivered} deliveries, last with {error!r}"
            await self._refuse(message, position, found, DeadReason.REFUSED, reason)
        finally:
            keeper.cancel()

    async def _damage_met(self, message: Msg, position: Position, item: Item, error: Exception) -> None:
        """The item itself cannot be read, or something else that the handler read; only then is it worth another try."""
        if (isinstance(error, Unreadable) and error.item is item) or not _is_message(item):
            return await self._refuse(message, position, item, DeadReason.UNREADABLE, str(error))
        if position.delivered >= _MAX_TRIES:
            reason = f"met damage at each of {position.delivered} deliveries, last: {error}"
            return await self._refuse(message, position, item, DeadReason.REFUSED, reason)
        log.error("handed back", consumer=self.name, subject=message.subject, seq=position.seq, error=str(error))
        await self._hand_back(message, _DAMAGE_RETRY_S)

    async def _refuse(
        self, message: Msg, position: Position, item: Item, reason: DeadReason, detail: str, declared: str | None = None
    ) -> None:
        """Keep the message on DEAD, then terminate it; where it cannot be kept, it comes back."""
        self._bus.alarm("dead_letters", consumer=self.name, subject=item.subject, seq=item.seq, reason=detail)
        kept = await bury(self._bus, item, reason, detail, declared=declared, consumer=self.name, deliveries=position.delivered)
        if kept:
            await acknowledge(message, b"+TERM")
        else:
            await self._hand_back(message, _DAMAGE_RETRY_S)

    async def _hand_back(self, message: Msg, delay_s: float) -> None:
        await acknowledge(message, b'-NAK {"delay": %d}' % int(delay_s * 1e9))

    async def _keep(self, message: Msg) -> None:
        while True:
            await asyncio.sleep(self.spec.ack_wait_s / _HEARTBEATS)
            await acknowledge(message, b"+WPI")


def _is_message(item: Item) -> bool:
    try:
        decode_any(item.data)
    except CodecError:
        return False
    return True
