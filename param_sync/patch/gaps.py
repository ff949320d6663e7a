"""Positions as gaps: one symbol byte per change, the gap's low bits beside it, rare long gaps in full.

A gap is the number of unchanged elements since the previous change. Its low `shift` bits are close to uniform and travel raw,
one bit plane each; the rest is a byte that an entropy coder shrinks; 255 means that the whole gap is in the list of escapes.
`shift` follows the mean gap, so that the code is good at any density.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from param_sync.patch.errors import Corrupt

ESCAPE = 255
MAX_SHIFT = 31


def shift_for(elements: int, changed: int) -> int:
    """The number of raw low bits: the mean symbol stays between 16 and 32, so that escapes are rare."""
    return 0 if changed == 0 else max(0, (elements // changed).bit_length() - 5)


def plane_bytes(changed: int) -> int:
    """Bytes of one bit plane over the changes."""
    return (changed + 7) // 8


def encode(positions: npt.NDArray[np.uint32], shift: int) -> tuple[npt.NDArray[np.uint8], bytes, npt.NDArray[np.uint32]]:
    """(symbols [k], `shift` bit planes, escapes) of ascending positions."""
    gaps = positions.copy()
    gaps[1:] -= positions[:-1]
    gaps[1:] -= 1
    high = gaps >> np.uint32(shift)
    escaped = high >= ESCAPE
    symbols = np.minimum(high, ESCAPE).astype(np.uint8)
    escapes = gaps[escaped]
    gaps[escaped] = 0
    planes = [np.packbits((gaps >> np.uint32(b)).astype(np.uint8) & 1, bitorder="little").tobytes() for b in range(shift)]
    return symbols, b"".join(planes), escapes


def decode(
    symbols: npt.NDArray[np.uint8], planes: npt.NDArray[np.uint8], escapes: npt.NDArray[np.uint32], shift: int, elements: int
) -> npt.NDArray[np.uint32]:
    """The positions, ascending and below `elements`. Raises `Corrupt` when the streams disagree or run past the end."""
    changed = len(symbols)
    gaps = symbols.astype(np.uint64) << np.uint64(shift)
    for bit, plane in enumerate(planes.reshape(shift, -1) if shift else ()):
        gaps |= np.unpackbits(plane, count=changed, bitorder="little").astype(np.uint64) << np.uint64(bit)
    escaped = np.flatnonzero(symbols == ESCAPE)
    if len(escaped) != len(escapes):
        raise Corrupt(f"{len(escaped)} gaps are escaped but {len(escapes)} are listed")
    gaps[escaped] = escapes
    positions = np.cumsum(gaps + np.uint64(1)) - np.uint64(1)
    # At most 2**24 gaps below 2**39 each: the sum cannot wrap.
    if changed and positions[-1] >= elements:
        raise Corrupt(f"the last change is at element {positions[-1]} of {elements}")
    return positions.astype(np.uint32)
