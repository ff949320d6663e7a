"""The siblings of one lease: each slot is played, retried within its budget, and sealed once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from rollouter.agent import Agent
from rollouter.episode import EpisodeBroken, Stage, aborted_episode, play_attempt
from rollouter.generation import GenerationFailed
from rollouter.journal import AttemptName, AttemptTaken, past_attempts
from rollouter.sandbox_client import SandboxLost
from schemas.lease import GroupLease
from schemas.table import Stream
from schemas.task import Task, TaskSuite
from schemas.termination import Termination
from schemas.trajectory import Episode
from services.bus import BusError, OnceConflict
from services.health import Health
from services.tracing import span

log = structlog.get_logger()
MAX_TAKEOVERS = 5  # attempts beyond a slot's retries that takeovers may use before the slot counts as poisonous


class Groups:
    """Plays groups until every slot has its sealed episode.

    Consumes: a lease. Produces: `episode.<group>.<slot>`, once per slot. Waits for: nothing but its episodes, each of which has
    its own deadlines. On error: an infrastructure abort of a slot is retried and the finished siblings are kept; beyond its
    budget, or when its data are broken, the slot is sealed as an abort. On cancellation: sandboxes are discarded, sealed slots
    stay sealed, and whoever gets the lease next goes on from there.
    """

    def __init__(
        self, stage: Stage, suite: TaskSuite, manifest: str, agent_for: Callable[[Task], Agent], health: Health
    ) -> None:
        self._stage = stage
        self._suite = suite
        self._manifest = manifest
        self._agent_for = agent_for
        self._health = health

    async def play(self, lease: GroupLease) -> None:
        """Returns when all slots are sealed, by this process or by another one."""
        missing = await self._missing_slots(lease)
        past = await past_attempts(self._stage.bus, lease.group)
        if past.next_attempt:
            log.info("taking over", group=lease.group, missing=sorted(missing), attempts=past.next_attempt)
            self._health.count("takeovers")
        for executor, sandbox in past.sandboxes:
            await self._stage.sandboxes.discard(sandbox, executor)
        async with asyncio.TaskGroup() as siblings:
            for slot in missing:
                siblings.create_task(self._seal_slot(lease, slot, past.next_attempt.get(slot, 0)), name=f"{lease.group}/{slot}")

    async def _missing_slots(self, lease: GroupLease) -> list[int]:
        bus = self._stage.bus
        if await bus.last(bus.subjects.episode(lease.group, "*"), Stream.EPISODES) is None:
            return list(range(lease.group_size))
        held = await asyncio.gather(*(bus.last(bus.subjects.episode(lease.group, slot)) for slot in range(lease.group_size)))
        return [slot for slot, item in enumerate(held) if item is None]

    async def _seal_slot(self, lease: GroupLease, slot: int, first_attempt: int) -> None:
        started_ns = time.time_ns()
        attempt, retries_left = first_attempt, lease.slot_retries
        episode: Episode | None = None
        while episode is None:
            name = AttemptName(lease=lease, slot=slot, attempt=attempt)
            if attempt > lease.slot_retries + MAX_TAKEOVERS:
                log.error("slot is poisonous", group=lease.group, slot=slot, attempts=attempt)
                episode = aborted_episode(name, Termination.INFRA_ABORT, self._stage.rollouter, started_ns)
                break
            try:
                episode = await self._attempt(name)
            except AttemptTaken as error:
                self._health.count("attempts_taken")
                log.warning("attempt was taken", group=lease.group, slot=slot, attempt=attempt, reason=str(error))
                if slot not in await self._missing_slots(lease):
                    return
                attempt = max(attempt + 1, (await past_attempts(self._stage.bus, lease.group)).next_attempt.get(slot, 0))
            except (SandboxLost, GenerationFailed) as error:
                self._health.count("infra_aborts")
                log.warning("infrastructure abort", group=lease.group, slot=slot, retries_left=retries_left, reason=str(error))
                if retries_left == 0:
                    episode = aborted_episode(name, Termination.INFRA_ABORT, self._stage.rollouter, started_ns)
                attempt, retries_left = attempt + 1, retries_left - 1
        await self._publish(episode)

    async def _attempt(self, name: AttemptName) -> Episode:
        """One attempt, or the abort that stands for a sample that can never be played."""
        started_ns = time.time_ns()
        lease = name.lease
        if lease.manifest != self._manifest:
            log.error("lease of another behaviour", group=lease.group, leased=lease.manifest, ours=self._manifest)
            return aborted_episode(name, Termination.SCHEDULER_CANCEL, self._stage.rollouter, started_ns)
        with span("episode", None, group=lease.group, slot=name.slot, attempt=name.attempt):
            try:
                task = self._suite.task(lease.task_id)
                return await play_attempt(self._stage, self._agent_for(task), name, task)
            except (SandboxLost, GenerationFailed, AttemptTaken, BusError):
                raise
            except EpisodeBroken as error:
                reason, trace = str(error), None
            except Exception as error:  # suites, templates and agents are foreign code: one bad sample ends alone
                reason, trace = repr(error), error
        self._health.count("broken_episodes")
        log.error("episode is broken", group=lease.group, slot=name.slot, task=lease.task_id, reason=reason, exc_info=trace)
        return aborted_episode(name, Termination.INFRA_ABORT, self._stage.rollouter, started_ns)

    async def _publish(self, episode: Episode) -> None:
        try:
            await self._stage.bus.publish_once(self._stage.bus.subjects.episode(episode.group, episode.slot), episode)
        except OnceConflict:
            self._health.count("sealed_elsewhere")
            log.warning("slot was sealed by another process", group=episode.group, slot=episode.slot)
            return
        self._health.count("episodes_sealed")
        self._health.count(f"ended_{episode.termination}")
