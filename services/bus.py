"""The bus: one connection to NATS JetStream, once-only publishing, and exact reads.

Rules kept here and nowhere else: payload limits are checked before the client sees them; an ambiguous time-out is retried,
since a once-only write cannot happen twice; a client that is *closed* ends its process, since nats-py cannot recover from that.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import nats
import nats.errors
import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError

from schemas.codec import MAX_WIRE_BYTES, CodecError, decode, digest, encode
from schemas.message import Message
from schemas.permissions import inbox_prefix
from schemas.table import Role, Stream, Subjects, spec_of
from services.nats_client import RefusalClient, closed_door_of, refusal_of
from services.tracing import inject

log = structlog.get_logger()
M = TypeVar("M", bound=Message)
DIGEST_HEADER = "Hr-Digest"
_WRONG_LAST_SEQUENCE = (10071, 10164)
_STREAM_FULL = (10077, 10047, 10023)
_NO_MESSAGE = 10037
_ANSWER_S = 5.0
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class BusError(RuntimeError):
    """The bus could not do what was asked; the text names the subject and the reason."""


class Forbidden(BusError):
    """The server knows this identity and does not let it do this, or does not know it at all."""


class OnceConflict(BusError):
    """A once-only subject already holds something else."""


class Fenced(BusError):
    """Another writer appended to a log that this process believed to own."""


class IntegrityError(BusError):
    """An item's bytes do not match the digest that it carries, or its stream has a hole."""


class Rewound(IntegrityError):
    """What a reader had read no longer stands in the log; whoever keeps a state of it must fold again."""


class Unreadable(CodecError):
    """A stored item is not the message that its subject promises; the text names stream, sequence and subject."""

    def __init__(self, item: Item, reason: str) -> None:
        super().__init__(f"{item.stream}: sequence {item.seq} ({item.subject}): {reason}")
        self.item = item


