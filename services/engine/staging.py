"""New weights on their way to worker processes: one file of bfloat16 words per chunk, in shared memory or a shared folder."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from services.engine.changes import ChangeError, TensorChange
from services.engine.protocol import CheckpointTensor

ALIGNMENT = 64
Placed = tuple[str, list[int], int, int, int]
"""A change in a file: name, shape, elements, bytes per position, byte offset of its index, old and new."""


class StagedChunk(msgspec.Struct, frozen=True):
    """A file and what lies in it: (name, shape, byte offset) per tensor."""

    path: str
    tensors: list[tuple[str, list[int], int]]
    bytes: int


class StagedChanges(msgspec.Struct, frozen=True):
    """A file and what lies in it."""

    path: str
    changes: list[Placed]
    digest: bytes  # xxh3-128 of the file


@contextmanager
def staging_file(folder: str) -> Iterator[Path]:
    """A private file that is gone afterwards, whatever happens to the update."""
    handle, name = tempfile.mkstemp(prefix="headrace-weights-", dir=folder)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def staged(path: Path, tensors: Iterable[CheckpointTensor], chunk_bytes: int) -> Iterator[StagedChunk]:
    """Write tensors to `path` until a chunk is full, yield it, and start over. A tensor is never split.

    The consumer must be done with a chunk before it asks for the next one: the file is reused.
    """
    listed: list[tuple[str, list[int], int]] = []
    size = 0
    file = path.open("wb")
    try:
        for name, bits, shape in tensors:
            words = np.ascontiguousarray(bits).reshape(-1)
            if listed and size + words.nbytes > chunk_bytes:
                file.close()
                yield StagedChunk(str(path), listed, size)
                file, listed, size = path.open("wb"), [], 0
            listed.append((name, list(shape), size))
            file.write(words.data)
            padding = -words.nbytes % ALIGNMENT
            file.write(bytes(padding))
            size += words.nbytes + padding
    finally:
        file.close()
    if listed:
        yield StagedChunk(str(path), listed, size)


def staged_changes(path: Path, changes: Iterable[TensorChange], chunk_bytes: int) -> Iterator[StagedChanges]:
    """As `staged`, for changed elements. A tensor's change is split where it would not fit."""
    most = max(1, chunk_bytes // 16)  # elements
    for group in _grouped(_pieces(changes, most), chunk_bytes):
        listed: list[Placed] = []
        size, total = 0, xxhash.xxh3_128()
        with path.open("wb") as file:
            for change in group:
                listed.append((change.name, list(change.shape), change.index.size, change.index.itemsize, size))
                for part in (change.index, change.old, change.new):
                    raw = np.ascontiguousarray(part).tobytes()
                    raw += bytes(-len(raw) % 8)
                    file.write(raw)
                    total.update(raw)
                    size += len(raw)
        yield StagedChanges(str(path), listed, total.digest())


def changes_in(path: str, digest: bytes, listed: Iterable[tuple[str, list[int], int, int, int]]) -> Iterator[TensorChange]:
    """Read them again, on the other side. Raises `ChangeError` when the file is not the one that was written."""
    data = np.fromfile(path, dtype=np.uint8)
    if xxhash.xxh3_128_digest(data.data) != digest:
        raise ChangeError(f"{path}: the staged file is not the one that was written")
    for name, shape, count, width, offset in listed:
        parts = []
        for dtype in (np.dtype(np.uint32) if width == 4 else np.dtype(np.int64), np.dtype(np.uint16), np.dtype(np.uint16)):
            parts.append(data[offset : offset + count * dtype.itemsize].view(dtype))
            offset += count * dtype.itemsize
            offset += -offset % 8
        yield TensorChange(name, tuple(shape), *parts)


def sliced(shapes: Iterable[tuple[str, tuple[int, ...]]], held: Container[str], slice_bytes: int) -> list[list[str]]:
    """The held tensors in groups of about `slice_bytes` bfloat16 bytes, in order."""
    groups: list[list[str]] = [[]]
    room = slice_bytes
    for name, shape in shapes:
        if name not in held:
            continue
        size = 2 * math.prod(shape)
        if groups[-1] and size > room:
            groups.append([])
            room = slice_bytes
        groups[-1].append(name)
        room -= size
    return groups


def _pieces(changes: Iterable[TensorChange], most: int) -> Iterator[TensorChange]:
    for change in changes:
        for at in range(0, change.index.size, most):
            cut = slice(at, at + most)
            yield TensorChange(change.name, change.shape, change.index[cut], change.old[cut], change.new[cut])


def _grouped(changes: Iterable[TensorChange], chunk_bytes: int) -> Iterator[list[TensorChange]]:
    group: list[TensorChange] = []
    size = 0
    for change in changes:
        nbytes = change.nbytes + change.old.nbytes + 24
        if group and size + nbytes > chunk_bytes:
            yield group
            group, size = [], 0
        group.append(change)
        size += nbytes
    if group:
        yield group
