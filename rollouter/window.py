"""How many groups are leased ahead of training: a fold over how groups have flowed, batch by batch.

Ahead of the batch that the version in rotation is for, up to K further batches may be leased before a group could only be used
too stale. But what is leased as far ahead as that has no time left: a group that takes a step longer than its neighbours is
overtaken, and ages out. So no more is leased ahead than keeps the trainer busy. Generation that outruns training shows when a
batch is decided: ready groups are left over, and the window closes by some. A trainer that has to wait for its batch opens it.
Between two batches, groups that lie ready and engines that queue hold leasing back at once.

What moves the window are facts of the logs at the server's times, so a sampler that starts again comes to the same one; only
the engines' load is of the moment.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_IDLE = 0.04  # share of the time that the trainer may wait for a batch before more is leased ahead
_NEVER = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSettings:
    """`batch`: groups of one. `max_lag`: K, so at most K batches are leased ahead. `adapt`: else always K batches."""

    batch: int
    max_lag: int
    adapt: bool

    @property
    def most(self) -> int:
        return self.batch * self.max_lag

    @property
    def least(self) -> int:
        """One batch, which is generated while another is trained on."""
        return min(self.batch, self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One decided batch: ready groups left over, groups gone stale since the one before it, and for which share of the time
    since then the trainer waited for it."""

    left: int
    stale: int
    waited: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Sequences of the whole fleet: running, waiting for a place, and places."""

    running: int = 0
    waiting: int = 0
    places: int = 0

    def queues(self) -> bool:
        """Whether more wait than a quarter of the places, so that another group would only make all of them slower."""
        return self.places > 0 and 4 * self.waiting > self.places


class Window(NamedTuple):
    """Groups that may be leased ahead, and why so many."""

    ahead: int
    why: str


def first(settings: WindowSettings) -> Window:
    """The window before any batch is decided."""
    return Window(settings.least, "no batch yet") if settings.adapt else Window(settings.most, "the bound")


def after(settings: WindowSettings, before: Window, cut: Cut) -> Window:
    """The window after another batch, inside its bounds. Its steps are small, since a change shows a batch or two later."""
    if not settings.adapt:
        return before
    step = max(1, settings.batch // 4)
    if cut.waited > MOST_IDLE:
        wanted = Window(before.ahead + step, f"the trainer waited for {cut.waited:.0%} of a step's time")
    elif cut.stale:
        wanted = Window(before.ahead - step, f"{cut.stale} groups went stale")
    elif cut.left:
        wanted = Window(before.ahead - max(1, cut.left // 4), f"{cut.left} ready groups were left over")
    else:
        wanted = Window(before.ahead, before.why)
    return Window(min(settings.most, max(settings.least, wanted.ahead)), wanted.why)


def now(settings: WindowSettings, held: Window, *, ready: int, load: EngineLoad) -> Window:
    """The window at this moment, with so many groups that lie ready, and the engines' load."""
    if not settings.adapt or held.ahead <= settings.least:
        return held
    if ready >= held.ahead:
        return Window(settings.least, f"{ready} groups lie ready")
    if load.queues():
        return Window(settings.least, f"{load.waiting} sequences wait for the engines")
    return held


@dataclass(slots=True)
class _Times:
    ready_ns: int = _NEVER
    closed_seq: int = _NEVER


@dataclass(frozen=True, slots=True)
class _Batch:
    seq: int
    time_ns: int
    demand_seq: int
    stale: int


@dataclass(slots=True)
class FlowBook:
    """The fold: facts as they come, in any order of the logs, and the window that follows from the batches up to now."""

    _window: Window | None = None
    _groups: dict[str, _Times] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)  # what is still told of them comes late
    _demanded_ns: dict[int, int] = field(default_factory=dict)
    _batches: deque[_Batch] = field(default_factory=deque)  # that the window does not know yet
    _before_ns: int = 0
    _stale: int = 0

    def ready(self, group: str, time_ns: int) -> None:
        """A training group became whole."""
        if group not in self._done:
            self._of(group).ready_ns = time_ns

    def demanded(self, seq: int, time_ns: int) -> None:
        """The trainer asked for a batch."""
        self._demanded_ns[seq] = time_ns

    def batch(self, seq: int, time_ns: int, groups: tuple[str, ...], demand_seq: int) -> None:
        """A batch was decided; in the order of the ledger."""
        self._batches.append(_Batch(seq, time_ns, demand_seq, self._stale))
        self._stale = 0
        for group in groups:
            self._of(group).closed_seq = seq

    def turned_away(self, seq: int, group: str, *, stale: bool) -> None:
        """A group was quarantined or abandoned."""
        self._of(group).closed_seq = seq
        self._stale += stale

    def window(self, settings: WindowSettings, load: EngineLoad) -> Window:
        """The window now. To be asked when the logs have been read up to their ends."""
        held = self._window or first(settings)
        while self._batches:
            batch = self._batches.popleft()
            held = after(settings, held, self._cut(batch))
            self._before_ns = batch.time_ns
            self._forget(batch)
        self._window = held
        return now(settings, held, ready=self.depth(), load=load)

    def depth(self) -> int:
        """Ready groups that are not closed."""
        return sum(times.closed_seq == _NEVER and times.ready_ns != _NEVER for times in self._groups.values())

    def _cut(self, batch: _Batch) -> Cut:
        left = sum(times.closed_seq > batch.seq and times.ready_ns <= batch.time_ns for times in self._groups.values())
        last_ns = max((times.ready_ns for times in self._groups.values() if times.closed_seq == batch.seq), default=_NEVER)
        asked_ns = self._demanded_ns.get(batch.demand_seq, _NEVER)
        waited_ns = max(0, last_ns - asked_ns) if last_ns != _NEVER and self._before_ns else 0
        return Cut(left=left, stale=batch.stale, waited=waited_ns / max(1, batch.time_ns - self._before_ns))

    def _forget(self, batch: _Batch) -> None:
        for group in [name for name, times in self._groups.items() if times.closed_seq <= batch.seq]:
            del self._groups[group]
            self._done.add(group)
        for seq in [seq for seq in self._demanded_ns if seq <= batch.demand_seq]:
            del self._demanded_ns[seq]

    def _of(self, group: str) -> _Times:
        return self._groups.setdefault(group, _Times())
