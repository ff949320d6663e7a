"""An event loop whose clock stands still while this program waits for a processor that others are using.

For load tests whose subject is waiting, on a machine that is shared: a step that lasts 8 s of sleeping and 0.5 s of work lasts
minutes where 20 programs want the same core. Linux says how long each thread stood in the run queue
(`/proc/<pid>/task/<tid>/schedstat`, second number, ns); that time, of all threads of this process and of the servers that it
started, is taken from the monotonic clock. What is left is sleeping, work, and waiting for disks and for each other. Where two
threads queue at once the smaller claim wins: the clock never goes backward, and never faster than the real one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_S = 0.01
LIST_EVERY_S = 1.0


class QuietClock:
    """Monotonic seconds without those in the run queue. Call it as often as you like."""

    def __init__(self) -> None:
        self.queued_s = 0.0
        self.processes: set[int | str] = {"self"}
        self._files: dict[str, int] = {}  # open descriptors, by thread
        self._listed_s = -LIST_EVERY_S
        self._real_s = self._base_s = self._shown_s = time.monotonic()
        self._seen = self._delays(self._real_s)

    def __call__(self) -> float:
        now = time.monotonic()
        if (passed := now - self._real_s) >= LOOK_EVERY_S:
            delays = self._delays(now)
            queued = sum(ns - self._seen.get(task, ns) for task, ns in delays.items()) / 1e9
            taken = min(passed, max(0.0, queued))
            self.queued_s += taken
            self._base_s += passed - taken
            self._real_s, self._seen, passed = now, delays, 0.0
        self._shown_s = max(self._shown_s, self._base_s + passed)
        return self._shown_s

    def _delays(self, now: float) -> dict[str, int]:
        """Nanoseconds in the run queue since its start, by thread."""
        if now - self._listed_s >= LIST_EVERY_S:
            self._listed_s = now
            self._list()
        found = {}
        for task, file in self._files.items():
            try:
                found[task] = int(os.pread(file, 100, 0).split()[1])
            except (OSError, IndexError):
                continue  # it ended meanwhile
        return found

    def _list(self) -> None:
        paths = {str(path) for process in self.processes for path in Path(f"/proc/{process}/task").glob("*/schedstat")}
        for gone in self._files.keys() - paths:
            os.close(self._files.pop(gone))
        for new in paths - self._files.keys():
            try:
                self._files[new] = os.open(new, os.O_RDONLY)
            except OSError:
                continue


class QuietLoop(asyncio.SelectorEventLoop):
    """All timers of the loop go by the quiet clock."""

    def __init__(self) -> None:
        self.clock = QuietClock()
        super().__init__()

    def time(self) -> float:
        return self.clock()


def runner() -> Callable[[], asyncio.AbstractEventLoop]:
    """For `asyncio.Runner(loop_factory=runner())`: the quiet loop where the system counts, else the usual one."""
    return QuietLoop if Path("/proc/self/schedstat").exists() else asyncio.new_event_loop


def leave_out(process: int) -> None:
    """From now on what this process waits for a processor does not count either."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, QuietLoop):
        loop.clock.processes.add(process)


def queued_s() -> float:
    """Seconds that were taken from the clock so far."""
    loop = asyncio.get_running_loop()
    return loop.clock.queued_s if isinstance(loop, QuietLoop) else 0.0
