"""The recording file: stored messages of one run in compressed blocks, each of one stream, with an index at the end.

    8 bytes   magic, `HRREC` and the format's version
    frame     header (`Header`)
    frame …   blocks, each a run of one stream's records in the log's order
    frame     index (`Index`): where each block lies and which groups and steps are in it
    trailer   offset of the index, and the closing magic

A frame is a fixed head (tag, number, lengths, digest) and a zstd payload. Every length is checked against its bound and the
file's size before memory is reserved for it. `services/recording_writer.py` writes it; `docs/replay.md` describes it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import zstandard

from schemas.codec import CODEC_VERSION, MAX_WIRE_BYTES
from schemas.message import SCHEMA_VERSION
from schemas.table import Stream

FORMAT = 1
MAGIC, END = b"HRREC\x00\x01\n", b"HRRECEND"
BLOCK_BYTES = 1 << 20  # a block is closed at this size before compression
MAX_BLOCK_BYTES = BLOCK_BYTES + 2 * MAX_WIRE_BYTES
MAXHEADER_BYTES = 16 * 2**20
MAX_INDEX_BYTES = 512 * 2**20
HEAD = struct.Struct("<4sIIII8sQ32s")  # tag, number, stored, plain, records, stream, first sequence, SHA-256 of the payload
TRAILER = struct.Struct("<Q8s")
HEADER, BLOCK, INDEX = b"HEAD", b"BLCK", b"INDX"
BOUNDS = {HEADER: MAXHEADER_BYTES, BLOCK: MAX_BLOCK_BYTES, INDEX: MAX_INDEX_BYTES}
WIRE, OUTLINE, DAMAGED, HOLE = range(4)
S = TypeVar("S")


class RecordingError(ValueError):
    """A recording that cannot be used; the text names the file, the block and what to do."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One stored message, or what is there in its place.

    `form`: WIRE (`data` is the message as it was published), OUTLINE (`data` is the message without its bodies, see
    `admission/outline.py`), DAMAGED (`data` is what was found, `fact` says why it cannot be used), HOLE (sequences `seq` to
    `size` are missing; `data` says how).
    """

    seq: int
    time_ns: int  # the server's time of it
    subject: str  # below `hr.<run>.`
    digest: bytes  # SHA-256 of the bytes as they stood in the store
    size: int  # their number
    form: int
    data: bytes
    fact: bytes = b""  # what admission's core takes from a message whose body is left out


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the recording is of."""

    run: str
    made_ns: int
    bodies: bool
    selection: str  # in words; empty: the whole run
    configs: tuple[str, ...] = ()  # resolved configurations that the run was under (TOML), newest first
    note: str = ""  # says of a generated recording that it is one
    format: int = FORMAT
    schema_version: int = SCHEMA_VERSION
    codec_version: int = CODEC_VERSION


class StreamFacts(msgspec.Struct, kw_only=True):
    """One stream as it was when it was recorded. `whole`: everything from its first to its last sequence is here."""

    created: str = ""
    last_seq: int = 0
    records: int = 0
    holes: int = 0
    damaged: int = 0
    whole: bool = True


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Where a block lies and what is in it. `groups` and `steps`: ascending, as differences; `groups` are `group_key`s."""

    stream: str
    offset: int
    stored: int
    plain: int
    records: int
    first_seq: int
    last_seq: int
    first_ns: int
    last_ns: int
    digest: bytes
    groups: list[int]
    steps: list[int]


class Index(msgspec.Struct, kw_only=True):
    """Built once, when the file is closed."""

    streams: dict[str, StreamFacts]
    blocks: list[Block]


def group_key(group: str) -> int:
    """A group's place in the index: twice its ordinal, plus one for an evaluation group; -1 for a name without one."""
    if group[:1] in ("g", "e") and group[1:].isdecimal():
        return 2 * int(group[1:]) + (group[0] == "e")
    return -1


def sums(values: list[int]) -> Iterator[int]:
    """The values again."""
    total = 0
    for value in values:
        total += value
        yield total


