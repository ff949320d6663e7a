"""One tensor's part of a patch: an entry with its digests, and its frames. Independent of every other tensor.

So each trainer rank encodes what it owns, and the parts are assembled wherever they meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from param_sync.patch import changes, frame
from param_sync.patch.bits import WORDS, Bits, Words, count_of, element_bytes, is_float
from param_sync.patch.digest import tensor_digest
from param_sync.patch.errors import Corrupt, DigestMismatch, PatchError, TooLarge, WrongBase
from param_sync.patch.streams import MAX_EXPANSION


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor as the header lists it. An empty `base_digest` says that the frames need no old tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    base_digest: bytes
    digest: bytes
    body_bytes: int
    """Length of its frames, which lie in the body in the order of the entries."""


@dataclass(frozen=True, slots=True)
class TensorPatch:
    """One tensor's entry and the frames that it describes."""

    entry: TensorEntry
    body: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What a patch does to a tensor, in absolute terms, so that applying it twice does no harm.

    `index` [k] int64 ascending positions in the flat tensor and `words` [k] their new bits; `index` None: `words` is all of it.
    """

    index: npt.NDArray[np.int64] | None
    words: Words


def segments_of(start: int, stop: int) -> list[tuple[int, int]]:
    """Where elements from `start` to `stop` of a tensor are cut into frames: at multiples of the segment's size."""
    size = frame.SEGMENT_ELEMENTS
    cuts = [start, *range((start // size + 1) * size, stop, size), stop]
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def encode_slice(old: Words, new: Words, *, dtype: str, start: int = 0, total: int | None = None, level: int = 1) -> bytes:
    """Frames for the elements from `start` of a tensor of `total` elements (default: this slice is all of it).

    A rank may hold just that slice. The frames of all slices, joined in order of `start`, are the tensor's body (see
    `join_slices`); slices that are cut where `segments_of` cuts give the bytes that the whole tensor gives. Empty when nothing
    changed.
    """
    width = WORDS[element_bytes(dtype)]
    old, new = np.ascontiguousarray(old).reshape(-1).view(width), np.ascontiguousarray(new).reshape(-1).view(width)
    if old.size != new.size:
        raise PatchError(f"slices differ in length: {old.size} and {new.size}")
    total = start + new.size if total is None else total
    compiled = is_float(dtype) and width.itemsize == 2 and total >= changes.COMPILED_FROM
    cuts = [(a, slice(a - start, b - start)) for a, b in segments_of(start, start + new.size)]
    return b"".join(frame.encode_changes(old[s], new[s], a, is_float(dtype), level, compiled) for a, s in cuts)


def join_slices(
    name: str, dtype: str, shape: tuple[int, ...], base_digest: bytes, digest: bytes, frames: list[bytes]
) -> TensorPatch:
    """A tensor's patch from its slices' frames, in ascending order; the digests are those of the whole tensor."""
    body = b"".join(frames)
    return TensorPatch(TensorEntry(name, dtype, shape, base_digest, digest, len(body)), body)


def encode_full(name: str, new: Bits, digest: bytes | None = None) -> TensorPatch:
    """A tensor that the receiver need not hold: every word, absolute."""
    size, words = frame.SEGMENT_ELEMENTS, new.data
    turn = is_float(new.dtype)
    frames = [frame.encode_absolute(words[i : i + size], i, turn) for i in range(0, words.size, size)]
    return join_slices(name, new.dtype, new.shape, b"", digest or tensor_digest(words), frames)


def encode_tensor(
    name: str,
    old: Bits | None,
    new: Bits,
    *,
    old_digest: bytes | None = None,
    digest: bytes | None = None,
    level: int = 1,
) -> TensorPatch | None:
    """The patch from `old` to `new`; None when they are the same bits. Absent, or of another dtype or shape: sent whole.

    Digests that are already known need not be computed again.
    """
    if old is None or old.dtype != new.dtype or old.shape != new.shape:
        return encode_full(name, new, digest)
    if (old_digest is not None and old_digest == digest) or new.data.size == 0:
        return None
    body = encode_slice(old.data, new.data, dtype=new.dtype, level=level)
    if not body:
        return None
    digests = old_digest or tensor_digest(old.data), digest or tensor_digest(new.data)
    return join_slices(name, new.dtype, new.shape, *digests, [body])


def _frames(entry: TensorEntry, body: memoryview, offset: int, level: int) -> Iterator[tuple[frame.Frame, int]]:
    """The tensor's frames with their byte offsets in the file; together they stay inside the tensor and in order."""
    at, end, count, width = 0, 0, count_of(entry.shape), element_bytes(entry.dtype)
    while at < len(body):
        with _named(entry, offset + at):
            parsed = frame.parse(body[at:], level)
        if parsed.width != width or parsed.start < end or parsed.start + parsed.elements > count:
            reason = f"a frame of {parsed.elements} words of {parsed.width} bytes at {parsed.start} does not fit {entry.shape}"
            raise Corrupt(reason, tensor=entry.name, offset=offset + at)
        end = parsed.start + parsed.elements
        yield parsed, offset + at
        at += frame.frame_bytes(body[at:])


def check_entry(entry: TensorEntry, max_tensor_bytes: int) -> None:
    """Refuse an entry that cannot be, or that announces more than its bytes can hold. Raises `Corrupt`, `TooLarge`."""
    try:
        total = count_of(entry.shape) * element_bytes(entry.dtype)
    except PatchError as error:
        raise Corrupt(error.reason, tensor=entry.name) from error
    if total > max_tensor_bytes:
        raise TooLarge(f"{total} bytes exceed the limit of {max_tensor_bytes}", tensor=entry.name)
    if not entry.base_digest and total > entry.body_bytes * MAX_EXPANSION:
        raise Corrupt(f"{entry.body_bytes} bytes cannot hold a tensor of {total}", tensor=entry.name)
    if len(entry.digest) != 16 or len(entry.base_digest) not in (0, 16) or entry.body_bytes < 0:
        raise Corrupt("a digest must have 16 bytes and a length must not be negative", tensor=entry.name)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One stretch of a tensor's elements: a frame with its byte offset in the file, or what stays as it was."""

    start: int
    stop: int
    frame: frame.Frame | None
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A tensor that is to be decoded: its pieces cover it without overlap, and may be filled in any order, on any thread."""

    entry: TensorEntry
    base: Words | None
    words: Words
    """The new tensor, not yet filled."""
    pieces: tuple[Piece, ...]
    offset: int


def begin(
    entry: TensorEntry, body: memoryview, offset: int, base: Bits | None, *, level: int = 2, into: Words | None = None
) -> Job:
    """Check everything that can be checked without decoding, then give the work. `into`: memory for the result.

    Raises `WrongBase`, `Truncated`, `Corrupt`, each with the tensor's name and the offset in the file.
    """
    if entry.base_digest and (base is None or (base.dtype, base.shape) != (entry.dtype, entry.shape)):
        held = "nothing" if base is None else f"{base.dtype}{base.shape}"
        raise WrongBase(f"the patch changes {entry.dtype}{entry.shape}, the receiver holds {held}", tensor=entry.name)
    count, pieces, at = count_of(entry.shape), [], 0
    for parsed, where in _frames(entry, body, offset, level):
        if at < parsed.start:
            pieces.append(Piece(at, parsed.start, None, where))
        at = parsed.start + parsed.elements
        pieces.append(Piece(parsed.start, at, parsed, where))
    if at < count:
        pieces.append(Piece(at, count, None, offset))
    if not entry.base_digest and any(piece.frame is None or piece.frame.form != frame.ABSOLUTE for piece in pieces):
        covered = sum(piece.stop - piece.start for piece in pieces if piece.frame is not None)
        raise Corrupt(f"a whole tensor needs all its {count} words absolute, the frames hold {covered}", tensor=entry.name)
    old = base.data if entry.base_digest and base is not None else None
    width = WORDS[element_bytes(entry.dtype)]
    fits = into is not None and into.size == count and into.dtype == width and into.flags.writeable and into.ndim == 1
    words: Words = into if into is not None and fits else np.empty(count, width)
    return Job(entry, old, words, tuple(pieces), offset)


def fill(job: Job, piece: Piece, *, collect: bool = False) -> Change | None:
    """Decode one piece into its place; with `collect` also what changes there. Raises `Corrupt`."""
    part = slice(piece.start, piece.stop)
    if piece.frame is None:
        np.copyto(job.words[part], job.base[part] if job.base is not None else 0)
        return None
    with _named(job.entry, piece.offset):
        if job.base is None:
            job.words[part] = frame.decode_dense(piece.frame, None)
            return None
        found = frame.decode_into(piece.frame, job.base[part], job.words[part], collect=collect)
    return None if found is None else Change(found[0].astype(np.int64) + piece.start, found[1])


def finish(job: Job) -> Bits:
    """The tensor once all its pieces are filled, verified. Raises `DigestMismatch`."""
    found = tensor_digest(job.words)
    if found != job.entry.digest:
        reason = f"announced {job.entry.digest.hex()}, decoded {found.hex()}"
        raise DigestMismatch(reason, tensor=job.entry.name, offset=job.offset)
    return Bits(job.entry.dtype, job.entry.shape, job.words)


def change_of(job: Job, parts: list[Change | None]) -> Change:
    """What the patch does to the tensor, from what it does to its pieces, in order."""
    if job.base is None:
        return Change(None, job.words)
    found = [part for part in parts if part is not None]
    where = [part.index for part in found if part.index is not None]
    return Change(
        np.concatenate([np.empty(0, np.int64), *where]),
        np.concatenate([np.empty(0, job.words.dtype), *(part.words for part in found)]),
    )


@contextmanager
def _named(entry: TensorEntry, offset: int) -> Iterator[None]:
    """Add the tensor and the offset to the errors of what runs inside."""
    try:
        yield
    except PatchError as error:
        raise type(error)(error.reason, tensor=entry.name, offset=offset) from error
