"""Weights to patch, patch to weights.

`apply(base, encode(base, new).tobytes())` is `new` bit for bit; any other file is an error, and `base` stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from param_sync.patch import frame
from param_sync.patch.bits import Bits, count_of, element_bytes
from param_sync.patch.container import Encoded, Header, assemble, decode_header
from param_sync.patch.decoding import Change, TensorPlan, carry_out, check_entry, each, plan_tensors
from param_sync.patch.digest import Entry, state_digest
from param_sync.patch.errors import DigestMismatch, PatchError, TooLarge, WrongBase
from param_sync.patch.snapshot import Snapshot
from param_sync.patch.tensor import TensorPatch, encode_full, join_slices, segments


@dataclass(frozen=True, slots=True)
class Limits:
    """What a receiver is willing to allocate for one file, in bytes. Checked before anything is."""

    tensor_bytes: int = 64 * 2**30
    state_bytes: int = 4 * 2**40


DEFAULT_LIMITS = Limits()
LEVEL_2_FROM = 1 << 25
"""Elements of a model from which level 2 is used where the configuration leaves it open."""


def level_for(chosen: int, elements: int) -> int:
    """The level for a model of so many elements where 0 was chosen: 2 where its compiled loops are worth compiling."""
    return chosen or (2 if elements >= LEVEL_2_FROM else 1)


def encode(old: Snapshot, new: Snapshot, *, workers: int = 1, level: int = 1) -> Encoded:
    """The patch from `old` to `new`, over `workers` threads.

    Level 2 is a quarter smaller than level 1 and takes half as long again; the file says level 2 only if some frame needs it.
    Raises `PatchError` when the step does not lead forward within one incarnation: a new incarnation begins with an anchor.
    """
    if old.incarnation != new.incarnation or old.version >= new.version:
        here, there = (old.incarnation, old.version), (new.incarnation, new.version)
        raise PatchError(f"a patch leads forward within one incarnation, not from {here} to {there}")
    if level not in frame.LEVELS:
        raise PatchError(f"level {level} is unknown; use one of {', '.join(map(str, frame.LEVELS))}")
    names = [name for name, entry in new.entries.items() if old.entries.get(name) != entry]
    jobs: list[tuple[str, slice | None]] = []
    for name in names:
        if name in old.entries and old.entries[name][:2] == new.entries[name][:2]:
            jobs += [(name, cut) for cut in segments(0, new.tensors[name].data.size)]
        else:
            jobs.append((name, None))

    def one(job: tuple[str, slice | None]) -> bytes:
        name, cut = job
        bits = new.tensors[name]
        if cut is None:
            return encode_full(name, bits, new.entries[name][2]).body
        return frame.encode_changes(old.tensors[name].data[cut], bits.data[cut], cut.start, bits.dtype, level)

    frames: dict[str, list[bytes]] = {name: [] for name in names}
    for (name, _), made in zip(jobs, each(one, jobs, workers), strict=True):
        frames[name].append(made)
    whole = {name for name, cut in jobs if cut is None}

    def part(name: str) -> TensorPatch:
        before = b"" if name in whole else old.entries[name][2]
        return join_slices(name, *new.entries[name][:2], before, new.entries[name][2], frames[name])

    return assemble(
        [part(name) for name in names],
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

    parts = each(one, new.tensors, workers)
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
    plans, header = plan_file(base, file, workers, limits, in_place=False)
    carry_out(plans, workers, ordered=collect)
    made = result(base, header, plans)
    return made, {plan.entry.name: plan.change() for plan in plans} if collect else {}


def plan_file(
    base: Snapshot | None, file: bytes | bytearray | memoryview, workers: int, limits: Limits, *, in_place: bool
) -> tuple[list[TensorPlan], Header]:
    """Everything that can be checked before a word is decoded. Raises as `apply` does."""
    view = memoryview(file).cast("B")
    header, start = decode_header(view)
    check_base(base, header)
    for entry in header.tensors:
        check_entry(entry, limits.tensor_bytes)
    total = sum(count_of(entry.shape) * element_bytes(entry.dtype) for entry in header.tensors)
    if total > limits.state_bytes:
        raise TooLarge(f"{total} bytes of tensors exceed the limit of {limits.state_bytes}")
    held = {} if base is None or header.is_anchor else base.tensors
    return plan_tensors(header, view, start, held, workers, in_place=in_place), header


def result(base: Snapshot | None, header: Header, plans: list[TensorPlan]) -> Snapshot:
    """The verified tensors under the name that the header gives them. Raises `DigestMismatch` when it is not theirs."""
    held = {} if base is None or header.is_anchor else dict(base.tensors)
    entries: dict[str, Entry] = {} if base is None or header.is_anchor else dict(base.entries)
    for name in header.removed:
        del held[name], entries[name]
    for plan in plans:
        entry = plan.entry
        held[entry.name] = Bits(entry.dtype, entry.shape, plan.words)
        entries[entry.name] = (entry.dtype, entry.shape, entry.digest)
    found = state_digest(entries)
    if found != header.digest:
        raise DigestMismatch(f"the state is announced as {header.digest}, decoded {found}")
    return Snapshot(header.version, header.incarnation, held, entries, found)


def check_base(base: Snapshot | None, header: Header) -> None:
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
