"""The bus: one connection to NATS JetStream, once-only publishing, and exact reads.

Rules kept here and nowhere else: payload limits are checked before the client sees them; an ambiguous time-out is retried,
since a once-only write cannot happen twice; a client that is *closed* ends its process, since nats-py cannot recover from that.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import nats.errors
import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError

from schemas.codec import MAX_WIRE_BYTES, digest, encode
from schemas.message import Message
from schemas.table import Role, Stream, spec_of
from services.holding import Hold, Holds
from services.items import DIGEST_HEADER, BusError, Fenced, IntegrityError, Item, OnceConflict, Published
from services.nats_connection import close_client, open_client, server_name
from services.server_api import BACKOFF_S, ServerApi
from services.tracing import inject

log = structlog.get_logger()
_WRONG_LAST_SEQUENCE = (10071, 10164)
_STREAM_FULL = (10077, 10047, 10023)


class Bus(ServerApi):
    """A service's connection to one run's streams."""

    def __init__(self, client: Client, run: str, role: Role, instance: str, server: str = "the server") -> None:
        super().__init__(client, run)
        self.server = server
        self.holds = Holds()
        self.jetstream: JetStreamContext = client.jetstream(timeout=5)
        self.role = role
        self.instance = instance
        self.reconnected = asyncio.Event()
        self.give_up_s = 900.0
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
        bus = cls(client, run, role, instance, server_name(url))
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
        with self.holds.of(subject, self.give_up_s if give_up_s is None else give_up_s) as hold:
            while True:
                try:
                    return await self.last(subject)
                except IntegrityError:
                    raise
                except BusError as error:
                    if hold.left_s < 0 or self.client.is_closed:
                        raise
                    hold.reason = f"nats-server {self.server} does not say what stands there: {error}"
                    log.warning("publish is held back", subject=subject, reason=hold.reason, for_s=round(hold.age_s, 1))

    async def store(self, subject: str, data: bytes, headers: dict[str, str], *, give_up_s: float | None = None) -> int:
        """Store raw bytes and give their sequence; holds and retries while the server is away or full, up to `give_up_s`.

        While there is no connection nothing is given to the client, which would keep a copy of every try. What holds the
        message back is in `holds`, and in the log from the third try on.
        """
        patience_s = self.give_up_s if give_up_s is None else give_up_s
        if len(data) > MAX_WIRE_BYTES:
            raise BusError(f"{subject}: {len(data)} bytes exceed the message limit of {MAX_WIRE_BYTES}")
        carried = inject({**headers, DIGEST_HEADER: digest(data)})
        with self.holds.of(subject, patience_s) as hold:
            while True:
                reconnected = self.reconnected
                if self.client.is_closed:
                    raise BusError(f"{subject}: the connection is closed")
                seq = await self._try_to_store(hold, data, dict(carried))
                if seq is not None:
                    return seq
                if hold.left_s < 0:
                    raise BusError(f"{subject}: not stored within {patience_s:.0f} s; {hold.reason}")
                pause_s = BACKOFF_S[min(hold.tries, len(BACKOFF_S) - 1)]
                hold.tries += 1
                if hold.tries > 2:
                    held = {"for_s": round(hold.age_s, 1), "given_up_in_s": round(hold.left_s), "next_try_s": pause_s}
                    log.warning("publish is held back", subject=subject, reason=hold.reason, **held)
                with suppress(asyncio.TimeoutError):  # at a new connection at once
                    await asyncio.wait_for(reconnected.wait(), pause_s)

    async def _try_to_store(self, hold: Hold, data: bytes, headers: dict[str, str]) -> int | None:
        """One try. `None`: it can be tried again, and `hold` says what is in the way."""
        if not self.client.is_connected:
            hold.reason = f"no connection to nats-server {self.server} for {hold.age_s:.0f} s"
            return None
        try:
            ack = await self.jetstream.publish(hold.subject, data, timeout=5, headers=headers)
        except APIError as error:
            if error.err_code not in _STREAM_FULL and error.code != 503:
                raise
            hold.reason = f"the stream refuses: {error.description} (nats-server {self.server}, for {hold.age_s:.0f} s)"
        except (nats.errors.TimeoutError, NoStreamResponseError, nats.errors.OutboundBufferLimitError) as error:
            hold.reason = await self._why_silent(hold, error)
        except nats.errors.ConnectionClosedError as error:
            raise BusError(f"{hold.subject}: the connection is closed") from error
        else:
            if hold.subject.startswith(self.subjects.prefix):
                self.saw(self.stream_of(hold.subject), ack.seq)
            return ack.seq
        return None

    async def _why_silent(self, hold: Hold, error: Exception) -> str:
        """The server does not say why it acknowledges nothing; whether it answers at all tells two reasons apart."""
        server, since = f"nats-server {self.server}", f"for {hold.age_s:.0f} s"
        if isinstance(error, NoStreamResponseError):
            return f"{server} has no stream for it, or its JetStream is off, {since}"
        try:
            await self.client.flush(timeout=2)
        except (nats.errors.Error, asyncio.TimeoutError, OSError):
            return f"{server} does not answer, {since}"
        return f"{server} answers and acknowledges nothing, {since}: is its disk full? Its log and its /healthz say it"
