"""Weights to patch, patch to weights.

`apply(base, encode(base, new).tobytes())` is `new` bit for bit; any other file is an error, and `base` stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from param_sync.patch.bits import Bits, count_of, element_bytes
from param_sync.patch.container import Encoded, Header, assemble, decode_header
from param_sync.patch.digest import Entry, state_digest
from param_sync.patch.errors import DigestMismatch, PatchError, TooLarge, WrongBase
from param_sync.patch.snapshot import Snapshot
from param_sync.patch.tensor import Change, TensorEntry, TensorPatch, check_entry, decode_tensor, encode_full, encode_tensor


@dataclass(frozen=True, slots=True)
class Limits:
    """What a receiver is willing to allocate for one file, in bytes. Checked before anything is."""

    tensor_bytes: int = 64 * 2**30
    state_bytes: int = 4 * 2**40


DEFAULT_LIMITS = Limits()

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def encode(old: Snapshot, new: Snapshot, *, workers: int = 1) -> Encoded:
    """The patch from `old` to `new`, over `workers` threads.

    Raises `PatchError` when the step does not lead forward within one incarnation: a new incarnation begins with an anchor.
    """
    if old.incarnation != new.incarnation or old.version >= new.version:
        here, there = (old.incarnation, old.version), (new.incarnation, new.version)
        raise PatchError(f"a patch leads forward within one incarnation, not from {here} to {there}")

    def one(name: str) -> TensorPatch | None:
        before = old.entries[name][2] if name in old.entries else None
        return encode_tensor(name, old.tensors.get(name), new.tensors[name], old_digest=before, digest=new.entries[name][2])

    return assemble(
        [part for part in _each(one, new.tensors, workers) if part is not None],
        version=new.version,
        incarnation=new.incarnation,
        digest=new.digest,
        base_version=old.version,
        base_digest=old.digest,
        removed=[name for name in old.tensors if name not in new.tensors],
    )


def encode_anchor(new: Snapshot, *, workers: int = 1) -> Encoded:
    """The full snapshot: every tensor, nothing needed to read it."""

    def one(name: str) -> TensorPatch:
        return encode_full(name, new.tensors[name], new.entries[name][2])

    parts = _each(one, new.tensors, workers)
    return assemble(parts, version=new.version, incarnation=new.incarnation, digest=new.digest)


def apply(
    base: Snapshot | None, file: bytes | bytearray | memoryview, *, workers: int = 1, limits: Limits = DEFAULT_LIMITS
) -> Snapshot:
    """The weights that the file names, verified tensor by tensor and as a whole. `base` is never written to.

    `base` may be None for an anchor. Changed tensors come in new arrays, the others are shared with `base`.
    Raises `WrongBase`, `Truncated`, `Corrupt`, `DigestMismatch`, `TooLarge`, all of them `PatchError`.
    """
    return _apply(base, file, workers, limits, False)[0]


def apply_with_changes(
    base: Snapshot | None, file: bytes | bytearray | memoryview, *, workers: int = 1, limits: Limits = DEFAULT_LIMITS
) -> tuple[Snapshot, dict[str, Change]]:
    """As `apply`, with what changed in absolute terms: decode once per host, then hand the changes to the engine's ranks.

    Tensors that are new, or came whole, have a `Change` without index; removed ones have none.
    """
    return _apply(base, file, workers, limits, True)


def _apply(
    base: Snapshot | None, file: bytes | bytearray | memoryview, workers: int, limits: Limits, collect: bool
) -> tuple[Snapshot, dict[str, Change]]:
    view = memoryview(file).cast("B")
    header, start = decode_header(view)
    _check_base(base, header)
    for entry in header.tensors:
        check_entry(entry, limits.tensor_bytes)
    total = sum(count_of(entry.shape) * element_bytes(entry.dtype) for entry in header.tensors)
    if total > limits.state_bytes:
        raise TooLarge(f"{total} bytes of tensors exceed the limit of {limits.state_bytes}")
    places: list[tuple[TensorEntry, int]] = []
    for entry in header.tensors:
        places.append((entry, start))
        start += entry.body_bytes
    held = {} if base is None or header.is_anchor else dict(base.tensors)

    def one(place: tuple[TensorEntry, int]) -> tuple[Bits, Change | None]:
        entry, at = place
        return decode_tensor(entry, view[at : at + entry.body_bytes], at, held.get(entry.name), collect=collect)

    decoded = _each(one, places, workers)
    entries: dict[str, Entry] = {} if base is None or header.is_anchor else dict(base.entries)
    for name in header.removed:
        del held[name], entries[name]
    for (entry, _), (bits, _change) in zip(places, decoded, strict=True):
        held[entry.name] = bits
        entries[entry.name] = (entry.dtype, entry.shape, entry.digest)
    found = state_digest(entries)
    if found != header.digest:
        raise DigestMismatch(f"the state is announced as {header.digest}, decoded {found}")
    changes = {entry.name: change for (entry, _), (_bits, change) in zip(places, decoded, strict=True) if change is not None}
    return Snapshot(header.version, header.incarnation, held, entries, found), changes


def _check_base(base: Snapshot | None, header: Header) -> None:
    """The receiver holds exactly what the patch starts from, by number, by whole digest and by each tensor's."""
    if header.is_anchor:
        return
    wanted = (header.incarnation, header.base_version, header.base_digest)
    if base is None or (base.incarnation, base.version, base.digest) != wanted:
        held = "nothing" if base is None else (base.incarnation, base.version, base.digest)
        raise WrongBase(f"the patch starts at incarnation, version, digest {wanted}; the receiver holds {held}")
    for name in header.removed:
        if name not in base.entries:
            raise WrongBase("the patch removes it, the receiver does not hold it", tensor=name)
    for entry in header.tensors:
        if entry.base_digest and (entry.name not in base.entries or base.entries[entry.name][2] != entry.base_digest):
            raise WrongBase("the patch changes other bits than the receiver holds", tensor=entry.name)


def _each(function: Callable[[_In], _Out], items: Iterable[_In], workers: int) -> list[_Out]:
    """`map`, over threads when there are several workers: the heavy parts release the interpreter lock."""
    if workers <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(workers, thread_name_prefix="patch") as pool:
        return list(pool.map(function, items))
