"""Reading from JetStream: ordered folds over a log, live registers, and work consumers with credit and heartbeats.

Every pull is bounded by count, bytes and time, and survives a server restart: credit is counted back from the server's own
status messages, and a pull that stays silent past its expiry is written off.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from schemas.codec import CodecError, decode_any
from schemas.table import Stream, consumer_of
from services.bus import Bus, BusError, IntegrityError, Item, item_of

log = structlog.get_logger()
_PULL_BYTES = 16 * 2**20
_EXPIRES_S = 5.0
_DAMAGE_RETRY_S = 5.0
_MAX_TRIES = 20  # deliveries of a whole message whose handler keeps meeting damage elsewhere
_CLOSE_INBOX_S = 2.0


class Retry(Exception):
    """Raised by a handler that cannot do its work now; the message comes back after `delay_s`."""

    def __init__(self, reason: str, delay_s: float = 1.0) -> None:
        super().__init__(reason)
        self.delay_s = delay_s


@dataclass(slots=True)
class _Position:
    seq: int
    time_ns: int
    consumer_seq: int
    pending: int
    delivered: int


def _position(message: Msg) -> _Position:
    """Stream and consumer position out of the acknowledgement subject, in its nine-token or its newer form."""
    parts = message.reply.split(".")
    if len(parts) >= 11:  # $JS.ACK.<domain>.<account>.<stream>.<consumer>.<n>.<sseq>.<cseq>.<time>.<pending>[.<token>]
        parts = ["$JS", "ACK", *parts[4:11]]
    return _Position(int(parts[5]), int(parts[7]), int(parts[6]), int(parts[8]), int(parts[4]))


def _status(message: Msg) -> str | None:
    headers = message.headers or {}
    return headers.get("Status") if not message.reply or headers.get("Status") else None


def _consumer_is_gone(message: Msg, status: str) -> bool:
    """No responder to a pull, or the server's word that the consumer was deleted."""
    return status == "503" or (status == "409" and "Consumer Deleted" in (message.headers or {}).get("Description", ""))


def _to_item(stream: str, message: Msg, position: _Position) -> Item:
    return item_of(stream, message.subject, position.seq, position.time_ns, message.data, dict(message.headers or {}))


async def fold(
    bus: Bus,
    stream: Stream,
    *patterns: str,
    start: int = 1,
    stop: asyncio.Event,
    live: bool = True,
    latest_per_subject: bool = False,
) -> AsyncIterator[Item | None]:
    """Every message of a log in order, from `start`, and then (if `live`) the new ones as they come, until `stop`.

    Yields `None` each time it has caught up with the stream, so that a reader knows when its state is complete; with
    `live=False` it ends there. `patterns` are table patterns; none means the whole stream. Needs no acknowledgement: a reader
    that restarts folds again. Raises `IntegrityError` at a hole in an unfiltered log or at a damaged item.
    """
    name = bus.subjects.stream(stream)
    expected = start
    caught_up = False
    while not stop.is_set():
        consumer = await _ephemeral(bus, name, [bus.subjects.pattern(p) for p in patterns], expected, latest_per_subject)
        if consumer.pending == 0 and not caught_up:
            caught_up = True
            yield None
            if not live:
                return
        inbox = bus.client.new_inbox()
        subscription = await bus.client.subscribe(inbox, pending_bytes_limit=256 * 2**20)
        try:
            async for message in _pull_forever(bus, name, consumer.name, inbox, subscription, stop):
                position = _position(message)
                if position.seq < expected and not latest_per_subject:
                    continue
                if not patterns and not latest_per_subject and position.seq != expected and expected > start:
                    raise IntegrityError(f"{name}: sequences {expected} to {position.seq - 1} are missing")
                expected = position.seq + 1
                yield _to_item(name, message, position)
                if position.pending == 0:
                    caught_up = True
                    yield None
                    if not live:
                        return
        finally:
            await _unsubscribe(subscription)


async def read_all(bus: Bus, stream: Stream, *patterns: str, start: int = 1) -> list[Item]:
    """Everything stored up to now."""
    return [
        item async for item in fold(bus, stream, *patterns, start=start, stop=asyncio.Event(), live=False) if item is not None
    ]


