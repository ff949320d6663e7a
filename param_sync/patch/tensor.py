"""One tensor's part of a patch: an entry with its digests, and its frames. Independent of every other tensor.

So each trainer rank encodes what it owns, and the parts are assembled wherever they meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from param_sync.patch import frame
from param_sync.patch.bits import WORDS, Bits, Words, element_bytes, is_float
from param_sync.patch.digest import tensor_digest
from param_sync.patch.errors import PatchError


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
    level: int = 1
    """What a reader of the frames must know."""


def segments(start: int, elements: int) -> Iterator[slice]:
    """The cuts of `elements` from element `start` of a tensor, counted from `start`: each ends where a frame must end.

    Frames end at multiples of `frame.SEGMENT_ELEMENTS` from the tensor's beginning, whoever holds which slice.
    """
    size, at = frame.SEGMENT_ELEMENTS, 0
    while at < elements:
        end = min(elements, at + size - (start + at) % size)
        yield slice(at, end)
        at = end


def encode_slice(old: Words, new: Words, *, dtype: str, start: int = 0, level: int = 1) -> bytes:
    """Frames for the elements from `start` of a tensor that a rank holds only a slice of. Empty when nothing changed.

    The frames of all slices, joined in order of `start`, are the tensor's body (see `join_slices`).
    """
    width = WORDS[element_bytes(dtype)]
    old, new = np.ascontiguousarray(old).reshape(-1).view(width), np.ascontiguousarray(new).reshape(-1).view(width)
    if old.size != new.size:
        raise PatchError(f"slices differ in length: {old.size} and {new.size}")
    cuts = segments(start, new.size)
    return b"".join(frame.encode_changes(old[cut], new[cut], start + cut.start, dtype, level) for cut in cuts)


def join_slices(
    name: str, dtype: str, shape: tuple[int, ...], base_digest: bytes, digest: bytes, frames: list[bytes]
) -> TensorPatch:
    """A tensor's patch from its slices' frames, in ascending order; the digests are those of the whole tensor."""
    body = b"".join(frames)
    return TensorPatch(TensorEntry(name, dtype, shape, base_digest, digest, len(body)), body, frame.level_of(body))


def encode_full(name: str, new: Bits, digest: bytes | None = None) -> TensorPatch:
    """A tensor that the receiver need not hold: every word, absolute."""
    words, turn = new.data, is_float(new.dtype)
    frames = [frame.encode_absolute(words[cut], cut.start, turn) for cut in segments(0, words.size)]
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
