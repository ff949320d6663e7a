"""The bank service: joins siblings and verdicts, and publishes each group once, in completion order."""

from __future__ import annotations

import asyncio
import time

import structlog

from admission.joining import Bank, EpisodeFact, VerdictFact, episode_fact, verdict_fact
from schemas.codec import CodecError
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.table import Stream
from schemas.trajectory import Episode, Verdict
from services.bus import Item, OnceConflict
from services.consume import fold, read_all
from services.runtime import ServiceContext
from services.standing_wait import StandingWait

log = structlog.get_logger()
_DECODE_ASIDE_BYTES = 256 * 1024
_NAMED_WAIT_S = 600.0
_SINGLE_READS = 32  # up to here single reads cost the server less than a consumer
_LOOK_EVERY_S = 5.0  # leases are read for the status too; no decision depends on when


async def serve(context: ServiceContext) -> None:
    """Join until `context.stop`.

    Consumes: EPISODES in stream order; TASKS whenever a group is not known yet; READY at the start.
    Produces: `ready.<group>` (training) and `graded.<group>` (evaluation), each once, in completion order.
    Waits for: the next sealed episode or verdict; names the oldest open group.
    On error: bytes that cannot be read become facts that end their group; a group that READY holds with other bytes is logged
    and left as it is. On stop: ends after the publish in hand; a restart folds everything again.
    """
    joiner = _Joiner(context)
    await joiner.settle()
    waiting = StandingWait(context.health, _NAMED_WAIT_S)
    async for item in fold(context.bus, Stream.EPISODES, stop=context.stop):
        if item is None:
            await joiner.report(waiting)
            if context.health.phase == "starting":
                context.ready()
            continue
        ready = await joiner.take(item)
        if ready is not None:
            await joiner.publish(ready)
    waiting.over()


class _Joiner:
    """The bank's core with its reads and writes."""

    def __init__(self, context: ServiceContext) -> None:
        self.bus = context.bus
        self.health = context.health
        self.bank = Bank()
        self.next_lease_seq = 1
        self.next_look = 0.0

    async def settle(self) -> None:
        """Learn which groups READY holds already."""
        for item in await read_all(self.bus, Stream.READY):
            self.bank.close(item.subject.rpartition(".")[2])

    async def learn_leases(self) -> None:
        """Fold what TASKS holds by now. A lease always precedes its episodes, so this is only ever a step behind."""
        for item in await self._new_leases():
            self.next_lease_seq = item.seq + 1
            try:
                self.bank.lease(item.decode(GroupLease))
            except CodecError as error:
                log.error("unreadable lease", subject=item.subject, seq=item.seq, error=str(error))
                self.health.count("unreadable")

    async def _new_leases(self) -> list[Item]:
        first, last = self.next_lease_seq, await self.bus.last_sequence(Stream.TASKS)
        if last - first >= _SINGLE_READS:
            return await read_all(self.bus, Stream.TASKS, start=first)
        return [await self.bus.get(Stream.TASKS, seq) for seq in range(first, last + 1)]

    async def take(self, item: Item) -> ReadyGroup | None:
        """Fold one episode or verdict; gives the group that it completed, if it did."""
        kind, group, slot_text = item.subject.rsplit(".", 3)[1:]
        if not self.bank.knows(group):
            await self.learn_leases()
        slot = int(slot_text) if slot_text.isdecimal() else -1
        if kind == "episode":
            return self.bank.episode(await self._episode(item, group, slot))
        return self.bank.verdict(self._verdict(item, group, slot))

    async def _episode(self, item: Item, group: str, slot: int) -> EpisodeFact:
        if not self.bank.is_open(group):
            return EpisodeFact(group=group, slot=slot, seq=item.seq, digest=item.digest)
        try:
            if len(item.data) > _DECODE_ASIDE_BYTES:
                episode = await asyncio.to_thread(item.decode, Episode)
            else:
                episode = item.decode(Episode)
        except CodecError as error:
            self._unreadable(item, error)
            return EpisodeFact(group=group, slot=slot, seq=item.seq, digest=item.digest, readable=False)
        return episode_fact(group, slot, item.seq, item.digest, episode)

    def _verdict(self, item: Item, group: str, slot: int) -> VerdictFact:
        try:
            return verdict_fact(group, slot, item.seq, item.digest, item.decode(Verdict))
        except CodecError as error:
            self._unreadable(item, error)
            return VerdictFact(group=group, slot=slot, seq=item.seq, digest=item.digest, readable=False)

    def _unreadable(self, item: Item, error: CodecError) -> None:
        log.error("unreadable", subject=item.subject, seq=item.seq, error=str(error))
        self.health.count("unreadable")

    async def publish(self, ready: ReadyGroup) -> None:
        """Write the group where it belongs, once."""
        subjects = self.bus.subjects
        subject = subjects.ready(ready.group) if ready.purpose == "train" else subjects.graded(ready.group)
        try:
            published = await self.bus.publish_once(subject, ready)
        except OnceConflict as error:
            log.error("ready group differs from the one in the stream", group=ready.group, error=str(error))
            self.health.count("conflicts")
            return
        self.health.count("published_again" if published.duplicate else f"{ready.purpose}_groups")
        log.debug("group is whole", group=ready.group, seq=published.seq, purpose=ready.purpose)

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
