"""From a file to words in memory: every frame on its own, in any order, on any thread, and undone if need be.

A plan holds, for each tensor that the file names, the array to write and the frames parsed and checked. Carrying it out swaps
the changed words in; what stood there is kept, so that a plan that fails half-way, or whose digests differ, leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from param_sync.patch import changes, frame
from param_sync.patch.bits import WORDS, Bits, Words, count_of, element_bytes
from param_sync.patch.container import Header
from param_sync.patch.digest import tensor_digest
from param_sync.patch.errors import Corrupt, DigestMismatch, PatchError, TooLarge, WrongBase
from param_sync.patch.streams import MAX_EXPANSION
from param_sync.patch.tensor import TensorEntry

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What a patch does to a tensor, in absolute terms, so that applying it twice does no harm.

    `index` [k] int64 ascending positions in the flat tensor and `words` [k] their new bits; `index` None: `words` is all of it.
    """

    index: npt.NDArray[np.int64] | None
    words: Words


@dataclass(frozen=True, slots=True, eq=False)
class _Edit:
    """A frame that was carried out: the segment, the positions in it, and the words that stood there."""

    segment: slice
    positions: changes.U32
    words: Words


@dataclass(slots=True, eq=False)
class TensorPlan:
    """One tensor to write. `words`: the array, which holds the old words of a tensor that changes."""

    entry: TensorEntry
    offset: int
    frames: list[tuple[frame.Frame, int]]
    words: Words
    edits: list[_Edit] = field(default_factory=list)

    def carry_out(self, parsed: frame.Frame, offset: int, *, ordered: bool) -> None:
        """Write one frame. Either all of it is done, and noted, or nothing. Raises `Corrupt`."""
        segment = slice(parsed.start, parsed.start + parsed.elements)
        with _named(self.entry, offset):
            if not self.entry.base_digest:
                self.words[segment] = frame.decode_dense(parsed, None)
                return
            positions, values = _changes(parsed, self.words[segment], ordered)
        changes.exchange(self.words[segment], positions, values)
        self.edits.append(_Edit(segment, positions, values))

    def verify(self) -> None:
        """Raises `DigestMismatch` when the words are not the announced ones."""
        found = tensor_digest(self.words)
        if found != self.entry.digest:
            reason = f"announced {self.entry.digest.hex()}, decoded {found.hex()}"
            raise DigestMismatch(reason, tensor=self.entry.name, offset=self.offset)

    def undo(self) -> None:
        """Put the old words back."""
        while self.edits:
            edit = self.edits.pop()
            changes.exchange(self.words[edit.segment], edit.positions, edit.words)

    def change(self) -> Change:
        """What was done, in absolute terms; the frames were carried out in order of position."""
        if not self.entry.base_digest:
            return Change(None, self.words)
        index: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        words: list[Words] = [np.empty(0, self.words.dtype)]
        for edit in sorted(self.edits, key=lambda edit: edit.segment.start):
            index.append(edit.positions.astype(np.int64) + edit.segment.start)
            words.append(changes.gather(self.words[edit.segment], edit.positions))
        return Change(np.concatenate(index), np.concatenate(words))


def _changes(parsed: frame.Frame, old: Words, ordered: bool) -> tuple[changes.U32, Words]:
    """(positions in the segment, new words), in arrays of their own."""
    if parsed.form in (frame.ABSOLUTE, frame.XOR):
        positions, _, values = changes.find(old, frame.decode_dense(parsed, old))
        return positions, values.copy()
    return frame.decode_sparse(parsed, old, ordered=ordered)


def plan_tensors(
    header: Header, view: memoryview, start: int, held: Mapping[str, Bits], workers: int, *, in_place: bool
) -> list[TensorPlan]:
    """The plan for the file `view` whose body begins at `start`. Entries are checked (`check_entry`); nothing is changed yet.

    `in_place`: write into the arrays of `held`; else into copies. Raises `WrongBase`, `Truncated`, `Corrupt`.
    """
    places = []
    for entry in header.tensors:
        places.append((entry, start))
        start += entry.body_bytes

    def one(place: tuple[TensorEntry, int]) -> TensorPlan:
        return plan_tensor(*place, view, held.get(place[0].name), in_place=in_place)

    return each(one, places, workers)


