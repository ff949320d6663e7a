"""Who sits in which row of the slot cache: running sequences in front, finished ones parked behind for prefix reuse.

Running sequences occupy rows `0 .. n-1` without holes, so that a decode step reads the cache as a view and copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.engine.slot_cache import SlotCache

if TYPE_CHECKING:
    from services.engine.batch_loop import Sequence

MIN_SHARED = 8  # a shorter common prefix is cheaper to compute than to copy


@dataclass
class Parked:
    """KV left behind by a finished sequence: the first `ids.size` columns of its row are valid for these ids."""

    ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    session: str = ""
    used: int = 0


class SlotRows:
    """Row bookkeeping over one `SlotCache` of `count` rows."""

    def __init__(self, cache: SlotCache, count: int, prefix_cache: bool = True) -> None:
        self.cache = cache
        self.count = count
        self.active: list[Sequence] = []  # index = row
        self._parked = [Parked() for _ in range(count)]  # index = row; empty where a running sequence sits
        self._clock = 0
        self._prefix_cache = prefix_cache

    def has_room(self) -> bool:
        return len(self.active) < self.count

    def row_of(self, sequence: Sequence) -> int:
        return self.active.index(sequence)

    def used_columns(self) -> int:
        return sum(len(s.ids) for s in self.active)

    def shares_unfinished_prefill(self, sequence: Sequence) -> bool:
        """True while a running sequence has yet to compute a long prefix that `sequence` could copy afterwards."""
        return self._prefix_cache and any(
            s.pure
            and s.computed < s.prompt.size
            and _common(s.prompt, sequence.prompt) >= max(MIN_SHARED, s.computed + MIN_SHARED)
            for s in self.active
        )

    def place(self, sequence: Sequence) -> int:
        """Seat `sequence` in the next running row; returns how many prompt tokens its row already holds."""
        row = len(self.active)
        limit = sequence.prompt.size - 1  # the last prompt token is always computed: its logits give the first sample
        source, shared = self._best_source(sequence, limit)
        victim = source if shared and source >= row and self._is_continuation(source, sequence) else self._oldest_parked()
        if victim != row:
            self._move_parked(row, victim)
        if shared and source != victim:
            self.cache.copy_prefix(victim if source == row else source, row, shared)
        self._parked[row] = Parked()
        self.active.append(sequence)
        return shared

    def release(self, sequence: Sequence) -> None:
        """Take a running sequence out of its row and park its KV; the last running row moves into the hole."""
        if sequence not in self.active:
            return
        row, last = self.row_of(sequence), len(self.active) - 1
        if row != last:
            self.cache.swap(row, last, max(sequence.computed, self.active[last].computed))
            self.active[row] = self.active[last]
        self.active.pop()
        self._clock += 1
        ids = np.array(sequence.ids[: sequence.computed] if sequence.pure and self._prefix_cache else [], dtype=np.int32)
        self._parked[last] = Parked(ids, sequence.session, self._clock)

    def forget_parked(self) -> None:
        """No parked KV may be reused: the weights that made it are gone."""
        self._parked = [Parked() for _ in range(self.count)]

    def _best_source(self, sequence: Sequence, limit: int) -> tuple[int, int]:
        """The row with the longest usable common prefix, and that length (0 when too short to be worth it)."""
        if not self._prefix_cache:
            return 0, 0
        best_row, best = 0, 0
        for row in range(self.count):
            if row < len(self.active):
                running = self.active[row]
                if not running.pure:
                    continue
                held = running.prompt[: running.computed]
            else:
                held = self._parked[row].ids
            if held.size > best and (shared := min(limit, _common(held, sequence.prompt))) > best:
                best_row, best = row, shared
        return (best_row, best) if best >= MIN_SHARED else (0, 0)

    def _is_continuation(self, row: int, sequence: Sequence) -> bool:
        """A parked row may be taken over, not copied, by the conversation that left it."""
        return self._parked[row].session == sequence.session != ""

    def _oldest_parked(self) -> int:
        rows = range(len(self.active), self.count)
        return min(rows, key=lambda row: (self._parked[row].ids.size > 0, self._parked[row].used))

    def _move_parked(self, row: int, victim: int) -> None:
        """Make `victim`'s KV sit in `row`; what was parked in `row` moves to `victim`."""
        length = max(self._parked[row].ids.size, self._parked[victim].ids.size)
        self.cache.swap(row, victim, length)
        self._parked[row], self._parked[victim] = self._parked[victim], self._parked[row]


def _common(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    """Length of the common prefix."""
    size = min(left.size, right.size)
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if different.size else size
