"""A verified set of weights: version, incarnation, tensors, and the digests that prove it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from param_sync.patch.bits import Bits, State
from param_sync.patch.digest import Entry, entries_of, state_digest
from param_sync.patch.errors import DigestMismatch


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Weights under their name. `entries` were computed from `tensors`; treat both as read-only."""

    version: int
    incarnation: int
    tensors: Mapping[str, Bits]
    entries: Mapping[str, Entry]
    digest: str

    @classmethod
    def of(cls, state: State, *, version: int, incarnation: int) -> Snapshot:
        """Hash every tensor (0.6 of a copy's time) and name the whole."""
        entries = entries_of(state)
        return cls(version, incarnation, dict(state), entries, state_digest(entries))

    def audit(self) -> None:
        """Hash everything again. Raises `DigestMismatch` naming the first tensor whose bits changed behind our back."""
        for name, entry in entries_of(self.tensors).items():
            if entry != self.entries.get(name):
                raise DigestMismatch("the bits in memory are not the ones that were verified", tensor=name)
