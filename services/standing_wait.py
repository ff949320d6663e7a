"""One wait that stands over many turns of a loop, and ends when its reason changes."""

from __future__ import annotations

from contextlib import ExitStack

from services.health import Health


class StandingWait:
    """What a loop waits for now. The same reason keeps its `since`, so that heartbeat and log show how long it has lasted."""

    def __init__(self, health: Health, timeout_s: float) -> None:
        self._health = health
        self._timeout_s = timeout_s
        self._open = ExitStack()
        self._reason: tuple[str, str] | None = None

    def on(self, what: str, culprit: str, at_deadline: str) -> None:
        """Wait for `what`, because of `culprit`; nothing happens if that is what the loop was waiting for already."""
        if self._reason != (what, culprit):
            self.over()
            self._reason = (what, culprit)
            self._open.enter_context(self._health.waiting(what, culprit, self._timeout_s, at_deadline))

    def over(self) -> None:
        """Nothing is waited for any more."""
        self._open.close()
        self._reason = None
