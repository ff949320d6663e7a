"""Writing a recording: records in, blocks out, and at the end an index by sequence, time and item. It is there whole or not at
all: until the end it has another name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from schemas.table import Stream
from services.recording import (
    BLOCK_BYTES,
    END_MAGIC,
    FILE_HEAD,
    FORMAT_VERSION,
    MAGIC,
    RECORDED,
    TRAILER,
    Kind,
    Manifest,
    Record,
    RecordingError,
    write_block,
)


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The index block: arrays as little-endian bytes.

    Of each block of records: `offsets` u64, `streams` u8, `firsts`, `lasts`, `times` i64 [blocks], `counts` u32.
    Of each item: `keys` u64 [items], ascending hashes of names; item `i` is in `blocks[starts[i]:starts[i + 1]]`, u32.
    """

    offsets: bytes
    streams: bytes
    firsts: bytes
    lasts: bytes
    times: bytes
    counts: bytes
    keys: bytes
    starts: bytes
    blocks: bytes


def hash_of(name: str) -> int:
    """What the index knows an item by, e.g. `g00000042` or `step:7`. Two names that share one only cost a look."""
    return xxhash.xxh3_64_intdigest(name.encode())


class RecordingWriter:
    """Writes `path`. Use as a context; without an error in it, the file is there when it ends. Raises `RecordingError`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.records = 0
        self._aside = path.with_name(f".{path.name}.part-{os.getpid()}")
        self._manifest = manifest
        self._out: BinaryIO | None = None
        self._blocks = 0
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._keys: list[npt.NDArray[np.uint64]] = []  # of each block of records
        self._stream: Stream | None = None
        self._pending: list[Record] = []
        self._pending_bytes = 0
        self._pending_keys: set[int] = set()

    def __enter__(self) -> Self:
        if self.path.is_dir():
            raise RecordingError(f"{self.path}: cannot be written: it is a folder; give a file, e.g. {self.path / 'run.hrrec'}")
        with self._writing():
            self._out = self._aside.open("wb")
            self._out.write(FILE_HEAD.pack(MAGIC, FORMAT_VERSION, 0))
            write_block(self._out, 0, Kind.MANIFEST, msgspec.msgpack.encode(self._manifest))
        self._blocks = 1
        return self

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecordingError(f"{self.path}: cannot be written: {error.strerror}") from error

    def add(self, stream: Stream, record: Record, keys: Iterable[str]) -> None:
        """Append one record; `keys` name the items that it tells of. A stream's records come in its order."""
        if stream is not self._stream:
            self._flush()
            self._stream = stream
        self._pending.append(record)
        self._pending_bytes += len(record.data) + len(record.name) + 64
        self._pending_keys.update(map(hash_of, keys))
        self.records += 1
        if self._pending_bytes >= BLOCK_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._pending or self._out is None or self._stream is None:
            return
        first, last = self._pending[0], self._pending[-1]
        with self._writing():
            head = write_block(
                self._out,
                self._blocks,
                Kind.RECORDS,
                msgspec.msgpack.encode(self._pending),
                stream=self._stream,
                records=len(self._pending),
                seqs=(first.seq, last.seq),
                first_ns=first.time_ns,
            )
        self._rows.append((head.offset, RECORDED.index(self._stream), first.seq, last.seq, first.time_ns, len(self._pending)))
        self._keys.append(np.fromiter(self._pending_keys, dtype=np.uint64, count=len(self._pending_keys)))
        self._blocks += 1
        self._pending, self._pending_bytes, self._pending_keys = [], 0, set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        out = self._out
        if out is None:
            return
        try:
            if error is None:
                self._flush()
                with self._writing():
                    self._end(out)
        finally:
            with suppress(OSError):  # what a full disk refused is being thrown away
                out.close()
            self._aside.unlink(missing_ok=True)

    def _end(self, out: BinaryIO) -> None:
        offset = out.tell()
        write_block(out, self._blocks, Kind.INDEX, msgspec.msgpack.encode(_index(self._rows, self._keys)))
        out.write(TRAILER.pack(offset, END_MAGIC))
        out.flush()
        os.fsync(out.fileno())
        out.close()
        os.replace(self._aside, self.path)


def _index(rows: list[tuple[int, int, int, int, int, int]], keys: list[npt.NDArray[np.uint64]]) -> Index:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    named = np.concatenate([*keys, np.zeros(0, np.uint64)])
    of_block = np.repeat(np.arange(len(keys), dtype=np.uint32), [len(part) for part in keys])
    order = np.lexsort((of_block, named))
    unique, starts = np.unique(named[order], return_index=True)
    return Index(
        offsets=columns[0].astype("<u8").tobytes(),
        streams=columns[1].astype("u1").tobytes(),
        firsts=columns[2].astype("<i8").tobytes(),
        lasts=columns[3].astype("<i8").tobytes(),
        times=columns[4].astype("<i8").tobytes(),
        counts=columns[5].astype("<u4").tobytes(),
        keys=unique.astype("<u8").tobytes(),
        starts=np.append(starts, len(named)).astype("<u4").tobytes(),
        blocks=of_block[order].astype("<u4").tobytes(),
    )
