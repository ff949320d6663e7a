"""`headrace replay --into`: a recording published to a server again, in its own rhythm, for live services to work on."""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from rich.console import Console

from admission.explain_text import when
from admission.record import found_by
from admission.recorded import message_of
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, QuarantineEntry
from schemas.message import Message
from schemas.table import Role, Stream, family_of, spec_of
from services.bus import Bus, BusError
from services.config import Config
from services.identity import may_create_streams
from services.provision import provision
from services.recording import WIRE, Record, Recording, RecordingError
from services.runtime import connect
from services.stack import on_signals

PUBLISHED = (Stream.TASKS, Stream.TURNS, Stream.EPISODES, Stream.READY, Stream.LEDGER, Stream.TRAIN, Stream.POLICY)
_NEXT = 5
_LOOK_S = 0.2
_BATCH_WAIT_S = 120.0
KEYS = ("group", "step", "reason")


@dataclass(frozen=True, slots=True)
class Break:
    """Where to stop: before the first message that concerns this group, step or reason."""

    key: str
    value: str

    @classmethod
    def of(cls, text: str) -> Break:
        """Raises `RecordingError` that says how it is written."""
        key, separator, value = text.partition("=")
        if key not in KEYS or not separator or not value:
            raise RecordingError(f"--break {text!r}: write group=g00000042, step=7 or reason=stale")
        return cls(key, value)

    def hits(self, record: Record, message: Message | None) -> bool:
        groups, steps = found_by(record.subject, message)
        if self.key == "group":
            return self.value in groups
        if self.key == "step":
            return self.value in {str(step) for step in steps}
        return isinstance(message, QuarantineEntry | AbandonEntry) and str(message.reason) == self.value

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def live_roles(text: str) -> frozenset[Role]:
    """Raises `RecordingError` naming the roles there are."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in list(Role):
            raise RecordingError(f"--live {word}: is no service; use {', '.join(Role)}")
    return frozenset(Role(word) for word in words)


def speed_of(text: str) -> float:
    """Raises `RecordingError` unless it is a positive number or `max`."""
    if text == "max":
        return float("inf")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise RecordingError(f"--speed {text!r}: write a number above 0, or max")
    return value


@dataclass
class Republish:
    """Publishes every record of which the publisher does not run live, each under its publisher's name.

    A step's commit waits until the live admission has decided its batch, since no trainer commits what it was not given.
    Stops at breaks; Ctrl-C ends it.
    """

    recording: Recording
    config: Config
    live: frozenset[Role]
    speed: float
    breaks: Sequence[Break]
    once: bool
    ask: Callable[[], str] = input

    async def run(self) -> int:
        """Raises `RecordingError` when it cannot be published whole, and `BusError` when the server cannot take it."""
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._check_bodies()
        stop = asyncio.Event()
        async with AsyncExitStack() as stack:
            stack.enter_context(on_signals(stop.set))
            buses = await self._connect(stack)
            published, began, first_ns = 0, time.monotonic(), 0
            hit = dict.fromkeys(self.breaks, False)
            timeline = Timeline(self.recording)
            for stream, record in timeline:
                first_ns = first_ns or record.time_ns
                message = message_of(record)
                for each in self.breaks:
                    if not hit[each] and each.hits(record, message):
                        hit[each] = True
                        paused = time.monotonic()
                        self._tell(each, stream, record, message, timeline)
                        if self.once or not await self._go_on():
                            self._console.print(f"ended at {each}: {published} messages were published", soft_wrap=True)
                            return 0
                        began += time.monotonic() - paused
                role = self.role_of(record)
                if role in self.live:
                    continue
                if not await _until(began + (record.time_ns - first_ns) / 1e9 / self.speed, stop):
                    return 0
                await self._causes(buses[role], record, stop)
                await self._publish(buses[role], record)
                published += 1
            for each, was in hit.items():
                if not was:
                    self._console.print(f"no message concerns {each}", soft_wrap=True)
            self._console.print(f"published {published} messages in {time.monotonic() - began:.1f} s", soft_wrap=True)
        return 0

    def role_of(self, record: Record) -> Role:
        """Who publishes this subject, by the table."""
        return family_of(record.subject)[1].publishers[0]

    def _check_bodies(self) -> None:
        path = self.recording.path
        for stream in PUBLISHED:
            facts = self.recording.facts(stream)
            owners = {role for subject in spec_of(stream).subjects for role in subject.publishers}
            if not facts.records or owners <= self.live:
                continue
            if stream in (Stream.TURNS, Stream.EPISODES) and not self.recording.header.bodies:
                raise RecordingError(
                    f"{path}: was made without bodies, so {stream} cannot be published; record again with them"
                )
            if facts.holes or facts.damaged:
                raise RecordingError(f"{path}: {stream} has holes or damage and cannot be published as it was")
            if stream is Stream.READY and not self.recording.facts(Stream.EPISODES).whole:
                raise RecordingError(
                    f"{path}: holds a part of the run, so READY would name other sequences; let a bank run live there"
                )

    async def _connect(self, stack: AsyncExitStack) -> dict[Role, Bus]:
        """One connection for each publisher, on streams that hold nothing yet."""
        roles = sorted({r for stream in PUBLISHED for s in spec_of(stream).subjects for r in s.publishers[:1]} - self.live)
        buses: dict[Role, Bus] = {}
        for role in roles:
            buses[role] = bus = await connect(self.config, role, f"replay-{os.getpid()}")
            stack.push_async_callback(bus.close)
            if len(buses) == 1 and may_create_streams(self.config.nats, role):
                await provision(bus, self.config.nats.store_bytes, self.config.nats.replicas)
        watcher = await connect(self.config, Role.OBSERVER, f"replay-{os.getpid()}")
        stack.push_async_callback(watcher.close)
        for stream in PUBLISHED:
            held = await watcher.last_sequence(stream)
            if held:
                raise BusError(
                    f"{self.config.nats.url}: {stream} of run {watcher.run} holds {held} messages;"
                    " replay into a server that does not know this run"
                )
        self._watcher = watcher
        return buses

    async def _publish(self, bus: Bus, record: Record) -> None:
        once = family_of(record.subject)[1].once
        headers = {"Nats-Expected-Last-Subject-Sequence": "0"} if once else {}
        await bus.store(bus.subjects.pattern(record.subject), record.data, headers)

    async def _causes(self, bus: Bus, record: Record, stop: asyncio.Event) -> None:
        """Wait for what the live services must have written before this. Raises `BusError` naming who did not."""
        words = record.subject.split(".")
        if words[:2] != ["train", "step"] or Role.ADMISSION not in self.live:
            return
        subject = bus.subjects.batch(int(words[2].partition("-")[0]))
        deadline = time.monotonic() + _BATCH_WAIT_S
        while not stop.is_set() and await self._watcher.last(subject) is None:
            if time.monotonic() > deadline:
                raise BusError(
                    f"admission: {subject} is not there after {_BATCH_WAIT_S:.0f} s, so {record.subject} cannot follow"
                )
            await asyncio.sleep(_LOOK_S)

    def _tell(self, each: Break, stream: Stream, record: Record, message: Message | None, timeline: Timeline) -> None:
        """Why it stops, and what comes next."""
        self._console.print(f"break at {each}: {describe(stream, record, message)}", soft_wrap=True)
        if self.role_of(record) in self.live:
            self._console.print(f"  it is for {self.role_of(record)}, which runs live, to write this", soft_wrap=True)
        self._console.print("next:", soft_wrap=True)
        for following, after in timeline.peek(_NEXT):
            self._console.print(f"  {describe(following, after, message_of(after))}", soft_wrap=True)

    async def _go_on(self) -> bool:
        self._console.print("Enter goes on, q and Enter ends", soft_wrap=True)
        try:
            return (await asyncio.to_thread(self.ask)).strip().lower() not in ("q", "quit")
        except EOFError:
            return False


class Timeline:
    """Every published stream's records, merged by the server's time of them; one can look ahead."""

    def __init__(self, recording: Recording) -> None:
        lanes = [self._lane(recording, stream) for stream in PUBLISHED]
        self._records = heapq.merge(*lanes, key=lambda pair: pair[1].time_ns)
        self._ahead: list[tuple[Stream, Record]] = []

    @staticmethod
    def _lane(recording: Recording, stream: Stream) -> Iterator[tuple[Stream, Record]]:
        return ((stream, record) for record in recording.records(stream))

    def __iter__(self) -> Iterator[tuple[Stream, Record]]:
        while True:
            if self._ahead:
                yield self._ahead.pop(0)
                continue
            found = next(self._records, None)
            if found is None:
                return
            yield found

    def peek(self, count: int) -> list[tuple[Stream, Record]]:
        """What comes next, without taking it."""
        while len(self._ahead) < count and (found := next(self._records, None)) is not None:
            self._ahead.append(found)
        return self._ahead[:count]


def describe(stream: Stream, record: Record, message: Message | None) -> str:
    """One record in one line."""
    more = ""
    if isinstance(message, QuarantineEntry | AbandonEntry):
        more = f": {message.reason}, {message.detail}"
    elif isinstance(message, GroupLease):
        more = f": {message.group}, {message.task_id}"
    size = "" if record.form == WIRE else " (without its body)"
    return f"{when(record.time_ns)}  {stream} {record.seq}  {record.subject}{more}{size}"


async def _until(moment: float, stop: asyncio.Event) -> bool:
    """Sleep until then; false when asked to stop."""
    while not stop.is_set():
        left = moment - time.monotonic()
        if left <= 0:
            return True
        try:
            await asyncio.wait_for(stop.wait(), min(left, 1.0))
        except asyncio.TimeoutError:
            continue
    return False
