"""From ranks and steps to symbols and back, compiled: small alphabets for the coder, the gaps' low bits raw, the rest listed.

Everything is grouped by class. Imported only when there is something to code. Reading checks every bound itself.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from param_sync.patch.compiled import IN8, IN16, IN32, IN64, OUT8, OUT16, OUT32, OUT64, OUT64_2, compiled, inlined

ESCAPE = 63
MAX_CLASSES = 16
TABLE_BITS = 350.0
"""What one more class costs: its two tables."""
WORTH = 1.008
"""Fewer classes are taken where they cost less than this factor: each takes time at both ends."""


@inlined
def _choices(n: float, k: float) -> Any:
    """Bits that say which `k` of `n` elements change."""
    if k <= 0.0 or k >= n:
        return 0.0
    return (n * math.log(n) - k * math.log(k) - (n - k) * math.log(n - k)) / math.log(2.0)


@compiled(IN64, IN64, numba.i8, OUT64)
def choose(sampled: Any, changed: Any, elements: int, chosen: Any) -> None:
    """`chosen` [2] = (top exponent, classes) with nearly the least bits, given exponents [256] of a sample and of the changes.

    Class 0 holds the exponents from the top one on, the last class its own and all below, each other class one exponent.
    """
    scale = elements / max(1, sampled.sum())
    all_, hit = np.zeros(257), np.zeros(257)
    low, high = 255, 0
    for e in range(256):
        all_[e + 1] = all_[e] + max(sampled[e] * scale, float(changed[e]))
        hit[e + 1] = hit[e] + changed[e]
        if changed[e]:
            low, high = min(low, e), max(high, e)
    chosen[0], chosen[1] = high, 1
    least = _choices(all_[256], hit[256]) + TABLE_BITS
    for classes in range(2, MAX_CLASSES + 1):
        best, at = np.inf, high
        for top in range(min(high, low + classes - 1), high + 1):
            bottom = top - classes + 1
            if bottom < 0:
                continue
            cost = _choices(all_[256] - all_[top], hit[256] - hit[top]) + _choices(all_[bottom + 1], hit[bottom + 1])
            for e in range(bottom + 1, top):
                cost += _choices(all_[e + 1] - all_[e], hit[e + 1] - hit[e])
            if cost < best:
                best, at = cost, top
        if (best + classes * TABLE_BITS) * WORTH < least:
            least, chosen[0], chosen[1] = best + classes * TABLE_BITS, at, classes


@compiled(IN16, numba.i8, OUT64)
def exponents(words: Any, shift: int, counts: Any) -> None:
    """Add to `counts` [256] how often each exponent occurs."""
    for j in range(words.size):
        counts[(words[j] & 0x7FFF) >> shift] += 1


@compiled(IN16, IN16, numba.i8, numba.i8, OUT64, OUT16)
def group_steps(olds: Any, news: Any, shift: int, top: int, slots: Any, steps: Any) -> None:
    """The steps [k] by class, as `2 * (size - 1) + negative`. `slots` says where each class begins, and is moved on."""
    last = slots.size - 1
    for j in range(olds.size):
        a, b = np.int32(olds[j]), np.int32(news[j])
        c = min(last, max(0, top - ((a & 0x7FFF) >> shift)))
        a ^= 0x8000 | (-(a >> 15) & 0x7FFF)
        b ^= 0x8000 | (-(b >> 15) & 0x7FFF)
        step = (b - a) & 0xFFFF
        negative = step >> 15
        steps[slots[c]] = ((((step ^ -negative) + negative) & 0xFFFF) - 1) << 1 | negative
        slots[c] += 1


@compiled(IN32, IN64, IN64, OUT8, OUT64_2, OUT8, OUT32)
def split_gaps(gaps: Any, counts: Any, shifts: Any, symbols: Any, tally: Any, low: Any, escapes: Any) -> int:
    """Symbols [k], their tally [classes, 64], the low bits (`counts @ shifts`, in bytes), the escapes; gives how many."""
    j, e, at, held = 0, 0, 0, 0
    bits = np.uint64(0)
    for c in range(counts.size):
        shift, mask = np.uint64(shifts[c]), (np.uint64(1) << np.uint64(shifts[c])) - np.uint64(1)
        begin, j = j, j + counts[c]
        for i in range(begin, j):
            gap = np.uint64(gaps[i])
            high = gap >> shift
            if high >= ESCAPE:
                escapes[e] = high
                e += 1
                high = np.uint64(ESCAPE)
            symbols[i] = high
            tally[c, high] += 1
            bits |= (gap & mask) << np.uint64(held)
            held += shifts[c]
            while held >= 8:
                low[at] = bits & np.uint64(255)
                bits >>= np.uint64(8)
                at += 1
                held -= 8
    if held:
        low[at] = bits & np.uint64(255)
    return e


@compiled(IN8, IN64, IN64, IN8, IN32, OUT32)
def join_gaps(symbols: Any, counts: Any, shifts: Any, low: Any, escapes: Any, gaps: Any) -> bool:
    """The inverse of `split_gaps`; a gap longer than any segment comes as 2**31. False when the escapes disagree."""
    j, e, at, held = 0, 0, 0, 0
    bits = np.uint64(0)
    for c in range(counts.size):
        shift, mask = np.uint64(shifts[c]), (np.uint64(1) << np.uint64(shifts[c])) - np.uint64(1)
        begin, j = j, j + counts[c]
        for i in range(begin, j):
            while held < shifts[c]:
                bits |= np.uint64(low[at]) << np.uint64(held)
                at += 1
                held += 8
            high = np.uint64(symbols[i])
            if high == ESCAPE:
                if e == escapes.size:
                    return False
                high = np.uint64(escapes[e])
                e += 1
            gaps[i] = min((high << shift) | (bits & mask), np.uint64(1 << 31))
            bits >>= shift
            held -= shifts[c]
    return bool(e == escapes.size)


@compiled(IN16, IN64, OUT8, OUT64_2, OUT16)
def split_steps(steps: Any, counts: Any, symbols: Any, tally: Any, escapes: Any) -> int:
    """Symbols [k], their tally [classes, 64], and the escapes; gives how many."""
    j, e = 0, 0
    for c in range(counts.size):
        begin, j = j, j + counts[c]
        for i in range(begin, j):
            if steps[i] >= ESCAPE:
                escapes[e] = steps[i]
                e += 1
            symbols[i] = min(steps[i], np.uint16(ESCAPE))
            tally[c, symbols[i]] += 1
    return e


@compiled(IN8, IN16, OUT16)
def join_steps(symbols: Any, escapes: Any, steps: Any) -> bool:
    """The inverse of `split_steps`. False when the escapes disagree."""
    e = 0
    for j in range(symbols.size):
        steps[j] = symbols[j]
        if symbols[j] == ESCAPE:
            if e == escapes.size:
                return False
            steps[j] = escapes[e]
            e += 1
    return bool(e == escapes.size)
