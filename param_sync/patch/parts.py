"""One patch out of what several ranks made: each encodes the elements that it owns, nobody gathers the model.

A part covers a flat range of a named tensor. Parts may arrive in any order; together they must cover every tensor that changed.
Where ranges are cut at `cut_points`, the file is byte for byte the one that a single rank makes; where they are cut elsewhere
it has more frames and gives the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from param_sync.patch import frame
from param_sync.patch.bits import WORDS, Words, count_of, element_bytes, is_float
from param_sync.patch.container import Encoded, assemble
from param_sync.patch.digest import Entry, state_digest
from param_sync.patch.errors import PatchError
from param_sync.patch.tensor import TensorPatch, encode_slice, join_slices, segments_of


@dataclass(frozen=True, slots=True)
class Part:
    """Frames for the elements `start` to `stop` of a tensor; none where nothing changed there."""

    name: str
    start: int
    stop: int
    absolute: bool
    """Needs no old weights: the tensor is new, or of another form than before."""
    frames: bytes


def cut_points(total: int, ranks: int) -> list[int]:
    """Where to cut `total` elements for `ranks` ranks, as evenly as whole segments allow: `ranks + 1` ascending numbers."""
    size = frame.SEGMENT_ELEMENTS
    segments = -(-total // size)
    return [min(total, segments * rank // ranks * size) for rank in range(ranks + 1)]


def encode_part(name: str, old: Words | None, new: Words, *, dtype: str, start: int, total: int, level: int = 1) -> Part:
    """A rank's share of a tensor of `total` elements: its elements from `start`, before and after. `old` None: it is new.

    Raises `PatchError` when the share does not lie in the tensor or the two differ in length.
    """
    if start < 0 or start + new.size > total:
        raise PatchError(f"{new.size} elements from {start} do not lie in {total}", tensor=name)
    stop = start + new.size
    if old is not None:
        return Part(name, start, stop, False, encode_slice(old, new, dtype=dtype, start=start, total=total, level=level))
    words, turn = new.reshape(-1).view(WORDS[element_bytes(dtype)]), is_float(dtype)
    frames = [frame.encode_absolute(words[a - start : b - start], a, turn) for a, b in segments_of(start, stop)]
    return Part(name, start, stop, True, b"".join(frames))


def assemble_parts(
    parts: Iterable[Part],
    base: Mapping[str, Entry],
    result: Mapping[str, Entry],
    *,
    version: int,
    incarnation: int,
    base_version: int,
    level: int = 1,
) -> Encoded:
    """The patch from `base` to `result`, given as their tensors' dtype, shape and digest.

    Raises `PatchError` when parts overlap, when a tensor that changed is not covered, or when one that did not has frames.
    """
    by_name: dict[str, list[Part]] = {name: [] for name in result}
    for part in parts:
        if part.name not in by_name:
            raise PatchError("a part belongs to no tensor of the result", tensor=part.name)
        by_name[part.name].append(part)
    tensors = [
        tensor
        for name, found in by_name.items()
        if (tensor := _join(name, sorted(found, key=lambda p: (p.start, p.stop)), base.get(name), result[name])) is not None
    ]
    return assemble(
        tensors,
        version=version,
        incarnation=incarnation,
        digest=state_digest(result),
        base_version=base_version,
        base_digest=state_digest(base),
        removed=[name for name in base if name not in result],
        level=level,
    )


def _join(name: str, parts: list[Part], before: Entry | None, after: Entry) -> TensorPatch | None:
    dtype, shape, digest = after
    absolute = before is None or before[:2] != after[:2]
    frames = [part.frames for part in parts]
    if before == after:
        if any(frames):
            raise PatchError("parts change a tensor whose digest stays", tensor=name)
        return None
    at = 0
    for part in parts:
        if part.start != at:
            raise PatchError(f"its parts {'overlap' if part.start < at else 'leave a hole'} at element {at}", tensor=name)
        if part.absolute != absolute and part.start < part.stop:
            raise PatchError("a part is made against the old tensor and another is not, or it has changed form", tensor=name)
        at = part.stop
    if at != count_of(shape):
        raise PatchError(f"its parts end at element {at} of {count_of(shape)}", tensor=name)
    return join_slices(name, dtype, shape, b"" if absolute or before is None else before[2], digest, frames)
