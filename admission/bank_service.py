"""The bank service: joins siblings and verdicts, and publishes each group once, in completion order.

It also sees to it that no group stays open because an item of it was lost. That a lease has all its episodes, and an episode
its verdict, is what the rollouters' and the verifiers' acknowledgements say; what the log lacks all the same is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

import structlog

from admission.joining import Bank, EpisodeFact, VerdictFact, episode_fact, verdict_fact
from schemas.codec import CodecError
from schemas.group import LOST, ReadyGroup
from schemas.lease import GroupLease
from schemas.table import Stream, consumer_of
from schemas.trajectory import Episode, Verdict
from services.consume import events, read_events
from services.continuity import Hole, LogRewound, Standing
from services.dead_letters import pass_over, report_loss
from services.health import pause
from services.high_water import cut_short
from services.items import IntegrityError, Item, OnceConflict, Published
from services.pull import Damaged
from services.runtime import ServiceContext
from services.standing_wait import StandingWait

log = structlog.get_logger()
_DECODE_ASIDE_BYTES = 256 * 1024
_NAMED_WAIT_S = 600.0
_SINGLE_READS = 32  # up to here single reads cost the server less than a consumer
_LOOK_EVERY_S = 5.0  # leases are read for the status too; no decision depends on when


async def serve(context: ServiceContext) -> None:
    """Join until `context.stop`.

    Consumes: EPISODES in stream order; TASKS whenever a group is not known yet; READY at the start; how far the rollouters and
    verifiers have acknowledged.
    Produces: `ready.<group>` (training) and `graded.<group>` (evaluation), each once, in completion order.
    Waits for: the next sealed episode or verdict; names the oldest open group.
    On error: an item that cannot be read, and one that is missing though it was written, are lost: an alarm, and facts that end
    their group; a group that READY holds with other bytes is logged and left as it is. When what was read no longer stands in
    the log, the service ends, and its successor folds anew. On stop: ends after the publish in hand; a restart folds everything
    again.
    """
    joiner = _Joiner(context)
    await joiner.settle()
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(joiner.look_after_losses(ended), name="losses")
        try:
            await joiner.join(StandingWait(context.health, _NAMED_WAIT_S))
        finally:
            ended.set()


class _Joiner:
    """The bank's core with its reads and writes."""

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self.bus = context.bus
        self.health = context.health
        self.bank = Bank()
        self.next_lease_seq = 1
        self.next_look = 0.0
        self.position = 0  # EPISODES sequence up to which everything is in the bank
        self.ready_log = Standing(Stream.READY, 1)
        self.last_ready: Published | None = None
        self.learning = asyncio.Lock()

    async def join(self, waiting: StandingWait) -> None:
        """The loop over EPISODES."""
        async for event in events(self.bus, Stream.EPISODES, stop=self.context.stop):
            if event is None:
                await self.report(waiting)
                if self.health.phase == "starting":
                    self.context.ready()
            elif isinstance(event, Hole):
                self.position = max(self.position, event.last)
            else:
                ready = await self.take(event)
                if ready is not None:
                    await self.publish(ready)
                self.position = event.item.seq if isinstance(event, Damaged) else event.seq
        waiting.over()

    async def settle(self) -> None:
        """Learn which groups READY holds already, and say which logs are shorter than they were."""
        for hole in await cut_short(self.bus):
            await report_loss(self.bus, hole)
        self.ready_log.look(await self.bus.stream_state(Stream.READY))
        for event in await read_events(self.bus, Stream.READY):
            if not isinstance(event, Hole):
                item = event.item if isinstance(event, Damaged) else event
                self.bank.close(item.subject.rpartition(".")[2])
                if isinstance(event, Item):
                    self._stands_in_ready(Published(item.seq, item.digest))

    def _stands_in_ready(self, published: Published) -> None:
        if published.seq > self.ready_log.at:
            self.ready_log.pass_to(published.seq, 0)
            self.last_ready = published

    async def learn_leases(self) -> None:
        """Fold what TASKS holds by now. A lease always precedes its episodes, so this is only ever a step behind."""
        async with self.learning:
            first, last = self.next_lease_seq, await self.bus.last_sequence(Stream.TASKS)
            if last < first - 1:
                raise await self._rewound(Hole(Stream.TASKS, last + 1, first - 1, "truncated"))
            for event in await self._leases(first, last) if last >= first else []:
                await self._learn(event)

    async def _leases(self, first: int, last: int) -> Sequence[Item | Damaged | Hole]:
        if last - first < _SINGLE_READS:
            with suppress(IntegrityError):
                return [await self.bus.get(Stream.TASKS, seq) for seq in range(first, last + 1)]
        return await read_events(self.bus, Stream.TASKS, start=first)

    async def _learn(self, event: Item | Damaged | Hole) -> None:
        if isinstance(event, Hole):
            self.next_lease_seq = max(self.next_lease_seq, event.last + 1)
        elif isinstance(event, Damaged):
            self.next_lease_seq = event.item.seq + 1
            await pass_over(self.bus, event)
        else:
            self.next_lease_seq = event.seq + 1
            try:
                self.bank.lease(event.decode(GroupLease), event.seq)
            except CodecError as error:
                await pass_over(self.bus, event, error)

    async def take(self, event: Item | Damaged) -> ReadyGroup | None:
        """Fold one episode or verdict; gives the group that it completed, if it did."""
        item = event.item if isinstance(event, Damaged) else event
        kind, group, slot_text = item.subject.rsplit(".", 3)[1:]
        if not self.bank.knows(group):
            await self.learn_leases()
        slot = int(slot_text) if slot_text.isdecimal() else -1
        if kind == "episode":
            return self.bank.episode(await self._episode(event, item, group, slot))
        return self.bank.verdict(await self._verdict(event, item, group, slot))

    async def _episode(self, event: Item | Damaged, item: Item, group: str, slot: int) -> EpisodeFact:
        lost = EpisodeFact(group=group, slot=slot, seq=item.seq, digest=item.digest, readable=False)
        if isinstance(event, Damaged):
            await pass_over(self.bus, event)
            return lost
        if not self.bank.is_open(group):
            return lost
        try:
            if len(item.data) > _DECODE_ASIDE_BYTES:
                episode = await asyncio.to_thread(item.decode, Episode)
            else:
                episode = item.decode(Episode)
            fact = episode_fact(group, slot, item.seq, item.digest, episode)
        except CodecError as error:
            await pass_over(self.bus, item, error)
            return lost
        if not fact.readable:
            await pass_over(self.bus, item, CodecError(f"it is the episode of {episode.group}, slot {episode.slot}"))
        return fact

    async def _verdict(self, event: Item | Damaged, item: Item, group: str, slot: int) -> VerdictFact:
        lost = VerdictFact(group=group, slot=slot, seq=item.seq, digest=item.digest, readable=False)
        if isinstance(event, Damaged):
            await pass_over(self.bus, event)
            return lost
        try:
            verdict = item.decode(Verdict)
            fact = verdict_fact(group, slot, item.seq, item.digest, verdict)
        except CodecError as error:
            await pass_over(self.bus, item, error)
            return lost
        if not fact.readable:
            await pass_over(self.bus, item, CodecError(f"it is the verdict on {verdict.group}, slot {verdict.slot}"))
        return fact

    async def publish(self, ready: ReadyGroup) -> None:
        """Write the group where it belongs, once."""
        subjects = self.bus.subjects
        subject = subjects.ready(ready.group) if ready.purpose == "train" else subjects.graded(ready.group)
        for sibling in ready.siblings:
            if sibling.status in LOST:
                self.bus.alarm("lost_items", group=ready.group, slot=sibling.slot, what=sibling.status)
        try:
            published = await self.bus.publish_once(subject, ready)
        except OnceConflict as error:
            log.error("ready group differs from the one in the stream", group=ready.group, error=str(error))
            self.health.count("conflicts")
            return
        self._stands_in_ready(published)
        self.health.count("published_again" if published.duplicate else f"{ready.purpose}_groups")
        log.debug("group is whole", group=ready.group, seq=published.seq, purpose=ready.purpose)

    async def look_after_losses(self, ended: asyncio.Event) -> None:
        """Now and then: end the groups of which something is missing that others have acknowledged as written.

        Raises `Rewound` when READY has lost what this bank knows to stand there: its successor writes it again.
        """
        while not await pause(ended, _LOOK_EVERY_S):
            await self._look_at_ready()
            await self.learn_leases()
            leases_done, episodes_done = await self._acknowledged("rollouter"), await self._acknowledged("verifier")
            end = await self.bus.last_sequence(Stream.EPISODES)  # all of it was written before this
            if end > self.position:
                continue
            for fact in self.bank.lost(leases_done, episodes_done):
                ready = self.bank.episode(fact) if isinstance(fact, EpisodeFact) else self.bank.verdict(fact)
                if ready is not None:
                    await self.publish(ready)

    async def _look_at_ready(self) -> None:
        try:
            self.ready_log.look(await self.bus.stream_state(Stream.READY))
            if self.last_ready is not None and not await self._still_stands(self.last_ready):
                self.ready_log.look(await self.bus.stream_state(Stream.READY))  # it may have been cut short since
                raise LogRewound(Hole(Stream.READY, self.last_ready.seq, self.last_ready.seq, "truncated"))
        except LogRewound as error:
            raise await self._rewound(error.hole) from error

    async def _rewound(self, hole: Hole) -> LogRewound:
        await report_loss(self.bus, hole)
        return LogRewound(hole)

    async def _still_stands(self, published: Published) -> bool:
        try:
            return (await self.bus.get(Stream.READY, published.seq)).digest == published.digest
        except IntegrityError:
            return False

    async def _acknowledged(self, consumer: str) -> int:
        """Stream sequence up to which a work consumer has nothing left to do; 0 where nobody has made it yet."""
        spec = consumer_of(consumer)
        reply = await self.bus.api(f"CONSUMER.INFO.{self.bus.subjects.stream(spec.stream)}.{spec.name}", {})
        return 0 if "error" in reply else int(reply["ack_floor"]["stream_seq"])

    async def report(self, waiting: StandingWait) -> None:
        """Counters, and the oldest group that is not whole yet."""
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + _LOOK_EVERY_S
            await self.learn_leases()
        still_open = self.bank.open_groups()
        self.health.set("open_groups", len(still_open))
        for name, value in self.bank.counters.items():
            self.health.set(name, value)
        if still_open:
            oldest = still_open[0]
            missing = self.bank.missing(oldest)
            waiting.on(f"the last sibling of {oldest}", missing, "the group stays open and is named again")
        else:
            waiting.over()
