"""Pulling from JetStream consumers: bounded pulls, the server's status messages, positions, acknowledgements.

Every pull is bounded by count, bytes and time, and survives a server restart: a pull that stays silent past its expiry is
written off.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from schemas.codec import digest
from services.bus import Bus
from services.items import DIGEST_HEADER, BusError, IntegrityError, Item, item_of

log = structlog.get_logger()
PULL_BYTES = 16 * 2**20
EXPIRES_S = 5.0
_QUIET_S = 1.0
_CLOSE_INBOX_S = 2.0


@dataclass(slots=True)
class Position:
    """Where a delivered message stands. `pending`: messages that the consumer still has to deliver, by the server's count."""

    seq: int
    time_ns: int
    consumer_seq: int
    pending: int
    delivered: int


@dataclass(frozen=True, slots=True)
class Damaged:
    """A stored item whose bytes are not those that its publisher sent; `item.digest` is of the bytes as they are."""

    item: Item
    declared: str
    reason: str


def position_of(message: Msg) -> Position:
    """Where a delivered message stands."""
    return position_in(message.reply)


def position_in(delivery: str) -> Position:
    """Stream and consumer position out of an acknowledgement subject, in its nine-token or its newer form."""
    parts = delivery.split(".")
    if len(parts) >= 11:  # $JS.ACK.<domain>.<account>.<stream>.<consumer>.<n>.<sseq>.<cseq>.<time>.<pending>[.<token>]
        parts = ["$JS", "ACK", *parts[4:11]]
    return Position(int(parts[5]), int(parts[7]), int(parts[6]), int(parts[8]), int(parts[4]))


def status_of(message: Msg) -> str | None:
    """The status of a message that the server sends about a pull; `None` for a stored one."""
    headers = message.headers or {}
    return headers.get("Status") if not message.reply or headers.get("Status") else None


def consumer_is_gone(message: Msg, status: str) -> bool:
    """No responder to a pull, or the server's word that the consumer was deleted."""
    return status == "503" or (status == "409" and "Consumer Deleted" in (message.headers or {}).get("Description", ""))


def to_item(stream: str, message: Msg, position: Position) -> Item | Damaged:
    """The stored item, or what is left of it where its bytes do not match the digest that it carries."""
    headers = dict(message.headers or {})
    try:
        return item_of(stream, message.subject, position.seq, position.time_ns, message.data, headers)
    except IntegrityError as error:
        return damaged_item(stream, message.subject, position.seq, position.time_ns, message.data, headers, str(error))


def damaged_item(
    stream: str, subject: str, seq: int, time_ns: int, data: bytes, headers: dict[str, str], reason: str
) -> Damaged:
    """Keeps the bytes as they were found, under their own digest."""
    declared = headers.get(DIGEST_HEADER, "")
    return Damaged(Item(stream, subject, seq, time_ns, data, digest(data), headers), declared, reason)


async def send_pull(bus: Bus, stream: str, consumer: str, inbox: str, batch: int) -> None:
    """Ask for up to `batch` messages."""
    body = {"batch": batch, "expires": int(EXPIRES_S * 1e9), "max_bytes": PULL_BYTES}
    try:
        await bus.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", json.dumps(body).encode(), reply=inbox)
    except nats.errors.OutboundBufferLimitError:
        await asyncio.sleep(0.5)


async def acknowledge(message: Msg, word: bytes) -> None:
    """Send one acknowledgement word. A lost one only brings the message back, and every effect is once-only."""
    try:
        await message._client.publish(message.reply, word)
    except (nats.errors.Error, OSError) as error:
        log.warning("ack not sent", word=word.decode(), error=repr(error))


class Inbox:
    """Where a consumer's messages arrive. What the pulls asked for is the bound on what waits here."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.arrived: deque[Msg] = deque()
        self.wake = asyncio.Event()
        self._subscription: Subscription | None = None

    @classmethod
    async def open(cls, bus: Bus) -> Inbox:
        inbox = cls(bus.client.new_inbox())
        inbox._subscription = await bus.client.subscribe(inbox.subject, cb=inbox._take, pending_bytes_limit=256 * 2**20)
        return inbox

    async def _take(self, message: Msg) -> None:
        self.arrived.append(message)
        self.wake.set()

    async def wait(self, timeout_s: float) -> None:
        """Return when something has arrived or `wake` is set, at the latest after `timeout_s`."""
        if self.arrived:
            return
        self.wake.clear()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.wake.wait(), timeout_s)

    async def drain(self) -> None:
        """End the server's interest and take in what was on its way; the server then drops the pulls waiting for it."""
        if self._subscription is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_INBOX_S):
                await self._subscription.drain()  # type: ignore[no-untyped-call]
        except (nats.errors.Error, OSError, TimeoutError) as error:
            log.info("inbox not closed in order", error=repr(error))

    async def close(self) -> None:
        if self._subscription is not None:
            with suppress(nats.errors.Error, OSError):
                await self._subscription.unsubscribe()


async def pull_forever(
    bus: Bus, stream: str, consumer: str, inbox: Inbox, stop: asyncio.Event, batch: int
) -> AsyncGenerator[Msg | None, None]:
    """Messages of one consumer, pull after pull; ends when `stop` is set, the consumer is gone, or the connection was another
    one: what the server sent down the old one may never have arrived, and it does not send it again.

    Yields `None` whenever a pull of ours has waited at the server for a second without an answer.
    """
    reconnected = bus.reconnected
    while not stop.is_set() and not bus.client.is_closed and not reconnected.is_set():
        received = 0
        await send_pull(bus, stream, consumer, inbox.subject, batch)
        quiet_since = time.monotonic()
        deadline = quiet_since + EXPIRES_S + 2.0
        while received < batch and not stop.is_set() and not reconnected.is_set():
            if not inbox.arrived:
                await inbox.wait(0.5)
                now = time.monotonic()
                if inbox.arrived:
                    continue
                if now > deadline or bus.client.is_closed:
                    break
                if now - quiet_since >= _QUIET_S:
                    quiet_since = now
                    yield None
                continue
            message = inbox.arrived.popleft()
            status = status_of(message)
            if status is None:
                received += 1
                quiet_since = time.monotonic()
                yield message
            elif consumer_is_gone(message, status):
                return
            elif status in ("404", "408", "409"):
                break
        if received == 0 and time.monotonic() > deadline and not await _exists(bus, stream, consumer):
            return


async def _exists(bus: Bus, stream: str, consumer: str) -> bool:
    try:
        await bus.request(f"CONSUMER.INFO.{stream}.{consumer}", {})
    except BusError:
        return False
    return True
