"""Weights to patch, patch to weights.

`apply(base, encode(base, new).tobytes())` is `new` bit for bit; any other file is an error, and `base` stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from param_sync.patch.bits import Words, count_of, element_bytes
from param_sync.patch.container import LEVELS, Encoded, Header, assemble, decode_header, level_of
from param_sync.patch.digest import Entry, state_digest
from param_sync.patch.errors import DigestMismatch, PatchError, TooLarge, WrongBase
from param_sync.patch.snapshot import Snapshot
from param_sync.patch.tensor import (
    Change,
    Job,
    TensorPatch,
    begin,
    change_of,
    check_entry,
    encode_full,
    encode_slice,
    fill,
    finish,
    join_slices,
    segments_of,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a receiver is willing to allocate for one file, in bytes. Checked before anything is."""

    tensor_bytes: int = 64 * 2**30
    state_bytes: int = 4 * 2**40


DEFAULT_LIMITS = Limits()

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def encode(old: Snapshot, new: Snapshot, *, workers: int = 1, level: int = 1) -> Encoded:
    """The patch from `old` to `new`, over `workers` threads, which share out the segments of large tensors too.

    Level 2 is smaller and costs a second pass over the old weights at both ends. `new` may be several versions ahead: one patch
    over several steps is much smaller than theirs together. Raises `PatchError` when the step does not lead forward within one
    incarnation: a new incarnation begins with an anchor.
    """
    if old.incarnation != new.incarnation or old.version >= new.version:
        here, there = (old.incarnation, old.version), (new.incarnation, new.version)
        raise PatchError(f"a patch leads forward within one incarnation, not from {here} to {there}")
    check_level(level)
    whole = {name: None for name, entry in new.entries.items() if entry[:2] != old.entries.get(name, ("", ()))[:2]}
    differ = [name for name, entry in new.entries.items() if name not in whole and entry[2] != old.entries[name][2]]
    slices = [(name, a, b) for name in differ for a, b in segments_of(0, new.tensors[name].data.size)]

    def one(part: tuple[str, int, int]) -> bytes:
        name, a, b = part
        before, after = old.tensors[name], new.tensors[name]
        return encode_slice(before.data[a:b], after.data[a:b], dtype=after.dtype, start=a, total=after.data.size, level=level)

    bodies: dict[str, list[bytes]] = {name: [] for name in differ}
    for (name, _, _), body in zip(slices, _each(one, slices, workers), strict=True):
        bodies[name].append(body)
    parts = [encode_full(name, new.tensors[name], new.entries[name][2]) for name in whole]
    for name, found in bodies.items():
        dtype, shape, digest = new.entries[name]
        parts.append(join_slices(name, dtype, shape, old.entries[name][2], digest, found))
    return assemble(
        parts,
        version=new.version,
        incarnation=new.incarnation,
        digest=new.digest,
        base_version=old.version,
        base_digest=old.digest,
        removed=[name for name in old.tensors if name not in new.tensors],
        level=level,
    )


def encode_anchor(new: Snapshot, *, workers: int = 1) -> Encoded:
    """The full snapshot: every tensor, nothing needed to read it."""

    def one(name: str) -> TensorPatch:
        return encode_full(name, new.tensors[name], new.entries[name][2])

    parts = _each(one, new.tensors, workers)
    return assemble(parts, version=new.version, incarnation=new.incarnation, digest=new.digest)


def apply(
    base: Snapshot | None,
    file: bytes | bytearray | memoryview,
    *,
    workers: int = 1,
    limits: Limits = DEFAULT_LIMITS,
    into: Mapping[str, Words] | None = None,
) -> Snapshot:
    """The weights that the file names, verified tensor by tensor and as a whole. `base` is never written to.

    `base` may be None for an anchor. Changed tensors come in new arrays, the others are shared with `base`. `into`: flat arrays
    of words by tensor name that nobody reads any more (an older snapshot's), to be overwritten instead of fresh memory; on an
    error they hold rubbish.
    Raises `WrongBase`, `Truncated`, `Corrupt`, `DigestMismatch`, `TooLarge`, all of them `PatchError`.
    """
    return _apply(base, file, workers, limits, False, into)[0]


