"""A frame: the new words of one segment of one tensor, decodable alone given the segment's old words.

Layout in docs/patch-format.md. The forms hold the changed elements (sparse), or every element, absolute or as XOR, when most of
the segment changed beyond recognition. A frame carries a checksum, so damage is found before anything is decoded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt
import xxhash

from param_sync.patch import changes, gaps, planes, steps, streams
from param_sync.patch.bits import WORDS, Words
from param_sync.patch.errors import Corrupt, PatchError, Truncated

ABSOLUTE, XOR, SPARSE_XOR, SPARSE_STEPS, GAPS, RANKS = range(6)
CLASSED = (GAPS, RANKS)
LAST_FORM = {1: GAPS, 2: RANKS}
"""The last form that a file of each level may hold."""
MAX_CLASSES = 8
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
    ends: npt.NDArray[np.uint8] | None = None
    """Last exponent of each class (`CLASSED` forms)."""
    counts: npt.NDArray[np.int64] | None = None
    """Changes of each class."""


def _classed() -> ModuleType:
    from param_sync.patch import classed

    return classed


def _raw_bytes(form: int, width: int, shift: int, elements: int, changed: int, escapes: tuple[int, int]) -> list[int]:
    """The raw length of every stream of a frame, in order."""
    if form in (ABSOLUTE, XOR):
        return [elements] * width
    bits = gaps.plane_bytes(changed)
    positions = [changed, shift * bits, 4 * escapes[0]]
    return positions + ([bits, changed, 2 * escapes[1]] if form == SPARSE_STEPS else [changed] * width)


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
    packed = [streams.pack(r) for r in raw]
    table = struct.pack(f"<{len(packed)}I", *(len(p) | (_COMPRESSED if z else 0) for p, z in packed))
    size = _HEAD.size + len(table) + sum(len(p) for p, _ in packed) + _SUM_BYTES
    head = _HEAD.pack(form, width, turn, shift, size, start, elements, changed, *escapes)
    return _sealed(b"".join((head, table, *(p for p, _ in packed))))


def _sealed(content: bytes) -> bytes:
    return content + xxhash.xxh3_64_digest(content)


def encode_absolute(new: Words, start: int, turn: bool) -> bytes:
    """A frame that needs no old words. `turn` for floats (see `planes`). At most `MAX_SEGMENT_ELEMENTS`."""
    return _build(ABSOLUTE, new.dtype.itemsize, turn, 0, start, new.size, new.size, (0, 0), planes.split(new, turn))


def encode_changes(old: Words, new: Words, start: int, is_float: bool, level: int = 1, compiled: bool = False) -> bytes:
    """A small frame that takes `old` to `new`, the segment from element `start`; empty when nothing changed.

    `compiled`: a tensor of 16-bit floats that is large enough for the forms which need a compiler.
    """
    if old.dtype != new.dtype or old.shape != new.shape:
        raise PatchError(f"segments differ in form: {old.dtype}{old.shape} and {new.dtype}{new.shape}")
    sparse = _encode_classed(old, new, start, level) if compiled else _encode_sparse(old, new, start, is_float)
    if not sparse or 2 * len(sparse) < old.nbytes:
        return sparse
    changed = int(np.count_nonzero(old != new))
    dense = _build(XOR, old.dtype.itemsize, False, 0, start, old.size, changed, (0, 0), planes.split(old ^ new, False))
    return min(sparse, dense, encode_absolute(new, start, is_float), key=len)


def _encode_sparse(old: Words, new: Words, start: int, is_float: bool) -> bytes:
    positions = changes.positions_of(old, new)
    width, k = old.dtype.itemsize, len(positions)
    if not k:
        return b""
    shift = gaps.shift_for(old.size, k)
    symbols, low, far = gaps.encode(positions, shift)
    where = [symbols.tobytes(), low, far.tobytes()]
    if width == 2 and is_float:
        signs, magnitudes, long = steps.encode(old[positions], new[positions])
        if 8 * len(long) <= k:
            what = [signs, magnitudes.tobytes(), long.tobytes()]
            return _build(SPARSE_STEPS, width, False, shift, start, old.size, k, (len(far), len(long)), where + what)
    xor = planes.split(old[positions] ^ new[positions], False)
    return _build(SPARSE_XOR, width, False, shift, start, old.size, k, (len(far), 0), where + xor)


def _encode_classed(old: Words, new: Words, start: int, level: int) -> bytes:
    classed, form = _classed(), LAST_FORM[level]
    found = classed.changes_between(old, new)
    k = len(found.positions)
    if not k:
        return b""
    ends, counts, raw = classed.encode(old, found, form == RANKS)
    content = b"".join((ends.tobytes(), counts.astype("<u4").tobytes(), struct.pack(f"<{len(raw)}I", *map(len, raw)), *raw))
    head = _HEAD.pack(form, 2, 0, len(ends), _HEAD.size + len(content) + _SUM_BYTES, start, old.size, k, 0, 0)
    return _sealed(head + content)


def parse(body: memoryview, level: int = 2) -> Frame:
    """The frame at the start of `body`, in a file of that level: all sizes and the checksum verified, nothing allocated.

    Raises `Truncated`, `Corrupt`.
    """
    if len(body) < _HEAD.size + _SUM_BYTES:
        raise Truncated(f"a frame needs at least {_HEAD.size + _SUM_BYTES} bytes, {len(body)} are left")
    form, width, turn, shift, size, start, elements, changed, far, long = _HEAD.unpack_from(body)
    if not _HEAD.size + _SUM_BYTES <= size <= len(body):
        raise Truncated(f"a frame of {size} bytes does not fit into the {len(body)} that are left")
    if xxhash.xxh3_64_digest(body[: size - _SUM_BYTES]) != body[size - _SUM_BYTES : size]:
        raise Corrupt("a frame's checksum does not match")
    if form > LAST_FORM[level]:
        raise Corrupt(f"no such frame at level {level}: form {form}")
    if width not in WORDS or turn > 1 or (form >= SPARSE_STEPS and width != 2):
        raise Corrupt(f"no such frame: form {form}, {width} bytes wide, turn {turn}")
    if not 0 < changed <= elements <= MAX_SEGMENT_ELEMENTS or far > changed or long > changed:
        raise Corrupt(f"{changed} of {elements} elements with {far} and {long} escapes cannot be")
    body = body[: size - _SUM_BYTES]
    if form in CLASSED:
        return _parse_classed(body, form, shift, start, elements, changed)
    if shift > gaps.MAX_SHIFT:
        raise Corrupt(f"gaps have no {shift} raw bits")
    raw = _raw_bytes(form, width, shift, elements, changed, (far, long))
    words, stored = _table(body, _HEAD.size, len(raw), ~_COMPRESSED)
    table = tuple((view, bool(word & _COMPRESSED), n) for word, view, n in zip(words, stored, raw, strict=True))
    for stream in table:
        streams.check(*stream)
    return Frame(form, width, bool(turn), shift, start, elements, changed, table)


def _table(body: memoryview, at: int, count: int, mask: int) -> tuple[tuple[int, ...], list[memoryview]]:
    """The words of the table at `at`, and the streams behind it, which fill the frame exactly."""
    begin = at + 4 * count
    if begin > len(body):
        raise Corrupt("a frame ends inside its table of streams")
    words, found = struct.unpack_from(f"<{count}I", body, at), []
    for word in words:
        stored = word & mask
        if stored > len(body) - begin:
            raise Corrupt(f"a stream of {stored} bytes runs past its frame")
        found.append(body[begin : begin + stored])
        begin += stored
    if begin != len(body):
        raise Corrupt(f"a frame has {len(body) - begin} bytes that belong to no stream")
    return words, found


def _parse_classed(body: memoryview, form: int, classes: int, start: int, elements: int, changed: int) -> Frame:
    at = _HEAD.size + 5 * classes
    if not 0 < classes <= MAX_CLASSES or at > len(body):
        raise Corrupt(f"a frame cannot have {classes} classes")
    ends = np.frombuffer(bytes(body[_HEAD.size : _HEAD.size + classes]), np.uint8)
    counts = np.frombuffer(bytes(body[_HEAD.size + classes : at]), "<u4").astype(np.int64)
    if ends[-1] != 255 or np.any(np.diff(ends.astype(np.int64)) <= 0) or int(counts.sum()) != changed:
        raise Corrupt("a frame's classes must ascend to 255, and their changes add up")
    _, found = _table(body, at, classes + (classes if form == RANKS else 1), -1)
    return Frame(form, 2, False, 0, start, elements, changed, tuple((s, False, len(s)) for s in found), ends, counts)


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


def decode_sparse(frame: Frame, old: Words) -> tuple[changes.U32, Words]:
    """(positions in the segment, ascending; new words) of the changed elements, forms 2 and 3. Raises `Corrupt`."""
    raw = [streams.unpack(*s) for s in frame.streams]
    symbols, low = np.frombuffer(raw[0], np.uint8), np.frombuffer(raw[1], np.uint8)
    positions = gaps.decode(symbols, low, np.frombuffer(raw[2], "<u4"), frame.shift, frame.elements)
    if frame.form == SPARSE_XOR:
        return positions, old[positions] ^ planes.join(raw[3:], frame.changed, False)
    signs, magnitudes = np.frombuffer(raw[3], np.uint8), np.frombuffer(raw[4], np.uint8)
    return positions, steps.decode(old[positions], signs, magnitudes, np.frombuffer(raw[5], "<u2"))


def decode_into(frame: Frame, old: Words, new: Words, *, collect: bool = False) -> tuple[changes.U32, Words] | None:
    """Fill `new` [elements] with the segment's new words; `old` is only read, and is another array.

    With `collect` also give what `decode_sparse` gives. Raises `Corrupt`; `new` then holds rubbish.
    """
    if frame.form in CLASSED:
        found = [s for s, _, _ in frame.streams]
        result: tuple[changes.U32, Words] | None = _classed().apply(
            frame.form == RANKS, frame.ends, frame.counts, found, old, new, collect=collect
        )
        return result
    if frame.form in (ABSOLUTE, XOR):
        new[:] = decode_dense(frame, old)
        positions = changes.positions_of(old, new) if collect else None
        return None if positions is None else (positions, new[positions])
    positions, values = decode_sparse(frame, old)
    new[:] = old
    new[positions] = values
    return (positions, values) if collect else None
