"""Reading a recording: by stream, by sequence, or only the blocks that tell of one item."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from schemas.codec import CODEC_VERSION
from schemas.message import SCHEMA_VERSION
from schemas.table import Stream
from services.recording import (
    END_MAGIC,
    FILE_HEAD,
    FORMAT_VERSION,
    MAGIC,
    RECORDED,
    TRAILER,
    BlockHead,
    Kind,
    Manifest,
    Record,
    RecordingError,
    decoded,
    end_of,
    read_head,
    read_payload,
)
from services.recording_writer import Index, hash_of


class RecordingReader:
    """An open recording. Raises `RecordingError` where the file is torn, corrupted or of another version."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        try:
            self._file = Path(path).open("rb")  # noqa: SIM115 (closed by the context)
        except OSError as error:
            raise RecordingError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            self._size = self._file.seek(0, 2)
            self._check_head()
            head = read_head(self._file, self.path, 0, FILE_HEAD.size, self._size)
            self.manifest = self._manifest(head)
            self._read_index(head)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def count(self, stream: Stream) -> int:
        """Records of one stream."""
        return int(self._counts[self._streams == RECORDED.index(stream)].sum())

    def span_ns(self) -> tuple[int, int]:
        """Times at which the first and the last block begin."""
        return (int(self._times.min()), int(self._times.max())) if len(self._times) else (0, 0)

    def records(self, stream: Stream, first: int = 1) -> Iterator[Record]:
        """One stream's records in its order, from sequence `first`."""
        for number in np.flatnonzero((self._streams == RECORDED.index(stream)) & (self._lasts >= first)):
            for record in self._block(int(number)):
                if record.seq >= first:
                    yield record

    def last(self, stream: Stream) -> int:
        """The last sequence of one stream that is recorded; 0: none is."""
        return int(self._lasts[self._streams == RECORDED.index(stream)].max(initial=0))

    def at(self, stream: Stream, sequences: Iterable[int]) -> Iterator[Record]:
        """One stream's records at these sequences, as far as they are recorded; only the blocks that hold them are read."""
        wanted = np.unique(np.fromiter(sequences, dtype=np.int64))
        for number in np.flatnonzero(self._streams == RECORDED.index(stream)):
            low, high = np.searchsorted(wanted, [self._firsts[number], self._lasts[number] + 1])
            if low < high:
                asked = set(wanted[low:high].tolist())
                yield from (record for record in self._block(int(number)) if record.seq in asked)

    def about(self, names: Iterable[str], streams: Iterable[Stream] = RECORDED) -> Iterator[tuple[Stream, Record]]:
        """The records of every block that tells of one of the items; the caller picks among them."""
        wanted = {RECORDED.index(stream) for stream in streams}
        numbers: set[int] = set()
        for name in names:
            key = np.uint64(hash_of(name))
            at = int(np.searchsorted(self._keys, key))
            if at < len(self._keys) and self._keys[at] == key:
                numbers.update(int(b) for b in self._key_blocks[self._starts[at] : self._starts[at + 1]])
        for number in sorted(numbers):
            if int(self._streams[number]) in wanted:
                stream = RECORDED[int(self._streams[number])]
                for record in self._block(number):
                    yield stream, record

    def verify(self) -> int:
        """Check every block's digest; gives the number of records. Raises `RecordingError` naming the first bad block."""
        return sum(1 for number in range(len(self._offsets)) for _ in self._block(number))

    def _block(self, number: int) -> list[Record]:
        head = read_head(self._file, self.path, number + 1, int(self._offsets[number]), self._size)
        if head.kind is not Kind.RECORDS:
            raise RecordingError(f"{self.path}: {head}: the index names it as one of records; the file is corrupted")
        return decoded(read_payload(self._file, self.path, head), list[Record], self.path, head)

    def _check_head(self) -> None:
        self._file.seek(0)
        data = self._file.read(FILE_HEAD.size)
        if len(data) < FILE_HEAD.size or not data.startswith(MAGIC):
            raise RecordingError(f"{self.path}: is not a recording; `headrace record` makes one")
        _, version, reserved = FILE_HEAD.unpack(data)
        if reserved:
            raise RecordingError(f"{self.path}: its head is corrupted")
        if version != FORMAT_VERSION:
            raise RecordingError(f"{self.path}: format version {version} is unknown; this build reads {FORMAT_VERSION}")

    def _manifest(self, head: BlockHead) -> Manifest:
        manifest = decoded(read_payload(self._file, self.path, head), Manifest, self.path, head)
        found = (manifest.codec_version, manifest.schema_version)
        if found != (CODEC_VERSION, SCHEMA_VERSION):
            raise RecordingError(
                f"{self.path}: its messages are of codec {found[0]}, schema {found[1]}; this build reads codec "
                f"{CODEC_VERSION}, schema {SCHEMA_VERSION}; read it with headrace {manifest.headrace}"
            )
        return manifest

    def _read_index(self, first: BlockHead) -> None:
        self._file.seek(max(0, self._size - TRAILER.size))
        trailer = self._file.read(TRAILER.size)
        offset, magic = TRAILER.unpack(trailer) if len(trailer) == TRAILER.size else (0, b"")
        if magic != END_MAGIC or not end_of(first) <= offset < self._size:
            raise self._torn(first)
        head = read_head(self._file, self.path, -1, offset, self._size)
        if head.kind is not Kind.INDEX:
            raise RecordingError(f"{self.path}: {head}: the trailer names it as the index; the file is corrupted")
        index = decoded(read_payload(self._file, self.path, head), Index, self.path, head)
        self._offsets = np.frombuffer(index.offsets, "<u8").astype(np.int64)
        self._streams = np.frombuffer(index.streams, "u1")
        self._firsts, self._lasts = np.frombuffer(index.firsts, "<i8"), np.frombuffer(index.lasts, "<i8")
        self._times, self._counts = np.frombuffer(index.times, "<i8"), np.frombuffer(index.counts, "<u4")
        self._keys: npt.NDArray[np.uint64] = np.frombuffer(index.keys, "<u8")
        self._starts, self._key_blocks = np.frombuffer(index.starts, "<u4"), np.frombuffer(index.blocks, "<u4")
        columns: list[npt.NDArray[Any]] = [self._streams, self._firsts, self._lasts, self._times, self._counts]
        if any(len(column) != len(self._offsets) for column in columns) or len(self._starts) != len(self._keys) + 1:
            raise RecordingError(f"{self.path}: {head}: its columns differ in length; the file is corrupted")

    def _torn(self, first: BlockHead) -> RecordingError:
        """Why there is no index: the first block that is not whole."""
        number, offset = 1, end_of(first)
        while offset < self._size:
            head = read_head(self._file, self.path, number, offset, self._size)
            read_payload(self._file, self.path, head)
            number, offset = number + 1, end_of(head)
        return RecordingError(
            f"{self.path}: the file ends after block {number - 1}, at byte {self._size}, without its index; "
            "it is torn, record it again"
        )
