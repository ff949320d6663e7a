"""From positions in a checkpoint tensor to positions in a runtime parameter: one landing of a load plan, inverted.

A landing copies a strided view of the checkpoint tensor into a strided view of a parameter. Read backwards, a flat position
belongs to the view exactly when it splits into coordinates along the view's strides, and the same coordinates along the other
strides say where it lands. Contiguous stretches collapse to one subtraction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.engine.load_plan import Landing, PlanError

Places = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Route:
    """`dims`: (size, stride in the checkpoint tensor, stride in the parameter), by falling checkpoint stride."""

    parameter: str
    start: int
    extent: int
    """Positions from `start` that the view spans, holes included."""
    to: int
    dims: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, landing: Landing) -> Route:
        """Raises `PlanError` for a view in which one position may stand for two coordinates."""
        source, target = landing.source, landing.target
        dims = sorted(zip(source.size, source.stride, target.stride, strict=True), key=lambda dim: -dim[1])
        merged: list[tuple[int, int, int]] = []
        for size, stride, to_stride in dims:
            if size == 0:
                return cls(landing.parameter, source.offset, 0, target.offset, ())
            if size == 1:
                continue
            if merged and merged[-1][1:] == (size * stride, size * to_stride):
                merged[-1] = (merged[-1][0] * size, stride, to_stride)
            else:
                merged.append((size, stride, to_stride))
        reach = 0
        for size, stride, _ in reversed(merged):
            if stride <= reach:
                raise PlanError(f"parameter {landing.parameter} receives overlapping elements of a checkpoint tensor")
            reach += (size - 1) * stride
        return cls(landing.parameter, source.offset, reach + 1, target.offset, tuple(merged))

    def take(self, index: npt.NDArray[Any], narrow: bool) -> tuple[slice, npt.NDArray[np.bool_] | None, Places]:
        """Which of the ascending positions `index` [k] lie on this route, and where they land.

        Gives a slice of `index`, a mask inside the slice (None: all of it), and the places of what is left in the parameter's
        storage, as int32 where that is `narrow` enough for them, else int64. They may be a view of `index`.
        """
        first, last = np.searchsorted(index, np.array([self.start, self.start + self.extent], dtype=index.dtype))
        part = slice(int(first), int(last))
        if not self.dims or (len(self.dims) == 1 and self.dims[0][1:] == (1, 1)):
            return part, None, _moved(index[part], self.to - self.start, narrow)
        rest = index[part].astype(np.int64) - self.start
        inside = np.ones(rest.size, dtype=np.bool_)
        places = np.full(rest.size, self.to, dtype=np.int64)
        for size, stride, to_stride in self.dims:
            at, rest = np.divmod(rest, stride)
            inside &= at < size
            places += at * to_stride
        inside &= rest == 0
        places = places[inside]
        return part, inside, places.astype(np.int32) if narrow else places


def _moved(index: npt.NDArray[Any], by: int, narrow: bool) -> Places:
    if not narrow:
        return index.astype(np.int64) + by
    if index.dtype != np.uint32:
        return (index + by).astype(np.int32)
    moved = index if by == 0 else index + np.uint32(by % 2**32)  # may wrap on its way to a place that fits
    return moved.view(np.int32)
