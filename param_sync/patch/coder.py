"""A static range coder (rANS) over small symbols with a table for each context, four states side by side, compiled.

State in [2**16, 2**32), words of 16 bits, frequencies that add up to 2**12: J. Duda, "Asymmetric numeral systems" (2013),
in the interleaved form of F. Giesen (2014). Sections follow each other; each has one table and starts again at the first state.
Imported only when there is something to code. Reading is bounded by the arrays' sizes, whatever the bytes are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from param_sync.patch.compiled import IN8, IN16, IN64, OUT8, OUT16, OUT16_2, OUT64_2, compiled, inlined

SYMBOLS = 64
SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
LANES = 4
LOW = 1 << 16


@compiled(OUT64_2, OUT16_2)
def normalise(counts: Any, frequencies: Any) -> None:
    """`frequencies` [contexts, 64] in proportion to `counts`, at least 1 where a symbol occurs, adding up to 2**12 or 0."""
    for c in range(counts.shape[0]):
        total = counts[c].sum()
        if total == 0:
            frequencies[c] = 0
            continue
        left: Any = SCALE
        most: Any = 0
        for s in range(SYMBOLS):
            share = counts[c, s] * SCALE // total
            if counts[c, s] > 0 and share == 0:
                share = 1
            frequencies[c, s] = share
            left -= share
            if frequencies[c, s] > frequencies[c, most]:
                most = s
        while left < 0:  # many rare symbols were lifted to 1: the frequent ones give it back
            most = np.argmax(frequencies[c])
            given: Any = min(-left, np.int64(frequencies[c, most]) // 2)
            frequencies[c, most] -= given
            left += given
        frequencies[c, most] += left


@compiled(OUT16_2, OUT8)
def write_tables(frequencies: Any, out: Any) -> int:
    """Each used context's table: number of symbols, then a varint for each frequency. Returns the bytes written."""
    at = 0
    for c in range(frequencies.shape[0]):
        used = 0
        for s in range(SYMBOLS):
            if frequencies[c, s]:
                used = s + 1
        if used == 0:
            continue
        out[at] = used
        at += 1
        for s in range(used):
            f = frequencies[c, s]
            if f >= 128:
                out[at] = (f & 127) | 128
                at += 1
                f >>= 7
            out[at] = f
            at += 1
    return at


@compiled(IN8, IN64, OUT16_2)
def read_tables(data: Any, counts: Any, frequencies: Any) -> int:
    """The inverse of `write_tables`, for the contexts with a count. Returns the bytes read, or -1 when they are no tables."""
    at = 0
    for c in range(counts.size):
        frequencies[c] = 0
        if counts[c] == 0:
            continue
        if at == data.size or not 0 < data[at] <= SYMBOLS:
            return -1
        used, total = np.int64(data[at]), 0
        at += 1
        for s in range(used):
            if at == data.size:
                return -1
            f: Any = np.int64(data[at])
            at += 1
            if f >= 128:
                if at == data.size:
                    return -1
                f = (f & 127) | np.int64(data[at]) << 7
                at += 1
            total += f
            if total > SCALE:
                return -1
            frequencies[c, s] = f
        if total != SCALE:
            return -1
    return at


