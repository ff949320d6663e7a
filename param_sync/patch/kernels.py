"""The compiled loops over 16-bit words: which differ and by how many steps, ranks within classes, and the way back.

`old`, `new` [n] are one segment's words; `ends` [K] the last exponent of each class, ascending, the last of them 255. Exponent
means bits 7 to 14. Functions that read what came from outside check it and return a negative number where it cannot be.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from param_sync.patch.compiled import I64, IN8, IN16, IN32, OUT8, OUT16, OUT32, OUT64, compiled
from param_sync.patch.vectors import CLASSES, LANES, bit_of_rank, copy_words, count_below, differ, first_one, ones, pass_classes

STEP_KINDS = 8
_PART = 1 << 14
"""Elements copied before they are changed: they stay in the first cache meanwhile."""
_NEVER = 1 << 60
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE = np.uint64(1)


@numba.njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _step(old: Any, new: Any) -> int:
    """The signed step between two different words, folded: (abs - 1) * 2 + negative. No branches on data."""
    a: Any = np.int32(old)
    b: Any = np.int32(new)
    a ^= 0x8000 | (-(a >> 15) & 0x7FFF)
    b ^= 0x8000 | (-(b >> 15) & 0x7FFF)
    step = (b - a) & 0xFFFF
    negative = step >> 15
    folded: int = ((((step ^ -negative) + negative - 1) & 0x7FFF) << 1) | negative
    return folded


@numba.njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _moved(old: Any, folded: Any) -> int:
    """The word that lies the folded step away from `old`."""
    a: Any = np.int32(old)
    negative = np.int32(folded) & 1
    a ^= 0x8000 | (-(a >> 15) & 0x7FFF)
    step = (np.int32(folded) >> 1) + 1
    b = (a + ((step ^ -negative) + negative)) & 0xFFFF
    word: int = b ^ (0x8000 | (((b >> 15) - 1) & 0x7FFF))
    return word


@numba.njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _classes(ends: Any) -> Any:
    """The class of each exponent [256]."""
    table, c = np.empty(256, np.uint8), 0
    for e in range(256):
        table[e] = c
        c += e == ends[c] and c + 1 < ends.size
    return table


@compiled(IN16, IN16, OUT32, OUT32, OUT8)
def collect(old: Any, new: Any, positions: Any, steps: Any, exponents: Any) -> int:
    """Position, folded step and old exponent of each change, ascending; room for n each. Returns how many."""
    k, whole = 0, old.size // LANES * LANES
    for at in range(0, whole, LANES):
        mask = differ(old, new, at)
        while mask:
            p = at + first_one(mask)
            mask &= mask - _ONE
            positions[k] = p
            steps[k] = _step(old[p], new[p])
            exponents[k] = (old[p] >> 7) & 0xFF
            k += 1
    for p in range(whole, old.size):
        if old[p] != new[p]:
            positions[k] = p
            steps[k] = _step(old[p], new[p])
            exponents[k] = (old[p] >> 7) & 0xFF
            k += 1
    return k


@compiled(IN16, I64, OUT64)
def sample(old: Any, every: int, population: Any) -> None:
    """Add to `population` [256] the old exponents of each `every`-th run of 64 words."""
    for at in range(0, old.size, LANES * every):
        for p in range(at, min(at + LANES, old.size)):
            population[(old[p] >> 7) & 0xFF] += 1


@compiled(IN32, IN8, OUT64, OUT64)
def census(steps: Any, exponents: Any, changes: Any, kinds: Any) -> None:
    """Count the changes by old exponent [256], and by exponent and kind of step [256 * 8]."""
    for j in range(steps.size):
        changes[exponents[j]] += 1
        kinds[exponents[j] * STEP_KINDS + min(steps[j], np.uint32(STEP_KINDS - 1))] += 1


@compiled(IN32, IN8, IN8, OUT32, OUT64)
def by_class(steps: Any, exponents: Any, ends: Any, grouped: Any, counts: Any) -> None:
    """Steps in order of class, then position, into `grouped` [k]; and each class's number of changes [K, zeroed]."""
    table = _classes(ends)
    for j in range(exponents.size):
        counts[table[exponents[j]]] += 1
    slots = np.zeros(ends.size, np.int64)
    for c in range(1, ends.size):
        slots[c] = slots[c - 1] + counts[c - 1]
    for j in range(exponents.size):
        c = table[exponents[j]]
        grouped[slots[c]] = steps[j]
        slots[c] += 1


@compiled(IN32, OUT32)
def gaps_of(positions: Any, gaps: Any) -> None:
    """The unchanged elements before each position."""
    after = np.uint32(0)
    for j in range(positions.size):
        gaps[j] = positions[j] - after
        after = positions[j] + np.uint32(1)


@numba.njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _limits(ends: Any) -> Any:
    """The magnitudes at which the classes end [8]; what is missing ends where the last does, above all."""
    limits = np.full(CLASSES, 0x8000, np.uint16)
    for c in range(ends.size):
        limits[c] = (np.int64(ends[c]) + 1) << 7
    return limits