@dataclass(frozen=True, slots=True)
class Item:
    """One stored message: where it stands, when the server stored it, and its exact bytes.

    `delivery` is where this delivery of it is acknowledged; empty where nothing is to be acknowledged.
    """

    stream: str
    subject: str
    seq: int
    time_ns: int
    data: bytes
    digest: str
    headers: dict[str, str]
    delivery: str = ""

    def decode(self, kind: type[M]) -> M:
        """The message. Raises `Unreadable` if it is not a well-formed `kind`."""
        try:
            return decode(self.data, kind)
        except CodecError as error:
            raise Unreadable(self, str(error)) from error


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the server says of a stream. `deleted`: sequences between first and last that it knows to be gone."""

    created: str
    messages: int
    first_seq: int
    last_seq: int
    deleted: tuple[int, ...]
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Published:
    """Where a message was stored; `duplicate` says that it was there before."""

    seq: int
    digest: str
    duplicate: bool = False


class Bus:
    """A service's connection to one run's streams."""

    def __init__(self, client: Client, run: str, role: Role, instance: str) -> None:
        self.client = client
        self.jetstream: JetStreamContext = client.jetstream(timeout=5)
        self.subjects = Subjects(run)
        self.run = run
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
        client = RefusalClient()
        holder: list[Bus] = []

        async def on_error(error: Exception) -> None:
            log.warning("nats error", error=repr(error))
            if closed_door := closed_door_of(error, identity, has_key=bool(nkeys_seed), has_ca=tls is not None):
                text = f"{url}: {closed_door}"
                if not holder:  # the client would try for ever
                    raise Forbidden(text)
                on_loss(text)
            elif refused := refusal_of(error):
                text = f"the server refuses {identity}'s {refused.deed} of {client.spelled(refused.subject)}"
                client.refuse(refused.subject, Forbidden(text))
                on_loss(text)

        async def on_closed() -> None:
            on_loss("the nats client is closed")

        def on_loss(reason: str) -> None:
            if on_fatal and holder:
                on_fatal(reason)

        async def on_reconnect() -> None:
            log.info("nats reconnected")
            if tls is not None and not client.is_encrypted:
                on_loss(f"{url}: the server no longer uses TLS")
            for bus in holder:
                bus.reconnected.set()
                bus.reconnected = asyncio.Event()

        options: dict[str, Any] = {"reconnect_time_wait": 0.5}  # the client takes any number, its annotation only whole ones
        if nkeys_seed:
            options["nkeys_seed_str"] = nkeys_seed
        if tls is not None:
            options["tls"] = tls
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await asyncio.wait_for(
                    client.connect(
                        servers=[part.strip() for part in url.split(",")],
                        name=f"{identity}-{instance}",
                        inbox_prefix=inbox_prefix(identity).encode(),
                        max_reconnect_attempts=-1,
                        allow_reconnect=True,
                        ping_interval=5,
                        max_outstanding_pings=2,
                        connect_timeout=3,
                        drain_timeout=5,
                        pending_size=16 * 2**20,
                        flush_timeout=30,
                        error_cb=on_error,
                        closed_cb=on_closed,
                        reconnected_cb=on_reconnect,
                        **options,
                    ),
                    timeout=max(0.5, min(5.0, deadline - time.monotonic())),
                )
                break
            except (OSError, asyncio.TimeoutError, nats.errors.Error) as error:
                if time.monotonic() >= deadline:
                    raise BusError(
                        f"no NATS server answered at {url} within {timeout_s:.0f} s ({error!r}); start one or set nats.url"
                    ) from error
                await asyncio.sleep(0.3)
                client = RefusalClient()
            except Forbidden:
                with suppress(asyncio.TimeoutError, nats.errors.Error, OSError):  # after a failed handshake it waits for ever
                    await asyncio.wait_for(client.close(), 1)
                raise
        bus = cls(client, run, role, instance)
        if tls is not None and not client.is_encrypted:
            await bus.close()
            raise Forbidden(f"{url}: the server does not use TLS, though nats.tls_ca_file is set")
        holder.append(bus)
        return bus

    async def close(self) -> None:
        """Flush and close; harmless when the server is gone."""
        try:
            await asyncio.wait_for(self.client.flush(), 3)
        except (asyncio.TimeoutError, nats.errors.Error, OSError):
            pass
        try:
            await asyncio.wait_for(self.client.close(), 3)
        except (asyncio.TimeoutError, nats.errors.Error, OSError):
            pass

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
                held = await self.last(subject)
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
            held = await self.last(subject)
            ours = held is not None and held.digest == digest(data)
            if held is not None and ours and (held.seq > after if within else held.seq == after + 1):
                return Published(held.seq, held.digest, duplicate=True)
            raise Fenced(f"{subject}: the log moved past sequence {after}; another writer is active") from error
        return Published(seq, digest(data))

    async def store(self, subject: str, data: bytes, headers: dict[str, str], *, give_up_s: float | None = None) -> int:
        """Store raw bytes and give their sequence; holds and retries while the server is away or full, up to `give_up_s`."""
        patience_s = self.give_up_s if give_up_s is None else give_up_s
        if len(data) > MAX_WIRE_BYTES:
            raise BusError(f"{subject}: {len(data)} bytes exceed the message limit of {MAX_WIRE_BYTES}")
        carried = inject({**headers, DIGEST_HEADER: digest(data)})
        deadline = time.monotonic() + patience_s
        for attempt in range(10_000):
            try:
                ack = await self.jetstream.publish(subject, data, timeout=_ANSWER_S, headers=dict(carried))
                if subject.startswith(self.subjects.prefix):
                    self.saw(self.stream_of(subject), ack.seq)
                return ack.seq
            except APIError as error:
                if error.err_code not in _STREAM_FULL and error.code != 503:
                    raise
                reason = f"the stream refuses: {error.description}"
            except nats.errors.TimeoutError:
                reason = f"the server does not answer within {_ANSWER_S:g} s, as when its disk is full; its log tells"
            except NoStreamResponseError:
                reason = "no server holds the stream now"
            except nats.errors.OutboundBufferLimitError:
                reason = "the server is away, and what may wait for it is waiting"
            except nats.errors.ConnectionClosedError as error:
                raise BusError(f"{subject}: the connection is closed") from error
            if time.monotonic() > deadline:
                raise BusError(f"{subject}: not stored within {patience_s:.0f} s; {reason}")
            pause = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
            if attempt >= 2:
                log.warning("publish is held back", subject=subject, reason=reason, next_try_s=pause)
            await asyncio.sleep(pause)
        raise BusError(f"{subject}: gave up")

    # -- reading -------------------------------------------------------------------------------------------------------------

    async def request(self, api: str, body: dict[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
        """One JetStream API call, retried over reconnects. Raises `BusError` with the server's words."""
        reply: dict[str, Any] = await self.api(api, body, timeout_s)
        if "error" in reply:
            raise BusError(f"{api}: {reply['error'].get('description')} ({reply['error'].get('err_code')})")
        return reply

    async def api(self, api: str, body: dict[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
        """One JetStream API call whose answer may be an error; retried over reconnects."""
        payload = json.dumps(body).encode() if body else b""
        for attempt in range(12):
            try:
                message = await self.client.request(f"$JS.API.{api}", payload, timeout=timeout_s)
                return dict(json.loads(message.data))
            except (nats.errors.TimeoutError, nats.errors.NoRespondersError, nats.errors.OutboundBufferLimitError) as error:
                if attempt == 11:
                    raise BusError(f"{api}: no answer from the server ({error!r})") from error
                await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
        raise BusError(f"{api}: no answer")

    async def last(self, subject: str, stream: Stream | None = None) -> Item | None:
        """The newest message of a subject, read from the stream's leader; `None` when there is none."""
        return await self._get(stream or self.stream_of(subject), {"last_by_subj": subject})

    async def get(self, stream: Stream, seq: int) -> Item:
        """The message at a sequence. Raises `IntegrityError` if it is gone or its bytes do not match its digest."""
        item = await self._get(stream, {"seq": seq})
        if item is None:
            raise IntegrityError(f"{self.subjects.stream(stream)}: sequence {seq} is missing from the store")
        return item

    async def _get(self, stream: Stream, body: dict[str, Any]) -> Item | None:
        raw = await self._raw(stream, body)
        if raw is None:
            return None
        name = self.subjects.stream(stream)
        headers, data = _headers(_b64(raw.get("hdrs"))), _b64(raw.get("data"))
        return item_of(name, raw["subject"], int(raw["seq"]), _nanoseconds(raw["time"]), data, headers)

    async def _raw(self, stream: Stream, body: dict[str, Any]) -> dict[str, Any] | None:
        name = self.subjects.stream(stream)
        reply = await self.api(f"STREAM.MSG.GET.{name}", body, 5.0)
        if "error" in reply:
            if reply["error"].get("err_code") == _NO_MESSAGE or reply["error"].get("code") == 404:
                return None
            raise BusError(f"{name}: {reply['error'].get('description')}")
        return dict(reply["message"])

    async def stored_ns(self, stream: Stream, which: dict[str, Any]) -> int | None:
        """The server's time of a message, asked for by `seq` and perhaps `next_by_subj`; `None` when there is none."""
        raw = await self._raw(stream, which)
        return None if raw is None else _nanoseconds(raw["time"])

    async def last_sequence(self, stream: Stream) -> int:
        """The stream's last sequence."""
        reply = await self.request(f"STREAM.INFO.{self.subjects.stream(stream)}", {})
        return int(reply["state"]["last_seq"])

    async def stream_state(self, stream: Stream) -> StreamState:
        """What the server says of the stream, the sequences that it lost included."""
        reply = await self.request(f"STREAM.INFO.{self.subjects.stream(stream)}", {"deleted_details": True})
        state = reply["state"]
        return StreamState(
            created=reply["created"],
            messages=int(state["messages"]),
            first_seq=int(state["first_seq"]),
            last_seq=int(state["last_seq"]),
            deleted=tuple(sorted(state.get("deleted") or ())),
            max_bytes=int(reply["config"].get("max_bytes", -1)),
        )

    def stream_of(self, subject: str) -> Stream:
        """The stream that a subject of this run belongs to, by its first words."""
        head = subject.removeprefix(self.subjects.prefix).split(".", 1)[0]
        return _STREAM_BY_HEAD[head]


_STREAM_BY_HEAD = {
    "task": Stream.TASKS,
    "gen": Stream.GEN,
    "sbx": Stream.SBX,
    "turn": Stream.TURNS,
    "episode": Stream.EPISODES,
    "verdict": Stream.EPISODES,
    "ready": Stream.READY,
    "graded": Stream.READY,
    "ledger": Stream.LEDGER,
    "train": Stream.TRAIN,
    "policy": Stream.POLICY,
    "reg": Stream.REGISTRY,
    "dead": Stream.DEAD,
}


def item_of(stream: str, subject: str, seq: int, time_ns: int, data: bytes, headers: dict[str, str]) -> Item:
    """An item whose bytes match the digest it carries. Raises `IntegrityError` naming stream and sequence otherwise."""
    actual = digest(data)
    declared = headers.get(DIGEST_HEADER, actual)
    if actual != declared:
        told, found = declared[:12], actual[:12]
        raise IntegrityError(f"{stream}: sequence {seq} ({subject}) carries digest {told} but its bytes are {found}")
    return Item(stream, subject, seq, time_ns, data, actual, headers)


def _b64(text: str | None) -> bytes:
    return base64.b64decode(text) if text else b""


def _headers(block: bytes) -> dict[str, str]:
    lines = block.decode("utf-8", "replace").split("\r\n")[1:]
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines if line)}


def _nanoseconds(text: str) -> int:
    """RFC 3339 with nanoseconds to nanoseconds since the epoch."""
    whole, _, rest = text.rstrip("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole + "+00:00").timestamp())
    return seconds * 1_000_000_000 + int((rest + "000000000")[:9])
