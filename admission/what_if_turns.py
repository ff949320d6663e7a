"""What a change of weights does to a group in play, by in-flight mode, from the recorded times of its turns. Pure.

`finish_old`: a turn ends under the weights that it began with. `continue`: tokens after the change are of the new version.
`regenerate`: the unfinished turn is thrown away and sampled again; finished turns stay. `restart`: everything sampled so far is
thrown away. The last two cost time: what was thrown away is spent once more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

InFlight = Literal["finish_old", "continue", "regenerate", "restart"]
IN_FLIGHT: tuple[InFlight, ...] = get_args(InFlight)
Turns = tuple[tuple[float, float], ...]  # begin and end of each turn of one sibling, in seconds from the lease


def mode_of(word: str) -> InFlight | None:
    """The mode of a configuration's or a person's word; `None` for none.

    `continue_keep` and `continue_recompute` differ in what they cost an engine, not in which version a token has.
    """
    plain = "continue" if word in ("continue_keep", "continue_recompute") else word
    return next((mode for mode in IN_FLIGHT if mode == plain), None)


def thrown_away(turns: Turns, offset_s: float, mode: InFlight) -> float:
    """Seconds of one sibling's sampling that a change at `offset_s` throws away; 0 before its first and after its last turn."""
    if mode in ("finish_old", "continue") or not turns or not turns[0][0] < offset_s < turns[-1][1]:
        return 0.0
    if mode == "restart":
        return offset_s - turns[0][0]
    begin, end = turns[bisect_right(turns, (offset_s, float("inf"))) - 1]
    return offset_s - begin if begin < offset_s < end else 0.0


@dataclass
class Play:
    """A group in play. `shifts_s`: what changes have added to each sibling; `since_s`: when its oldest token that counts was
    sampled, as virtual time."""

    leased_s: float
    ready_s: float
    turns: Sequence[Turns]
    shifts_s: list[float] = field(default_factory=list)
    since_s: list[float] = field(default_factory=list)
    stamp: int = 0

    def __post_init__(self) -> None:
        self.shifts_s = [0.0] * len(self.turns)
        self.since_s = [self.leased_s + (turns[0][0] if turns else 0.0) for turns in self.turns]

    def change(self, now_s: float, mode: InFlight) -> bool:
        """New weights at `now_s`; whether that moves the group's end."""
        moved = False
        for slot, turns in enumerate(self.turns):
            offset = now_s - self.leased_s - self.shifts_s[slot]
            cost = thrown_away(turns, offset, mode)
            if cost > 0.0:
                if offset - cost <= turns[0][0]:
                    self.since_s[slot] = now_s
                self.shifts_s[slot] += cost
                moved = True
        self.stamp += moved
        return moved

    def end_s(self) -> float:
        """When the group becomes whole."""
        played = [turns[-1][1] for turns in self.turns if turns]
        if not played:
            return self.leased_s + self.ready_s
        tail = max(0.0, self.ready_s - max(played))
        shifted = [shift + turns[-1][1] for shift, turns in zip(self.shifts_s, self.turns, strict=True) if turns]
        return self.leased_s + max(shifted) + tail

    def sampled_s(self, slot: int, mode: InFlight) -> tuple[float, float]:
        """When the version of a sibling's oldest and of its newest token was fixed; without recorded turns its whole time."""
        if slot >= len(self.turns) or not self.turns[slot]:
            return self.leased_s, self.end_s()
        begin, end = self.turns[slot][-1]
        last = begin if mode in ("finish_old", "regenerate", "restart") else end
        return self.since_s[slot], max(self.since_s[slot], self.leased_s + self.shifts_s[slot] + last)
