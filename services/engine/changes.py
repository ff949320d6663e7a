"""What an update does to one tensor, element by element, in the checkpoint's coordinates. Needs numpy alone.

Changes are absolute (position, old bits, new bits), so writing them twice does no harm, and whoever holds the old weights can
check that it is really them before anything is overwritten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[Any]
U16 = npt.NDArray[np.uint16]


class ChangeError(ValueError):
    """A change that cannot be written as it stands; the text names tensor, position and rule. Nothing was written."""


class BaseDiffers(ChangeError):
    """The running weights are not the ones that the change starts from, though they carry their name."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorChange:
    """`index` [k], ascending flat positions (uint32, or int64 in a tensor that needs it); `old` and `new` bits there, [k]."""

    name: str
    shape: tuple[int, ...]
    index: Index
    old: U16
    new: U16

    def checked(self) -> TensorChange:
        """Raises `ChangeError` unless the arrays have one length and the positions ascend inside the tensor."""
        count = math.prod(self.shape)
        if not self.index.shape == self.old.shape == self.new.shape or self.index.ndim != 1:
            shapes = self.index.shape, self.old.shape, self.new.shape
            raise ChangeError(f"tensor {self.name}: index, old and new have shapes {shapes}; they must be one [k]")
        if self.index.dtype not in (np.uint32, np.int64) or self.old.dtype != np.uint16 or self.new.dtype != np.uint16:
            dtypes = self.index.dtype, self.old.dtype, self.new.dtype
            raise ChangeError(f"tensor {self.name}: dtypes {dtypes} must be uint32 or int64, uint16, uint16")
        if self.index.size:
            first, last = int(self.index[0]), int(self.index[-1])
            if first < 0 or last >= count or not bool((self.index[1:] > self.index[:-1]).all()):
                raise ChangeError(f"tensor {self.name}: positions {first} to {last} must ascend inside {self.shape}")
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the patch proper: where, and what."""
        return int(self.index.nbytes + self.new.nbytes)
