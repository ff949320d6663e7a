"""A frame: the new words of one segment of one tensor, decodable alone given the segment's old words.

Layout in docs/patch-format.md. The changed elements (sparse), or every element, absolute or as XOR, when most of the segment
changed beyond recognition. A frame carries a checksum, so damage is found before anything is decoded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from param_sync.patch import changes, gaps, planes, ranked, streams
from param_sync.patch.bits import WORDS, Words, is_float
from param_sync.patch.errors import Corrupt, PatchError, Truncated

ABSOLUTE, XOR, SPARSE_XOR, SPARSE_STEPS, RANKED_STEPS = 0, 1, 2, 3, 4
LEVELS = (1, 2)
"""1: gaps and steps under zstd. 2: also form 4, ranks and steps under a range coder."""
RANKED_FROM = 1024
"""Changes in a segment from which form 4 is tried: its tables take a few hundred bytes."""
SEGMENT_ELEMENTS = 1 << 22
"""Elements the encoder puts into one frame: bounds scratch memory, and frames may be decoded in parallel."""
MAX_SEGMENT_ELEMENTS = 1 << 24

_HEAD = struct.Struct("<BBBBIQIIII")  # form, width, turn, shift, bytes, start, elements, changed, gap escapes, step escapes
_SUM_BYTES = 8
_COMPRESSED = 1 << 31


@dataclass(frozen=True, slots=True)
class Frame:
    """A parsed frame, its sizes checked against each other; the streams are still packed."""

    form: int
    width: int
    turn: bool
    shift: int
    start: int
    elements: int
    changed: int
    streams: tuple[tuple[memoryview, bool, int], ...]
    """(stored bytes, compressed?, raw bytes) each."""


def _raw_bytes(form: int, width: int, shift: int, elements: int, changed: int, escapes: tuple[int, int]) -> list[int | None]:
    """The raw length of every stream of a frame, in order; None where the stream itself says it."""
    if form in (ABSOLUTE, XOR):
        return [elements] * width
    if form == RANKED_STEPS:
        return [None, None, None, 4 * escapes[0], 2 * escapes[1]]
    bits = gaps.plane_bytes(changed)
    positions = [changed, shift * bits, 4 * escapes[0]]
    return [*positions, *([bits, changed, 2 * escapes[1]] if form == SPARSE_STEPS else [changed] * width)]


def _build(
    form: int,
    width: int,
    turn: bool,
    shift: int,
    start: int,
    elements: int,
    changed: int,
    escapes: tuple[int, int],
    raw: list[bytes],
) -> bytes:
    packed = [(r, False) if form == RANKED_STEPS else streams.pack(r) for r in raw]
    table = struct.pack(f"<{len(packed)}I", *(len(p) | (_COMPRESSED if z else 0) for p, z in packed))
    size = _HEAD.size + len(table) + sum(len(p) for p, _ in packed) + _SUM_BYTES
    head = _HEAD.pack(form, width, turn, shift, size, start, elements, changed, *escapes)
    content = b"".join((head, table, *(p for p, _ in packed)))
    return content + xxhash.xxh3_64_digest(content)


def encode_absolute(new: Words, start: int, turn: bool) -> bytes:
    """A frame that needs no old words. `turn` for floats (see `planes`). At most `MAX_SEGMENT_ELEMENTS`."""
    return _build(ABSOLUTE, new.dtype.itemsize, turn, 0, start, new.size, new.size, (0, 0), planes.split(new, turn))


def encode_changes(old: Words, new: Words, start: int, dtype: str, level: int = 1) -> bytes:
    """The smallest frame found that takes `old` to `new`, the segment from element `start`; empty when nothing changed."""
    if old.dtype != new.dtype or old.shape != new.shape:
        raise PatchError(f"segments differ in form: {old.dtype}{old.shape} and {new.dtype}{new.shape}")
    positions, olds, news = changes.find(old, new)
    if not len(positions):
        return b""
    if level < 2 or dtype not in ranked.EXPONENT_SHIFT or len(positions) < RANKED_FROM:
        return _encode_gaps(old, new, positions, olds, news, start, dtype)
    coded = ranked.encode(old, positions, olds, news, ranked.EXPONENT_SHIFT[dtype])
    far, long, k = coded.long_gaps, coded.long_steps, len(positions)
    frame = _build(RANKED_STEPS, 2, False, 0, start, old.size, k, (far, long), list(coded.streams))
    if 16 * (far + long) <= k and k >= 16 * RANKED_FROM:
        return frame
    return min(frame, _encode_gaps(old, new, positions, olds, news, start, dtype), key=len)


def _encode_gaps(old: Words, new: Words, positions: changes.U32, olds: Words, news: Words, start: int, dtype: str) -> bytes:
    """The smallest frame of forms 0 to 3."""
    width, k = old.dtype.itemsize, len(positions)
    shift, symbols, low, far = changes.encode_gaps(positions, old.size)
    where = [symbols.tobytes(), bytes(low), far.tobytes()]
    if width == 2 and is_float(dtype):
        signs, magnitudes, long = changes.encode_steps(olds, news, old.size)
        if 8 * len(long) <= k:
            what = [bytes(signs), magnitudes.tobytes(), long.tobytes()]
            return _build(SPARSE_STEPS, width, False, shift, start, old.size, k, (len(far), len(long)), where + what)
    xor = planes.split(olds ^ news, False)
    sparse = _build(SPARSE_XOR, width, False, shift, start, old.size, k, (len(far), 0), where + xor)
    if 2 * len(sparse) < old.nbytes:
        return sparse
    dense = _build(XOR, width, False, 0, start, old.size, k, (0, 0), planes.split(old ^ new, False))
    return min(sparse, dense, encode_absolute(new, start, is_float(dtype)), key=len)


def level_of(body: bytes) -> int:
    """The level that a reader of these frames must know. The frames are ours: nothing is checked."""
    at = 0
    while at < len(body):
        if body[at] == RANKED_STEPS:
            return 2
        at += frame_bytes(memoryview(body)[at:])
    return 1


def parse(body: memoryview) -> Frame:
    """The frame at the start of `body`: all sizes and the checksum verified, nothing allocated.

    Raises `Truncated`, `Corrupt`.
    """
    if len(body) < _HEAD.size + _SUM_BYTES:
        raise Truncated(f"a frame needs at least {_HEAD.size + _SUM_BYTES} bytes, {len(body)} are left")
    form, width, turn, shift, size, start, elements, changed, far, long = _HEAD.unpack_from(body)
    if not _HEAD.size + _SUM_BYTES <= size <= len(body):
        raise Truncated(f"a frame of {size} bytes does not fit into the {len(body)} that are left")
    if xxhash.xxh3_64_digest(body[: size - _SUM_BYTES]) != body[size - _SUM_BYTES : size]:
        raise Corrupt("a frame's checksum does not match")
    steps_only = form in (SPARSE_STEPS, RANKED_STEPS)
    if form > RANKED_STEPS or width not in WORDS or turn > 1 or shift > gaps.MAX_SHIFT or (steps_only and width != 2):
        raise Corrupt(f"no such frame: form {form}, {width} bytes wide, turn {turn}, shift {shift}")
    if not 0 < changed <= elements <= MAX_SEGMENT_ELEMENTS or far > changed or long > changed:
        raise Corrupt(f"{changed} of {elements} elements with {far} and {long} escapes cannot be")
    raw = _raw_bytes(form, width, shift, elements, changed, (far, long))
    at, table = _HEAD.size + 4 * len(raw), []
    if at > size - _SUM_BYTES:
        raise Corrupt("a frame ends inside its table of streams")
    for word, raw_bytes in zip(struct.unpack_from(f"<{len(raw)}I", body, _HEAD.size), raw, strict=True):
        stored = word & ~_COMPRESSED
        if stored > size - _SUM_BYTES - at:
            raise Corrupt(f"a stream of {stored} bytes runs past its frame")
        table.append((body[at : at + stored], bool(word & _COMPRESSED), stored if raw_bytes is None else raw_bytes))
        at += stored
    if at != size - _SUM_BYTES:
        raise Corrupt(f"a frame has {size - _SUM_BYTES - at} bytes that belong to no stream")
    for stream in table:
        if form == RANKED_STEPS and stream[1]:
            raise Corrupt("streams of form 4 are stored as they are")
        streams.check(*stream)
    return Frame(form, width, bool(turn), shift, start, elements, changed, tuple(table))


def frame_bytes(body: memoryview) -> int:
    """The announced size of the frame at the start of `body`; `parse` has checked it."""
    return int(_HEAD.unpack_from(body)[4])


def decode_dense(frame: Frame, old: Words | None) -> Words:
    """Every word of the segment. `old` [elements] is needed for the XOR form only. Raises `Corrupt`."""
    words = planes.join([streams.unpack(*s) for s in frame.streams], frame.elements, frame.turn)
    if frame.form == ABSOLUTE:
        return words
    if old is None:
        raise Corrupt("a frame of differences has nothing to differ from")
    return words ^ old


def decode_sparse(frame: Frame, old: Words, *, ordered: bool = True) -> tuple[changes.U32, Words]:
    """(positions in the segment, each once; new words) of the changed elements, ascending if `ordered`. Raises `Corrupt`."""
    if frame.form == RANKED_STEPS:
        found = ranked.decode([stored for stored, _, _ in frame.streams], old, frame.changed)
        return ranked.in_order(*found) if ordered else found
    raw = [streams.unpack(*s) for s in frame.streams]
    symbols, low = np.frombuffer(raw[0], np.uint8), np.frombuffer(raw[1], np.uint8)
    positions = changes.decode_gaps(symbols, low, np.frombuffer(raw[2], "<u4"), frame.shift, frame.elements)
    olds = changes.gather(old, positions)
    if frame.form == SPARSE_XOR:
        return positions, olds ^ planes.join(raw[3:], frame.changed, False)
    signs, magnitudes = np.frombuffer(raw[3], np.uint8), np.frombuffer(raw[4], np.uint8)
    return positions, changes.decode_steps(olds, signs, magnitudes, np.frombuffer(raw[5], "<u2"), frame.elements)
