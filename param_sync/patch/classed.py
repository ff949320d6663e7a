"""The two compiled forms of a frame for 16-bit floats: gaps, or ranks among the elements of equal class; steps by class.

Both need the old words to be read. Layout in docs/patch-format.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from param_sync.patch import classes, kernels, numbers
from param_sync.patch.errors import Corrupt

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]
LARGEST_STEP = 65535


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What differs between two segments, ascending: position, folded step and old exponent, [k] each."""

    positions: U32
    steps: U32
    exponents: U8


def changes_between(old: U16, new: U16) -> Changes:
    """Every word that differs. Scratch memory of nine bytes for each element, of which only the changes' share is touched."""
    n = old.size
    found: tuple[Any, Any, Any] = np.empty(n, np.uint32), np.empty(n, np.uint32), np.empty(n, np.uint8)
    k = kernels.collect(old, new, *found)
    return Changes(*(a[:k] for a in found))


def encode(old: U16, changes: Changes, ranked: bool) -> tuple[U8, I64, list[bytes]]:
    """(last exponent of each class [K], changes of each class [K], streams): gaps or K rank streams, then K of steps."""
    k = len(changes.positions)
    census, kinds = np.zeros(256, np.int64), np.zeros(256 * kernels.STEP_KINDS, np.int64)
    kernels.census(changes.steps, changes.exponents, census, kinds)
    ends = classes.choose(census, kinds, _population(old) if ranked else None)
    counts, grouped, gaps = np.zeros(len(ends), np.int64), np.empty(k, np.uint32), np.empty(k, np.uint32)
    kernels.by_class(changes.steps, changes.exponents, ends, grouped, counts)
    cuts = np.cumsum(counts)[:-1]
    if ranked:
        kernels.ranks_of(old, ends, changes.positions, changes.exponents, counts, gaps)
        where = [numbers.pack(part) for part in np.split(gaps, cuts)]
    else:
        kernels.gaps_of(changes.positions, gaps)
        where = [numbers.pack(gaps)]
    return ends, counts, where + [numbers.pack(part) for part in np.split(grouped, cuts)]


def _population(old: U16) -> I64:
    """The old exponents of the segment, from a sample of at least 64 Ki elements, scaled to all of them."""
    every, population = max(1, old.size >> 16), np.zeros(256, np.int64)
    kernels.sample(old, every, population)
    return population * every


def apply(
    ranked: bool, ends: U8, counts: I64, streams: list[memoryview], old: U16, new: U16, *, collect: bool = False
) -> tuple[U32, U16] | None:
    """Fill `new` from `old`; with `collect` also give (positions, new words) [k], ascending. Raises `Corrupt`.

    On an error `new` holds rubbish.
    """
    lengths, k = [int(count) for count in counts], int(counts.sum())
    first = len(lengths) if ranked else 1
    gaps = np.concatenate([numbers.unpack(s, n) for s, n in zip(streams[:first], lengths if ranked else [k], strict=True)])
    steps = np.concatenate([numbers.unpack(s, n) for s, n in zip(streams[first:], lengths, strict=True)])
    if int(steps.max(initial=0)) > LARGEST_STEP:
        raise Corrupt("a step is longer than the line")
    if ranked:
        positions = np.empty(k if collect else 0, np.uint32)
        bad = kernels.apply_ranks(old, ends, counts, gaps, steps, new, positions)
    else:
        positions = gaps
        if kernels.positions_from(positions, old.size):
            raise Corrupt(f"a change lies past the {old.size} elements of its segment")
        bad = kernels.apply_gaps(old, ends, counts, positions, steps, new)
    if bad:
        raise Corrupt("the changes of a class and the old weights disagree")
    return (positions, new[positions]) if collect else None
