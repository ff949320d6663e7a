"""The admission service: the ledger's one writer."""

from __future__ import annotations

import asyncio
import time

import structlog

from admission.assembly import Assembly, decide
from admission.gates import GateSettings
from schemas.codec import CodecError, decode_any
from schemas.group import ReadyGroup
from schemas.health import Heartbeat
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, QuarantineEntry
from schemas.table import Role, Stream
from schemas.training import BatchDemand, StepCommit
from services.bus import Bus, BusError, Fenced
from services.config import Config
from services.consume import read_latest
from services.feed import Arrival, Feed, Source
from services.runtime import ServiceContext
from services.standing_wait import StandingWait

log = structlog.get_logger()
_TURN_S = 0.5
_NAMED_WAIT_S = 600.0
_STANDBY = "standby"


async def serve(context: ServiceContext) -> None:
    """Decide batches until `context.stop`.

    Consumes: READY, TRAIN and LEDGER, each from its beginning.
    Produces: LEDGER; every append is fenced by the stream's last sequence.
    Waits for: a demand (names the trainer), or enough eligible groups (names bank, rollouter and verifier); as a standby, for
    the silence of the active writer.
    On error: an unreadable item is logged, counted and passed over, except in LEDGER, where it ends the service. A refused
    append means that another writer is active: this one reads on and decides nothing until the other's heartbeat stands still.
    On stop: ends between two appends.
    """
    feed = Feed(context.bus, (Source(Stream.LEDGER), Source(Stream.READY), Source(Stream.TRAIN)))
    async with asyncio.TaskGroup() as group:
        group.create_task(feed.run(context.stop), name="feed")
        await _Admission(context, feed).work()


def gate_settings(config: Config) -> GateSettings:
    """The gates as the configuration says."""
    section = config.admission
    return GateSettings(
        max_lag=section.max_lag, versions=section.versions, zero_variance=section.zero_variance, min_rewards=section.min_rewards
    )


