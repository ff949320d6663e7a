"""Writing recordings: blocks are filled stream by stream, and the index is built as they are closed."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
import zstandard

from schemas.table import Stream
from services.recording import (
    BLOCK,
    BLOCK_BYTES,
    BOUNDS,
    DAMAGED,
    END,
    HEAD,
    HEADER,
    HOLE,
    INDEX,
    MAGIC,
    OUTLINE,
    TRAILER,
    WIRE,
    Block,
    Header,
    Index,
    Record,
    RecordingError,
    StreamFacts,
)

_LEVEL = 9


def differences(values: set[int]) -> list[int]:
    """Ascending, as differences, which are small numbers."""
    out, before = [], 0
    for value in sorted(values):
        out.append(value - before)
        before = value
    return out


@dataclass
class _Pending:
    """A block that is being filled."""

    payload: bytearray = field(default_factory=bytearray)
    records: int = 0
    first_seq: int = 0
    last_seq: int = 0
    first_ns: int = 0
    last_ns: int = 0
    groups: set[int] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)


class RecordingWriter:
    """Writes `<path>.part` and gives it its name when it is whole. Streams may be written in turn or interleaved."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.streams: dict[Stream, StreamFacts] = {}
        self._aside = path.with_name(path.name + ".part")
        self._pending: dict[Stream, _Pending] = {}
        self._blocks: list[Block] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        try:
            self._file: BinaryIO = self._aside.open("wb")
        except OSError as error:
            raise RecordingError(
                f"{path}: cannot be written ({error.strerror}); give a file in a folder that exists"
            ) from error
        self._file.write(MAGIC)
        self._frame(HEADER, 0, "", 0, 0, self._encoder.encode(header))

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
            self._aside.unlink(missing_ok=True)

    def add(self, stream: Stream, record: Record, groups: set[int], steps: set[int]) -> None:
        """Append one record of a stream; `groups` (keys) and `steps` are what it can be found by."""
        facts = self.streams.setdefault(stream, StreamFacts())
        facts.records += record.form in (WIRE, OUTLINE)
        facts.holes += record.form == HOLE
        facts.damaged += record.form == DAMAGED
        block = self._pending.setdefault(stream, _Pending(first_seq=record.seq, first_ns=record.time_ns))
        block.payload += self._encoder.encode(record)
        block.records += 1
        block.last_seq = record.size if record.form == HOLE else record.seq
        block.last_ns = record.time_ns
        block.groups |= groups
        block.steps |= steps
        if len(block.payload) >= BLOCK_BYTES:
            self._close_block(stream)

    def close(self) -> None:
        """Write what is pending, the index and the trailer, and make the file durable under its name."""
        for stream in list(self._pending):
            self._close_block(stream)
        offset = self._file.tell()
        index = Index(streams={str(stream): facts for stream, facts in self.streams.items()}, blocks=self._blocks)
        self._frame(INDEX, len(self._blocks), "", 0, len(self._blocks), self._encoder.encode(index))
        self._file.write(TRAILER.pack(offset, END))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._aside.rename(self.path)

    def _close_block(self, stream: Stream) -> None:
        block = self._pending.pop(stream)
        offset = self._file.tell()
        plain = bytes(block.payload)
        stored, found = self._frame(BLOCK, len(self._blocks), str(stream), block.first_seq, block.records, plain)
        self._blocks.append(
            Block(
                stream=str(stream),
                offset=offset,
                stored=stored,
                plain=len(plain),
                records=block.records,
                first_seq=block.first_seq,
                last_seq=block.last_seq,
                first_ns=block.first_ns,
                last_ns=block.last_ns,
                digest=found,
                groups=differences(block.groups),
                steps=differences(block.steps),
            )
        )

    def _frame(self, tag: bytes, number: int, stream: str, first: int, records: int, plain: bytes) -> tuple[int, bytes]:
        if len(plain) > BOUNDS[tag]:
            raise RecordingError(f"{self.path}: {len(plain)} bytes exceed the bound of {BOUNDS[tag]}; record a smaller range")
        payload = self._compressor.compress(plain)
        found = hashlib.sha256(payload).digest()
        self._file.write(HEAD.pack(tag, number, len(payload), len(plain), records, stream.encode(), first, found))
        self._file.write(payload)
        return len(payload), found
