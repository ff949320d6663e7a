"""Dense words as byte planes: the bytes of equal weight together, so that an entropy coder finds the skewed ones.

Floats are turned left by one bit first, which puts the exponent alone in the top byte (bf16, f32) and the sign at the bottom.
"""

from __future__ import annotations

import numpy as np

from param_sync.patch.bits import WORDS, Words


def split(words: Words, turn: bool) -> list[bytes]:
    """One `bytes` per byte of the word, lowest first, each one byte per element."""
    width = words.dtype.itemsize
    if turn:
        one, rest = words.dtype.type(1), words.dtype.type(8 * width - 1)
        words = (words << one) | (words >> rest)
    columns = np.ascontiguousarray(words).view(np.uint8).reshape(-1, width)
    return [columns[:, b].tobytes() for b in range(width)]


def join(planes: list[bytes | memoryview], count: int, turn: bool) -> Words:
    """The words [count] of `split`'s planes, each `count` bytes long."""
    width = len(planes)
    columns = np.empty((count, width), np.uint8)
    for b, plane in enumerate(planes):
        columns[:, b] = np.frombuffer(plane, np.uint8)
    words: Words = columns.reshape(-1).view(WORDS[width])
    if turn:
        one, rest = words.dtype.type(1), words.dtype.type(8 * width - 1)
        words = (words >> one) | (words << rest)
    return words
