"""Which elements differ, and the two codings of them, each in numpy or compiled by size.

Both forms write the same bytes. numpy serves small tensors, so that a service which holds only those never loads a compiler.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt

from param_sync.patch import gaps, steps
from param_sync.patch.bits import Words
from param_sync.patch.errors import Corrupt

COMPILED_FROM = 1 << 20
"""Elements in a segment from which the compiled form is used."""

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]


def _kernels() -> ModuleType:
    from param_sync.patch import kernels

    return kernels


def find(old: Words, new: Words) -> tuple[U32, Words, Words]:
    """(ascending positions, old words, new words) [k] of the elements that differ."""
    if old.dtype.itemsize != 2 or old.size < COMPILED_FROM:
        positions = np.flatnonzero(old != new).astype(np.uint32)
        return positions, old[positions], new[positions]
    from param_sync.patch import vectors

    for room in (old.size // 8 + 64, old.size):
        positions, olds, news = np.empty(room, np.uint32), np.empty(room, np.uint16), np.empty(room, np.uint16)
        k = vectors.scan(old, new, positions, olds, news)
        if k >= 0:
            break
    return positions[:k], olds[:k], news[:k]


def encode_gaps(positions: U32, elements: int) -> tuple[int, U8, bytes | U8, U32]:
    """(shift, symbols, planes, escapes) of the positions among `elements`."""
    shift = gaps.shift_for(elements, len(positions))
    if elements < COMPILED_FROM:
        return shift, *gaps.encode(positions, shift)
    symbols, escapes = np.empty(len(positions), np.uint8), np.empty(len(positions), np.uint32)
    planes = np.zeros(shift * gaps.plane_bytes(len(positions)), np.uint8)
    count = _kernels().encode_gaps(positions, shift, gaps.plane_bytes(len(positions)), symbols, planes, escapes)
    return shift, symbols, planes, escapes[:count]


def decode_gaps(symbols: U8, planes: U8, escapes: U32, shift: int, elements: int) -> U32:
    """The positions. Raises `Corrupt` when the streams disagree or run past `elements`."""
    if elements < COMPILED_FROM:
        return gaps.decode(symbols, planes, escapes, shift, elements)
    positions = np.empty(len(symbols), np.uint32)
    bad = _kernels().decode_gaps(symbols, planes, escapes, shift, gaps.plane_bytes(len(symbols)), elements, positions)
    if bad == -2:
        raise Corrupt(f"the escaped gaps and the list of {len(escapes)} disagree")
    if bad >= 0:
        raise Corrupt(f"a change is at element {bad} of {elements}")
    return positions


def encode_steps(olds: U16, news: U16, elements: int) -> tuple[bytes | U8, U8, U16]:
    """(sign bits, magnitudes, escapes) of the changed ones among `elements`."""
    if elements < COMPILED_FROM:
        return steps.encode(olds, news)
    signs = np.zeros((len(olds) + 7) // 8, np.uint8)
    magnitudes, escapes = np.empty(len(olds), np.uint8), np.empty(len(olds), np.uint16)
    return signs, magnitudes, escapes[: _kernels().encode_steps(olds, news, signs, magnitudes, escapes)]


def decode_steps(olds: U16, signs: U8, magnitudes: U8, escapes: U16, elements: int) -> U16:
    """The new words from the old ones [k]. Raises `Corrupt` when the streams disagree."""
    if elements < COMPILED_FROM:
        return steps.decode(olds, signs, magnitudes, escapes)
    if len(escapes) and int(escapes.max()) > steps.LARGEST:
        raise Corrupt(f"a step of {int(escapes.max()) + 1} is longer than the line")
    values = np.empty(len(olds), np.uint16)
    if _kernels().decode_steps(olds, signs, magnitudes, escapes, values):
        raise Corrupt(f"the escaped steps and the list of {len(escapes)} disagree")
    return values


def gather(words: Words, positions: U32) -> Words:
    """`words[positions]`; positions are in range."""
    if words.dtype.itemsize != 2 or words.size < COMPILED_FROM:
        return words[positions]
    values = np.empty(len(positions), np.uint16)
    _kernels().gather(positions, words, values)
    return values


def exchange(words: Words, positions: U32, values: Words) -> None:
    """Swap `words[positions]` and `values` in place; the same call once more undoes it. Positions are in range, each once."""
    if words.dtype.itemsize != 2 or words.size < COMPILED_FROM:
        before = words[positions]
        words[positions] = values
        values[:] = before
    else:
        _kernels().exchange(positions, values, words)
