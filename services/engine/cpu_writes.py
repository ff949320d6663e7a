"""The inner loops of a scatter into this process's own memory, compiled: one pass over the changes, where tensors take several.

Imported only for models that are large enough to be worth a compiler. `flat` is a parameter's storage as unsigned words of two
or four bytes, `places` [k] int32 or int64, `words` [k] bfloat16 bits, which a four-byte parameter holds `shift` = 16 bits
higher. Loops release the interpreter lock. A place outside `flat` is never touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from param_sync.patch.compiled import IN16, IN64, OUT16, OUT32, compiled

_IN32 = numba.types.Array(numba.i4, 1, "C", readonly=True)
_Loop = Callable[[Any, Any, Any, int], int]


def _differs(flat: Any, places: Any, words: Any, shift: int) -> int:
    """The first j whose place holds another word than `words[j]`, or lies outside; -1 when there is none."""
    for j in range(places.size):
        place = np.int64(places[j])
        if place < 0 or place >= flat.size or np.int64(flat[place]) != np.int64(words[j]) << shift:
            return j
    return -1


def _put(flat: Any, places: Any, words: Any, shift: int) -> int:
    """Write the words to their places, up to the first that lies outside; how many."""
    for j in range(places.size):
        place = np.int64(places[j])
        if place < 0 or place >= flat.size:
            return j
        flat[place] = np.int64(words[j]) << shift
    count: int = places.size
    return count


def _for_each_width(loop: _Loop) -> dict[tuple[int, int], _Loop]:
    """The loop for words of 2 and 4 bytes, and places of 4 and 8."""
    kinds = {(2, 4): (OUT16, _IN32), (2, 8): (OUT16, IN64), (4, 4): (OUT32, _IN32), (4, 8): (OUT32, IN64)}
    return {widths: compiled(flat, places, IN16, numba.i8)(loop) for widths, (flat, places) in kinds.items()}


_DIFFERS, _PUT = _for_each_width(_differs), _for_each_width(_put)


def holds(flat: npt.NDArray[Any], places: npt.NDArray[Any], words: npt.NDArray[np.uint16]) -> bool:
    """Whether every place holds its word."""
    return _DIFFERS[flat.itemsize, places.itemsize](flat, places, words, 8 * flat.itemsize - 16) < 0


def put(flat: npt.NDArray[Any], places: npt.NDArray[Any], words: npt.NDArray[np.uint16]) -> int:
    """Write every word to its place; how many were written, which is all of them where no place lies outside."""
    return _PUT[flat.itemsize, places.itemsize](flat, places, words, 8 * flat.itemsize - 16)
