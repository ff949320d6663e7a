"""The one copy of the weights that a receiver keeps, patched in place: no second copy of the model, at any time.

Steps are not idempotent, so a half-applied patch would be fatal; here it cannot be: what is overwritten is kept (6 bytes for
each changed element) until the digests agree, and is put back if they do not, or if whoever is served from here refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from param_sync.patch.bits import Bits
from param_sync.patch.codec import DEFAULT_LIMITS, Limits, plan_file, result
from param_sync.patch.decoding import Change, carry_out, undo
from param_sync.patch.snapshot import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """Weights that are verified and in place, while the receiver may still refuse them."""

    snapshot: Snapshot
    changes: dict[str, Change]
    """What changed, in absolute terms, by tensor; empty if it was not asked for."""


class Shadow:
    """Verified weights that patches are applied to in place. For one thread at a time; readers wait while a patch is staged."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Takes the snapshot's arrays over: the caller lets go of them. Copies those that are read-only, and those that share
        memory with another (tied weights), which would otherwise be changed twice."""
        tensors = {}
        for name, bits in snapshot.tensors.items():
            own = bits.data if bits.data.flags.writeable else bits.data.copy()
            tensors[name] = Bits(bits.dtype, bits.shape, own)
        for name in _shared(tensors):
            tensors[name] = Bits(tensors[name].dtype, tensors[name].shape, tensors[name].data.copy())
        self._snapshot = Snapshot(snapshot.version, snapshot.incarnation, tensors, snapshot.entries, snapshot.digest)

    @property
    def snapshot(self) -> Snapshot:
        """The weights as they are now. Its arrays are this shadow's: the next patch changes them."""
        return self._snapshot

    def apply(self, file: bytes | bytearray | memoryview, *, workers: int = 1, limits: Limits = DEFAULT_LIMITS) -> Snapshot:
        """The weights that a patch (or an anchor) names, verified. Raises as `codec.apply` does, with nothing changed."""
        with self.staged(file, workers=workers, limits=limits) as staged:
            return staged.snapshot

    @contextmanager
    def staged(
        self,
        file: bytes | bytearray | memoryview,
        *,
        collect: bool = False,
        workers: int = 1,
        limits: Limits = DEFAULT_LIMITS,
    ) -> Iterator[Staged]:
        """The new weights, in place; they become the shadow's when the block ends, and are taken back if it raises.

        `collect` also gives what changed. Raises as `codec.apply` does.
        """
        plans, header = plan_file(self._snapshot, file, workers, limits, in_place=True)
        carry_out(plans, workers, ordered=collect)
        try:
            made = result(self._snapshot, header, plans)
            yield Staged(made, {plan.entry.name: plan.change() for plan in plans} if collect else {})
        except BaseException:
            undo(plans)
            raise
        self._snapshot = made


def _shared(tensors: dict[str, Bits]) -> list[str]:
    """Tensors that share memory with one before them in order of address."""
    found, end = [], 0
    spans = sorted((bits.data.ctypes.data, bits.data.nbytes, name) for name, bits in tensors.items() if bits.data.nbytes)
    for start, size, name in spans:
        if start < end:
            found.append(name)
        end = max(end, start + size)
    return found
