"""Receivers that are several versions behind: one merged patch in place of a chain, made of what the last patches overwrote."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from param_sync.chain import Manifest, Weights
from param_sync.patch.bits import Bits, Words
from param_sync.patch.container import Encoded, assemble
from param_sync.patch.decoding import Change
from param_sync.patch.digest import Entry, tensor_digest
from param_sync.patch.errors import DigestMismatch
from param_sync.patch.snapshot import Snapshot
from param_sync.patch.tensor import TensorPatch, encode_tensor

Positions = npt.NDArray[np.unsignedinteger]


def merge_from(chain: Sequence[Manifest], remembered: Collection[Weights]) -> Weights | None:
    """Where one merged patch to the chain's end should begin, so that it replaces the most links; None: none is worth it.

    It can begin only at `remembered` weights. It must replace at least two links, and no anchor: what follows an anchor is
    merged, if anything is. Whether it came out smaller is seen when it is made (`is_smaller`).
    """
    for number, link in enumerate(chain):
        if link.base is not None and link.base in remembered:
            return link.base if len(chain) - number >= 2 else None
    return None


def is_smaller(merged_bytes: int, replaced: Iterable[Manifest]) -> bool:
    """Whether the merged patch is worth its place in the store, beside the links that it replaces."""
    return merged_bytes < sum(link.nbytes for link in replaced)


@dataclass(frozen=True, slots=True, eq=False)
class Undo:
    """What one patch overwrote."""

    base: Weights
    entries: Mapping[str, Entry]
    """Of the base."""
    words: Mapping[str, tuple[Positions, Words]]
    """Old words at the changed positions, by tensor: 6 bytes for each changed element of bfloat16."""
    whole: Mapping[str, Bits | None]
    """Old tensors that came new or in another form, or went; None: there was none."""

    @property
    def nbytes(self) -> int:
        listed = sum(index.nbytes + words.nbytes for index, words in self.words.values())
        return listed + sum(bits.data.nbytes for bits in self.whole.values() if bits is not None)


class History:
    """The last `depth` steps that led to the newest weights, backwards, in at most `share` of the newest weights' bytes."""

    def __init__(self, depth: int, *, share: float = 0.5) -> None:
        self._share = share
        self._steps: deque[Undo] = deque(maxlen=depth)
        self._newest: Weights | None = None

    def starts(self) -> frozenset[Weights]:
        """Weights that a merged patch can begin at."""
        return frozenset(step.base for step in self._steps)

    def add(self, base: Snapshot, new: Snapshot, changes: Mapping[str, Change]) -> None:
        """The patch that took `base` to `new` (`codec.apply_with_changes`). A gap, or another incarnation, forgets the rest."""
        here = _name(base)
        if self._newest != here or base.incarnation != new.incarnation:
            self._steps.clear()
        self._newest = _name(new)
        if base.incarnation != new.incarnation:
            return
        words: dict[str, tuple[Positions, Words]] = {}
        whole: dict[str, Bits | None] = {name: base.tensors[name] for name in base.tensors if name not in new.tensors}
        for name, change in changes.items():
            if change.index is None:
                whole[name] = base.tensors.get(name)
            else:
                data = base.tensors[name].data
                narrow = change.index.astype(np.uint32) if data.size <= 2**32 else change.index.astype(np.uint64)
                words[name] = narrow, data[change.index]
        self._steps.append(Undo(here, dict(base.entries), words, whole))
        room = self._share * sum(bits.data.nbytes for bits in new.tensors.values())
        while self._steps and sum(step.nbytes for step in self._steps) > room:
            self._steps.popleft()

    def since(self, start: Weights) -> tuple[Undo, ...]:
        """The steps from `start`, one of `starts()`, to the newest weights, oldest first."""
        return tuple(step for step in self._steps if step.base.version >= start.version)


def merged(steps: Sequence[Undo], newest: Snapshot, *, level: int) -> Encoded:
    """The patch from where `steps` begin to the newest weights, which they lead to, as if it had been made between the two.

    Takes memory for one tensor. Raises `DigestMismatch` when an old tensor does not come back as it was.
    """
    start, entries = steps[0].base, steps[0].entries
    touched = {name for step in steps for name in (*step.words, *step.whole)}
    parts: list[TensorPatch] = []
    for name in sorted(touched & newest.tensors.keys()):
        old = _before(name, newest.tensors[name], steps)
        if old is not None and tensor_digest(old.data) != entries[name][2]:
            raise DigestMismatch("the old words do not come back", tensor=name)
        before, digest = None if old is None else entries[name][2], newest.entries[name][2]
        part = encode_tensor(name, old, newest.tensors[name], old_digest=before, digest=digest, level=level)
        parts += [] if part is None else [part]
    return assemble(
        parts,
        version=newest.version,
        incarnation=newest.incarnation,
        digest=newest.digest,
        base_version=start.version,
        base_digest=start.digest,
        removed=[name for name in entries if name not in newest.tensors],
    )


def _before(name: str, now: Bits, steps: Sequence[Undo]) -> Bits | None:
    """A tensor as it was before these steps; None when it was not there."""
    held: Bits | None = Bits(now.dtype, now.shape, now.data.copy())
    for step in reversed(steps):
        if name in step.whole:
            was = step.whole[name]
            held = None if was is None else Bits(was.dtype, was.shape, was.data.copy())
        elif name in step.words and held is not None:
            positions, words = step.words[name]
            held.data[positions] = words
    return held


def _name(snapshot: Snapshot) -> Weights:
    return Weights(snapshot.incarnation, snapshot.version, snapshot.digest)
