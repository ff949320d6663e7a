"""The admission service: the ledger's one writer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from admission.assembly import Assembly, decide
from admission.gates import GateSettings
from admission.losses import lost_entries
from admission.presence import lost_items
from schemas.codec import CodecError, decode_any
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, QuarantineEntry, QuarantineReason
from schemas.table import Stream
from schemas.training import BatchDemand, StepCommit
from services.config import Config
from services.continuity import Hole
from services.dead_letters import pass_over
from services.feed import Arrival, Feed, Source
from services.items import BusError, Fenced, Item, nanoseconds
from services.ownership import Ownership
from services.pull import Damaged
from services.runtime import ServiceContext
from services.standing_wait import StandingWait

log = structlog.get_logger()
_TURN_S = 0.5
_NAMED_WAIT_S = 600.0


async def serve(context: ServiceContext) -> None:
    """Decide batches until `context.stop`.

    Consumes: TASKS, READY, TRAIN and LEDGER, each from its beginning; of EPISODES, whether what a batch names is there.
    Produces: LEDGER; every append is fenced by the stream's last sequence.
    Waits for: the ownership, by its holder's name, while it folds along; then a demand (names the trainer), or enough eligible
    groups (names bank, rollouter and verifier).
    On error: an item that cannot be read is passed over with an alarm, and a group that lost an item is abandoned with its
    name; in LEDGER, damage and holes end the service, since nothing may be decided beside a partial ledger. A refused append
    means that an owner before this one was still writing: this one reads on and decides again. A lost ownership ends it.
    On stop: ends between two appends.
    """
    feed = Feed(context.bus, [Source(stream) for stream in (Stream.LEDGER, Stream.READY, Stream.TRAIN, Stream.TASKS)])
    ownership, ended = Ownership(context), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(feed.run(context.stop), name="feed")
        group.create_task(ownership.hold(ended), name="ownership")
        try:
            await _Admission(context, feed, ownership).work()
        finally:
            ended.set()


class LedgerDamaged(BusError):
    """LEDGER lacks entries that were written. Nothing is decided beside a partial ledger."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; nothing can be decided on a partial ledger: restore the store from a copy, or begin a new run"
        )


def gate_settings(config: Config) -> GateSettings:
    """The gates as the configuration says."""
    section = config.admission
    return GateSettings(
        max_lag=section.max_lag,
        versions=section.versions,
        zero_variance=section.zero_variance,
        min_rewards=section.min_rewards,
        max_span=section.max_span,
        max_age_s=section.max_age_s,
    )


def _sequence(arrival: Arrival) -> int:
    """Up to where an arrival brings the reader of its log; 0 for one that says nothing of it."""
    if arrival.item is not None:
        return arrival.item.seq
    if isinstance(arrival.damage, Damaged):
        return arrival.damage.item.seq
    return arrival.damage.last if isinstance(arrival.damage, Hole) else 0


def _names_manifest(entry: LedgerEntry) -> bool:
    return isinstance(entry, QuarantineEntry) and entry.reason is QuarantineReason.MANIFEST


