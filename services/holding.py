"""Publishes that are held back: since when, on whose account, until when; for the log and the heartbeat's open waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from schemas.health import Wait


@dataclass(slots=True)
class Hold:
    """One message that its publisher still has in hand."""

    subject: str
    patience_s: float
    begun_s: float = field(default_factory=time.monotonic)
    since_ns: int = field(default_factory=time.time_ns)
    tries: int = 0
    reason: str = ""  # the culprit and what it does; empty while nothing is amiss

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.begun_s

    @property
    def left_s(self) -> float:
        return self.patience_s - self.age_s


class Holds:
    """The messages that are on their way to the server now; those with a reason are held back.

    There are never more than callers: each has one message in hand, and nothing of it lies in the client's buffer while there
    is no connection.
    """

    def __init__(self) -> None:
        self._open: dict[int, Hold] = {}
        self._next = 0

    @contextmanager
    def of(self, subject: str, patience_s: float) -> Iterator[Hold]:
        """Remember a message until it is stored or given up."""
        number, self._next = self._next, self._next + 1
        hold = self._open[number] = Hold(subject, patience_s)
        try:
            yield hold
        finally:
            del self._open[number]

    @property
    def held(self) -> list[Hold]:
        """Those that something holds back, oldest first."""
        return sorted((hold for hold in self._open.values() if hold.reason), key=lambda hold: hold.begun_s)

    def wait(self) -> Wait | None:
        """All of them as one open wait of the service, as old as the oldest."""
        held = self.held
        if not held:
            return None
        oldest = held[0]
        return Wait(
            what=f"{len(held)} publish{'es' if len(held) > 1 else ''} held back, the oldest on {oldest.subject}",
            culprit=oldest.reason,
            since_ns=oldest.since_ns,
            deadline_ns=oldest.since_ns + int(oldest.patience_s * 1e9),
            at_deadline="its publisher fails",
        )
