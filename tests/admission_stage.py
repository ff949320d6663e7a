"""The parts of the pipeline that tests of bank, admission and sampler play themselves, over the real bus.

`Stage` runs real services as tasks of the test. `Actors` is a rollouter, a verifier, a fleet and a trainer that publish the
real messages, some of them twice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np

from schemas.arrays import Array
from schemas.group import ReadyGroup, Sibling
from schemas.lease import GroupLease
from schemas.ledger import BatchEntry
from schemas.message import Message
from schemas.policy import FleetVersions
from schemas.table import Role, Stream
from schemas.termination import CENSORED, Termination
from schemas.training import BatchDemand, StepCommit
from schemas.trajectory import Episode, SamplingConfig, Verdict, VersionSpan
from services.bus import Bus
from services.config import Config
from services.consume import fold, read_all
from services.health import Health
from services.items import Item
from services.provision import provision
from services.runtime import Serve, ServiceContext

STORE_BYTES = 256 * 2**20


def make_lease(ordinal: int = 0, *, group_size: int = 2, purpose: str = "train", **changes: object) -> GroupLease:
    """A plausible lease."""
    lease = GroupLease(
        run="t",
        group=f"{'g' if purpose == 'train' else 'e'}{ordinal:08d}",
        ordinal=ordinal,
        purpose="train" if purpose == "train" else "eval",
        task_id=f"task-{ordinal}",
        family="files",
        template="files-t00",
        split="train" if purpose == "train" else "heldout_instance",
        group_size=group_size,
        manifest="m0",
        environment="test",
        base_snapshot="",
        sampling=SamplingConfig(),
        seed=ordinal,
    )
    return msgspec.structs.replace(lease, **changes)


def make_episode(
    lease: GroupLease, slot: int, *, version: int = 0, termination: Termination = Termination.AGENT_FINISH, **changes: object
) -> Episode:
    """A sealed episode of five tokens, three of them sampled under `version`."""
    mask = np.array([False, False, True, True, True])
    episode = Episode(
        run=lease.run,
        group=lease.group,
        slot=slot,
        attempt=0,
        task_id=lease.task_id,
        family=lease.family,
        template=lease.template,
        purpose=lease.purpose,
        seed=lease.seed,
        manifest=lease.manifest,
        termination=termination,
        ids=Array.of(np.arange(5, dtype=np.int32)),
        mask=Array.of(mask),
        logprobs=Array.of(np.where(mask, -0.5, 0.0).astype(np.float32)),
        versions=(VersionSpan(2, 5, version),),
        turn_starts=Array.of(np.array([2], dtype=np.int32)),
        turns=1,
        sampled_tokens=3,
    )
    return msgspec.structs.replace(episode, **changes)


def make_verdict(episode: Episode, digest: str, *, reward: float = 1.0, **changes: object) -> Verdict:
    """What an honest verifier says of an episode whose wire bytes have this digest."""
    censored = episode.termination in CENSORED
    verdict = Verdict(
        run=episode.run,
        group=episode.group,
        slot=episode.slot,
        episode_digest=digest,
        status="censored" if censored else "graded",
        success=None if censored else reward > 0.5,
        reward=None if censored else reward,
    )
    return msgspec.structs.replace(verdict, **changes)


def make_ready(ordinal: int = 0, *, oldest: int = 0, newest: int | None = None, **changes: object) -> ReadyGroup:
    """A whole group of two graded siblings."""
    siblings = tuple(
        Sibling(
            slot=slot,
            episode_seq=4 * ordinal + 2 * slot + 1,
            episode_digest=f"e{ordinal}-{slot}",
            verdict_seq=4 * ordinal + 2 * slot + 2,
            verdict_digest=f"v{ordinal}-{slot}",
            termination=Termination.AGENT_FINISH,
            status="graded",
            reward=float(slot),
            success=bool(slot),
            oldest_version=oldest,
            newest_version=oldest if newest is None else newest,
            incarnation=0,
            sampled_tokens=3,
            total_tokens=5,
            turns=1,
            manifest="m0",
        )
        for slot in range(2)
    )
    group = ReadyGroup(
        run="t",
        group=f"g{ordinal:08d}",
        ordinal=ordinal,
        purpose="train",
        task_id=f"task-{ordinal}",
        family="files",
        template="files-t00",
        split="train",
        manifest="m0",
        group_size=2,
        siblings=siblings,
    )
    return msgspec.structs.replace(group, **changes)


def with_siblings(group: ReadyGroup, slot: int, **changes: object) -> ReadyGroup:
    """The group with one sibling changed."""
    siblings = tuple(msgspec.structs.replace(s, **changes) if s.slot == slot else s for s in group.siblings)
    return msgspec.structs.replace(group, siblings=siblings)


@asynccontextmanager
async def connected(url: str, run: str, role: Role, instance: str = "0") -> AsyncIterator[Bus]:
    """A bus of one role on provisioned streams."""
    bus = await Bus.connect(url, run, role, instance)
    try:
        await provision(bus, STORE_BYTES)
        yield bus
    finally:
        await bus.close()


@dataclass
class Running:
    """One service that runs as a task."""

    context: ServiceContext
    task: asyncio.Task[None]
    background: list[asyncio.Task[None]]
    quiet: asyncio.Event

    async def stop(self) -> None:
        """Drain, as SIGTERM would make it."""
        self.context.stop.set()
        try:
            await asyncio.wait_for(self.task, 15)
        finally:
            await self._end()

    async def kill(self) -> None:
        """End at once, wherever it is: the task is cancelled and its connection cut."""
        await self.context.bus.client.close()
        self.context.stop.set()
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=15)
        if not self.task.cancelled():
            self.task.exception()
        await self._end()

    async def _end(self) -> None:
        self.quiet.set()
        for task in self.background:
            task.cancel()
        await asyncio.gather(*self.background, return_exceptions=True)
        await self.context.bus.close()


class Stage:
    """Real services of one run, as tasks of the test; whatever still runs at the end is stopped."""

    def __init__(self, url: str, config: Config) -> None:
        self.url = url
        self.config = config
        self._running: list[Running] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Stage:
        return self

    async def __aexit__(self, *_: object) -> None:
        for running in self._running:
            if not running.task.done():
                await running.stop()
        await self._stack.aclose()

    async def bus(self, role: Role, instance: str = "test") -> Bus:
        """A connection that is closed with the stage."""
        return await self._stack.enter_async_context(connected(self.url, self.config.run.name, role, instance))

    async def start(self, role: Role, serve: Serve, instance: str = "0", config: Config | None = None) -> Running:
        """Start a service and give its handle."""
        bus = await Bus.connect(self.url, self.config.run.name, role, instance)
        await provision(bus, STORE_BYTES)
        chosen = config or self.config
        health = Health(bus, chosen.telemetry.heartbeat_s)
        context = ServiceContext(chosen, bus, role, instance, asyncio.Event(), health)
        quiet = asyncio.Event()
        task = asyncio.create_task(_to_end(serve, context))
        running = Running(context, task, [asyncio.create_task(health.beat(quiet))], quiet)
        self._running.append(running)
        return running


async def _to_end(serve: Serve, context: ServiceContext) -> None:
    await serve(context)


@dataclass
class Actors:
    """A rollouter with its verifier, a fleet and a trainer; their messages are real, `disorder` shuffles and repeats them."""

    bus: Bus
    disorder: random.Random
    group_size: int
    groups_per_batch: int
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    version: int = -1
    terminations: Callable[[GroupLease, int], Termination] = lambda lease, slot: Termination.AGENT_FINISH
    most_open: int = 0

    async def serve_version(self, version: int) -> None:
        """The whole fleet confirms a version."""
        self.version = version
        fleet = FleetVersions(
            run=self.bus.run, target=version, incarnation=0, engines={"e0": version}, oldest=version, newest=version
        )
        await self.bus.publish(self.bus.subjects.active(), fleet)

    async def roll_out(self) -> None:
        """Take every lease; its episodes and verdicts come later, out of order, and some are told twice."""
        async with asyncio.TaskGroup() as groups:
            async for item in fold(self.bus, Stream.TASKS, stop=self.stop):
                if item is not None:
                    groups.create_task(self._group(item.decode(GroupLease)))

    async def _group(self, lease: GroupLease) -> None:
        slots = list(range(lease.group_size))
        self.disorder.shuffle(slots)
        for slot in slots:
            await asyncio.sleep(self.disorder.uniform(0, 0.05))
            if self.stop.is_set():
                return
            termination = self.terminations(lease, slot)
            episode = make_episode(lease, slot, version=max(self.version, 0), termination=termination)
            stored = await self._once(self.bus.subjects.episode(lease.group, slot), episode)
            verdict = make_verdict(episode, stored, reward=float(self.disorder.random() < 0.5))
            await self._once(self.bus.subjects.verdict(lease.group, slot), verdict)

    async def _once(self, subject: str, message: Message) -> str:
        digest = (await self.bus.publish_once(subject, message)).digest
        if self.disorder.random() < 0.3:
            assert (await self.bus.publish_once(subject, message)).duplicate
        return digest

    async def train(self, steps: Iterable[int], on_batch: Callable[[BatchEntry], Awaitable[None]] | None = None) -> None:
        """Ask for each batch, take it from the ledger, commit, and let the fleet serve what came out."""
        for step in steps:
            demand = BatchDemand(run=self.bus.run, step=step, version=step, incarnation=0, groups=self.groups_per_batch)
            await self._once(self.bus.subjects.demand(step), demand)
            batch = await self._batch(step)
            if on_batch is not None:
                await on_batch(batch)
            await self._once(self.bus.subjects.step(step), make_commit(batch))
            await self.serve_version(step + 1)

    async def _batch(self, step: int) -> BatchEntry:
        async for item in fold(self.bus, Stream.LEDGER, f"ledger.batch.{step}", stop=self.stop):
            if item is not None:
                return item.decode(BatchEntry)
        raise AssertionError(f"no batch {step} before the stop")


def make_commit(batch: BatchEntry) -> StepCommit:
    """The commit of a batch."""
    return StepCommit(
        run=batch.run,
        step=batch.step,
        version=batch.version + 1,
        incarnation=batch.incarnation,
        digest=f"d{batch.version + 1}",
        base_digest=f"d{batch.version}",
        groups=tuple(member.group for member in batch.groups),
        rows=0,
        trained_tokens=0,
        optimizer_steps=1,
        patches=(),
        patch_bytes=0,
        metrics={},
        ledger_seq=0,
    )


async def items(bus: Bus, stream: Stream, *patterns: str) -> list[Item]:
    """Everything stored up to now."""
    return await read_all(bus, stream, *patterns)
