"""How long each service takes from its process to its first word that it is ready, at a start that nothing disturbs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection
from contextlib import suppress

from loadtests.chaos.local_run import LocalRun
from loadtests.chaos.observer import Event, Observer
from loadtests.chaos.processes import Process
from schemas.health import Heartbeat


class StartTimes:
    """Listens from before the start on. All services start together, so each has but a share of the machine meanwhile."""

    def __init__(self, run: LocalRun, observer: Observer) -> None:
        self._run = run
        self._found: dict[str, float] = {}
        self._more = asyncio.Event()
        self._end = observer.listen(self._on_event)

    async def of(self, labels: Collection[str], within_s: float) -> None:
        """Wait until all of them are ready; a second instance says so when it has seen that another one owns the role."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while set(labels) - self._found.keys():
                    self._more.clear()
                    await self._more.wait()

    def end(self) -> dict[str, float]:
        """Seconds by label, of those that became ready. A heartbeat may be half a second late."""
        self._end()
        return dict(self._found)

    def _on_event(self, event: Event) -> None:
        if event.words[:2] != ("reg", "service") or len(event.words) != 4:
            return
        label = f"{event.words[2]}-{event.words[3]}"
        beat = event.message() if label not in self._found else None
        if isinstance(beat, Heartbeat) and beat.phase == "ready":
            process = self._run.now(label)
            if process is not None and process.pid == beat.pid:
                self._found[label] = round(age_s(process), 2)
                self._more.set()


def age_s(process: Process) -> float:
    """Seconds since the process began, by the kernel's own record."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(process.began) / os.sysconf("SC_CLK_TCK")
