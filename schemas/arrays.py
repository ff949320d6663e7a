"""Arrays on the wire: raw little-endian bytes + dtype + shape, checked before any memory is reserved.

Never pickle. The decoder compares `prod(shape) * itemsize` with the bytes that came, so a lying shape cannot make it allocate.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

MAX_ARRAY_BYTES = 64 * 2**20
MAX_DIMENSIONS = 4
_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("int8", "uint8", "int16", "uint16", "int32", "int64", "float32", "float64", "bool")
}


class ArrayError(ValueError):
    """An array on the wire contradicts itself or its contract; the text names the field, the value and the rule."""


class Array(msgspec.Struct, frozen=True, array_like=True):
    """One array: `[dtype, shape, data]`. Example: `Array.of(np.arange(3, dtype=np.int32))`."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Array:
        """Pack a numpy array. Raises `ArrayError` for a dtype that is not on the wire's list."""
        name = values.dtype.name
        if name not in _DTYPES:
            raise ArrayError(f"dtype {name!r} is not allowed on the wire; use one of {sorted(_DTYPES)}")
        return cls(name, tuple(values.shape), np.ascontiguousarray(values, dtype=_DTYPES[name]).tobytes())

    def numpy(self, field: str = "array") -> npt.NDArray[Any]:
        """A read-only view of the values, shape as sent. Raises `ArrayError` naming `field` when the three parts disagree."""
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            raise ArrayError(f"{field}: dtype {self.dtype!r} is not allowed on the wire; use one of {sorted(_DTYPES)}")
        if len(self.shape) > MAX_DIMENSIONS or any(n < 0 for n in self.shape):
            raise ArrayError(f"{field}: shape {self.shape} needs at most {MAX_DIMENSIONS} non-negative dimensions")
        expected = math.prod(self.shape) * dtype.itemsize
        if expected > MAX_ARRAY_BYTES:
            raise ArrayError(f"{field}: {expected} bytes exceed the limit of {MAX_ARRAY_BYTES}; send it by reference")
        if expected != len(self.data):
            raise ArrayError(f"{field}: shape {self.shape} of {self.dtype} needs {expected} bytes, got {len(self.data)}")
        return np.frombuffer(self.data, dtype=dtype).reshape(self.shape)

    def of_kind(self, field: str, dtype: str, ndim: int) -> npt.NDArray[Any]:
        """`numpy(field)` that also insists on dtype and number of dimensions."""
        if self.dtype != dtype or len(self.shape) != ndim:
            raise ArrayError(f"{field}: expected {dtype} with {ndim} dimension(s), got {self.dtype} with shape {self.shape}")
        return self.numpy(field)
