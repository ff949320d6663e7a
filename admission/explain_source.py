"""Where an explanation comes from: a recording, or the logs of a run. Both give the same messages of one group or one step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from admission.record import found_by
from admission.recorded import configurations, message_of
from schemas.codec import CodecError, decode_any
from schemas.lease import ordinal_of
from schemas.ledger import BatchEntry
from schemas.message import Message
from schemas.table import Stream
from services.bus import Bus, IntegrityError, Item
from services.config import Config
from services.consume import read_events
from services.recording import DAMAGED, Recording

_STEP_STREAMS = (Stream.LEDGER, Stream.TRAIN, Stream.POLICY)


@dataclass(frozen=True, slots=True)
class Found:
    """One stored message: where it stands, when the server stored it, and what it says. `damage`: why it says nothing."""

    stream: Stream
    seq: int
    time_ns: int
    name: str  # subject below `hr.<run>.`
    message: Message | None
    damage: str = ""


class Source(Protocol):
    """A run, as far as explanations need it."""

    run: str
    config: Config | None

    async def of_group(self, group: str) -> list[Found]:
        """Everything that names the group: lease, journal, episodes, verdicts, ready entry, and what closed it."""
        ...

    async def of_step(self, step: int) -> list[Found]:
        """Everything that names the step: demands, batch, commits, and the version that came out of it."""
        ...

    async def ready(self, groups: Sequence[str]) -> list[Found]:
        """The ready entries of some groups."""
        ...


class RecordingSource:
    """Reads only the blocks that the index names."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.run = recording.header.run
        self.config = next(iter(configurations(recording)), None)

    async def of_group(self, group: str) -> list[Found]:
        ordinal = str(ordinal_of(group))
        found: list[Found] = []
        for stream, record in self._recording.of_group(group):
            words = record.subject.split(".")
            # a batch names its groups inside, and a lease has the ordinal in its subject
            if group in words or words[:2] == ["ledger", "batch"] or (words[0] == "task" and words[-1] == ordinal):
                message = message_of(record)
                if words[0] in ("ledger", "task") and group not in found_by(record.subject, message)[0]:
                    continue
                damage = record.fact.decode("utf-8", "replace") if record.form == DAMAGED else ""
                found.append(Found(stream, record.seq, record.time_ns, record.subject, message, damage))
        return found

    async def of_step(self, step: int) -> list[Found]:
        found: list[Found] = []
        for stream, record in self._recording.of_step(step, *_STEP_STREAMS):
            words = record.subject.split(".")
            numbered = words[-1].partition("-")[0]
            if stream is not Stream.POLICY and numbered != str(step):
                continue
            message = message_of(record)
            if step in found_by(record.subject, message)[1]:
                found.append(Found(stream, record.seq, record.time_ns, record.subject, message))
        return found

    async def ready(self, groups: Sequence[str]) -> list[Found]:
        wanted = {f"ready.{group}" for group in groups}
        found: dict[str, Found] = {}
        for group in groups:
            if f"ready.{group}" in found:
                continue
            for stream, record in self._recording.of_group(group, Stream.READY):
                if record.subject in wanted and record.subject not in found:
                    found[record.subject] = Found(stream, record.seq, record.time_ns, record.subject, message_of(record))
        return list(found.values())


class BusSource:
    """Reads by subject from a run's server."""

    def __init__(self, bus: Bus, config: Config | None) -> None:
        self._bus = bus
        self.run = bus.run
        self.config = config

    async def of_group(self, group: str) -> list[Found]:
        found = [
            *await self._read(Stream.TASKS, f"task.lease.{ordinal_of(group)}"),
            *await self._read(Stream.TURNS, f"turn.{group}.*.*.*"),
            *await self._read(Stream.EPISODES, f"episode.{group}.*", f"verdict.{group}.*"),
            *await self._read(Stream.READY, f"ready.{group}", f"graded.{group}"),
            *await self._read(Stream.LEDGER, f"ledger.quarantine.{group}", f"ledger.abandon.{group}"),
        ]
        if not any(item.stream is Stream.LEDGER for item in found):
            batches = await self._read(Stream.LEDGER, "ledger.batch.*")
            found += [item for item in batches if isinstance(item.message, BatchEntry) and _holds(item.message, group)]
        return found

    async def of_step(self, step: int) -> list[Found]:
        found = [
            *await self._read(Stream.LEDGER, f"ledger.batch.{step}"),
            *await self._read(Stream.TRAIN, "train.demand.*", "train.step.*"),
            *await self._read(Stream.POLICY),
        ]
        return [item for item in found if step in found_by(item.name, item.message)[1]]

    async def ready(self, groups: Sequence[str]) -> list[Found]:
        found: list[Found] = []
        for group in groups:
            try:
                item = await self._bus.last(self._bus.subjects.ready(group))
            except IntegrityError:
                continue
            found += self._usable([] if item is None else [item], Stream.READY)
        return found

    async def _read(self, stream: Stream, *patterns: str) -> list[Found]:
        events = await read_events(self._bus, stream, *patterns)
        return self._usable((event for event in events if isinstance(event, Item)), stream)

    def _usable(self, items: Iterable[Item], stream: Stream) -> list[Found]:
        found = []
        for item in items:
            name, message, damage = item.subject.removeprefix(self._bus.subjects.prefix), None, ""
            try:
                message = decode_any(item.data)
            except CodecError as error:
                damage = str(error)
            found.append(Found(stream, item.seq, item.time_ns, name, message, damage))
        return found


def _holds(batch: BatchEntry, group: str) -> bool:
    return any(member.group == group for member in batch.groups)
