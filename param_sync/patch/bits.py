"""A tensor as bits: dtype name, shape, and the raw little-endian words. Nothing here ever looks at a float.

Comparing floats misses `+0 -> -0` and sees an unchanged NaN as changed for ever, so the whole package works on integers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from param_sync.patch.errors import PatchError

MAX_DIMENSIONS = 16

# dtype name -> (bytes per element, sign-magnitude float?)
DTYPES: dict[str, tuple[int, bool]] = {
    "bool": (1, False),
    "u8": (1, False),
    "i8": (1, False),
    "f8_e4m3": (1, True),
    "f8_e5m2": (1, True),
    "u16": (2, False),
    "i16": (2, False),
    "f16": (2, True),
    "bf16": (2, True),
    "u32": (4, False),
    "i32": (4, False),
    "f32": (4, True),
    "u64": (8, False),
    "i64": (8, False),
    "f64": (8, True),
}
WORDS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}

Words: TypeAlias = npt.NDArray[Any]
"""A flat array of unsigned little-endian words, one per element."""


def element_bytes(dtype: str) -> int:
    """Bytes of one element. Raises `PatchError` for a dtype that is not on the list."""
    if dtype not in DTYPES:
        raise PatchError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    return DTYPES[dtype][0]


def is_float(dtype: str) -> bool:
    """True where the sign is the top bit and the rest orders by magnitude."""
    element_bytes(dtype)
    return DTYPES[dtype][1]


def count_of(shape: tuple[int, ...]) -> int:
    """Elements of a shape (1 for 0-d). Raises `PatchError` for a shape that cannot be."""
    if len(shape) > MAX_DIMENSIONS or any(n < 0 for n in shape):
        raise PatchError(f"shape {shape} needs at most {MAX_DIMENSIONS} dimensions, none negative")
    return math.prod(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Bits:
    """One tensor. `data` may come as any unsigned (or raw byte) array of the right size; it is kept flat, one word per element.

    The array is never written to by this package. Raises `PatchError` when dtype, shape and data disagree.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Words

    def __post_init__(self) -> None:
        width, count = element_bytes(self.dtype), count_of(self.shape)
        if self.data.nbytes != count * width:
            raise PatchError(f"shape {self.shape} of {self.dtype} needs {count * width} bytes, got {self.data.nbytes}")
        flat = np.ascontiguousarray(self.data).reshape(-1).view(WORDS[width])
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "data", flat if flat.flags.aligned else flat.copy())

    def equals(self, other: Bits) -> bool:
        """Bit-identical: same dtype, shape and words."""
        return self.dtype == other.dtype and self.shape == other.shape and np.array_equal(self.data, other.data)


State: TypeAlias = Mapping[str, Bits]
"""All the tensors of a model by name."""


def same_state(left: State, right: State) -> bool:
    """Bit-identical states: same names, each with the same dtype, shape and words."""
    return left.keys() == right.keys() and all(left[name].equals(right[name]) for name in left)
