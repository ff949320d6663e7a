"""Ranks that each hold slices of tensors: every rank encodes its own, and the parts are put together by name and position.

Nobody gathers the model. Whoever puts the parts of a tensor together holds its old words and needs memory for one tensor more;
different tensors may be put together in different places (`settle`), or all in one that holds the old weights
(`assemble_parts`). The patch is byte for byte the one that a single rank would have made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from param_sync.patch import frame
from param_sync.patch.bits import WORDS, Bits, Words, count_of, element_bytes, is_float
from param_sync.patch.container import Encoded, assemble
from param_sync.patch.decoding import TensorPlan, check_entry, each, frames_of
from param_sync.patch.digest import Entry, state_digest, tensor_digest
from param_sync.patch.errors import Corrupt, DigestMismatch, PatchError, WrongBase
from param_sync.patch.snapshot import Snapshot
from param_sync.patch.tensor import TensorEntry, TensorPatch, encode_slice, join_slices, segments


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The elements `start` to `start + elements` of a flat tensor. Travels as msgpack."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    elements: int
    is_new: bool
    """The receiver does not hold the tensor, or holds it in another form: the frames are absolute."""
    digest: bytes
    """Tensor digest of the new words of these elements."""
    frames: bytes


@dataclass(frozen=True, slots=True)
class Settled:
    """A tensor whose parts were put together."""

    entry: Entry
    patch: TensorPatch | None
    """None when it is the old tensor, bit for bit."""
    words: Words | None
    """The new words; None when they were let go."""


def encode_part(
    name: str, dtype: str, shape: Sequence[int], old: Words | None, new: Words, *, start: int = 0, level: int = 1
) -> Part:
    """The part for a slice that begins at element `start`: from `old` to `new`, or `new` alone when `old` is None.

    Each rank makes one for every slice that it owns, changed or not. Raises `PatchError` when the slice does not fit the shape.
    """
    form = tuple(int(n) for n in shape)
    words = np.ascontiguousarray(new).reshape(-1).view(WORDS[element_bytes(dtype)])
    if not 0 <= start <= start + words.size <= count_of(form):
        raise PatchError(f"{words.size} elements from {start} on do not fit {form}", tensor=name)
    if old is None:
        cuts = segments(start, words.size)
        frames = b"".join(frame.encode_absolute(words[cut], start + cut.start, is_float(dtype)) for cut in cuts)
    else:
        frames = encode_slice(old, words, dtype=dtype, start=start, level=level)
    return Part(name, dtype, form, start, words.size, old is None, tensor_digest(words), frames)


def assemble_parts(
    base: Snapshot, parts: Iterable[Part], *, version: int, removed: Iterable[str] = (), level: int = 1, workers: int = 1
) -> Encoded:
    """The patch from `base` to version `version` out of the parts, in any order. `base` is only read.

    Every tensor of the base that stays must be covered by its parts exactly once, so that a part that got lost is found.
    `level` is the one that the parts were made with. Raises `PatchError` for parts that overlap, leave a hole or disagree, and
    `Corrupt`, `Truncated`, `WrongBase`, `DigestMismatch` with the tensor's name.
    """
    gone, by_name = set(removed), dict[str, list[Part]]()
    for part in parts:
        by_name.setdefault(part.name, []).append(part)
    missing = base.entries.keys() - gone - by_name.keys()
    if missing or gone & by_name.keys() or not gone <= base.entries.keys():
        wrong = sorted(missing or gone & by_name.keys() or gone - base.entries.keys())[0]
        raise PatchError("each tensor of the base either has parts or is removed", tensor=wrong)

    def one(name: str) -> Settled:
        before = base.entries[name][2] if name in base.entries else b""
        made = settle(base.tensors.get(name), before, by_name[name], level=level)
        return Settled(made.entry, made.patch, None)

    made = dict(zip(by_name, each(one, by_name, workers), strict=True))
    return assemble(
        [settled.patch for settled in made.values() if settled.patch is not None],
        version=version,
        incarnation=base.incarnation,
        digest=state_digest({name: settled.entry for name, settled in made.items()}),
        base_version=base.version,
        base_digest=base.digest,
        removed=gone,
    )


def settle(held: Bits | None, held_digest: bytes, parts: Iterable[Part], *, level: int = 1) -> Settled:
    """One tensor out of all of its parts, in any order. `held`: the old tensor, None when it is new; it is only read.

    Raises as `assemble_parts` does.
    """
    parts = sorted(parts, key=lambda part: part.start)
    first, count = parts[0], count_of(parts[0].shape)
    end = 0
    for part in parts:
        if (part.name, part.dtype, part.shape, part.is_new) != (first.name, first.dtype, first.shape, first.is_new):
            raise PatchError("parts disagree on what they are parts of", tensor=first.name)
        if part.start != end or part.elements < 0:
            what = "are missing" if part.start > end else "come twice"
            raise PatchError(f"elements between {end} and {part.start} {what}", tensor=first.name)
        end += part.elements
    if end != count:
        raise PatchError(f"elements from {end} to {count} are missing", tensor=first.name)
    if first.is_new == (held is not None and (held.dtype, held.shape) == (first.dtype, first.shape)):
        raise WrongBase("the parts start from other weights than the receiver holds", tensor=first.name)
    old = None if first.is_new or held is None else held.data
    words, frames = _decoded(parts, old, count)
    digest = tensor_digest(words)
    entry: Entry = (first.dtype, first.shape, digest)
    before = b"" if old is None else held_digest
    if digest == before:
        return Settled(entry, None, words)
    patch = join_slices(first.name, *entry[:2], before, digest, _recut(parts, frames, old, words, level))
    return Settled(entry, patch, words)


def _decoded(parts: list[Part], old: Words | None, count: int) -> tuple[Words, dict[int, bytes]]:
    """The new words, each part's verified, and the frames by their first element."""
    first = parts[0]
    whole = TensorEntry(first.name, first.dtype, first.shape, b"" if old is None else bytes(16), bytes(16), 0)
    total = sum(len(part.frames) for part in parts)
    check_entry(msgspec.structs.replace(whole, body_bytes=total), count * element_bytes(first.dtype))
    words = np.empty(count, WORDS[element_bytes(first.dtype)]) if old is None else old.copy()
    plan, frames = TensorPlan(whole, 0, [], words), dict[int, bytes]()
    for part in parts:
        covered, at = 0, 0
        for parsed, offset in frames_of(whole, memoryview(part.frames), 0):
            size = frame.frame_bytes(memoryview(part.frames)[offset:])
            if parsed.start < part.start or parsed.start + parsed.elements > part.start + part.elements:
                raise Corrupt(f"a frame of the part at {part.start} leaves it", tensor=first.name, offset=offset)
            if old is None and parsed.form != frame.ABSOLUTE:
                raise Corrupt("a new tensor needs absolute words", tensor=first.name, offset=offset)
            plan.carry_out(parsed, offset, ordered=False)
            frames[parsed.start] = part.frames[offset : offset + size]
            covered, at = covered + parsed.elements, offset + size
        if old is None and covered != part.elements:
            raise Corrupt(f"the part at {part.start} fills {covered} of {part.elements} elements", tensor=first.name, offset=at)
        if tensor_digest(words[part.start : part.start + part.elements]) != part.digest:
            raise DigestMismatch(f"the part at {part.start} does not give the announced words", tensor=first.name)
    return words, frames


def _recut(parts: list[Part], frames: dict[int, bytes], old: Words | None, new: Words, level: int) -> list[bytes]:
    """The frames that one rank would have made: those parts' that end where a frame must, and new ones across parts' ends."""
    first, starts = parts[0], {part.start for part in parts if part.elements}
    made = []
    for cut in segments(0, new.size):
        if not any(cut.start < start < cut.stop for start in starts):
            made.append(frames.get(cut.start, b""))
        elif old is None:
            made.append(frame.encode_absolute(new[cut], cut.start, is_float(first.dtype)))
        else:
            made.append(frame.encode_changes(old[cut], new[cut], cut.start, first.dtype, level))
    return made
