"""A strict codec for the one tar that a state has.

The writer emits exactly one archive for a state (sorted names, no times, no owners, modes 0644 or 0755), in the GNU layout that
every tar program reads. The reader accepts exactly what the writer emits and nothing else, so equal digests mean equal states,
and none of tar's many extensions (sparse files, hard links, devices, pax headers) can carry anything past it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

_BLOCK = 512
_NAME_BYTES = 100
_LONG_LINK = b"././@LongLink"
_TYPES = {b"0": "file", b"5": "folder", b"2": "link", b"6": "special"}


class Kind(StrEnum):
    FILE = "file"
    FOLDER = "folder"
    LINK = "link"  # a symbolic link, kept as its text and never followed
    SPECIAL = "special"  # a fifo, socket or device: recorded, never recreated


_FLAGS = {Kind.FILE: b"0", Kind.FOLDER: b"5", Kind.LINK: b"2", Kind.SPECIAL: b"6"}


class StateRefused(ValueError):
    """A workspace or an archive breaks a rule. `code` is stable: over_cap, path, special, malformed, unreadable."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class StateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a state; all are checked before anything of that size is read or allocated."""

    max_entries: int = 8192
    max_file_bytes: int = 64 * 2**20
    max_total_bytes: int = 64 * 2**20
    max_path_bytes: int = 1024
    max_depth: int = 32

    @property
    def max_tar_bytes(self) -> int:
        """A bound that the archive of every admissible state keeps."""
        return self.max_total_bytes + self.max_entries * (4 * _BLOCK + 2 * self.max_path_bytes) + 2 * _BLOCK


