"""Values of 16-bit floats as signed steps: how many representable numbers lie between old and new.

Sign-magnitude bits map to a line on which neighbours differ by one (`-0` and `+0` are neighbours too, and infinities and NaN
payloads have their places at the ends), so any pair of words has a step and every step is undone exactly, modulo 2**16. Under
an optimizer most steps are one. Magnitudes are grouped by the old value's exponent, where they resemble each other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from param_sync.patch.errors import Corrupt

ESCAPE = 255
LARGEST = 32767

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]


def to_line(words: U16) -> U16:
    """Words to their places on the line. Negative: complemented; positive: above 2**15."""
    return np.where(words & 0x8000, ~words, words | 0x8000).astype(np.uint16, copy=False)


def from_line(places: U16) -> U16:
    """The inverse of `to_line`."""
    return np.where(places & 0x8000, places & 0x7FFF, ~places).astype(np.uint16, copy=False)


def _by_exponent(old: U16) -> npt.NDArray[np.intp]:
    return np.argsort((old >> 7).astype(np.uint8), kind="stable")


def encode(old: U16, new: U16) -> tuple[bytes, U8, U16]:
    """(sign bits, magnitudes - 1 by old exponent [k], escapes) of the changed elements' old and new words [k]; all differ."""
    step = (to_line(new) - to_line(old)).view(np.int16)
    signs = np.packbits(step < 0, bitorder="little").tobytes()
    magnitude = (np.abs(step.astype(np.int32)) - 1)[_by_exponent(old)]
    escapes = magnitude[magnitude >= ESCAPE].astype(np.uint16)
    return signs, np.minimum(magnitude, ESCAPE).astype(np.uint8), escapes


def decode(old: U16, signs: U8, magnitudes: U8, escapes: U16) -> U16:
    """The new words [k] from the old ones. Raises `Corrupt` when the streams disagree."""
    escaped = np.flatnonzero(magnitudes == ESCAPE)
    if len(escaped) != len(escapes):
        raise Corrupt(f"{len(escaped)} steps are escaped but {len(escapes)} are listed")
    if len(escapes) and int(escapes.max()) > LARGEST:
        raise Corrupt(f"a step of {int(escapes.max()) + 1} is longer than the line")
    grouped = magnitudes.astype(np.uint16)
    grouped[escaped] = escapes
    step = np.empty_like(grouped)
    step[_by_exponent(old)] = grouped + np.uint16(1)
    negative = np.unpackbits(signs, count=len(old), bitorder="little").view(np.bool_)
    np.negative(step, out=step, where=negative)
    return from_line(to_line(old) + step)
