"""From the weights that an engine holds to those that an order names: fetched, decoded and verified while it serves.

The host keeps one copy of the weights, the shadow, and patches it in place. What is overwritten (6 bytes for each changed
element) is kept until the engine serves the new weights, over all links of a walk, and put back where one of them or the engine
refuses: steps are not idempotent, so a shadow that stands half-way would be of no use to anyone. Only an anchor that comes to
an engine which still serves takes a second copy for as long as the old weights may be needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from param_sync.patch.bits import Words
from param_sync.patch.codec import DEFAULT_LIMITS, plan_file, result
from param_sync.patch.decoding import TensorPlan, carry_out, undo
from param_sync.patch.shadow import Shadow
from param_sync.patch.snapshot import Snapshot
from schemas.policy import ApplyOrder, WeightsManifest
from services.blobs import get as fetch
from services.bus import Bus, IntegrityError
from services.engine.changes import U16, Index, TensorChange
from services.engine.protocol import WeightUpdate

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""(dtype, shape) of every tensor."""


def shadow_of(snapshot: Snapshot) -> Snapshot:
    """The same weights in arrays that may be written to; the caller lets go of the snapshot's."""
    return Shadow(snapshot).snapshot


def layout_of(snapshot: Snapshot) -> Layout:
    """What an engine that loaded these weights has room for."""
    return {name: (dtype, shape) for name, (dtype, shape, _) in snapshot.entries.items()}


class Walk:
    """Where a walk along links has come to. `held`: the shadow that it starts from and changes, or nothing."""

    def __init__(self, held: Snapshot | None) -> None:
        self.at = held
        self._held = held
        self._done: list[list[TensorPlan]] = []  # by link, with what each of them overwrote

    async def follow(self, bus: Bus, order: ApplyOrder) -> Snapshot:
        """Follow an order's links, from wherever on them the shadow stands; what the order names, verified.

        Raises `PatchError` or `IntegrityError`, and `BusError` where the store does not answer; then call `back`.
        """
        for link in _ahead(order.links, self.at):
            if self.at is not None and self.at.digest == link.digest and link.form == "anchor":
                self.at = _named(self.at, link.version, link.incarnation)
                continue
            for reference in link.objects:
                data = await fetch(bus, reference)
                await asyncio.to_thread(self.step, data)
        at = self.at
        if at is None or (at.digest, at.version, at.incarnation) != (order.digest, order.version, order.incarnation):
            raise IntegrityError(
                f"order {order.order_id}: its links lead to {'nothing' if at is None else at.digest[:12]}, "
                f"announced is {order.digest[:12]} (version {order.version})"
            )
        return at

    def step(self, file: bytes) -> None:
        """One patch or anchor, all of it or nothing. Raises `PatchError`."""
        plans, header = plan_file(self.at, file, 1, DEFAULT_LIMITS, in_place=True)
        if header.is_anchor:
            self.back()  # what was patched on the way is not needed, and the shadow is to be compared with
        carry_out(plans, 1, ordered=True)
        try:
            self.at = result(self.at, header, plans)
        except BaseException:
            undo(plans)
            raise
        self._done.append(plans)

    def back(self) -> Snapshot | None:
        """The shadow as it was when the walk began."""
        while self._done:
            undo(self._done.pop())
        self.at = self._held
        return self._held

    def arrived(self) -> Snapshot:
        """The engine serves where the walk has come to: the shadow from now on. What was overwritten is let go."""
        if self.at is None:
            raise IntegrityError("a walk that came nowhere has no weights")
        self._done, self._held = [], self.at
        return self.at

    def update(self, layout: Layout) -> WeightUpdate:
        """What the engine needs to get from the shadow to where the walk has come. Valid until `back` or `arrived`.

        Raises `IntegrityError` for weights of another model than `layout`.
        """
        target, held = self.at, self._held
        if target is None or layout_of(target) != layout:
            raise IntegrityError("the weights ordered are those of another model, or none")
        before = held.entries if held is not None else {}
        changed = [name for name, entry in target.entries.items() if before.get(name) != entry]
        return WeightUpdate(
            version=target.version,
            incarnation=target.incarnation,
            digest=target.digest,
            load=lambda: iter([(name, target.tensors[name].data, target.tensors[name].shape) for name in changed]),
            base_digest=held.digest if held is not None else "",
            changes=None if held is None else lambda: self._changes(held, target, changed),
        )

    def _changes(self, held: Snapshot, target: Snapshot, changed: list[str]) -> Iterator[TensorChange]:
        for name in changed:
            before, after = held.tensors[name], target.tensors[name]
            edits = [edit for plans in self._done for plan in plans if _same(plan.words, before.data) for edit in plan.edits]
            parts = [(edit.positions, edit.segment.start, edit.words) for edit in edits]
            if _same(after.data, before.data):
                index, old = _first(parts, after.data.size)
            else:  # it came whole
                words = before.data.copy()
                for positions, start, overwritten in reversed(parts):
                    words[positions.astype(np.int64) + start] = overwritten
                index = np.flatnonzero(words != after.data).astype(_width(words.size))
                old = words[index]
            yield TensorChange(name, after.shape, index, old, after.data[index])


def _first(parts: list[tuple[npt.NDArray[np.uint32], int, U16]], size: int) -> tuple[Index, U16]:
    """(ascending positions, words that stood there at first) of a tensor's edits, in the order in which they were made."""
    wide = _width(size)
    index = np.concatenate([np.empty(0, wide), *(positions.astype(wide) + wide.type(start) for positions, start, _ in parts)])
    old = np.concatenate([np.empty(0, np.uint16), *(words for _, _, words in parts)])
    if bool((index[1:] > index[:-1]).all()):
        return index, old
    index, first = np.unique(index, return_index=True)
    return index, old[first]


def _same(one: Words, other: Words) -> bool:
    """Whether two arrays are one piece of memory, under whatever views."""
    return one.size == other.size and one.ctypes.data == other.ctypes.data


def _width(size: int) -> np.dtype[Any]:
    return np.dtype(np.uint32) if size <= 2**32 else np.dtype(np.int64)


def _ahead(links: tuple[WeightsManifest, ...], held: Snapshot | None) -> tuple[WeightsManifest, ...]:
    """The links that are still to be followed: an order may be from before the last one came through."""
    for number, link in enumerate(links):
        if held is not None and (held.digest, held.version, held.incarnation) == (link.digest, link.version, link.incarnation):
            return links[number + 1 :]
    return links


def _named(weights: Snapshot, version: int, incarnation: int) -> Snapshot:
    """The same bits under another name."""
    return Snapshot(version, incarnation, weights.tensors, weights.entries, weights.digest)