def plan_tensor(entry: TensorEntry, at: int, view: memoryview, base: Bits | None, *, in_place: bool) -> TensorPlan:
    """The plan for one tensor of the file `view`, whose frames begin at byte `at`; the rest as `plan_tensors`."""
    frames = list(frames_of(entry, view[at : at + entry.body_bytes], at))
    if not entry.base_digest:
        return TensorPlan(entry, at, frames, _room(entry, frames))
    if base is None or (base.dtype, base.shape) != (entry.dtype, entry.shape):
        found = "nothing" if base is None else f"{base.dtype}{base.shape}"
        raise WrongBase(f"the patch changes {entry.dtype}{entry.shape}, the receiver holds {found}", tensor=entry.name)
    return TensorPlan(entry, at, frames, base.data if in_place else base.data.copy())


def carry_out(plans: list[TensorPlan], workers: int, *, ordered: bool) -> None:
    """Decode every frame and verify every tensor. On an error all tensors are as they were, and no thread is left at work."""

    def one(job: tuple[TensorPlan, tuple[frame.Frame, int]]) -> None:
        plan, (parsed, offset) = job
        plan.carry_out(parsed, offset, ordered=ordered)

    try:
        if workers <= 1:
            for plan in plans:  # each tensor's digest while its words are still near the processor
                for parsed, offset in plan.frames:
                    plan.carry_out(parsed, offset, ordered=ordered)
                plan.verify()
        else:
            each(one, [(plan, parsed) for plan in plans for parsed in plan.frames], workers)
            each(TensorPlan.verify, plans, workers)
    except BaseException:
        undo(plans)
        raise


def undo(plans: Iterable[TensorPlan]) -> None:
    """Put every old word back."""
    for plan in plans:
        plan.undo()


def check_entry(entry: TensorEntry, max_tensor_bytes: int) -> None:
    """Refuse an entry that cannot be, or that announces more than its bytes can hold. Raises `Corrupt`, `TooLarge`."""
    try:
        total = count_of(entry.shape) * element_bytes(entry.dtype)
    except PatchError as error:
        raise Corrupt(error.reason, tensor=entry.name) from error
    if total > max_tensor_bytes:
        raise TooLarge(f"{total} bytes exceed the limit of {max_tensor_bytes}", tensor=entry.name)
    if not entry.base_digest and total > entry.body_bytes * MAX_EXPANSION:
        raise Corrupt(f"{entry.body_bytes} bytes cannot hold a tensor of {total}", tensor=entry.name)
    if len(entry.digest) != 16 or len(entry.base_digest) not in (0, 16) or entry.body_bytes < 0:
        raise Corrupt("a digest must have 16 bytes and a length must not be negative", tensor=entry.name)


def frames_of(entry: TensorEntry, body: memoryview, offset: int) -> Iterator[tuple[frame.Frame, int]]:
    """The tensor's frames with their byte offsets in the file; together they stay inside the tensor and in order."""
    at, end, count, width = 0, 0, count_of(entry.shape), element_bytes(entry.dtype)
    while at < len(body):
        with _named(entry, offset + at):
            parsed = frame.parse(body[at:])
        if parsed.width != width or parsed.start < end or parsed.start + parsed.elements > count:
            reason = f"a frame of {parsed.elements} words of {parsed.width} bytes at {parsed.start} does not fit {entry.shape}"
            raise Corrupt(reason, tensor=entry.name, offset=offset + at)
        end = parsed.start + parsed.elements
        yield parsed, offset + at
        at += frame.frame_bytes(body[at:])


def _room(entry: TensorEntry, frames: list[tuple[frame.Frame, int]]) -> Words:
    """An array for a tensor that comes whole, once its frames are known to fill it."""
    count, covered = count_of(entry.shape), sum(f.elements for f, _ in frames)
    if covered != count or any(f.form != frame.ABSOLUTE for f, _ in frames):
        raise Corrupt(f"a whole tensor needs all its {count} words absolute, the frames hold {covered}", tensor=entry.name)
    return np.empty(count, WORDS[element_bytes(entry.dtype)])


@contextmanager
def _named(entry: TensorEntry, offset: int) -> Iterator[None]:
    """Add the tensor and the offset to the errors of what runs inside."""
    try:
        yield
    except PatchError as error:
        raise type(error)(error.reason, tensor=entry.name, offset=offset) from error


def each(function: Callable[[_In], _Out], items: Iterable[_In], workers: int) -> list[_Out]:
    """`map`, over threads when there are several workers: the heavy parts release the interpreter lock.

    The first error is raised when every thread has stopped.
    """
    if workers <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(workers, thread_name_prefix="patch") as pool:
        return list(pool.map(function, items))