class Recording:
    """An open recording. Blocks are read when they are asked for, each checked against its digest."""

    def __init__(self, path: Path) -> None:
        """Read header and index. Raises `RecordingError` naming what is wrong."""
        self.path = path
        try:
            self._file = path.open("rb")
            self._size = path.stat().st_size
        except OSError as error:
            raise RecordingError(
                f"{path}: cannot be read ({error.strerror}); give a file that `headrace record` made"
            ) from error
        try:
            self.header, self.index = self._open()
        except BaseException:
            self._file.close()
            raise
        self._records = msgspec.msgpack.Decoder(list[Record])

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def digest(self) -> str:
        """Names the whole content: SHA-256 over the digests of all blocks in order."""
        return hashlib.sha256(b"".join(block.digest for block in self.index.blocks)).hexdigest()

    def facts(self, stream: Stream) -> StreamFacts:
        """What was recorded of a stream."""
        return self.index.streams.get(str(stream), StreamFacts())

    def records(self, stream: Stream) -> Iterator[Record]:
        """Every record of a stream, in the log's order."""
        for number, block in enumerate(self.index.blocks):
            if block.stream == stream:
                yield from self.block(number)

    def of_group(self, group: str, *streams: Stream) -> Iterator[tuple[Stream, Record]]:
        """The records of all blocks that hold something of a group; the reader picks what it wants."""
        key = group_key(group)
        return self._where(lambda block: key in sums(block.groups) or -1 in sums(block.groups), streams)

    def of_step(self, step: int, *streams: Stream) -> Iterator[tuple[Stream, Record]]:
        """The same by step."""
        return self._where(lambda block: step in sums(block.steps), streams)

    def _where(self, wanted: Callable[[Block], bool], streams: tuple[Stream, ...]) -> Iterator[tuple[Stream, Record]]:
        for number, block in enumerate(self.index.blocks):
            if (not streams or block.stream in streams) and wanted(block):
                for record in self.block(number):
                    yield Stream(block.stream), record

    def block(self, number: int) -> list[Record]:
        """One block's records. Raises `RecordingError` naming the block when it is damaged."""
        block = self.index.blocks[number]
        where = f"block {number} ({block.stream}, sequences {block.first_seq} to {block.last_seq}, at byte {block.offset})"
        plain = self._frame(BLOCK, block.offset, where)
        if hashlib.sha256(self._payload).digest() != block.digest:
            raise RecordingError(f"{self.path}: {where} is damaged: the index names other bytes; record it again")
        if block.records > len(plain):
            raise RecordingError(f"{self.path}: {where} is damaged: {block.records} records in {len(plain)} bytes")
        try:
            return self._records.decode(_as_array(plain, block.records))
        except (msgspec.DecodeError, RecursionError) as error:
            raise RecordingError(f"{self.path}: {where} is damaged: {error}; record it again") from error

    # -- reading the file ----------------------------------------------------------------------------------------------------

    def _open(self) -> tuple[Header, Index]:
        magic = self._file.read(len(MAGIC))
        if magic[:6] != MAGIC[:6]:
            raise RecordingError(f"{self.path}: is no recording (it begins with {magic!r}); `headrace record` makes one")
        if magic != MAGIC:
            raise RecordingError(f"{self.path}: format {magic[6]} is unknown; this build reads format {FORMAT}")
        header = self._decode(self._frame(HEADER, len(MAGIC), "the header"), Header, "the header")
        if header.schema_version != SCHEMA_VERSION or header.codec_version != CODEC_VERSION:
            raise RecordingError(
                f"{self.path}: holds messages of schema version {header.schema_version}, codec {header.codec_version};"
                f" this build speaks {SCHEMA_VERSION} and {CODEC_VERSION}; read it with the build that made it"
            )
        self._file.seek(max(0, self._size - TRAILER.size))
        trailer = self._file.read(TRAILER.size)
        if len(trailer) != TRAILER.size or not trailer.endswith(END):
            raise RecordingError(self._cut_short())
        offset, _ = TRAILER.unpack(trailer)
        index = self._decode(self._frame(INDEX, offset, "the index"), Index, "the index")
        return header, index

    def _decode(self, plain: bytes, kind: type[S], what: str) -> S:
        try:
            return msgspec.msgpack.decode(plain, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RecordingError(f"{self.path}: {what} is damaged: {error}; record it again") from error

    def _frame(self, tag: bytes, offset: int, where: str) -> bytes:
        """The plain bytes of the frame at `offset`. Nothing is allocated beyond the bounds and the file's size."""
        if not 0 <= offset <= self._size - HEAD.size:
            raise RecordingError(f"{self.path}: {where} is damaged: its place, byte {offset}, lies outside of the file")
        self._file.seek(offset)
        found, _, stored, plain, _, _, _, digest = HEAD.unpack(self._file.read(HEAD.size))
        bound = BOUNDS[tag]
        if found != tag:
            raise RecordingError(f"{self.path}: {where} is damaged: byte {offset} begins no such frame; record it again")
        if plain > bound or stored > self._size - offset - HEAD.size:
            raise RecordingError(
                f"{self.path}: {where} is damaged: it declares {stored} bytes, {plain} when unpacked;"
                f" the file has {self._size - offset - HEAD.size} left and the bound is {bound}"
            )
        self._payload = self._file.read(stored)
        if hashlib.sha256(self._payload).digest() != digest:
            raise RecordingError(f"{self.path}: {where} is damaged: its bytes do not match its digest; record it again")
        return self._unpack(self._payload, plain, where)

    def _unpack(self, payload: bytes, size: int, where: str) -> bytes:
        try:
            if zstandard.get_frame_parameters(payload).content_size != size:
                raise RecordingError(f"{self.path}: {where} is damaged: its frame declares another size; record it again")
            return zstandard.ZstdDecompressor().decompress(payload, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise RecordingError(f"{self.path}: {where} is damaged: {error}; record it again") from error

    def _cut_short(self) -> str:
        """Where a file without its trailer ends."""
        offset, whole = self._after_frame(len(MAGIC)), 0
        while offset + HEAD.size <= self._size:
            self._file.seek(offset)
            tag, number, _, _, _, stream, first, _ = HEAD.unpack(self._file.read(HEAD.size))
            what = (
                "the index" if tag == INDEX else f"block {number} ({stream.rstrip(bytes(1)).decode()}, from sequence {first})"
            )
            if self._after_frame(offset) > self._size or tag not in (BLOCK, INDEX):
                return f"{self.path}: was cut short inside {what}, at byte {self._size}; {_whole(whole)}; record it again"
            whole, offset = whole + (tag == BLOCK), self._after_frame(offset)
        return f"{self.path}: was cut short after block {whole - 1}, at byte {self._size}; {_whole(whole)}; record it again"

    def _after_frame(self, offset: int) -> int:
        self._file.seek(offset)
        head = self._file.read(HEAD.size)
        return offset + HEAD.size + HEAD.unpack(head)[2] if len(head) == HEAD.size else self._size


def _whole(count: int) -> str:
    return f"the {count} block(s) before are whole" if count else "no block is whole"


def _as_array(plain: bytes, count: int) -> bytes:
    """Records that stand one after the other, as one msgpack array."""
    return b"\xdd" + struct.pack(">I", count) + plain