async def read_latest(bus: Bus, stream: Stream, *patterns: str) -> list[Item]:
    """The newest item of each subject, up to now."""
    stop = asyncio.Event()
    items = fold(bus, stream, *patterns, stop=stop, live=False, latest_per_subject=True)
    return [item async for item in items if item is not None]


@dataclass(slots=True)
class _Ephemeral:
    name: str
    pending: int


async def _ephemeral(bus: Bus, stream: str, filters: list[str], start: int, latest: bool) -> _Ephemeral:
    config: dict[str, Any] = {
        "ack_policy": "none",
        "deliver_policy": "last_per_subject" if latest else "by_start_sequence",
        "inactive_threshold": 60_000_000_000,
        "mem_storage": True,
        "num_replicas": 1,
        "max_waiting": 8,
    }
    if latest:
        config["filter_subjects"] = filters or [">"]
    elif filters:
        config["filter_subjects"] = filters
    if not latest:
        config["opt_start_seq"] = max(1, start)
    reply = await bus.request(f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config})
    return _Ephemeral(reply["name"], int(reply.get("num_pending", 0)))


async def _pull_forever(
    bus: Bus, stream: str, consumer: str, inbox: str, subscription: Subscription, stop: asyncio.Event, batch: int = 256
) -> AsyncIterator[Msg]:
    """Messages of one consumer, pull after pull; ends when `stop` is set or the consumer is gone."""
    while not stop.is_set():
        received = 0
        await _send_pull(bus, stream, consumer, inbox, batch)
        deadline = time.monotonic() + _EXPIRES_S + 2.0
        reconnected = bus.reconnected
        while received < batch:
            if stop.is_set() or reconnected.is_set():
                break
            try:
                message = await subscription.next_msg(timeout=min(0.5, max(0.05, deadline - time.monotonic())))
            except nats.errors.TimeoutError:
                if time.monotonic() > deadline:
                    break
                continue
            except (nats.errors.BadSubscriptionError, nats.errors.ConnectionClosedError):
                return
            status = _status(message)
            if status is None:
                received += 1
                yield message
            elif status in ("404", "408"):
                break
            elif status == "409":
                text = (message.headers or {}).get("Description", "")
                if "Consumer Deleted" in text:
                    return
                break
            elif status == "503":
                return
        if received == 0 and time.monotonic() > deadline and not await _exists(bus, stream, consumer):
            return


async def _exists(bus: Bus, stream: str, consumer: str) -> bool:
    try:
        await bus.request(f"CONSUMER.INFO.{stream}.{consumer}", {})
    except BusError:
        return False
    return True


async def _send_pull(bus: Bus, stream: str, consumer: str, inbox: str, batch: int) -> None:
    body = {"batch": batch, "expires": int(_EXPIRES_S * 1e9), "max_bytes": _PULL_BYTES}
    try:
        await bus.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", json.dumps(body).encode(), reply=inbox)
    except nats.errors.OutboundBufferLimitError:
        await asyncio.sleep(0.5)


async def _unsubscribe(subscription: Subscription) -> None:
    try:
        await subscription.unsubscribe()
    except (nats.errors.Error, OSError):
        pass


async def _close_inbox(subscription: Subscription) -> None:
    """End the server's interest in an inbox and take in what was on its way; the server then drops the pulls waiting for it."""
    try:
        async with asyncio.timeout(_CLOSE_INBOX_S):
            await subscription.drain()  # type: ignore[no-untyped-call]
    except (nats.errors.Error, OSError, TimeoutError) as error:
        log.info("inbox not closed in order", error=repr(error))


def _readable(message: Msg) -> bool:
    """Is the message itself whole? Only then is it worth another try."""
    try:
        decode_any(message.data)
    except CodecError:
        return False
    return True


Handler = Callable[[Item], Awaitable[None]]