@compiled(IN16, IN8, IN32, IN8, OUT64, OUT32)
def ranks_of(old: Any, ends: Any, positions: Any, exponents: Any, counts: Any, gaps: Any) -> None:
    """As `gaps_of`, among the elements of the change's own class alone; in order of class, then position."""
    table, limits = _classes(ends), _limits(ends)
    slots, after = np.zeros(ends.size, np.int64), np.zeros(ends.size, np.int64)
    for c in range(1, ends.size):
        slots[c] = slots[c - 1] + counts[c - 1]
    # Elements of at most that class that were passed, now and before the 64 at hand.
    passed, masks = np.zeros(2 * CLASSES, np.int64), np.empty(CLASSES, np.uint64)
    j = 0
    for at in range(0, old.size, LANES):
        if at + LANES <= old.size:
            count_below(old, at, limits, masks, passed)
        else:
            masks[:] = 0
            for p in range(at, old.size):
                for c in range(table[(old[p] >> 7) & 0xFF], CLASSES):
                    masks[c] |= _ONE << np.uint64(p - at)
            passed[CLASSES:] = passed[:CLASSES]
        while j < positions.size and positions[j] < at + LANES:
            c = table[exponents[j]]
            before = (_ONE << np.uint64(positions[j] - at)) - _ONE
            rank = passed[CLASSES + c] + ones(masks[c] & before)
            if c > 0:
                rank -= passed[CLASSES + c - 1] + ones(masks[c - 1] & before)
            gaps[slots[c]] = rank - after[c]
            after[c] = rank + 1
            slots[c] += 1
            j += 1
        if j == positions.size:
            return


@compiled(OUT32, I64)
def positions_from(gaps: Any, elements: int) -> int:
    """Gaps to positions, in place. Returns 0, or -1 when one lies past the end."""
    at = np.int64(0)
    for j in range(gaps.size):
        at += np.int64(gaps[j])
        if at >= elements:
            return -1
        gaps[j] = at
        at += 1
    return 0


@compiled(IN16, IN8, OUT64, IN32, IN32, OUT16)
def apply_gaps(old: Any, ends: Any, counts: Any, positions: Any, steps: Any, new: Any) -> int:
    """Fill `new` from `old` and the changes at `positions`, which are in range. Returns 0, or -1 when classes disagree."""
    table = _classes(ends)
    slots, stops = np.zeros(ends.size, np.int64), np.zeros(ends.size, np.int64)
    for c in range(ends.size):
        stops[c] = (stops[c - 1] if c > 0 else 0) + counts[c]
        slots[c] = stops[c] - counts[c]
    j = 0
    for at in range(0, old.size, _PART):
        last = min(at + _PART, old.size)
        copy_words(new, old, at, last - at)
        while j < positions.size and positions[j] < last:
            p = positions[j]
            c = table[(old[p] >> 7) & 0xFF]
            if slots[c] == stops[c]:
                return -1
            new[p] = _moved(old[p], steps[slots[c]])
            slots[c] += 1
            j += 1
    return 0


@compiled(IN16, IN8, OUT64, IN32, IN32, OUT16, OUT32)
def apply_ranks(old: Any, ends: Any, counts: Any, gaps: Any, steps: Any, new: Any, positions: Any) -> int:
    """As `apply_gaps`, from ranks; where `positions` [k] has room, they are written there. -1 when a rank does not exist."""
    table, limits = _classes(ends), _limits(ends)
    slots, stops = np.zeros(ends.size, np.int64), np.zeros(ends.size, np.int64)
    rest = np.full(CLASSES, _NEVER, np.int64)  # elements of the class to pass over before its next change
    for c in range(ends.size):
        stops[c] = (stops[c - 1] if c > 0 else 0) + counts[c]
        slots[c] = stops[c] - counts[c]
        if counts[c] > 0:
            rest[c] = gaps[slots[c]]
    masks, j = np.zeros(CLASSES, np.uint64), 0
    for at in range(0, old.size, LANES):
        if at % _PART == 0:
            copy_words(new, old, at, min(_PART, old.size - at))
        if at + LANES <= old.size:
            hits = pass_classes(old, at, limits, masks, rest)
        else:
            masks[:], hits = 0, np.uint64(0)
            for p in range(at, old.size):
                masks[table[(old[p] >> 7) & 0xFF]] |= _ONE << np.uint64(p - at)
            for c in range(CLASSES):
                rest[c] -= ones(masks[c])
                hits |= np.uint64(rest[c] < 0) << np.uint64(c)
        touched = np.uint64(0)
        while hits:
            c = first_one(hits)
            hits &= hits - _ONE
            mine, left = masks[c], rest[c]
            skip = left + ones(mine)
            while left < 0:
                bit = bit_of_rank(mine, skip)
                mine &= ~(bit | (bit - _ONE))
                touched |= bit
                p = at + first_one(bit)
                new[p] = _moved(old[p], steps[slots[c]])
                slots[c] += 1
                skip = np.int64(gaps[slots[c]]) if slots[c] < stops[c] else np.int64(_NEVER)
                left += skip + 1
            rest[c] = left
        while touched and positions.size > 0:
            positions[j] = at + first_one(touched)
            touched &= touched - _ONE
            j += 1
    for c in range(ends.size):
        if slots[c] != stops[c]:
            return -1
    return 0
