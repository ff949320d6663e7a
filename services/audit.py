"""What an audit looks at: everything that the logs of a run hold, what is damaged or missing in them, and the checkpoints.

Only stored messages are read, never counters; high-water marks of heartbeats say only how long a log once was.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TypeVar

from schemas.codec import CodecError, decode_any
from schemas.dead_letter import DeadLetter, LostRange
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, QuarantineEntry
from schemas.message import Message
from schemas.policy import WeightsManifest
from schemas.table import Stream
from schemas.training import StepCommit
from services.bus import Bus
from services.consume import BATCH, events, read_events
from services.continuity import Hole
from services.high_water import cut_short
from services.items import Item
from services.pull import Damaged

M = TypeVar("M", bound=Message)
_PULL = 8 * BATCH


@dataclass(frozen=True, slots=True)
class Unusable:
    """A stored message that nobody can use, and why."""

    stream: Stream
    seq: int
    subject: str
    why: str


@dataclass(frozen=True, slots=True)
class CheckpointFact:
    """What a checkpoint folder holds; `damage` says why it must not be used, and then nothing else is known."""

    path: str
    damage: str = ""
    step: int = -1
    version: int = -1
    incarnation: int = 0
    digest: str = ""
    consumed: tuple[str, ...] = ()
    ledger_position: int = 0


Placed = list[tuple[int, M]]  # messages with their sequences, in the log's order


@dataclass
class Evidence:
    """The logs of one run. `episodes`: digest of the bytes at each EPISODES sequence."""

    run: str
    leases: Placed[GroupLease] = field(default_factory=list)
    ready: Placed[ReadyGroup] = field(default_factory=list)
    ledger: list[tuple[int, LedgerEntry]] = field(default_factory=list)
    steps: Placed[StepCommit] = field(default_factory=list)
    manifests: Placed[WeightsManifest] = field(default_factory=list)
    episodes: dict[int, str] = field(default_factory=dict)
    unusable: list[Unusable] = field(default_factory=list)
    holes: list[Hole] = field(default_factory=list)
    letters: Placed[DeadLetter] = field(default_factory=list)
    checkpoints: list[CheckpointFact] = field(default_factory=list)
    messages: dict[Stream, int] = field(default_factory=dict)


async def gather(bus: Bus) -> Evidence:
    """Read a run's logs to their present ends."""
    found = Evidence(bus.run)
    for stream in (Stream.TASKS, Stream.READY, Stream.LEDGER, Stream.TRAIN, Stream.POLICY, Stream.DEAD):
        for event in await read_events(bus, stream):
            _take(found, stream, event)
    await _read_episodes(bus, found)
    for event in await read_events(bus, Stream.TURNS, bodies=False):
        _count(found, Stream.TURNS, event)
    found.holes += [hole for hole in await cut_short(bus) if hole not in found.holes]
    return found


def _take(found: Evidence, stream: Stream, event: Item | Damaged | Hole) -> None:
    item = _count(found, stream, event)
    if item is None:
        return
    try:
        message = decode_any(item.data)
        if isinstance(message, ReadyGroup) and not message.stands_on(item.subject):
            raise CodecError(f"it is the entry of {message.group}")
    except CodecError as error:
        found.unusable.append(Unusable(stream, item.seq, item.subject, str(error)))
        return
    match message:
        case GroupLease():
            found.leases.append((item.seq, message))
        case ReadyGroup():
            found.ready.append((item.seq, message))
        case BatchEntry() | QuarantineEntry() | AbandonEntry():
            found.ledger.append((item.seq, message))
        case StepCommit():
            found.steps.append((item.seq, message))
        case WeightsManifest():
            found.manifests.append((item.seq, message))
        case DeadLetter():
            found.letters.append((item.seq, message))
        case LostRange() if message.how in ("truncated", "recreated"):  # the log itself no longer shows it
            found.holes.append(Hole(Stream(message.stream), message.first_seq, message.last_seq, message.how))


async def _read_episodes(bus: Bus, found: Evidence) -> None:
    """Episodes are many and large: their digests are kept, and only what READY does not name by digest is decoded."""
    named = {digest for _, group in found.ready for s in group.siblings for digest in (s.episode_digest, s.verdict_digest)}
    async for event in events(bus, Stream.EPISODES, stop=asyncio.Event(), live=False, batch=_PULL):
        item = _count(found, Stream.EPISODES, event)
        if item is not None:
            found.episodes[item.seq] = item.digest
            if item.digest not in named:
                try:
                    decode_any(item.data)
                except CodecError as error:
                    found.unusable.append(Unusable(Stream.EPISODES, item.seq, item.subject, str(error)))


def _count(found: Evidence, stream: Stream, event: Item | Damaged | Hole | None) -> Item | None:
    """The intact item of an event; everything else is noted."""
    if isinstance(event, Hole):
        found.holes.append(event)
        return None
    if isinstance(event, Damaged):
        found.unusable.append(Unusable(stream, event.item.seq, event.item.subject, event.reason))
        return None
    if event is not None:
        found.messages[stream] = found.messages.get(stream, 0) + 1
    return event
