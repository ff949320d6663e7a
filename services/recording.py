"""The recording's format: a file of digested, compressed blocks, the first with a manifest and the last with an index.

Layout: the file's head (`HRRECORD`, format version u32, 4 zero bytes), blocks, and a trailer (offset of the index block u64,
`HREND\\0\\0\\1`). A block is a head of 80 bytes (`_HEAD`) and a zstandard frame of msgpack. Its digest covers both; damage is
found in the block that has it. Sizes are checked before memory is reserved. `docs/replay.md` has the whole layout.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import BinaryIO, TypeVar

import msgspec
import zstandard

from schemas.codec import digest
from schemas.table import Stream

FORMAT_VERSION = 1
FILE_HEAD = struct.Struct("<8sII")
TRAILER = struct.Struct("<Q8s")
MAGIC, END_MAGIC, BLOCK_MAGIC = b"HRRECORD", b"HREND\0\0\1", b"HRBK"
BLOCK_BYTES = 2**20  # a block is closed once its records reach this
MAX_BLOCK_BYTES = 16 * 2**20  # before compression: a block that one largest message closes
MAX_INDEX_BYTES = 512 * 2**20
MAX_MANIFEST_BYTES = 4 * 2**20
RECORDED = (
    Stream.TASKS,
    Stream.TURNS,
    Stream.EPISODES,
    Stream.READY,
    Stream.LEDGER,
    Stream.TRAIN,
    Stream.POLICY,
    Stream.DEAD,
)
_HEAD = struct.Struct("<4sBBHIIIqqq4x32s")  # magic, kind, stream, 0, packed, raw, records, seqs, time of the first, digest
_DIGEST_BYTES = 32
_LEVEL = 6
T = TypeVar("T")


class RecordingError(ValueError):
    """A file that is no whole recording; the text names the file, the block and what is wrong with it."""


class Kind(IntEnum):
    """What a block holds."""

    MANIFEST = 1
    RECORDS = 2
    INDEX = 3


class Form(IntEnum):
    """How a record holds its message."""

    WHOLE = 0  # the very bytes of the stream; their digest follows from them
    SLIM = 1  # without bodies: what stands in their place, and the digest of the bytes
    DAMAGED = 2  # bytes that are not those that were published; the digest is theirs


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One message of a stream: its sequence, the server's time, its subject below `hr.<run>.`, and what is kept of it."""

    seq: int
    time_ns: int
    name: str
    form: int
    data: bytes
    digest_bytes: bytes = b""

    @property
    def digest(self) -> str:
        """SHA-256 of the stored bytes, in hex."""
        return self.digest_bytes.hex() if self.digest_bytes else digest(self.data)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording holds of one stream. `whole`: everything from sequence 1 to `last`, but for `holes`."""

    first: int  # as asked for
    last: int
    whole: bool
    created: str = ""
    holes: tuple[tuple[int, int], ...] = ()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording is of and how it was made. `config`: the run's resolved TOML."""

    run: str
    headrace: str
    format: int = FORMAT_VERSION
    codec_version: int
    schema_version: int
    bodies: bool
    made_ns: int
    source: str
    asked: str
    generated: bool = False  # by a generator and not by a run
    config: str = ""
    parts: dict[str, Part]


@dataclass(frozen=True, slots=True)
class BlockHead:
    """The head of one block: where it is, what it holds, and how large it is."""

    number: int
    offset: int
    kind: Kind
    stream: Stream | None
    packed_bytes: int
    raw_bytes: int
    records: int
    first_seq: int
    last_seq: int
    first_ns: int
    declared: bytes

    def __str__(self) -> str:
        if self.kind is not Kind.RECORDS:
            return f"block {self.number} ({self.kind.name.lower()}) at byte {self.offset}"
        return f"block {self.number} ({self.stream} {self.first_seq} to {self.last_seq}) at byte {self.offset}"


def write_block(
    out: BinaryIO,
    number: int,
    kind: Kind,
    raw: bytes,
    *,
    stream: Stream | None = None,
    records: int = 0,
    seqs: tuple[int, int] = (0, 0),
    first_ns: int = 0,
) -> BlockHead:
    """Compress and append one block; gives its head."""
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(raw)
    code = RECORDED.index(stream) if stream is not None else 255
    fields = (BLOCK_MAGIC, kind, code, 0, len(packed), len(raw), records, *seqs, first_ns)
    plain = _HEAD.pack(*fields, bytes(_DIGEST_BYTES))
    declared = _digest(plain, packed)
    offset = out.tell()
    out.write(plain[:-_DIGEST_BYTES] + declared)
    out.write(packed)
    return BlockHead(number, offset, kind, stream, len(packed), len(raw), records, *seqs, first_ns, declared)


def read_head(source: BinaryIO, path: str, number: int, offset: int, end: int) -> BlockHead:
    """The head at `offset`. Raises `RecordingError` naming the block where there is none, or where it promises too much."""
    where = f"{path}: block {number} at byte {offset}"
    source.seek(offset)
    data = source.read(_HEAD.size)
    if len(data) < _HEAD.size:
        raise RecordingError(f"{where}: the file ends in its head; it is torn, record it again")
    magic, kind, code, _, packed, raw, records, first, last, first_ns, declared = _HEAD.unpack(data)
    if magic != BLOCK_MAGIC or kind not in tuple(Kind) or (code != 255 and code >= len(RECORDED)):
        raise RecordingError(f"{where}: no block begins here; the file is corrupted")
    stream = RECORDED[code] if code != 255 else None
    head = BlockHead(number, offset, Kind(kind), stream, packed, raw, records, first, last, first_ns, declared)
    bound = {Kind.MANIFEST: MAX_MANIFEST_BYTES, Kind.RECORDS: MAX_BLOCK_BYTES, Kind.INDEX: MAX_INDEX_BYTES}[head.kind]
    if raw > bound:
        raise RecordingError(f"{path}: {head}: declares {raw} bytes, more than the limit of {bound}")
    if offset + _HEAD.size + packed > end:
        raise RecordingError(f"{path}: {head}: the file ends in it; it is torn, record it again")
    return head


def end_of(head: BlockHead) -> int:
    """Where the block after this one begins."""
    return head.offset + _HEAD.size + head.packed_bytes


def read_payload(source: BinaryIO, path: str, head: BlockHead) -> bytes:
    """The block's msgpack, its digest checked first. Raises `RecordingError` naming the block."""
    source.seek(head.offset)
    plain = source.read(_HEAD.size)[:-_DIGEST_BYTES] + bytes(_DIGEST_BYTES)
    packed = source.read(head.packed_bytes)
    if len(packed) != head.packed_bytes:
        raise RecordingError(f"{path}: {head}: the file ends in it; it is torn, record it again")
    if _digest(plain, packed) != head.declared:
        raise RecordingError(f"{path}: {head}: its bytes do not match its digest; the file is corrupted")
    try:
        declared = zstandard.get_frame_parameters(packed).content_size
        if declared != head.raw_bytes:
            raise RecordingError(f"{path}: {head}: its frame declares {declared} bytes, its head {head.raw_bytes}")
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=head.raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RecordingError(f"{path}: {head}: {error}") from error


def decoded(raw: bytes, kind: type[T], path: str, head: BlockHead) -> T:
    """The block's content as `kind`. Raises `RecordingError` naming the block."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordingError(f"{path}: {head}: {error}") from error


def _digest(head: bytes, packed: bytes) -> bytes:
    return hashlib.sha256(head + packed).digest()
