"""The inner loops over large 16-bit tensors, compiled. Same streams as the numpy forms in `gaps` and `steps`, bit for bit.

Imported only when a tensor is large enough to be worth it, so that a small service starts without a compiler. Loops release
the interpreter lock. Nothing here checks its arrays' sizes: callers do, and positions are checked against `elements`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

_IN8, _IN16, _IN32, _IN64 = (numba.types.Array(t, 1, "C", readonly=True) for t in (numba.u1, numba.u2, numba.u4, numba.u8))
_OUT8, _OUT16, _OUT32 = (numba.types.Array(t, 1, "C") for t in (numba.u1, numba.u2, numba.u4))


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(*signature: Any) -> Callable[[_Function], _Function]:
    """Compile now, from the cache where a cache can be written."""

    def decorate(function: _Function) -> _Function:
        compiled: _Function
        try:
            compiled = numba.njit([signature], nogil=True, cache=True)(function)
        except (RuntimeError, OSError):  # no writable place for the cache: compile in memory
            compiled = numba.njit([signature], nogil=True)(function)
        return compiled

    return decorate


@_compiled(_IN64, _IN64, _IN16, _IN16, _OUT32)
def scan(old4: Any, new4: Any, old: Any, new: Any, positions: Any) -> int:
    """Write the changed positions, return how many. `old4`, `new4` are the same bits four elements at a time."""
    k = 0
    for i in range(old4.size):
        if old4[i] != new4[i]:
            for j in range(4 * i, 4 * i + 4):
                positions[k] = j
                k += old[j] != new[j]
    for j in range(4 * old4.size, old.size):
        positions[k] = j
        k += old[j] != new[j]
    return k


@_compiled(_IN32, numba.i8, numba.i8, _OUT8, _OUT8, _OUT32)
def encode_gaps(positions: Any, shift: int, plane_bytes: int, symbols: Any, planes: Any, escapes: Any) -> int:
    """Fill symbols [k], planes (zeroed, `shift * plane_bytes`) and escapes (room for k); return the number of escapes."""
    previous, e = np.int64(-1), 0
    for j in range(positions.size):
        gap = np.int64(positions[j]) - previous - 1
        previous = np.int64(positions[j])
        high = gap >> shift
        if high >= 255:
            symbols[j] = 255
            escapes[e] = gap
            e += 1
        else:
            symbols[j] = high
            for b in range(shift):
                planes[b * plane_bytes + (j >> 3)] |= np.uint8(((gap >> b) & 1) << (j & 7))
    return e


@_compiled(_IN8, _IN8, _IN32, numba.i8, numba.i8, numba.i8, _OUT32)
def decode_gaps(symbols: Any, planes: Any, escapes: Any, shift: int, plane_bytes: int, elements: int, positions: Any) -> int:
    """Fill positions [k]. Returns -1 when all is well, -2 when escapes disagree, else the first position past the end."""
    at: Any = np.int64(-1)
    e = 0
    for j in range(symbols.size):
        if symbols[j] == 255:
            if e == escapes.size:
                return -2
            gap = np.int64(escapes[e])
            e += 1
        else:
            gap = np.int64(symbols[j]) << shift
            for b in range(shift):
                gap |= np.int64((planes[b * plane_bytes + (j >> 3)] >> (j & 7)) & 1) << b
        at += gap + 1
        if at >= elements:
            past: int = at
            return past
        positions[j] = at
    return -1 if e == escapes.size else -2


@_compiled(_IN16, _IN16, _IN32, _OUT8, _OUT8, _OUT16)
def encode_steps(old: Any, new: Any, positions: Any, signs: Any, magnitudes: Any, escapes: Any) -> int:
    """Fill signs (zeroed), magnitudes [k] by old exponent, escapes (room for k); return the number of escapes."""
    slots = np.zeros(257, np.int64)
    for j in range(positions.size):
        slots[((old[positions[j]] >> 7) & 0xFF) + 1] += 1
    for c in range(256):
        slots[c + 1] += slots[c]
    wide = np.empty(positions.size, np.uint16)
    for j in range(positions.size):
        a, b = np.int32(old[positions[j]]), np.int32(new[positions[j]])
        exponent = (a >> 7) & 0xFF
        # No branches on data: signs are coin tosses. A negative word is complemented, a positive one gets the top bit.
        a ^= 0x8000 | (-(a >> 15) & 0x7FFF)
        b ^= 0x8000 | (-(b >> 15) & 0x7FFF)
        step = (b - a) & 0xFFFF
        negative = step >> 15
        signs[j >> 3] |= np.uint8(negative << (j & 7))
        wide[slots[exponent]] = ((step ^ -negative) + negative - 1) & 0xFFFF
        slots[exponent] += 1
    e = 0
    for j in range(positions.size):
        if wide[j] >= 255:
            magnitudes[j] = 255
            escapes[e] = wide[j]
            e += 1
        else:
            magnitudes[j] = wide[j]
    return e


@_compiled(_IN16, _IN32, _IN8, _IN8, _IN16, _OUT16)
def decode_steps(old: Any, positions: Any, signs: Any, magnitudes: Any, escapes: Any, values: Any) -> int:
    """Fill the new words [k]. Returns 0, or -2 when the escapes disagree. Positions must already be in range."""
    wide = np.empty(positions.size, np.uint16)
    e = 0
    for j in range(positions.size):
        wide[j] = magnitudes[j]
        if magnitudes[j] == 255:
            if e == escapes.size:
                return -2
            wide[j] = escapes[e]
            e += 1
    if e != escapes.size:
        return -2
    slots = np.zeros(257, np.int64)
    for j in range(positions.size):
        slots[((old[positions[j]] >> 7) & 0xFF) + 1] += 1
    for c in range(256):
        slots[c + 1] += slots[c]
    for j in range(positions.size):
        a = np.int32(old[positions[j]])
        exponent = (a >> 7) & 0xFF
        a ^= 0x8000 | (-(a >> 15) & 0x7FFF)
        step = np.int32(wide[slots[exponent]]) + 1
        slots[exponent] += 1
        negative = np.int32((signs[j >> 3] >> (j & 7)) & 1)
        b = (a + ((step ^ -negative) + negative)) & 0xFFFF
        values[j] = b ^ (0x8000 | (((b >> 15) - 1) & 0x7FFF))
    return 0


@_compiled(_IN32, _IN16, _OUT16)
def scatter(positions: Any, values: Any, words: Any) -> None:
    """`words[positions] = values`; positions must already be in range."""
    for j in range(positions.size):
        words[positions[j]] = values[j]


def words4(words: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint64]:
    """The whole groups of four words as 64-bit words, a view."""
    return words[: words.size // 4 * 4].view(np.uint64)
