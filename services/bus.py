"""The bus: one connection to NATS JetStream, once-only publishing, and exact reads.

Rules kept here and nowhere else: payload limits are checked before the client sees them; an ambiguous time-out is retried,
since a once-only write cannot happen twice; a client that is *closed* ends its process, since nats-py cannot recover from that.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import nats.errors
import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError

from schemas.codec import MAX_WIRE_BYTES, digest, encode
from schemas.message import Message
from schemas.table import Role, Stream, spec_of
from services.items import DIGEST_HEADER, BusError, Fenced, IntegrityError, Item, OnceConflict, Published
from services.nats_connection import close_client, open_client
from services.server_api import BACKOFF_S, ServerApi
from services.tracing import inject

log = structlog.get_logger()
_WRONG_LAST_SEQUENCE = (10071, 10164)
_STREAM_FULL = (10077, 10047, 10023)
_ANSWER_S = 5.0


class Bus(ServerApi):
    """A service's connection to one run's streams."""

    def __init__(self, client: Client, run: str, role: Role, instance: str) -> None:
        super().__init__(client, run)
        self.jetstream: JetStreamContext = client.jetstream(timeout=5)
        self.role = role
        self.instance = instance
        self.reconnected = asyncio.Event()
        self.alarms: Counter[str] = Counter()
        self._alarmed: set[str] = set()
        self.seen: dict[Stream, int] = {}  # last sequence of each log that this process stored or read

    @classmethod
    async def connect(
        cls,
        url: str,
        run: str,
        role: Role,
        instance: str,
        *,
        timeout_s: float = 30.0,
        nkeys_seed: str | None = None,
        tls: ssl.SSLContext | None = None,
        on_fatal: Callable[[str], None] | None = None,
        identity: str = "",
    ) -> Bus:
        """Connect within `timeout_s`, as `identity` where that is not the role itself.

        Raises `BusError` naming the server when it cannot be reached or is not the one that we trust, and `Forbidden` when it
        does not let us in.
        """
        identity = identity or str(role)
        admitted: list[Bus] = []

        def on_loss(reason: str) -> None:
            if on_fatal:
                on_fatal(reason)

        def on_reconnect() -> None:
            for bus in admitted:
                bus.reconnected.set()
                bus.reconnected = asyncio.Event()

        client = await open_client(
            url,
            identity,
            f"{identity}-{instance}",
            timeout_s=timeout_s,
            nkeys_seed=nkeys_seed,
            tls=tls,
            on_loss=on_loss,
            on_reconnect=on_reconnect,
        )
        bus = cls(client, run, role, instance)
        admitted.append(bus)
        return bus

    async def close(self) -> None:
        """Flush and close; harmless when the server is gone."""
        await close_client(self.client)

    def alarm(self, kind: str, **what: object) -> bool:
        """Damage or loss, said aloud: an error in the log, and a count in the heartbeat that `headrace status` shows.

        The same words are said once; false when they were said before.
        """
        words = f"{kind} {what}"
        if words in self._alarmed:
            return False
        self._alarmed.add(words)
        self.alarms[kind] += 1
        log.error("alarm", alarm=kind, **what)
        return True

    def saw(self, stream: Stream, seq: int) -> None:
        """Remember that a log reached this sequence."""
        if seq > self.seen.get(stream, 0) and spec_of(stream).deny_delete:
            self.seen[stream] = seq

    # -- writing -------------------------------------------------------------------------------------------------------------

    async def publish(self, subject: str, message: Message) -> Published:
        """Store a message; retried until acknowledged. It may be stored twice, so its reader must key by identity."""
        data = encode(message)
        return Published(await self.store(subject, data, {}), digest(data))

    async def publish_once(self, subject: str, message: Message, *, give_up_s: float | None = None) -> Published:
        """Store a message on a subject that may hold one message for ever.

        A repeat with the same bytes succeeds and says so. Raises `OnceConflict` when the subject holds different bytes.
        """
        data = encode(message)
        try:
            seq = await self.store(subject, data, {"Nats-Expected-Last-Subject-Sequence": "0"}, give_up_s=give_up_s)
        except APIError as error:
            if error.err_code not in _WRONG_LAST_SEQUENCE:
                raise
            try:
                held = await self._what_stands(subject, give_up_s)
            except IntegrityError as damage:
                raise OnceConflict(f"{subject} holds something damaged: {damage}") from damage
            if held is None or held.digest != digest(data):
                raise OnceConflict(f"{subject} already holds {held.digest[:12] if held else 'nothing readable'}") from error
            return Published(held.seq, held.digest, duplicate=True)
        return Published(seq, digest(data))

    async def append(self, subject: str, message: Message, *, after: int, within: str = "") -> Published:
        """Append to a log that one writer owns: refused unless the log's last sequence is still `after`.

        The log is the whole stream, or the subjects that the filter `within` takes in, if all its writers name the same one.
        Raises `Fenced` when another message stands there. A lost acknowledgement is recognised by our own bytes.
        """
        data = encode(message)
        if within:
            place = {"Nats-Expected-Last-Subject-Sequence": str(after), "Nats-Expected-Last-Subject-Sequence-Subject": within}
        else:
            place = {"Nats-Expected-Last-Sequence": str(after), "Nats-Expected-Last-Subject-Sequence": "0"}
        try:
            seq = await self.store(subject, data, place)
        except APIError as error:
            if error.err_code not in _WRONG_LAST_SEQUENCE:
                raise
            held = await self._what_stands(subject)
            ours = held is not None and held.digest == digest(data)
            if held is not None and ours and (held.seq > after if within else held.seq == after + 1):
                return Published(held.seq, held.digest, duplicate=True)
            raise Fenced(f"{subject}: the log moved past sequence {after}; another writer is active") from error
        return Published(seq, digest(data))

    async def _what_stands(self, subject: str, give_up_s: float | None = None) -> Item | None:
        """The newest item of a subject that refused ours, with a publisher's patience: the server may be gone since."""
        begun_s = time.monotonic()
        while True:
            try:
                return await self.last(subject)
            except IntegrityError:
                raise
            except BusError as error:
                held_s = time.monotonic() - begun_s
                if held_s > self._patience_s(give_up_s) or self.client.is_closed:
                    raise
                reason = f"the server does not say what stands there: {error}"
                log.warning("publish is held back", subject=subject, reason=reason, for_s=round(held_s, 1))
                await asyncio.sleep(BACKOFF_S[3])

    async def store(self, subject: str, data: bytes, headers: dict[str, str], *, give_up_s: float | None = None) -> int:
        """Store raw bytes and give their sequence; holds and retries while the server is away or full, up to `give_up_s`.

        `Bus.give_up_s` may be lowered meanwhile, as a draining service does; it then holds for this message too. While there is
        no connection nothing is given to the client, which would keep a copy of every try. Raises `BusError` with the reason.
        """
        if len(data) > MAX_WIRE_BYTES:
            raise BusError(f"{subject}: {len(data)} bytes exceed the message limit of {MAX_WIRE_BYTES}")
        carried = inject({**headers, DIGEST_HEADER: digest(data)})
        begun_s = time.monotonic()
        for tries in count():
            reconnected = self.reconnected
            stored = await self._try_to_store(subject, data, dict(carried))
            if isinstance(stored, int):
                return stored
            held_s = time.monotonic() - begun_s
            if held_s > self._patience_s(give_up_s):
                raise BusError(f"{subject}: not stored within {held_s:.0f} s; {stored}")
            pause_s = BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
            if tries >= 2:
                log.warning("publish is held back", subject=subject, reason=stored, for_s=round(held_s, 1), next_try_s=pause_s)
            with suppress(asyncio.TimeoutError):  # at a new connection at once
                await asyncio.wait_for(reconnected.wait(), pause_s)
        raise AssertionError("unreachable")

    def _patience_s(self, asked_s: float | None) -> float:
        return self.give_up_s if asked_s is None else min(asked_s, self.give_up_s)

    async def _try_to_store(self, subject: str, data: bytes, headers: dict[str, str]) -> int | str:
        """One try: the sequence, or in words what is in the way for now. Raises `APIError` for what no repeat can mend."""
        if self.client.is_closed:
            raise BusError(f"{subject}: the connection is closed")
        if not self.client.is_connected:
            return "there is no connection to the server"
        try:
            ack = await self.jetstream.publish(subject, data, timeout=_ANSWER_S, headers=headers)
        except APIError as error:
            if error.err_code not in _STREAM_FULL and error.code != 503:
                raise
            return f"the stream refuses: {error.description}"
        except nats.errors.TimeoutError:
            return f"the server does not answer within {_ANSWER_S:g} s, as when its disk is full; its log tells"
        except NoStreamResponseError:
            return "no server holds the stream now"
        except nats.errors.OutboundBufferLimitError:
            return "the server is away, and what may wait for it is waiting"
        except nats.errors.ConnectionClosedError as error:
            raise BusError(f"{subject}: the connection is closed") from error
        if subject.startswith(self.subjects.prefix):
            self.saw(self.stream_of(subject), ack.seq)
        return ack.seq