def apply_with_changes(
    base: Snapshot | None,
    file: bytes | bytearray | memoryview,
    *,
    workers: int = 1,
    limits: Limits = DEFAULT_LIMITS,
    into: Mapping[str, Words] | None = None,
) -> tuple[Snapshot, dict[str, Change]]:
    """As `apply`, with what changed in absolute terms: decode once per host, then hand the changes to the engine's ranks.

    Tensors that are new, or came whole, have a `Change` without index; removed ones have none.
    """
    return _apply(base, file, workers, limits, True, into)


def compose(base: Snapshot, files: Iterable[bytes | bytearray | memoryview], *, workers: int = 1, level: int = 1) -> Encoded:
    """One patch instead of a chain that starts at `base`, for receivers that are several versions behind.

    Each link is applied and verified, so memory holds `base` and the newest weights. Raises what `apply` and `encode` raise;
    an anchor or an empty chain is no chain.
    """
    held, spare = base, dict[str, Words]()
    for file in files:
        made = apply(held, file, workers=workers, into=spare)
        read = {id(bits) for snapshot in (base, made) for bits in snapshot.tensors.values()}
        spare = {name: bits.data for name, bits in held.tensors.items() if id(bits) not in read}
        held = made
    return encode(base, held, workers=workers, level=level)


def _apply(
    base: Snapshot | None,
    file: bytes | bytearray | memoryview,
    workers: int,
    limits: Limits,
    collect: bool,
    into: Mapping[str, Words] | None,
) -> tuple[Snapshot, dict[str, Change]]:
    view = memoryview(file).cast("B")
    header, start = decode_header(view)
    _check_base(base, header)
    for entry in header.tensors:
        check_entry(entry, limits.tensor_bytes)
    total = sum(count_of(entry.shape) * element_bytes(entry.dtype) for entry in header.tensors)
    if total > limits.state_bytes:
        raise TooLarge(f"{total} bytes of tensors exceed the limit of {limits.state_bytes}")
    held = {} if base is None or header.is_anchor else dict(base.tensors)
    entries: dict[str, Entry] = {} if base is None or header.is_anchor else dict(base.entries)
    for name in header.removed:
        del held[name], entries[name]
    entries |= {entry.name: (entry.dtype, entry.shape, entry.digest) for entry in header.tensors}
    spare = _unread(into or {}, base)
    jobs, level = list[Job](), level_of(view)
    for entry in header.tensors:
        body = view[start : start + entry.body_bytes]
        jobs.append(begin(entry, body, start, held.get(entry.name), level=level, into=spare.get(entry.name)))
        start += entry.body_bytes
    found = state_digest(entries)
    if found != header.digest:
        raise DigestMismatch(f"the state is announced as {header.digest}, its tensors make {found}")
    pieces = [(job, piece) for job in jobs for piece in job.pieces]
    filled = _each(lambda part: fill(*part, collect=collect), pieces, workers)
    for job, bits in zip(jobs, _each(finish, jobs, workers), strict=True):
        held[job.entry.name] = bits
    changes: dict[str, Change] = {}
    if collect:
        parts = iter(filled)
        changes = {job.entry.name: change_of(job, list(islice(parts, len(job.pieces)))) for job in jobs}
    return Snapshot(header.version, header.incarnation, held, entries, found), changes


def _unread(into: Mapping[str, Words], base: Snapshot | None) -> dict[str, Words]:
    """What is offered as memory, without what overlaps the base or itself: a receiver would lose the weights it serves."""
    ranges = [(*np.lib.array_utils.byte_bounds(bits.data), "") for bits in (base.tensors.values() if base else ())]
    ranges += [(*np.lib.array_utils.byte_bounds(words), name) for name, words in into.items()]
    free, end = dict(into), 0
    last = ""
    for low, high, name in sorted(ranges):
        if low < end:
            free.pop(name, None)
            free.pop(last, None)
        if high > end:
            end, last = high, name
    return free


def check_level(level: int) -> None:
    """Raises `PatchError` for a level that there is not."""
    if level not in LEVELS:
        raise PatchError(f"level {level} is unknown; use one of {LEVELS}")


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
