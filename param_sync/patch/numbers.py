"""A stream of n numbers below 2**32, of any distribution: gaps between changes, and steps, in the compiled forms of a frame.

A number below 8 is a symbol of its own. A larger one is a symbol for its length and the two bits after the top one, beside
its remaining bits, which are close to uniform and travel raw. Symbols go through a static rANS. So the code fits densities
from one change in a segment to all of them without any parameter. Short streams are plain varints.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from param_sync.patch import number_kernels as kernels
from param_sync.patch.errors import Corrupt

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]
_RANS_FROM = 16
"""Numbers from which a frequency table can pay."""


def pack(numbers: U32) -> bytes:
    """The stream; empty for no numbers."""
    n = len(numbers)
    if n == 0:
        return b""
    plain = np.empty(5 * n, np.uint8)
    varints = bytes([kernels.VARINTS]) + plain[: kernels.encode_varints(numbers, plain)].tobytes() if n < 4096 else None
    if n < _RANS_FROM and varints is not None:
        return varints
    frequencies, symbols, raw = np.zeros(kernels.SYMBOLS, np.int64), np.empty(n, np.uint8), np.empty(4 * n + 8, np.uint8)
    raw = raw[: kernels.symbols_of(numbers, frequencies, symbols, raw)]
    kernels.normalise(frequencies, n)
    out = np.empty(2 * n + 16, np.uint8)
    coded = out[kernels.encode_symbols(symbols, frequencies, out) :]
    head = bytes([kernels.RANS]) + _table(frequencies) + len(coded).to_bytes(4, "little")
    stream = b"".join((head, coded.tobytes(), raw.tobytes()))
    return stream if varints is None or len(stream) < len(varints) else varints


def unpack(stream: memoryview, n: int) -> U32:
    """The n numbers. Allocates 4n bytes; raises `Corrupt` when the stream is not exactly n numbers."""
    if n == 0:
        if len(stream):
            raise Corrupt(f"{len(stream)} bytes stand for no numbers")
        return np.empty(0, np.uint32)
    if not len(stream) or stream[0] not in (kernels.VARINTS, kernels.RANS):
        raise Corrupt("a stream of numbers has no known form")
    data = np.frombuffer(stream, np.uint8)
    if stream[0] == kernels.VARINTS:
        if len(stream) - 1 < n:
            raise Corrupt(f"{len(stream)} bytes cannot hold {n} numbers")
        numbers = np.empty(n, np.uint32)
        bad = kernels.decode_varints(data[1:], numbers)
    else:
        frequencies, at = _read_table(stream)
        coded = at + 4 + int.from_bytes(stream[at : at + 4], "little")
        if coded > len(stream):
            raise Corrupt("a stream of numbers ends too early")
        numbers = np.empty(n, np.uint32)
        bad = kernels.decode_rans(_padded(data[at + 4 : coded]), frequencies, _padded(data[coded:]), numbers)
    if bad:
        raise Corrupt(f"a stream is not {n} numbers")
    return numbers


def _padded(data: U8) -> U8:
    """A copy with eight zero bytes behind it, so that the loops may read whole words."""
    return np.concatenate((data, np.zeros(8, np.uint8)))


def _table(frequencies: I64) -> bytes:
    """First symbol, last symbol, then each frequency between in one byte, or in two from 128 on."""
    used = np.flatnonzero(frequencies)
    first, last = int(used[0]), int(used[-1])
    coded = bytearray((first, last))
    for frequency in frequencies[first : last + 1].tolist():
        coded += bytes((frequency,)) if frequency < 128 else bytes((128 | frequency >> 8, frequency & 255))
    return bytes(coded)


def _read_table(stream: memoryview) -> tuple[I64, int]:
    """The frequencies [124], which add up to 4096, and where the table ends."""
    frequencies = np.zeros(kernels.SYMBOLS, np.int64)
    head = bytes(stream[1 : 3 + 2 * kernels.SYMBOLS])
    try:
        first, last, at = head[0], head[1], 2
        for symbol in range(first, last + 1):
            high = head[at]
            at += 1
            if high >= 128:
                high, at = (high & 127) << 8 | head[at], at + 1
            frequencies[symbol] = high
    except IndexError as error:
        raise Corrupt("a table of frequencies is cut or too long") from error
    if int(frequencies.sum()) != kernels.TOTAL:
        raise Corrupt(f"frequencies must add up to {kernels.TOTAL}, not {int(frequencies.sum())}")
    return frequencies, at + 1
