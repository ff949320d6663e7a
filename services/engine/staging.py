"""New weights on their way to worker processes: one file of bfloat16 words per chunk, in shared memory or a shared folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from services.engine.protocol import CheckpointTensor

ALIGNMENT = 64


class StagedChunk(msgspec.Struct, frozen=True):
    """A file and what lies in it: (name, shape, byte offset) per tensor."""

    path: str
    tensors: list[tuple[str, list[int], int]]
    bytes: int


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
