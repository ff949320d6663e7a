"""Which elements differ, in plain numpy: enough for small tensors, so that a service which holds only those never loads a
compiler, and for words of other widths than 16 bits, which are few."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from param_sync.patch.bits import Words

COMPILED_FROM = 1 << 16
"""Elements in a tensor of 16-bit floats from which the writer takes a compiled form."""

U32 = npt.NDArray[np.uint32]


def positions_of(old: Words, new: Words) -> U32:
    """Ascending positions of the words that differ."""
    return np.flatnonzero(old != new).astype(np.uint32)