DEFAULT_LIMITS = StateLimits()


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One name of a state. `path` is relative, without `.`, `..` or empty parts."""

    path: bytes
    kind: Kind
    executable: bool = False
    size: int = 0
    target: bytes = b""  # of a link


def write(entries: Iterable[tuple[Entry, bytes]]) -> bytes:
    """The archive of entries in ascending order of path, each with its content (empty unless a file)."""
    out = bytearray()
    for entry, content in entries:
        out += _header(entry)
        if content:
            out += content
            out += bytes(-len(content) % _BLOCK)
    out += bytes(2 * _BLOCK)
    return bytes(out)


def read(tar: bytes, limits: StateLimits) -> Iterator[tuple[Entry, memoryview]]:
    """Entries with their contents, in order. Raises `StateRefused` at the first thing that `write` would not have written."""
    if len(tar) > limits.max_tar_bytes:
        raise StateRefused("over_cap", f"archive: {len(tar)} bytes are more than {limits.max_tar_bytes}")
    view = memoryview(tar)
    offset, count, total = 0, 0, 0
    previous = b""
    folders: set[bytes] = {b""}
    while True:
        if bytes(view[offset : offset + _BLOCK]) == bytes(_BLOCK):
            if bytes(view[offset:]) != bytes(2 * _BLOCK):
                raise StateRefused("malformed", f"archive: it does not end after the closing blocks at byte {offset}")
            return
        entry, start = _parse(view, offset, limits)
        count, total = count + 1, total + entry.size
        if count > limits.max_entries or entry.size > limits.max_file_bytes or total > limits.max_total_bytes:
            raise StateRefused("over_cap", f"archive: {count} entries of {total} bytes break {limits}")
        check_path(entry.path, limits)
        if entry.path <= previous:
            raise StateRefused("malformed", f"archive: {entry.path!r} after {previous!r}; names ascend and none is twice")
        if entry.path.rpartition(b"/")[0] not in folders:
            raise StateRefused("path", f"archive: {entry.path!r} lies in no folder of this archive")
        if bytes(view[offset:start]) != _header(entry):
            raise StateRefused("malformed", f"archive: the header of {entry.path!r} is not in the canonical form")
        end = start + entry.size
        padded = end + -entry.size % _BLOCK
        if padded > len(tar) or any(view[end:padded]):
            raise StateRefused("malformed", f"archive: the content of {entry.path!r} is cut short or badly padded")
        if entry.kind is Kind.FOLDER:
            folders.add(entry.path)
        previous = entry.path
        yield entry, view[start:end]
        offset = padded


def check_path(path: bytes, limits: StateLimits) -> None:
    """Raises `StateRefused` unless `path` stays inside its folder and within the limits."""
    parts = path.split(b"/")
    if not path or b"\0" in path or any(part in (b"", b".", b"..") for part in parts):
        raise StateRefused("path", f"path {path!r}: it must be relative, without '.', '..', empty parts or NUL bytes")
    if len(path) > limits.max_path_bytes or len(parts) > limits.max_depth:
        raise StateRefused("over_cap", f"path {path[:80]!r}…: over {limits.max_path_bytes} bytes or {limits.max_depth} parts")


def _header(entry: Entry) -> bytes:
    name = entry.path + b"/" if entry.kind is Kind.FOLDER else entry.path
    out = b""
    if len(entry.target) > _NAME_BYTES:
        out += _long(b"K", entry.target)
    if len(name) > _NAME_BYTES:
        out += _long(b"L", name)
    mode = 0o755 if entry.executable or entry.kind is Kind.FOLDER else 0o644
    return out + _block(name[:_NAME_BYTES], mode, entry.size, _FLAGS[entry.kind], entry.target[:_NAME_BYTES])


def _long(flag: bytes, text: bytes) -> bytes:
    data = text + b"\0"
    return _block(_LONG_LINK, 0o644, len(data), flag, b"") + data + bytes(-len(data) % _BLOCK)


def _block(name: bytes, mode: int, size: int, flag: bytes, target: bytes) -> bytes:
    head = b"%s%07o\0%07o\0%07o\0%011o\0%011o\0" % (name.ljust(_NAME_BYTES, b"\0"), mode, 0, 0, size, 0)
    tail = flag + target.ljust(_NAME_BYTES, b"\0") + b"ustar  \0" + bytes(247)
    checksum = sum(head) + sum(tail) + 8 * 32
    return b"%s%06o\0 %s" % (head, checksum, tail)


def _parse(view: memoryview, offset: int, limits: StateLimits) -> tuple[Entry, int]:
    """The entry whose header starts at `offset`, and where its content starts. Lengths are bounded before they are used."""
    long_name, long_target = b"", b""
    for _ in range(3):
        block = bytes(view[offset : offset + _BLOCK])
        if len(block) < _BLOCK:
            raise StateRefused("malformed", f"archive: cut short at byte {offset}")
        flag, size = block[156:157], _octal(block[124:136])
        offset += _BLOCK
        if flag in (b"L", b"K"):
            if not 1 < size <= limits.max_path_bytes + 2:
                raise StateRefused("over_cap", f"archive: a name of {size} bytes is longer than {limits.max_path_bytes}")
            text = bytes(view[offset : offset + size - 1])
            offset += size + -size % _BLOCK
            long_name, long_target = (text, long_target) if flag == b"L" else (long_name, text)
            continue
        if flag not in _TYPES:
            raise StateRefused("special", f"archive: entry type {flag!r} at byte {offset - _BLOCK} is not allowed")
        kind = Kind(_TYPES[flag])
        if size and kind is not Kind.FILE:
            raise StateRefused("malformed", f"archive: a {kind} has no content")
        name = long_name or block[:_NAME_BYTES].rstrip(b"\0")
        path = name.removesuffix(b"/") if kind is Kind.FOLDER else name
        target = (long_target or block[157:257].rstrip(b"\0")) if kind is Kind.LINK else b""
        executable = kind is Kind.FILE and block[100:107] == b"0000755"
        return Entry(path=path, kind=kind, executable=executable, size=size, target=target), offset
    raise StateRefused("malformed", "archive: too many extended headers before an entry")


def _octal(field: bytes) -> int:
    digits = field.rstrip(b"\0")
    if len(digits) != 11 or not all(48 <= digit <= 55 for digit in digits):
        raise StateRefused("malformed", f"archive: {field!r} is no canonical size")
    return int(digits, 8)
