"""The compiled loops of `numbers`: a number's symbol and raw bits, the frequency table, and the static rANS over symbols.

After "Asymmetric numeral systems" (J. Duda, arXiv 1311.2540): four interleaved 32-bit states, 16-bit words, 12-bit
frequencies. Nothing here trusts its input: every read and every write is checked against the arrays' ends.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from param_sync.patch.compiled import I64, IN8, IN32, OUT8, OUT32, OUT64, compiled
from param_sync.patch.vectors import leading_zeros, read64, write64

SYMBOLS = 124
FREQUENCY_BITS = 12
TOTAL = 1 << FREQUENCY_BITS
LOWEST = 1 << 16
VARINTS, RANS = 0, 1
_MASK32 = np.uint64(0xFFFFFFFF)
_NO_BITS, _ONE = np.uint64(0), np.uint64(1)


@compiled(IN32, OUT64, OUT8, OUT8)
def symbols_of(numbers: Any, counts: Any, symbols: Any, raw: Any) -> Any:
    """Fill the symbols [n], count them [124], put the raw bits into `raw` [4n + 8]; return the raw bytes used."""
    held, bits = np.uint64(0), np.uint64(0)
    at: Any = 0
    for j in range(numbers.size):
        v = np.uint64(numbers[j])
        size = np.uint64(max(0, 61 - leading_zeros(v)))  # raw bits: all below the top one and the two that follow
        symbol = np.uint64(4) * size + (v >> size)
        symbols[j] = symbol
        counts[symbol] += 1
        held |= (v & ((_ONE << size) - _ONE)) << bits
        bits += size
        write64(raw, at, held)
        whole = bits >> np.uint64(3)
        at += np.int64(whole)
        held >>= whole << np.uint64(3)
        bits &= np.uint64(7)
    return at + np.int64(bits > _NO_BITS)


@compiled(OUT64, I64)
def normalise(counts: Any, total: int) -> None:
    """Turn counts into frequencies that add up to 4096, at least 1 where there was any; in place."""
    left = TOTAL
    for s in range(counts.size):
        if counts[s] > 0:
            counts[s] = max(1, counts[s] * TOTAL // total)
            left -= counts[s]
    while left != 0:  # what rounding left over goes to the largest, or comes from it
        most = 0
        for s in range(counts.size):
            if counts[s] > counts[most]:
                most = s
        change = left if left > 0 else max(left, -(counts[most] // 2))
        counts[most] += change
        left -= change


@compiled(IN8, OUT64, OUT8)
def encode_symbols(symbols: Any, frequencies: Any, out: Any) -> Any:
    """Write states and words at the end of `out` [16 + 2n or more]; return where they begin."""
    starts, inverse = np.zeros(SYMBOLS, np.uint64), np.zeros(SYMBOLS)
    for s in range(1, SYMBOLS):
        starts[s] = starts[s - 1] + np.uint64(frequencies[s - 1])
    for s in range(SYMBOLS):
        # A little above 1 / f: for states below 2**32 and f up to 4096 the product's integer part is exact.
        inverse[s] = (1.0 + 2.0**-50) / max(1, frequencies[s])
    states = np.full(4, LOWEST, np.uint64)
    at = out.size
    for j in range(symbols.size - 1, -1, -1):
        s = symbols[j]
        f, x = np.uint64(frequencies[s]), states[j & 3]
        full = np.int64(x >= f << np.uint64(20))
        out[at - 2] = x & np.uint64(0xFF)  # written in any case, kept where `at` moves: no branch on data
        out[at - 1] = (x >> np.uint64(8)) & np.uint64(0xFF)
        at -= 2 * full
        x >>= np.uint64(16 * full)
        whole = np.uint64(np.int64(np.float64(np.int64(x)) * inverse[s]))
        states[j & 3] = (whole << np.uint64(12)) + (x - whole * f) + starts[s]
    for i in range(3, -1, -1):
        at -= 4
        for b in range(4):
            out[at + b] = (states[i] >> np.uint64(8 * b)) & np.uint64(0xFF)
    return at


@numba.njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _take(x: Any, table: Any, coded: Any, at: int, last: int) -> Any:
    """(symbol, next state, next word's place) of a state. No branch on data; `last` keeps the read inside."""
    entry = table[x & np.uint64(TOTAL - 1)]
    x = ((entry >> np.uint64(8)) & np.uint64(0xFFFF)) * (x >> np.uint64(12)) + (entry >> np.uint64(32))
    low = np.int64(x < np.uint64(LOWEST))
    word = read64(coded, min(at, last)) & np.uint64(0xFFFF)
    shift = np.uint64(16 * low)
    x = (x << shift) | (word & ((_ONE << shift) - _ONE))
    return entry & np.uint64(0xFF), x, at + 2 * low


@compiled(IN8, OUT64, IN8, OUT32)
def decode_rans(coded: Any, frequencies: Any, raw: Any, numbers: Any) -> int:
    """Fill `numbers` [n]. Both inputs have 8 spare bytes at the end. Returns 0, or -1 when they are not exactly n numbers."""
    table, at = np.empty(TOTAL, np.uint64), 0  # symbol, frequency, distance from the symbol's start
    for s in range(frequencies.size):
        head = np.uint64(s) | (np.uint64(frequencies[s]) << np.uint64(8))
        for i in range(frequencies[s]):
            table[at] = head | (np.uint64(i) << np.uint64(32))
            at += 1
    if coded.size < 24:
        return -1
    first, second = read64(coded, 0), read64(coded, 8)
    a, b = first & _MASK32, first >> np.uint64(32)
    c, d = second & _MASK32, second >> np.uint64(32)
    n, at, last, limit = numbers.size, 16, coded.size - 8, raw.size - 8
    place: Any = 0
    symbols = np.zeros(n + 3, np.uint8)
    for j in range(0, n - 3, 4):
        symbols[j], a, at = _take(a, table, coded, at, last)
        symbols[j + 1], b, at = _take(b, table, coded, at, last)
        symbols[j + 2], c, at = _take(c, table, coded, at, last)
        symbols[j + 3], d, at = _take(d, table, coded, at, last)
    j = n // 4 * 4
    if j < n:
        symbols[j], a, at = _take(a, table, coded, at, last)
    if j + 1 < n:
        symbols[j + 1], b, at = _take(b, table, coded, at, last)
    if j + 2 < n:
        symbols[j + 2], c, at = _take(c, table, coded, at, last)
    low = np.uint64(LOWEST)
    if at != last or a != low or b != low or c != low or d != low:
        return -1
    for j in range(n):
        symbol = np.uint64(symbols[j])
        size = (max(symbol, np.uint64(4)) - np.uint64(4)) >> np.uint64(2)
        bits = (read64(raw, min(place >> 3, limit)) >> np.uint64(place & 7)) & ((_ONE << size) - _ONE)
        numbers[j] = ((symbol - np.uint64(4) * size) << size) | bits
        place += np.int64(size)
    if place + 7 >> 3 != limit or (place & 7 and raw[limit - 1] >> (place & 7)):
        return -1
    return 0


@compiled(IN32, OUT8)
def encode_varints(numbers: Any, out: Any) -> int:
    """Seven bits a byte, lowest first, the top bit set where more follow; `out` [5n or more]; return the bytes used."""
    at = 0
    for j in range(numbers.size):
        v = np.uint32(numbers[j])
        while v >= np.uint32(128):
            out[at] = (v & np.uint32(127)) | np.uint32(128)
            v >>= np.uint32(7)
            at += 1
        out[at] = v
        at += 1
    return at


@compiled(IN8, OUT32)
def decode_varints(coded: Any, numbers: Any) -> int:
    """Fill `numbers` [n]. Returns 0, or -1 when the bytes are not exactly n numbers of 32 bits."""
    at = 0
    for j in range(numbers.size):
        v, shift, more = np.uint64(0), np.uint64(0), True
        while more:
            if at >= coded.size or shift > np.uint64(28):
                return -1
            v |= (np.uint64(coded[at]) & np.uint64(127)) << shift
            more = coded[at] >= 128
            shift += np.uint64(7)
            at += 1
        if v >> np.uint64(32) != np.uint64(0):
            return -1
        numbers[j] = v
    return 0 if at == coded.size else -1