class _Admission:
    """The assembly core with its reads and writes."""

    def __init__(self, context: ServiceContext, feed: Feed, ownership: Ownership) -> None:
        self.context = context
        self.bus = context.bus
        self.health = context.health
        self.feed = feed
        self.ownership = ownership
        self.state = Assembly()
        self.folded = {Stream.READY: 0, Stream.TASKS: 0}  # sequence up to which everything is
        self.settings = gate_settings(context.config)
        self.waiting = StandingWait(context.health, _NAMED_WAIT_S)

    async def work(self) -> None:
        """The loop: take what came, decide, append, say what is waited for."""
        while not self.context.stop.is_set():
            for arrival in await self.feed.take(_TURN_S):
                await self.fold(arrival)
            if not self.feed.complete:
                self.waiting.on("the recorded streams", f"nats-server: {self.feed.behind()}", "nothing is decided before")
                continue
            if not self.ownership.held:
                self.waiting.over()
                continue
            if self.health.phase == "starting":
                self.context.ready()
            await self.append_decisions()
            self.report()
        self.waiting.over()

    async def fold(self, arrival: Arrival) -> None:
        """One item into the state. One that cannot be read is passed over; READY then has lost its group."""
        damage = arrival.damage
        if arrival.stream in self.folded:
            self.folded[arrival.stream] = max(self.folded[arrival.stream], _sequence(arrival))
        if arrival.item is None:
            if damage is not None and arrival.stream is Stream.LEDGER:
                raise self.damaged_ledger(str(damage) if isinstance(damage, Hole) else damage.reason)
            if isinstance(damage, Damaged):
                await self.pass_over(damage.item, damage)
            return
        item = arrival.item
        try:
            message = decode_any(item.data)
            if isinstance(message, ReadyGroup) and not message.stands_on(item.subject):
                raise CodecError(f"it is the entry of {message.group}")
        except CodecError as error:
            if arrival.stream is Stream.LEDGER:
                raise self.damaged_ledger(f"{item.subject}: entry {item.seq} cannot be read: {error}") from error
            await self.pass_over(item, item, error)
            return
        match message:
            case GroupLease():
                self.state.lease(message, item.time_ns)
            case ReadyGroup(purpose="train"):
                self.state.ready(item.seq, message, item.time_ns)
            case BatchDemand():
                self.state.demand(item.seq, message, item.time_ns)
            case StepCommit():
                self.state.step(message)
            case BatchEntry() | QuarantineEntry() | AbandonEntry():
                self.state.entry(item.seq, message)

    async def pass_over(self, item: Item, found: Item | Damaged, error: CodecError | None = None) -> None:
        """Go on without an item."""
        await pass_over(self.bus, found, error)
        kind, _, group = item.subject.removeprefix(self.bus.subjects.prefix).rpartition(".")
        if kind == "ready":
            self.state.unusable(item.seq, group)

    def damaged_ledger(self, what: str) -> LedgerDamaged:
        """The error to raise."""
        self.bus.alarm("ledger_damaged", what=what)
        return LedgerDamaged(what)

    def entries(self) -> Sequence[LedgerEntry]:
        """What the ledger lacks: first the groups that lost something, also out of a batch, then what answers the demand."""
        lost = lost_entries(self.state, self.bus.run, self.settings.hash())
        return lost or decide(self.state, self.settings)

    async def learn_ages(self) -> None:
        """With an age limit a decision needs all that was ready at its demand: ask the server whether that has been read.

        The answer's clock is that of READY, so what is stored there after it is stored no earlier. The lease of what stands in
        READY was stored before it, and is asked for afterwards.
        """
        held = self.state.outstanding() if self.settings.max_age_s else None
        if held is None or self.state.background.last_ready_by(self.state.background.demanded_ns(held[0])) is not None:
            return
        reply = await self.bus.api(f"STREAM.INFO.{self.bus.subjects.stream(Stream.READY)}", {})
        if "error" in reply or self.folded[Stream.READY] < int(reply["state"]["last_seq"]):
            return
        if await self.knows_leases():
            self.state.background.is_known_until(nanoseconds(reply["ts"]))

    async def knows_leases(self) -> bool:
        """Whether every lease has been read, with its time and its manifest, whose fields a refusal names."""
        return self.folded[Stream.TASKS] >= await self.bus.last_sequence(Stream.TASKS)

    async def append_decisions(self) -> None:
        """Append what the ledger lacks. A refusal ends the turn: what stands there instead is folded first."""
        while not self.context.stop.is_set():
            await self.learn_ages()
            entries = self.entries()
            if not entries:
                return
            for entry in entries:
                if isinstance(entry, BatchEntry) and not await self.can_be_handed_over(entry):
                    return
                if _names_manifest(entry) and not await self.knows_leases():
                    return
                await self.ownership.confirm()
                try:
                    published = await self.bus.append(self._subject(entry), entry, after=self.state.ledger_seq)
                except Fenced as error:
                    log.warning("append refused", reason=str(error))
                    self.health.count("fenced")
                    return
                self.state.entry(published.seq, entry)
                self._log(entry, published.seq)

    async def can_be_handed_over(self, batch: BatchEntry) -> bool:
        """Whether everything that a batch names is in the store; what is not is noted as lost.

        A step that is committed without its batch means that the ledger lost entries. It is then decided again, as the same
        inputs give the same decision; raises `LedgerDamaged` where they do not.
        """
        names = tuple(member.group for member in batch.groups)
        committed = self.state.committed(batch.step)
        if committed is not None:
            if await self.bus.last_sequence(Stream.LEDGER) != self.state.ledger_seq:
                return False
            if not committed.stands_on(names):
                raise self.damaged_ledger(
                    f"LEDGER has no batch {batch.step}, which was committed with {committed.groups}; decided now: {names}"
                )
            self.bus.alarm("ledger_restored", step=batch.step, after=self.state.ledger_seq)
            return True
        lost = await lost_items(self.bus, [self.state.open_group(name) for name in names])
        for group, item in lost.items():
            self.bus.alarm("lost_items", group=group, stream=item.stream, seq=item.seq)
            self.state.lose(group, item)
        return not lost

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

    def report(self) -> None:
        """Counters, and for whom the ledger waits."""
        for name, value in self.state.counters.items():
            self.health.set(name, value)
        self.health.set("depth", self.state.depth())
        self.health.set("max_lag", max(self.state.last_lags, default=0))
        held = self.state.outstanding()
        if held is None:
            self.waiting.on(
                f"the demand after step {self.state.step_committed}", "trainer", "the wait goes on; groups stay ready"
            )
        else:
            self.waiting.on(f"eligible groups for step {held[1].step}", "bank, rollouter, verifier", "the wait goes on")