@inlined
def _put(x: Any, frequency: Any, start: Any, words: Any, at: Any) -> Any:
    """Code one symbol into state `x`; a word that does not fit goes to `words[at - 1]`. Gives the new state and place."""
    words[at - 1] = x & np.uint64(0xFFFF)  # no branches: whether a word is full is as good as random
    full = np.uint64(x >= frequency << np.uint64(20))
    at -= np.int64(full)
    x >>= full << np.uint64(4)
    quotient = np.uint64(np.uint32(x) // np.uint32(frequency))
    return (quotient << np.uint64(SCALE_BITS)) + (x - quotient * frequency) + start, at


@compiled(IN8, IN64, OUT16_2, OUT16)
def encode(symbols: Any, counts: Any, frequencies: Any, words: Any) -> int:
    """Code the sections of `counts` symbols. Fills `words` from its end (room for symbols + 8) and returns where they begin."""
    states = np.full(LANES, LOW, np.uint64)
    at: Any = words.size
    end: Any = symbols.size
    starts = np.zeros(SYMBOLS + 1, np.uint64)
    for c in range(counts.size - 1, -1, -1):
        for s in range(SYMBOLS):
            starts[s + 1] = starts[s] + np.uint64(frequencies[c, s])
        begin, tail = end - counts[c], end - (counts[c] & 3)
        for j in range(end - 1, tail - 1, -1):
            s, lane = symbols[j], (j - begin) & 3
            states[lane], at = _put(states[lane], np.uint64(frequencies[c, s]), starts[s], words, at)
        a, b, d, e = states[0], states[1], states[2], states[3]
        for j in range(tail - 4, begin - 1, -4):
            s = symbols[j + 3]
            e, at = _put(e, np.uint64(frequencies[c, s]), starts[s], words, at)
            s = symbols[j + 2]
            d, at = _put(d, np.uint64(frequencies[c, s]), starts[s], words, at)
            s = symbols[j + 1]
            b, at = _put(b, np.uint64(frequencies[c, s]), starts[s], words, at)
            s = symbols[j]
            a, at = _put(a, np.uint64(frequencies[c, s]), starts[s], words, at)
        states[0], states[1], states[2], states[3] = a, b, d, e
        end = begin
    for lane in range(LANES - 1, -1, -1):
        words[at - 1], words[at - 2] = states[lane] >> np.uint64(16), states[lane] & np.uint64(0xFFFF)
        at -= 2
    begins: int = at
    return begins


@inlined
def _get(x: Any, symbol_of: Any, frequency: Any, starts: Any, words: Any, at: Any) -> Any:
    """One symbol out of state `x`: the symbol, the new state and the place of the next word, which may be past the end."""
    slot = x & np.uint64(SCALE - 1)
    s = symbol_of[slot]
    x = np.uint64(frequency[s]) * (x >> np.uint64(SCALE_BITS)) + slot - np.uint64(starts[s])
    short = np.uint64(x < np.uint64(LOW))
    x = (x << (short << np.uint64(4))) | (np.uint64(words[min(at, words.size - 1)]) & (np.uint64(0) - short))
    return s, x, at + np.int64(short)


@compiled(IN16, IN64, OUT16_2, OUT8)
def decode(words: Any, counts: Any, frequencies: Any, symbols: Any) -> bool:
    """Fill `symbols` with the sections of `counts` each. False when the words do not end where they must.

    `words` holds at least the eight of the states. Tables of contexts with a count add up to 2**12.
    """
    states = np.empty(LANES, np.uint64)
    for lane in range(LANES):
        states[lane] = np.uint64(words[2 * lane]) | np.uint64(words[2 * lane + 1]) << np.uint64(16)
        if states[lane] < np.uint64(LOW):
            return False
    at, begin = 2 * LANES, 0
    symbol_of, starts = np.empty(SCALE, np.uint8), np.zeros(SYMBOLS, np.uint16)
    for c in range(counts.size):
        if counts[c] == 0:
            continue
        table, n = frequencies[c], np.int64(0)
        for s in range(SYMBOLS):
            starts[s] = n
            for slot in range(n, n + table[s]):
                symbol_of[slot] = s
            n += np.int64(table[s])
        tail = begin + counts[c] // 4 * 4
        a, b, d, e = states[0], states[1], states[2], states[3]
        for j in range(begin, tail, 4):
            symbols[j], a, at = _get(a, symbol_of, table, starts, words, at)
            symbols[j + 1], b, at = _get(b, symbol_of, table, starts, words, at)
            symbols[j + 2], d, at = _get(d, symbol_of, table, starts, words, at)
            symbols[j + 3], e, at = _get(e, symbol_of, table, starts, words, at)
        states[0], states[1], states[2], states[3] = a, b, d, e
        end = begin + counts[c]
        for j in range(tail, end):
            lane = j - tail
            symbols[j], states[lane], at = _get(states[lane], symbol_of, table, starts, words, at)
        begin = end
    return at == words.size and bool((states == np.uint64(LOW)).all())
