"""How a segment's exponents are split into classes that behave alike: dynamic programming over the bits that a split costs.

An element changes easily where its ulp is small, and then by more steps. Within a class, positions are worth the entropy of
"changed or not" and steps their own entropy; each further class costs its tables. The split is the writer's choice: a reader
finds it in the frame. Floating point here only chooses; it never touches a weight.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from param_sync.patch.compiled import I64, OUT8, OUT64, compiled
from param_sync.patch.kernels import STEP_KINDS
from param_sync.patch.vectors import CLASSES

_BINS = 20
"""Neighbouring exponents are put together until each bin has a twentieth of the changes: the search stays short."""
_TABLE_BITS = 500.0


@numba.njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _bits(part: float, whole: float) -> float:
    cost: float = -part * np.log2(part / whole) if part > 0 else 0.0
    return cost


@compiled(OUT64, OUT64, OUT64, I64, OUT8)
def _choose(changes: Any, kinds: Any, population: Any, most: int, ends: Any) -> int:
    """Fill `ends` and return how many classes; see `choose`."""
    total = changes.sum()
    tops, bins, held = np.zeros(_BINS + 2, np.int64), 0, 0
    for e in range(256):
        held += changes[e]
        if held * _BINS >= total and held > 0 and bins < _BINS:
            tops[bins] = e
            bins += 1
            held = 0
    if bins == 0 or held > 0 or tops[bins - 1] < 255:  # the top exponents, changed or not
        tops[bins] = 255
        bins += 1
    cost = np.zeros((bins, bins))
    mix = np.zeros(STEP_KINDS)
    for i in range(bins):
        mix[:] = 0
        n, k = 0.0, 0.0
        for j in range(i, bins):
            for e in range(tops[j - 1] + 1 if j > 0 else 0, tops[j] + 1):
                n += population[e]
                k += changes[e]
                for s in range(STEP_KINDS):
                    mix[s] += kinds[e * STEP_KINDS + s]
            n_here = max(n, k)
            cost[i, j] = _TABLE_BITS
            if population[256] > 0:
                cost[i, j] += _bits(k, n_here) + _bits(n_here - k, n_here)
            for s in range(STEP_KINDS):
                cost[i, j] += _bits(mix[s], k)
    best = np.full((most + 1, bins + 1), np.inf)
    cut = np.zeros((most + 1, bins + 1), np.int64)
    best[0, 0] = 0.0
    for c in range(1, most + 1):
        for j in range(1, bins + 1):
            for i in range(j):
                if best[c - 1, i] + cost[i, j - 1] < best[c, j]:
                    best[c, j] = best[c - 1, i] + cost[i, j - 1]
                    cut[c, j] = i
    count = 1
    for c in range(2, most + 1):
        if best[c, bins] < best[count, bins]:
            count = c
    j = bins
    for c in range(count, 0, -1):
        ends[c - 1] = tops[j - 1]
        j = cut[c, j]
    return count


def choose(
    changes: npt.NDArray[np.int64], kinds: npt.NDArray[np.int64], population: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.uint8]:
    """The last exponent of each class, at most eight, ascending, the last 255.

    `changes` [256] by old exponent, `kinds` [256 * 8] by exponent and folded step (7: any larger); `population` [256] of all
    elements where positions are coded by class, None where they are not.
    """
    every = np.zeros(257, np.int64)
    if population is not None:
        every[:256], every[256] = population, 1
    ends = np.zeros(CLASSES, np.uint8)
    return ends[: _choose(changes, kinds, every, CLASSES, ends)].copy()
