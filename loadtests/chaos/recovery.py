"""How long a service takes to work again: until its next process runs, is ready, and completes the next unit of work.

Where a second instance waits, the role passes on: then what counts is the next unit after an owner took over, whoever it is.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass

from loadtests.chaos.local_run import LocalRun
from loadtests.chaos.observer import Event, Observer, worker_of
from loadtests.chaos.points import OWNED, SERVER
from loadtests.chaos.processes import Process
from loadtests.chaos.schedule import service_of
from schemas.health import Heartbeat
from schemas.ownership import OWNER
from schemas.table import Stream

_LOOK_S = 0.02
# A unit of work of each service: what it publishes when it has done what others wait for.
UNITS: dict[str, tuple[str, ...]] = {
    "sampler": ("task", "lease"),
    "rollouter": ("turn",),
    "engine": ("gen", "out"),
    "sandbox": ("sbx", "out"),
    "verifier": ("verdict",),
    "bank": ("ready",),
    "admission": ("ledger",),
    "trainer": ("train", "step"),
    "param_sync": ("policy", "staged"),
}
_STORED = (Stream.TASKS, Stream.TURNS, Stream.EPISODES, Stream.READY, Stream.LEDGER, Stream.TRAIN, Stream.POLICY)
_NAMED_BY_WORK = ("engine", "sandbox")  # whose messages say which instance did the work


@dataclass
class Recovery:
    """Seconds after the fault, or after its end where it lasts; `None`: not within the time given. `unit_s` counts what the
    service completed, so the time in which there was nothing to do is part of it. `taken_s`: until another one owned the role.
    """

    label: str
    started_s: float | None = None
    ready_s: float | None = None
    unit_s: float | None = None
    taken_s: float | None = None


class Watched:
    """Follows one label from the moment of its fault on. Made before the fault, so that nothing is missed."""

    def __init__(self, run: LocalRun, observer: Observer, label: str) -> None:
        self._run = run
        self._observer = observer
        self._label = label
        self._service = service_of(label)
        self._instance = label.rsplit("-", 1)[1] if label != SERVER else ""
        self._killed: Process | None = None
        self._heard: list[tuple[float, int]] = []  # (when, process id) of its heartbeats that say ready
        self._units: list[float] = []
        self._stored: int | None = None
        owner = observer.picture.owners.get(self._service) if self._service in OWNED else None
        self._owner = owner.token if owner is not None and owner.instance == self._instance else ""
        self._taken_s: float | None = None
        self._end = observer.listen(self._on_event)

    def kill(self) -> bool:
        """SIGKILL it; false, and followed no longer, when it does not run just now."""
        self._killed = self._run.signal(self._label, signal.SIGKILL)
        if self._killed is None:
            self._end()
        return self._killed is not None

    async def recovered(self, since_s: float, within_s: float) -> Recovery:
        """Wait until it works again: as another process where it was killed, under another owner where it owned its role."""
        out = Recovery(self._label)
        started = since_s if self._killed is None else None
        try:
            while time.monotonic() < since_s + within_s:
                started = self._started() if started is None else started
                again = self._taken_s if self._killed is not None and self._owner else started
                unit = None if again is None else await self._unit(again)
                if started is not None:
                    out.started_s, out.ready_s = _after(since_s, started), _after(since_s, self._ready(started))
                out.taken_s = _after(since_s, self._taken_s)
                if unit is not None and started is not None:
                    out.unit_s = _after(since_s, unit)
                    break
                await asyncio.sleep(_LOOK_S)
        finally:
            self._end()
        return out

    def end(self) -> float | None:
        """Follow it no longer; says when another process took its role over, if one did."""
        self._end()
        return self._taken_s

    def _ready(self, started_s: float) -> float | None:
        pid = process.pid if (process := self._run.now(self._label)) is not None else 0
        return next((at for at, whose in self._heard if at >= started_s and whose == pid), None)

    async def _unit(self, started_s: float) -> float | None:
        """When the first unit after `started_s` was completed. The server's is a message that it has stored."""
        if self._service != SERVER:
            return next((at for at in self._units if at >= started_s), None)
        stored = await self._observer.stored(*_STORED)
        self._stored = stored if self._stored is None else self._stored
        return time.monotonic() if stored is not None and self._stored is not None and stored > self._stored else None

    def _on_event(self, event: Event) -> None:
        if event.words[:3] == ("reg", "service", self._service) and event.words[3] == self._instance:
            beat = event.message()
            if isinstance(beat, Heartbeat) and beat.phase == "ready":
                self._heard.append((event.at_s, beat.pid))
        elif event.words == ("reg", "service", self._service, OWNER):
            owner = self._observer.picture.owners.get(self._service)
            if self._owner and self._taken_s is None and owner is not None and owner.token != self._owner:
                self._taken_s = event.at_s
        elif self._is_unit(event):
            self._units.append(event.at_s)

    def _is_unit(self, event: Event) -> bool:
        unit = UNITS.get(self._service, ("none",))
        if event.words[: len(unit)] != unit:
            return False
        if self._service == "rollouter":
            return event.words[-1].isdecimal() and self._observer.picture.player.get(event.words[1]) == self._instance
        return self._service not in _NAMED_BY_WORK or worker_of(event) == self._instance

    def _started(self) -> float | None:
        process = self._run.now(self._label)
        return time.monotonic() if process is not None and process != self._killed and process.alive() else None


def _after(since_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else round(at_s - since_s, 3)
