"""Watches a run from outside: every message on its subjects the moment the server hands it out, requests and answers too.

It subscribes beside the streams, so an event is often here before its publisher has the acknowledgement: what is killed on an
event is killed between publishing and committing. A plain subscription misses what passes while its server is away.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import nats.errors
from nats.aio.msg import Msg

from schemas.codec import CodecError, decode_any
from schemas.generation import GenerateRequest, GenerateResult
from schemas.lease import GroupLease
from schemas.message import Message
from schemas.ownership import OWNER, Owner
from schemas.sandbox import SandboxResult
from schemas.table import Role, Stream, Subjects
from schemas.trajectory import Episode
from services.bus import Bus
from services.items import BusError, Forbidden

_LOOK_FOR_CHECKPOINTS_S = 0.01
_ANSWER_S = 2.0
_TRY_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Event:
    """One message. `words` is its subject within the run; `at_s` is our monotonic clock."""

    at_s: float
    words: tuple[str, ...]
    data: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def message(self) -> Message | None:
        """`None` for bytes that are no message."""
        try:
            return decode_any(self.data)
        except CodecError:
            return None


class Picture:
    """What the events say so far, as far as observed points need it."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.sealed: Counter[str] = Counter()
        self.judged: Counter[str] = Counter()
        self.turned: set[str] = set()
        self.player: dict[str, str] = {}  # group -> instance of the rollouter that asked for its sandboxes last
        self.owners: dict[str, Owner] = {}  # role -> its last record
        self.steps = 0

    def take(self, event: Event) -> None:
        match event.words:
            case ("task", "lease", _):
                message = event.message()
                if isinstance(message, GroupLease):
                    self.sizes[message.group] = message.group_size
            case ("episode", group, _):
                self.sealed[group] += 1
            case ("verdict", group, _):
                self.judged[group] += 1
            case ("turn", group, _, _, number) if number.isdecimal():
                self.turned.add(group)
            case ("reg", "service", role, name) if name == OWNER:
                message = event.message()
                if isinstance(message, Owner):
                    self.owners[role] = message
            case ("train", "step", step):
                self.steps = max(self.steps, int(step.split("-")[0]) + 1)
            case ("gen", "req", _):
                message = event.message()
                if isinstance(message, GenerateRequest):
                    self.player[message.session.split("-")[0]] = instance_of(message.requester)


def instance_of(requester: str) -> str:
    """A requester's name is its instance and something that is new at each start."""
    return requester.rpartition("-")[0]


def worker_of(event: Event) -> str:
    """Which instance the work that this event completes was done by, where the message says it."""
    message = event.message()
    if isinstance(message, GenerateResult):
        return message.engine
    if isinstance(message, SandboxResult):
        return message.executor
    if isinstance(message, Episode):
        return instance_of(message.rollouter)
    return ""


class Observer:
    """Hands events to listeners in the order in which they come. `picture` is always one event ahead of them."""

    def __init__(self, run: str) -> None:
        self._subjects = Subjects(run)
        self._listeners: list[Callable[[Event], None]] = []
        self._bus: Bus | None = None
        self.picture = Picture()

    async def connect(self, url: str, seed: str | None = None, within_s: float = 60.0) -> None:
        """`seed` is that of the key that may see everything, which the server learns a moment after its start
        (`loadtests/chaos/observer_key.py`). Raises `BusError` when it does not let us in in time.
        """
        bus = await self._let_in(url, seed, time.monotonic() + within_s)
        await bus.client.subscribe(self._subjects.pattern(">"), cb=self._on_message, pending_bytes_limit=256 * 2**20)
        await bus.client.flush()
        self._bus = bus

    async def _let_in(self, url: str, seed: str | None, deadline: float) -> Bus:
        while True:
            try:
                return await Bus.connect(url, self._subjects.run, Role.OBSERVER, "chaos", nkeys_seed=seed)
            except Forbidden:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_TRY_AGAIN_S)

    async def close(self) -> None:
        if self._bus is not None:
            await self._bus.close()

    async def publish(self, words: tuple[str, ...], data: bytes, headers: dict[str, str]) -> None:
        """Store a message on a subject of the run, as its publisher would."""
        assert self._bus is not None
        await self._bus.store(self._subjects.pattern(".".join(words)), data, headers)

    async def message_at(self, *words: str) -> Message | None:
        """The last message on a subject of the run; `None` where there is none."""
        assert self._bus is not None
        item = await self._bus.last(self._subjects.pattern(".".join(words)))
        return None if item is None else decode_any(item.data)

    async def spoil_object(self, name: str) -> None:
        """Flip a bit of an object: its last chunk is written again with another byte, and the true one removed."""
        assert self._bus is not None
        bus, stream, bucket = self._bus, self._subjects.blob_stream(), self._subjects.blob_bucket()
        meta_subject = f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"
        meta = await bus.request(f"STREAM.MSG.GET.{stream}", {"last_by_subj": meta_subject})
        chunk_subject = f"$O.{bucket}.C.{json.loads(base64.b64decode(meta['message']['data']))['nuid']}"
        chunk = (await bus.request(f"STREAM.MSG.GET.{stream}", {"last_by_subj": chunk_subject}))["message"]
        data = bytearray(base64.b64decode(chunk["data"]))
        data[len(data) // 2] ^= 0x10
        await bus.store(chunk_subject, bytes(data), {})
        await bus.request(f"STREAM.MSG.DELETE.{stream}", {"seq": chunk["seq"], "no_erase": True})

    async def stored(self, *streams: Stream) -> int | None:
        """Items that the streams have taken so far; `None` while the server does not answer. An event alone does not prove that
        its message was stored.
        """
        assert self._bus is not None
        try:
            async with asyncio.timeout(_ANSWER_S):
                return sum([await self._bus.last_sequence(stream) for stream in streams])
        except (BusError, TimeoutError, nats.errors.Error):
            return None

    def emit(self, *words: str, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Hand out an event; also for what is seen elsewhere than on the bus."""
        event = Event(time.monotonic(), words, data, headers or {})
        self.picture.take(event)
        for listener in list(self._listeners):
            listener(event)

    async def first(
        self, condition: Callable[[Event], bool], within_s: float, at_once: Callable[[], None] | None = None
    ) -> Event | None:
        """The first event from now on that meets the condition; `at_once` runs in the very callback that brings it."""
        found: asyncio.Future[Event] = asyncio.get_running_loop().create_future()

        def look(event: Event) -> None:
            if not found.done() and condition(event):
                if at_once is not None:
                    at_once()
                found.set_result(event)

        self._listeners.append(look)
        try:
            async with asyncio.timeout(within_s):
                return await found
        except TimeoutError:
            return None
        finally:
            self._listeners.remove(look)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Every event from now on; gives what ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def _on_message(self, message: Msg) -> None:
        words = tuple(message.subject.removeprefix(self._subjects.prefix).split("."))
        self.emit(*words, data=message.data, headers=dict(message.headers or {}))


async def watch_checkpoints(observer: Observer, names: Callable[[], set[str]], stop: asyncio.Event) -> None:
    """Emit `("checkpoint", name)` as soon as a new one is visible in the run folder."""
    known = names()
    while not stop.is_set():
        await asyncio.sleep(_LOOK_FOR_CHECKPOINTS_S)
        now = names()
        for name in sorted(now - known):
            observer.emit("checkpoint", name)
        known = now
