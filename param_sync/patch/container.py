"""The file around the frames: magic, format version, header with every digest, body. Anchors and patches share it."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import xxhash

from param_sync.patch.errors import Corrupt, PatchError, Truncated
from param_sync.patch.frame import LEVELS
from param_sync.patch.tensor import TensorEntry, TensorPatch

MAGIC = b"HRWEIGHT"
FORMAT_VERSION = 1
MAX_HEADER_BYTES = 256 * 2**20

_HEAD = struct.Struct("<8sHHIQ")  # magic, format version, level, header bytes, body bytes
_SUM_BYTES = 16
PREFIX_BYTES = _HEAD.size + _SUM_BYTES


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a patch or an anchor is: from which weights to which, tensor by tensor. Versions count policy updates."""

    version: int
    incarnation: int
    digest: str
    base_version: int | None = None
    """None in an anchor, which needs no base and lists every tensor."""
    base_digest: str | None = None
    tensors: tuple[TensorEntry, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def is_anchor(self) -> bool:
        """A full snapshot."""
        return self.base_digest is None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A file in parts, so that large bodies are written without being copied together."""

    header: Header
    parts: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        """Length of the whole file."""
        return sum(len(part) for part in self.parts)

    def tobytes(self) -> bytes:
        """The file in one piece."""
        return b"".join(self.parts)


def assemble(
    parts: Iterable[TensorPatch],
    *,
    version: int,
    incarnation: int,
    digest: str,
    base_version: int | None = None,
    base_digest: str | None = None,
    removed: Iterable[str] = (),
) -> Encoded:
    """The file made of tensors' parts, wherever they were encoded. Sorted by name, so the order of arrival leaves no trace.

    Raises `PatchError` when a name comes twice, or when an anchor would need a base.
    """
    tensors = sorted(parts, key=lambda part: part.entry.name.encode())
    gone = tuple(sorted(removed, key=str.encode))
    names = [part.entry.name for part in tensors] + list(gone)
    if len(set(names)) != len(names):
        raise PatchError(f"tensor {next(n for n in names if names.count(n) > 1)!r} comes twice")
    if (base_version is None) != (base_digest is None) or (base_digest is None and gone):
        raise PatchError("base version and base digest come together, and an anchor has neither, nor removes anything")
    header = Header(
        version=version,
        incarnation=incarnation,
        digest=digest,
        base_version=base_version,
        base_digest=base_digest,
        tensors=tuple(part.entry for part in tensors),
        removed=gone,
    )
    coded = msgspec.msgpack.encode(header)
    level = max((part.level for part in tensors), default=1)
    head = _HEAD.pack(MAGIC, FORMAT_VERSION, level, len(coded), sum(len(part.body) for part in tensors))
    return Encoded(header, (head, xxhash.xxh3_128_digest(head + coded), coded, *(part.body for part in tensors)))


def decode_header(buffer: bytes | bytearray | memoryview, *, partial: bool = False) -> tuple[Header, int]:
    """The header and the offset of the body. `partial`: the buffer may be just the file's beginning.

    Raises `Truncated`, `Corrupt`; reads nothing from the body.
    """
    view = memoryview(buffer).cast("B")
    if len(view) < PREFIX_BYTES:
        raise Truncated(f"a file begins with {PREFIX_BYTES} bytes, got {len(view)}", offset=0)
    magic, version, level, header_bytes, body_bytes = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise Corrupt(f"not a weights file: it begins with {bytes(magic)!r}", offset=0)
    if version != FORMAT_VERSION or level not in LEVELS:
        known = f"this reader knows {FORMAT_VERSION} at levels {', '.join(map(str, LEVELS))}"
        raise Corrupt(f"format {version} at level {level} is unknown; {known}", offset=8)
    if header_bytes > MAX_HEADER_BYTES:
        raise Corrupt(f"a header of {header_bytes} bytes exceeds the limit of {MAX_HEADER_BYTES}", offset=12)
    start = PREFIX_BYTES + header_bytes
    if len(view) < start:
        raise Truncated(f"the header ends at {start}, the file at {len(view)}", offset=len(view))
    coded = bytes(view[PREFIX_BYTES:start])
    if xxhash.xxh3_128_digest(bytes(view[: _HEAD.size]) + coded) != view[_HEAD.size : PREFIX_BYTES]:
        raise Corrupt("the header's checksum does not match", offset=_HEAD.size)
    try:
        header = msgspec.msgpack.decode(coded, type=Header)
    except msgspec.DecodeError as error:
        raise Corrupt(f"the header is malformed: {error}", offset=PREFIX_BYTES) from error
    _check(header, body_bytes)
    if not partial and len(view) != start + body_bytes:
        kind = Truncated if len(view) < start + body_bytes else Corrupt
        raise kind(f"the file must have {start + body_bytes} bytes, got {len(view)}", offset=min(len(view), start + body_bytes))
    return header, start


def _check(header: Header, body_bytes: int) -> None:
    names = [entry.name for entry in header.tensors] + list(header.removed)
    if len(set(names)) != len(names):
        raise Corrupt("the header names a tensor twice", offset=PREFIX_BYTES)
    if any(entry.body_bytes < 0 for entry in header.tensors) or sum(entry.body_bytes for entry in header.tensors) != body_bytes:
        raise Corrupt(f"the tensors' lengths do not add up to the body's {body_bytes}", offset=PREFIX_BYTES)
    if (header.base_version is None) != (header.base_digest is None):
        raise Corrupt("base version and base digest come together", offset=PREFIX_BYTES)
    if header.is_anchor and (header.removed or any(entry.base_digest for entry in header.tensors)):
        raise Corrupt("an anchor is everything: it has no base and removes nothing", offset=PREFIX_BYTES)