class WorkConsumer:
    """Runs a handler over a durable consumer's messages, at most `capacity` at a time.

    Consumes: the consumer's messages. Acks: after the handler returned, so its publishes are confirmed first. While a handler
    works, its message is kept by in-progress heartbeats. A handler's `Retry` hands the message back; a damaged message is
    terminated and logged, and the work goes on. On stop: no more pulls, running handlers end within `drain_s`, the rest are
    handed back at once. `inactive_s` lets the server drop a consumer that nobody has pulled from for that long, for instances
    whose name never comes back; should it be dropped while its owner lives, it is created again.
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
        self._wake = asyncio.Event()

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

    async def run(self, handler: Handler, stop: asyncio.Event) -> None:
        """Work until `stop`, then drain."""
        await self.create()
        inbox = self._bus.client.new_inbox()
        arrived: deque[Msg] = deque()

        async def on_message(message: Msg) -> None:
            arrived.append(message)
            self._wake.set()

        subscription = await self._bus.client.subscribe(inbox, cb=on_message, pending_bytes_limit=256 * 2**20)
        tasks: set[asyncio.Task[None]] = set()
        failures: list[BaseException] = []

        def finished(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            self.running = len(tasks)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                failures.append(error)
            self._wake.set()

        silent_since = time.monotonic()
        reconnected = self._bus.reconnected
        try:
            while not stop.is_set() and not failures:
                if reconnected.is_set() or time.monotonic() - silent_since > _EXPIRES_S + 2.0:
                    reconnected = self._bus.reconnected
                    self._outstanding = 0
                    silent_since = time.monotonic()
                room = self.capacity - len(tasks) - self._outstanding
                # Few and large pulls: each waits on the server until it is used up, and the server refuses too many waiting.
                if room > 0 and (self._outstanding == 0 or room >= self.capacity // 4):
                    await _send_pull(self._bus, self.stream, self.name, inbox, room)
                    self._outstanding += room
                if not arrived:
                    self._wake.clear()
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), 0.5)
                while arrived:
                    silent_since = time.monotonic()
                    message = arrived.popleft()
                    status = _status(message)
                    if status is not None:
                        left = int((message.headers or {}).get("Nats-Pending-Messages", "0") or 0)
                        self._outstanding = max(0, self._outstanding - left) if status in ("404", "408", "409") else 0
                        if _consumer_is_gone(message, status):
                            log.warning("consumer is gone, creating it again", consumer=self.name)
                            await asyncio.sleep(0.5)
                            await self.create()
                            self._outstanding = 0
                        continue
                    self._outstanding = max(0, self._outstanding - 1)
                    task = asyncio.create_task(self._handle(message, handler))
                    tasks.add(task)
                    self.running = len(tasks)
                    task.add_done_callback(finished)
            await _close_inbox(subscription)  # first, or a waiting pull of ours would get what is handed back
            for message in arrived:
                if _status(message) is None:
                    await _ack(message, b"-NAK")
            if tasks:
                await asyncio.wait(tasks, timeout=self.drain_s)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=2)
            await _unsubscribe(subscription)
        if failures:
            raise failures[0]

    async def _handle(self, message: Msg, handler: Handler) -> None:
        position = _position(message)
        keeper = asyncio.create_task(self._keep(message))
        try:
            item = _to_item(self.stream, message, position)
            await handler(item)
            await _ack(message, b"+ACK")
            self.done += 1
        except Retry as retry:
            log.info("handed back", consumer=self.name, subject=message.subject, reason=str(retry))
            await _ack(message, b'-NAK {"delay": %d}' % int(retry.delay_s * 1e9))
        except (CodecError, IntegrityError) as error:
            if _readable(message) and position.delivered < _MAX_TRIES:  # something else that the handler read is damaged
                log.error("handed back", consumer=self.name, subject=message.subject, seq=position.seq, error=str(error))
                await _ack(message, b'-NAK {"delay": %d}' % int(_DAMAGE_RETRY_S * 1e9))
            else:
                log.error("refused message", consumer=self.name, subject=message.subject, seq=position.seq, error=str(error))
                await _ack(message, b"+TERM")
        except asyncio.CancelledError:
            await _ack(message, b"-NAK")
            raise
        finally:
            keeper.cancel()

    async def _keep(self, message: Msg) -> None:
        while True:
            await asyncio.sleep(self.spec.ack_wait_s / 3)
            await _ack(message, b"+WPI")


async def _ack(message: Msg, word: bytes) -> None:
    """Send one acknowledgement word. A lost one only brings the message back, and every effect is once-only."""
    try:
        await message._client.publish(message.reply, word)
    except (nats.errors.Error, OSError) as error:
        log.warning("ack not sent", word=word.decode(), error=repr(error))