class _Admission:
    """The assembly core with its reads and writes."""

    def __init__(self, context: ServiceContext, feed: Feed) -> None:
        self.context = context
        self.bus = context.bus
        self.health = context.health
        self.feed = feed
        self.state = Assembly()
        self.settings = gate_settings(context.config)
        self.waiting = StandingWait(context.health, _NAMED_WAIT_S)
        self.standby: _Standby | None = None

    async def work(self) -> None:
        """The loop: take what came, decide, append, say what is waited for."""
        while not self.context.stop.is_set():
            for arrival in await self.feed.take(_TURN_S):
                self.fold(arrival)
            if not self.feed.complete:
                self.waiting.on("the recorded streams", f"nats-server: {self.feed.behind()}", "nothing is decided before")
                continue
            if self.health.phase == "starting":
                self.context.ready()
            if self.standby is not None and not await self._may_take_over(self.standby):
                continue
            await self.append_decisions()
            self.report()
        self.waiting.over()

    def fold(self, arrival: Arrival) -> None:
        """One item into the state. One that cannot be read is logged, counted and passed over."""
        item = arrival.item
        if item is None:
            return
        try:
            message = decode_any(item.data)
        except CodecError as error:
            if arrival.stream is Stream.LEDGER:  # deciding on would contradict what stands there
                raise BusError(f"{item.subject}: ledger entry {item.seq} cannot be read: {error}") from error
            log.error("unreadable", subject=item.subject, seq=item.seq, error=str(error))
            self.health.count("unreadable")
            return
        match message:
            case ReadyGroup(purpose="train"):
                self.state.ready(item.seq, message)
            case BatchDemand():
                self.state.demand(item.seq, message)
            case StepCommit():
                self.state.step(message)
            case BatchEntry() | QuarantineEntry() | AbandonEntry():
                self.state.entry(item.seq, message)

    async def append_decisions(self) -> None:
        """Append what the ledger lacks. A refusal, or our very bytes by another hand, ends the turn."""
        while not self.context.stop.is_set() and (entries := decide(self.state, self.settings)):
            for entry in entries:
                try:
                    published = await self.bus.append(self._subject(entry), entry, after=self.state.ledger_seq)
                except Fenced as error:
                    await self._stand_by(str(error))
                    return
                self.state.entry(published.seq, entry)
                self._log(entry, published.seq)
                if published.duplicate and await self._stand_by("another writer appended the same decision"):
                    return

    def _subject(self, entry: LedgerEntry) -> str:
        if isinstance(entry, BatchEntry):
            return self.bus.subjects.batch(entry.step)
        if isinstance(entry, QuarantineEntry):
            return self.bus.subjects.quarantine(entry.group)
        return self.bus.subjects.abandon(entry.group)

    def _log(self, entry: LedgerEntry, seq: int) -> None:
        if isinstance(entry, BatchEntry):
            lags = [member.lag for member in entry.groups]
            log.info("batch", step=entry.step, version=entry.version, groups=len(lags), max_lag=max(lags), seq=seq)
        else:
            log.info("turned away", group=entry.group, reason=str(entry.reason), detail=entry.detail, seq=seq)

    async def _stand_by(self, reason: str) -> bool:
        """Become the standby of a living rival; false when there is none, so that this writer may go on."""
        rival = await find_rival(self.bus)
        log.warning(
            "append refused" if rival else "append repeated", reason=reason, rival=rival.instance if rival else "none alive"
        )
        self.health.count("fenced")
        if rival is None:
            return False
        self.standby = _Standby(rival, self.context.config.telemetry.heartbeat_s)
        self.health.set(_STANDBY, 1)
        self.waiting.on(
            "the active writer to end", f"admission {rival.instance} on {rival.host}", "take over once it is silent"
        )
        return True

    async def _may_take_over(self, standby: _Standby) -> bool:
        if not await standby.over(self.bus):
            return False
        log.info("taking over", silent=standby.rival.instance)
        self.standby = None
        self.health.set(_STANDBY, 0)
        self.waiting.over()
        return True

    def report(self) -> None:
        """Counters, and for whom the ledger waits."""
        for name, value in self.state.counters.items():
            self.health.set(name, value)
        self.health.set("depth", self.state.depth())
        self.health.set("max_lag", max(self.state.last_lags, default=0))
        held = self.state.outstanding()
        if self.standby is not None:
            return
        if held is None:
            self.waiting.on(
                f"the demand after step {self.state.step_committed}", "trainer", "the wait goes on; groups stay ready"
            )
        else:
            self.waiting.on(f"eligible groups for step {held[1].step}", "bank, rollouter, verifier", "the wait goes on")


async def find_rival(bus: Bus) -> Heartbeat | None:
    """Another admission instance that has said that it works; `None` if there is none."""
    beats = await _heartbeats(bus)
    rivals = [beat for beat in beats if beat.phase in ("starting", "ready") and not beat.counters.get(_STANDBY)]
    return max(rivals, key=lambda beat: beat.at_ns, default=None)


async def _heartbeats(bus: Bus) -> list[Heartbeat]:
    beats: list[Heartbeat] = []
    for item in await read_latest(bus, Stream.REGISTRY, f"reg.service.{Role.ADMISSION}.*"):
        try:
            beat = item.decode(Heartbeat)
        except CodecError as error:
            log.warning("unreadable heartbeat", subject=item.subject, error=str(error))
            continue
        if beat.instance != bus.instance:
            beats.append(beat)
    return beats


class _Standby:
    """Watches the active writer's heartbeat by our own clock: over when it says goodbye, stands by itself, or stands still."""

    def __init__(self, rival: Heartbeat, heartbeat_s: float) -> None:
        self.rival = rival
        self._silence_s = 3 * heartbeat_s + 1.0
        self._look_every_s = heartbeat_s
        self._looked = self._changed = time.monotonic()

    async def over(self, bus: Bus) -> bool:
        now = time.monotonic()
        if now - self._looked < self._look_every_s:
            return False
        self._looked = now
        rival = await find_rival(bus)
        if rival is None:
            return True
        if (rival.instance, rival.at_ns) != (self.rival.instance, self.rival.at_ns):
            self.rival, self._changed = rival, now
        return now - self._changed > self._silence_s
