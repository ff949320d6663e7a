"""The inner loops over large 16-bit tensors, compiled. Same streams as the numpy forms in `gaps` and `steps`, bit for bit.

Imported only when a tensor is large enough to be worth it, so that a small service starts without a compiler. Loops release
the interpreter lock. Nothing here checks its arrays' sizes: callers do, and positions are checked against `elements`. `olds`
and `news` are the changed elements' words alone, in order.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from param_sync.patch.compiled import IN8, IN16, IN32, OUT8, OUT16, OUT32, compiled


@compiled(IN32, numba.i8, numba.i8, OUT8, OUT8, OUT32)
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


@compiled(IN8, IN8, IN32, numba.i8, numba.i8, numba.i8, OUT32)
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


@compiled(IN16, IN16, OUT8, OUT8, OUT16)
def encode_steps(olds: Any, news: Any, signs: Any, magnitudes: Any, escapes: Any) -> int:
    """Fill signs (zeroed), magnitudes [k] by old exponent, escapes (room for k); return the number of escapes."""
    slots = np.zeros(257, np.int64)
    for j in range(olds.size):
        slots[((olds[j] >> 7) & 0xFF) + 1] += 1
    for c in range(256):
        slots[c + 1] += slots[c]
    wide = np.empty(olds.size, np.uint16)
    for j in range(olds.size):
        a, b = np.int32(olds[j]), np.int32(news[j])
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
    for j in range(olds.size):
        if wide[j] >= 255:
            magnitudes[j] = 255
            escapes[e] = wide[j]
            e += 1
        else:
            magnitudes[j] = wide[j]
    return e


@compiled(IN16, IN8, IN8, IN16, OUT16)
def decode_steps(olds: Any, signs: Any, magnitudes: Any, escapes: Any, values: Any) -> int:
    """Fill the new words [k] from the old ones. Returns 0, or -2 when the escapes disagree."""
    wide = np.empty(olds.size, np.uint16)
    e = 0
    for j in range(olds.size):
        wide[j] = magnitudes[j]
        if magnitudes[j] == 255:
            if e == escapes.size:
                return -2
            wide[j] = escapes[e]
            e += 1
    if e != escapes.size:
        return -2
    slots = np.zeros(257, np.int64)
    for j in range(olds.size):
        slots[((olds[j] >> 7) & 0xFF) + 1] += 1
    for c in range(256):
        slots[c + 1] += slots[c]
    for j in range(olds.size):
        a = np.int32(olds[j])
        exponent = (a >> 7) & 0xFF
        a ^= 0x8000 | (-(a >> 15) & 0x7FFF)
        step = np.int32(wide[slots[exponent]]) + 1
        slots[exponent] += 1
        negative = np.int32((signs[j >> 3] >> (j & 7)) & 1)
        b = (a + ((step ^ -negative) + negative)) & 0xFFFF
        values[j] = b ^ (0x8000 | (((b >> 15) - 1) & 0x7FFF))
    return 0


@compiled(IN32, IN16, OUT16)
def gather(positions: Any, words: Any, values: Any) -> None:
    """`values = words[positions]`; positions must already be in range."""
    for j in range(positions.size):
        values[j] = words[positions[j]]


@compiled(IN32, OUT16, OUT16)
def exchange(positions: Any, values: Any, words: Any) -> None:
    """Swap `values` and `words[positions]`; positions must already be in range, and each come once."""
    for j in range(positions.size):
        words[positions[j]], values[j] = values[j], words[positions[j]]
