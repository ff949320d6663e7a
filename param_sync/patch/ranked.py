"""Level 2: positions conditioned on the old weights. A change is likely where the old exponent is small, so that is a class.

Each change is its rank among the elements of its class (the receiver, who holds the old weights, finds the n-th element of that
class) and its step, both under a static rANS with a table for each class. Layout in docs/patch-format.md, form 4.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from param_sync.patch.bits import Words
from param_sync.patch.errors import Corrupt

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

EXPONENT_SHIFT = {"bf16": 7, "f16": 10}
MAX_SHIFT = 24
_HEAD = struct.Struct("<BBB")  # exponent shift, top exponent, classes
_STATE_WORDS = 8


@dataclass(frozen=True, slots=True)
class Coded:
    """The five streams of a frame, and how many gaps and steps are listed because their symbols are too large."""

    streams: tuple[bytes, bytes, bytes, bytes, bytes]
    long_gaps: int
    long_steps: int


def encode(old: U16, positions: U32, olds: U16, news: U16, shift: int) -> Coded:
    """Code the changes at `positions` [k] of the segment `old`, from `olds` [k] to `news` [k]. `k` is at least 1."""
    from param_sync.patch import coder, symbols, vectors

    k = len(positions)
    top, counts, slots = _classes(old, olds, shift)
    classes = len(counts)
    gaps, steps = np.empty(k, np.uint32), np.empty(k, np.uint16)
    vectors.rank(old, positions, shift, top, classes, slots.copy(), gaps)
    symbols.group_steps(olds, news, shift, top, slots.copy(), steps)
    sums = np.add.reduceat(np.append(gaps, 0), np.minimum(slots, k), dtype=np.int64)
    means = [int(total) // int(n) if n else 0 for total, n in zip(sums, counts, strict=True)]
    shifts = np.array([max(0, mean.bit_length() - 2) for mean in means], np.int64)
    coded, tally = np.empty(2 * k, np.uint8), np.zeros((2 * classes, coder.SYMBOLS), np.int64)
    low, far, long = np.empty(_low_bytes(counts, shifts), np.uint8), np.empty(k, np.uint32), np.empty(k, np.uint16)
    far_count = symbols.split_gaps(gaps, counts, shifts, coded[:k], tally[:classes], low, far)
    long_count = symbols.split_steps(steps, counts, coded[k:], tally[classes:], long)
    frequencies = np.empty((2 * classes, coder.SYMBOLS), np.uint16)
    coder.normalise(tally, frequencies)
    tables = np.empty(2 * classes * (1 + 2 * coder.SYMBOLS), np.uint8)
    size = coder.write_tables(frequencies, tables)
    words = np.empty(2 * k + _STATE_WORDS, np.uint16)
    at = coder.encode(coded, np.concatenate((counts, counts)), frequencies, words)
    head = _HEAD.pack(shift, top, classes) + counts.astype("<u4").tobytes() + shifts.astype(np.uint8).tobytes()
    streams = (head + tables[:size].tobytes(), words[at:].tobytes(), low.tobytes())
    return Coded((*streams, far[:far_count].tobytes(), long[:long_count].tobytes()), far_count, long_count)


def _classes(old: U16, olds: U16, shift: int) -> tuple[int, I64, I64]:
    """(top exponent, changes of each class, where each class begins among the changes)."""
    from param_sync.patch import symbols, vectors

    sampled, changed, chosen = np.zeros(256, np.int64), np.zeros(256, np.int64), np.empty(2, np.int64)
    vectors.sample_exponents(old, shift, sampled)
    symbols.exponents(olds, shift, changed)
    symbols.choose(sampled, changed, old.size, chosen)
    top, classes = int(chosen[0]), int(chosen[1])
    bottom = top - classes + 1
    counts = np.zeros(classes, np.int64)
    counts[: classes - 1] = changed[bottom + 1 : top + 1][::-1]
    counts[0] += changed[top + 1 :].sum() if classes > 1 else changed.sum()
    if classes > 1:
        counts[-1] = changed[: bottom + 1].sum()
    return top, counts, np.cumsum(counts) - counts


def _low_bytes(counts: I64, shifts: I64) -> int:
    return (int((counts * shifts).sum()) + 7) // 8


def decode(streams: list[memoryview], old: Words, changed: int) -> tuple[U32, U16]:
    """(positions [k] each once, new words [k]) of a frame that announces `changed` = k changes of the segment `old`.

    Raises `Corrupt`. Allocates in proportion to `changed`, which the caller has checked against the segment.
    """
    model, coded, low, far, long = streams
    shift, top, counts, shifts, frequencies = _model(model, changed)
    if len(low) != _low_bytes(counts, shifts):
        raise Corrupt(f"the gaps' low bits must take {_low_bytes(counts, shifts)} bytes, got {len(low)}")
    if len(coded) < 2 * _STATE_WORDS or len(coded) % 2:
        raise Corrupt(f"{len(coded)} bytes are no coded symbols")
    from param_sync.patch import coder, symbols, vectors

    words, found = np.frombuffer(coded, "<u2"), np.empty(2 * changed, np.uint8)
    if not coder.decode(words, np.concatenate((counts, counts)), frequencies, found):
        raise Corrupt("the coded symbols do not end where they must")
    gaps, steps = np.empty(changed, np.uint32), np.empty(changed, np.uint16)
    listed = np.frombuffer(far, "<u4"), np.frombuffer(long, "<u2")
    if not symbols.join_gaps(found[:changed], counts, shifts, np.frombuffer(low, np.uint8), listed[0], gaps):
        raise Corrupt(f"the escaped gaps and the list of {len(listed[0])} disagree")
    if not symbols.join_steps(found[changed:], listed[1], steps):
        raise Corrupt(f"the escaped steps and the list of {len(listed[1])} disagree")
    positions, values = np.empty(changed, np.uint32), np.empty(changed, np.uint16)
    fit = vectors.find(old, shift, top, counts, gaps, steps, positions, values)
    if fit != changed:
        raise Corrupt(f"{changed - fit} of {changed} changes lie past the segment's end")
    return positions, values


def in_order(positions: U32, values: U16) -> tuple[U32, U16]:
    """What `decode` gave, sorted by position, in place."""
    from param_sync.patch import vectors

    vectors.in_order(positions, values)
    return positions, values


def _model(model: memoryview, changed: int) -> tuple[int, int, I64, I64, npt.NDArray[np.uint16]]:
    """(exponent shift, top exponent, counts, gap shifts, frequencies). Raises `Corrupt`."""
    from param_sync.patch import coder, symbols

    shift, top, classes = _HEAD.unpack_from(model) if len(model) >= _HEAD.size else (0, 0, 0)
    if shift not in EXPONENT_SHIFT.values() or not 0 < classes <= symbols.MAX_CLASSES or len(model) < _HEAD.size + 5 * classes:
        raise Corrupt(f"no such model: {len(model)} bytes, exponents from bit {shift} on, {classes} classes")
    at = _HEAD.size
    counts = np.frombuffer(model, "<u4", classes, at).astype(np.int64)
    shifts = np.frombuffer(model, np.uint8, classes, at + 4 * classes).astype(np.int64)
    if int(counts.sum()) != changed or int(shifts.max()) > MAX_SHIFT:
        raise Corrupt(f"classes of {int(counts.sum())} changes with gap shifts up to {int(shifts.max())} cannot be")
    tables = np.frombuffer(model[at + 5 * classes :], np.uint8)
    frequencies = np.empty((2 * classes, coder.SYMBOLS), np.uint16)
    if coder.read_tables(tables, np.concatenate((counts, counts)), frequencies) != len(tables):
        raise Corrupt("the tables of symbols do not add up")
    return shift, top, counts, shifts, frequencies
