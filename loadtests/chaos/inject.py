"""Carries out one fault on a running stack and measures how each service that it hit recovers."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from loadtests.chaos.clocks import Clocks
from loadtests.chaos.corrupt import spoil_a_patch
from loadtests.chaos.damage import tear_newest_checkpoint
from loadtests.chaos.disk import SmallDisk
from loadtests.chaos.local_run import LocalRun
from loadtests.chaos.observer import Event, Observer
from loadtests.chaos.points import OWNER_NAME, owner_label
from loadtests.chaos.proxy import Proxy
from loadtests.chaos.recovery import Recovery, Watched
from loadtests.chaos.schedule import Fault, service_of
from schemas.table import Stream

POINT_WITHIN_S = 90.0  # longer than any message waits to be delivered again
RECOVERY_WITHIN_S = 180.0
_BY_ITSELF_S = 30.0
_STEPS_ITEMS = 4  # two steps and their demands
_COPIES = 2
_OF_A_GROUP = ("turn", "episode", "verdict")  # events whose subject names the group that the fault interrupts


@dataclass(frozen=True, kw_only=True)
class Record:
    """One process that one fault hit, from `at_s` to `until_s` after the first fault could strike. Recovery times as in
    `Recovery`, in seconds; `None`: not reached, or there is nothing to recover from.
    """

    fault: int
    kind: str
    service: str
    label: str
    at_service: str  # that the point is of; of a pair, one of the two
    point: str
    at_s: float
    until_s: float
    started_s: float | None = None
    ready_s: float | None = None
    unit_s: float | None = None
    taken_s: float | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Injector:
    """Faults of one run: `records` of those that struck, `missed` for those whose point did not come in time."""

    def __init__(
        self,
        run: LocalRun,
        observer: Observer,
        proxies: Mapping[str, Proxy],
        clocks: Clocks | None = None,
        disk: SmallDisk | None = None,
    ) -> None:
        self.run = run
        self.observer = observer
        self._proxies = proxies
        self._clocks = clocks
        self._disk = disk
        self._begun_s = time.monotonic()
        self.torn: set[str] = set()  # names of checkpoints that we have torn
        self.pairs: list[tuple[str, str]] = []  # services that died together, the one at its point first
        self.records: list[Record] = []
        self.injected = 0
        self.missed: list[Fault] = []
        self.whole_s: dict[int, float] = {}  # fault -> seconds until the group that it interrupted was whole
        self._interrupted: dict[str, list[tuple[int, float]]] = {}
        observer.listen(self._on_event)

    def begin(self) -> None:
        """From now on times are counted."""
        self._begun_s = time.monotonic()

    async def server(self) -> str:
        """Where the run's server is; the proxies lead there from then on."""
        url = await self.run.url()
        for proxy in self._proxies.values():
            proxy.target = int(url.rsplit(":", 1)[1])
        return url

    async def watch(self) -> None:
        """Let the observer in."""
        await self.observer.connect(await self.server(), self.run.seed)

    async def carry_out(self, fault: Fault) -> list[Record]:
        """Inject one fault and wait until what it hit works again; its records, empty when its point did not come."""
        match fault.kind:
            case "pause":
                records = await self._pause(fault)
            case "cut":
                records = await self._cut(fault)
            case "duplicate":
                records = await self._duplicate(fault)
            case "clock":
                records = await self._clock(fault)
            case "full disk":
                records = await self._full_disk(fault)
            case "corrupt patch":
                records = await self._corrupt_patch(fault)
            case _:
                records = await self._kill(fault)
        if records:
            self.injected += 1
            self.records += records
        else:
            self.missed.append(fault)
        return records

    async def _kill(self, fault: Fault) -> list[Record]:
        """SIGKILL at the observed point, inside the callback that brings the event; of a pair, both in the same instant."""
        assert fault.point is not None
        sees, hit = fault.point.sees, list[Watched]()

        def strike(label: str) -> bool:
            watched = Watched(self.run, self.observer, label)
            if not watched.kill():
                return False
            hit.append(watched)
            return True

        def look(event: Event) -> bool:
            label = sees(event, self.observer.picture)
            if not label or not strike(label):
                return False
            if fault.label and strike(self._now(fault.label)):
                self.pairs.append(fault.pair())
            return True

        event = await self.observer.first(look, POINT_WITHIN_S)
        if event is None:
            return []
        if event.words[0] in _OF_A_GROUP:
            self._interrupted.setdefault(event.words[1], []).append((fault.number, event.at_s))
        note = self._tear() if fault.kind == "torn checkpoint" else ""
        found = await asyncio.gather(*(watched.recovered(event.at_s, RECOVERY_WITHIN_S) for watched in hit))
        return [self._record(fault, recovery, event.at_s, fault.point.after, note) for recovery in found]

    async def _pause(self, fault: Fault) -> list[Record]:
        """SIGSTOP for longer than others wait, then SIGCONT: the stopped one wakes up in a world that went on without it."""
        label = self._now(fault.label)
        before = Watched(self.run, self.observer, label)  # to see who takes over meanwhile
        at, process = time.monotonic(), self.run.signal(label, signal.SIGSTOP)
        if process is None:
            before.end()
            return []
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            watched = Watched(self.run, self.observer, label)
            process.signal(signal.SIGCONT)
            taken_s = before.end()
        recovery = await watched.recovered(time.monotonic(), RECOVERY_WITHIN_S)
        note = "" if taken_s is None else f"another one took over after {taken_s - at:.1f} s"
        return [self._record(fault, recovery, at, f"stopped for {fault.seconds:g} s", note)]

    async def _cut(self, fault: Fault) -> list[Record]:
        assert fault.mode is not None
        at, label = time.monotonic(), self._now(fault.label)
        async with self._proxies[label].disturbed(fault.mode):
            await asyncio.sleep(fault.seconds)
            watched = Watched(self.run, self.observer, label)
        recovery = await watched.recovered(time.monotonic(), RECOVERY_WITHIN_S)
        return [self._record(fault, recovery, at, f"connection: {fault.mode} for {fault.seconds:g} s")]

    async def _duplicate(self, fault: Fault) -> list[Record]:
        """Put a request on its queue again, as a publisher does whose acknowledgement was lost."""
        event = await self.observer.first(lambda e: e.words[: len(fault.words)] == fault.words, POINT_WITHIN_S)
        if event is None:
            return []
        headers = {key: value for key, value in event.headers.items() if not key.startswith("Nats-")}
        for _ in range(_COPIES):
            await self.observer.publish(event.words, event.data, headers)
        label = f"engine-{event.words[-1]}" if event.words[0] == "gen" else "sandbox-x0"
        return [self._record(fault, Recovery(label), event.at_s, f"{'.'.join(fault.words)} published again")]

    async def _clock(self, fault: Fault) -> list[Record]:
        """The wall clock of one service jumps, and later jumps back."""
        assert self._clocks is not None
        at = time.monotonic()
        try:
            self._clocks.set(fault.label, fault.offset_s)
            await asyncio.sleep(fault.seconds)
        finally:
            self._clocks.set(fault.label, 0)
        watched = Watched(self.run, self.observer, fault.label)
        recovery = await watched.recovered(time.monotonic(), RECOVERY_WITHIN_S)
        return [self._record(fault, recovery, at, f"wall clock off by {fault.offset_s:+d} s")]

    async def _full_disk(self, fault: Fault) -> list[Record]:
        """No room under the store for a while. A server that gave up meanwhile is started again, as an operator would."""
        assert self._disk is not None
        at = time.monotonic()
        self._disk.fill()
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            self._disk.empty()
        emptied, note = time.monotonic(), ""
        watched = Watched(self.run, self.observer, fault.label)
        if not await self._goes_on(_BY_ITSELF_S):
            note = "the server had to be started again"
            watched.kill()
        recovery = await watched.recovered(emptied, RECOVERY_WITHIN_S)
        return [self._record(fault, recovery, at, f"no room under the store for {fault.seconds:g} s", note)]

    async def _goes_on(self, within_s: float) -> bool:
        """Do the trainer's demands and steps reach the store? They need every other stream."""
        deadline, first = time.monotonic() + within_s, await self.observer.stored(Stream.TRAIN)
        while time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            now = await self.observer.stored(Stream.TRAIN)
            first = now if first is None else first
            if now is not None and first is not None and now >= first + _STEPS_ITEMS:
                return True
        return False

    async def _corrupt_patch(self, fault: Fault) -> list[Record]:
        """A byte of a published patch is another one before any engine has read it. Its version has an anchor beside it."""
        spoiled = await spoil_a_patch(self.run, self.observer, POINT_WITHIN_S)
        if spoiled is None:
            return []
        found = await spoiled.outcome(RECOVERY_WITHIN_S)
        point = "the patch of its next version is damaged"
        return [self._record(fault, recovery, spoiled.at_s, point, note) for recovery, note in found]

    def _tear(self) -> str:
        name, note = tear_newest_checkpoint(self.run.folder)
        self.torn |= {name} if name else set()
        return note

    def _now(self, label: str) -> str:
        """The label of a process, where a role's owner is meant, of that one."""
        return owner_label(service_of(label), self.observer.picture) if label.endswith(f"-{OWNER_NAME}") else label

    def _on_event(self, event: Event) -> None:
        if event.words[0] == "ready":
            for number, at_s in self._interrupted.pop(event.words[1], []):
                self.whole_s[number] = round(event.at_s - at_s, 3)

    def _record(self, fault: Fault, recovery: Recovery, at_s: float, point: str, note: str = "") -> Record:
        service = service_of(recovery.label)
        return Record(
            fault=fault.number,
            kind=fault.kind,
            service=service,
            label=recovery.label,
            at_service=service if fault.point is None else fault.point.service,
            point=point,
            at_s=round(at_s - self._begun_s, 3),
            until_s=round(time.monotonic() - self._begun_s, 3),
            started_s=recovery.started_s,
            ready_s=recovery.ready_s,
            unit_s=recovery.unit_s,
            taken_s=recovery.taken_s,
            note=note,
        )
