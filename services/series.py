"""A running total by time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator


class Series:
    """Amounts with their times, as one stream gives them; one that goes back counts as no earlier than the one before."""

    def __init__(self) -> None:
        self._times: list[int] = []
        self._totals: list[float] = []

    def add(self, time_ns: int, amount: float = 1) -> None:
        self._times.append(max(time_ns, self._times[-1]) if self._times else time_ns)
        self._totals.append(self.total() + amount)

    def total(self) -> float:
        return self._totals[-1] if self._totals else 0

    def at(self, time_ns: int) -> float:
        """The total of everything up to this time."""
        index = bisect_right(self._times, time_ns)
        return self._totals[index - 1] if index else 0

    def changes(self, after_ns: int, until_ns: int) -> Iterator[tuple[int, float]]:
        """Times and amounts, later than `after_ns` and up to `until_ns`."""
        first, last = bisect_right(self._times, after_ns), bisect_right(self._times, until_ns)
        for index in range(first, last):
            yield self._times[index], self._totals[index] - (self._totals[index - 1] if index else 0)

    def first_ns(self) -> int | None:
        return self._times[0] if self._times else None

    def most(self, minus: Series, after_ns: int, until_ns: int) -> tuple[int, int]:
        """The highest that this total less another one stood in that time, and when; what goes counts before what comes."""
        held = self.at(after_ns) - minus.at(after_ns)
        highest, at_ns = held, after_ns
        moves = [(t, -amount) for t, amount in minus.changes(after_ns, until_ns)] + list(self.changes(after_ns, until_ns))
        for time_ns, amount in sorted(moves):
            held += amount
            if held > highest:
                highest, at_ns = held, time_ns
        return int(highest), at_ns
