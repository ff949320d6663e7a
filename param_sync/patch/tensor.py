"""One tensor's part of a patch: an entry with its digests, and its frames. Independent of every other tensor.

So each trainer rank encodes what it owns, and the parts are assembled wherever they meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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


def encode_slice(old: Words, new: Words, *, dtype: str, start: int = 0) -> bytes:
    """Frames for the elements from `start` of a tensor that a rank holds only a slice of. Empty when nothing changed.

    The frames of all slices, joined in order of `start`, are the tensor's body (see `join_slices`).
    """
    size = frame.SEGMENT_ELEMENTS
    width = WORDS[element_bytes(dtype)]
    old, new = np.ascontiguousarray(old).reshape(-1).view(width), np.ascontiguousarray(new).reshape(-1).view(width)
    if old.size != new.size:
        raise PatchError(f"slices differ in length: {old.size} and {new.size}")
    cuts = range(0, new.size, size)
    return b"".join(frame.encode_changes(old[i : i + size], new[i : i + size], start + i, is_float(dtype)) for i in cuts)


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
    name: str, old: Bits | None, new: Bits, *, old_digest: bytes | None = None, digest: bytes | None = None
) -> TensorPatch | None:
    """The patch from `old` to `new`; None when they are the same bits. Absent, or of another dtype or shape: sent whole.

    Digests that are already known need not be computed again.
    """
    if old is None or old.dtype != new.dtype or old.shape != new.shape:
        return encode_full(name, new, digest)
    if (old_digest is not None and old_digest == digest) or new.data.size == 0:
        return None
    body = encode_slice(old.data, new.data, dtype=new.dtype)
    if not body:
        return None
    digests = old_digest or tensor_digest(old.data), digest or tensor_digest(new.data)
    return join_slices(name, new.dtype, new.shape, *digests, [body])


def _frames(entry: TensorEntry, body: memoryview, offset: int) -> Iterator[tuple[frame.Frame, int]]:
    """The tensor's frames with their byte offsets in the file; together they stay inside the tensor and in order."""
    at, end, count, width = 0, 0, count_of(entry.shape), element_bytes(entry.dtype)
    while at < len(body):
        with _named(entry, offset + at):
            parsed = frame.parse(body[at:])
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


def decode_tensor(
    entry: TensorEntry, body: memoryview, offset: int, base: Bits | None, *, collect: bool = False
) -> tuple[Bits, Change | None]:
    """The new tensor, in an array of its own, verified; with `collect` also what changed. `base` is only read.

    Raises `WrongBase`, `Truncated`, `Corrupt`, `DigestMismatch`, each with the tensor's name and the offset in the file.
    """
    if not entry.base_digest:
        words = _decode_full(entry, list(_frames(entry, body, offset)))
        change = Change(None, words) if collect else None
    else:
        if base is None or (base.dtype, base.shape) != (entry.dtype, entry.shape):
            held = "nothing" if base is None else f"{base.dtype}{base.shape}"
            raise WrongBase(f"the patch changes {entry.dtype}{entry.shape}, the receiver holds {held}", tensor=entry.name)
        words, change = _decode_changes(entry, list(_frames(entry, body, offset)), base.data, collect)
    found = tensor_digest(words)
    if found != entry.digest:
        raise DigestMismatch(f"announced {entry.digest.hex()}, decoded {found.hex()}", tensor=entry.name, offset=offset)
    return Bits(entry.dtype, entry.shape, words), change


def _decode_full(entry: TensorEntry, frames: list[tuple[frame.Frame, int]]) -> Words:
    count = count_of(entry.shape)
    covered = sum(f.elements for f, _ in frames)
    if covered != count or any(f.form != frame.ABSOLUTE for f, _ in frames):
        raise Corrupt(f"a whole tensor needs all its {count} words absolute, the frames hold {covered}", tensor=entry.name)
    words: Words = np.empty(count, WORDS[element_bytes(entry.dtype)])
    for parsed, offset in frames:
        with _named(entry, offset):
            words[parsed.start : parsed.start + parsed.elements] = frame.decode_dense(parsed, None)
    return words


def _decode_changes(
    entry: TensorEntry, frames: list[tuple[frame.Frame, int]], base: Words, collect: bool
) -> tuple[Words, Change | None]:
    words = base.copy()
    where: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    what: list[Words] = [np.empty(0, base.dtype)]
    for parsed, offset in frames:
        segment = slice(parsed.start, parsed.start + parsed.elements)
        with _named(entry, offset):
            if parsed.form in (frame.ABSOLUTE, frame.XOR):
                every = frame.decode_dense(parsed, base[segment])
                positions = changes.positions_of(base[segment], every)
                values = every[positions]
            else:
                positions, values = frame.decode_sparse(parsed, base[segment])
        changes.scatter(words[segment], positions, values)
        if collect:
            where.append(positions.astype(np.int64) + parsed.start)
            what.append(values)
    return words, Change(np.concatenate(where), np.concatenate(what)) if collect else None


@contextmanager
def _named(entry: TensorEntry, offset: int) -> Iterator[None]:
    """Add the tensor and the offset to the errors of what runs inside."""
    try:
        yield
    except PatchError as error:
        raise type(error)(error.reason, tensor=entry.name, offset=offset) from error
