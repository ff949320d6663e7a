"""What stands on the bus, and what can be wrong with it: items with their digests, streams' states, errors."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from schemas.codec import CodecError, decode, digest
from schemas.message import Message

M = TypeVar("M", bound=Message)
DIGEST_HEADER = "Hr-Digest"


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


def item_of(stream: str, subject: str, seq: int, time_ns: int, data: bytes, headers: dict[str, str]) -> Item:
    """An item whose bytes match the digest it carries. Raises `IntegrityError` naming stream and sequence otherwise."""
    actual = digest(data)
    declared = headers.get(DIGEST_HEADER, actual)
    if actual != declared:
        told, found = declared[:12], actual[:12]
        raise IntegrityError(f"{stream}: sequence {seq} ({subject}) carries digest {told} but its bytes are {found}")
    return Item(stream, subject, seq, time_ns, data, actual, headers)


def unpacked(text: str | None) -> bytes:
    """Bytes out of base64; none out of nothing."""
    return base64.b64decode(text) if text else b""


def headers_of(block: bytes) -> dict[str, str]:
    """Headers out of the block that is stored before a message."""
    lines = block.decode("utf-8", "replace").split("\r\n")[1:]
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines if line)}


def nanoseconds(text: str) -> int:
    """RFC 3339 with nanoseconds to nanoseconds since the epoch."""
    whole, _, rest = text.rstrip("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole + "+00:00").timestamp())
    return seconds * 1_000_000_000 + int((rest + "000000000")[:9])
