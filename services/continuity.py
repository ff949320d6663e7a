"""What is missing from a log that keeps everything. Pure.

A damaged store loses messages in silence: the server may list them as deleted, pass over them, or end the log before them and
give their sequences to others; somebody may make the stream anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from schemas.dead_letter import LossKind
from schemas.table import Stream
from services.items import Rewound, StreamState

Run = tuple[int, int]  # first and last of an unbroken run of sequences


@dataclass(frozen=True, slots=True)
class Hole:
    """Sequences `first` to `last` of a log that are not there."""

    stream: Stream
    first: int
    last: int
    how: LossKind

    def __str__(self) -> str:
        several = self.last > self.first
        which = f"sequences {self.first} to {self.last} are" if several else f"sequence {self.first} is"
        return f"{self.stream}: {which} {_HOW[self.how]}"


_HOW: dict[LossKind, str] = {
    "deleted": "missing from the store",
    "unreadable": "missing: the server passes over what it cannot read",
    "truncated": "gone, the log ends before; it was cut short",
    "recreated": "gone, the stream was made anew",
}


class LogRewound(Rewound):
    """What had been read of a log no longer stands there."""

    def __init__(self, hole: Hole) -> None:
        super().__init__(f"{hole}, though it had been read")
        self.hole = hole


def runs(numbers: Iterable[int]) -> Iterator[Run]:
    """Ascending numbers as unbroken runs."""
    first = last = -1
    for number in numbers:
        if first >= 0 and number == last + 1:
            last = number
            continue
        if first >= 0:
            yield first, last
        first = last = number
    if first >= 0:
        yield first, last


def missing(state: StreamState, start: int = 1) -> list[Run]:
    """Sequences from `start` on that are not there by the server's own word."""
    if not state.messages:
        return [(start, state.last_seq)] if start <= state.last_seq else []
    before = [(start, state.first_seq - 1)] if start < state.first_seq else []
    return before + list(runs(seq for seq in state.deleted if seq >= start))


def without(run: Run, known: Iterable[Run]) -> list[Run]:
    """The parts of a run that no known run covers."""
    left = [run]
    for first, last in known:
        parts: list[Run] = []
        for a, b in left:
            parts += [(x, y) for x, y in ((a, min(b, first - 1)), (max(a, last + 1), b)) if x <= y]
        left = parts if first <= run[1] and last >= run[0] else left
    return left


@dataclass(slots=True)
class Standing:
    """Where a reader stands in one log, and what it knows to be missing there.

    `at` is the last sequence that it has passed; `anchor` is the last item that it read.
    """

    stream: Stream
    start: int
    at: int = 0
    anchor: int = 0
    anchor_ns: int = 0  # the server's time of that item
    created: str = ""
    known: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.at = self.start - 1

    def look(self, state: StreamState) -> list[Hole]:
        """Gaps that the server's word adds. Raises `LogRewound` when something that was read is no longer there."""
        if self.created and state.created != self.created:
            raise LogRewound(Hole(self.stream, self.start, max(self.start, self.at), "recreated"))
        self.created = state.created
        if self.anchor > state.last_seq:
            raise LogRewound(Hole(self.stream, state.last_seq + 1, self.anchor, "truncated"))
        new = [part for run in missing(state, self.start) for part in without(run, self.known)]
        for first, last in new:
            if first <= self.anchor:
                raise LogRewound(Hole(self.stream, first, min(last, self.anchor), "deleted"))
        self.known += new
        return [Hole(self.stream, first, last, "deleted") for first, last in new]

    def pass_to(self, seq: int, time_ns: int) -> None:
        """The reader came to an item."""
        self.at = self.anchor = seq
        self.anchor_ns = time_ns

    def end_at(self, seq: int) -> list[Hole]:
        """Nothing more can be read up to `seq`; gives what is missing there, for a reader that sees every item."""
        if seq <= self.at:
            return []
        new = without((self.at + 1, seq), self.known)
        self.known += new
        self.at = seq
        return [Hole(self.stream, first, last, "unreadable") for first, last in new]
