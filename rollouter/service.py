"""The rollouter service: plays the sibling episodes of every group that is leased to it."""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

import msgspec
import structlog

from rollouter.actions import make_parser
from rollouter.agent import Agent, LoopAgent
from rollouter.chat import ChatRenderer
from rollouter.claims import NotClaimed, deliveries_of_earlier_lives
from rollouter.episode import Stage
from rollouter.generation import Generation
from rollouter.groups import Groups, GroupTaken
from rollouter.manifest import policy_manifest
from rollouter.sandbox_client import Sandboxes
from schemas.lease import GroupLease
from schemas.task import Task, TaskSuite
from services.bus import BusError, IntegrityError, Item
from services.health import pause
from services.runtime import ServiceContext
from services.suites import resolve_suite
from services.tracing import span
from services.work import Retry, WorkConsumer

log = structlog.get_logger()
DRAIN_S = 20.0  # given to groups in flight before their leases are handed back
_DRAIN_WITHOUT_ENGINES_S = 3.0
_CANCEL_S = 8.0
_TAKEN_S = 30.0  # beyond the heartbeat of the other holder's lease, which sets this delay aside


async def serve(context: ServiceContext) -> None:
    """One rollouter; any number may run.

    Consumes: `task.lease.*`. Produces: turns, episodes, and requests to engines and sandboxes. Waits for: episodes, whose
    every wait has its own deadline. On error: a lease is acknowledged only when all its episodes are sealed, so another
    rollouter continues what this one leaves. On stop: no new leases; groups in flight get `DRAIN_S` to finish; then they stop
    after their last journalled turn, their sandboxes stay, and their leases are handed back.
    """
    rollouter = await Rollouter.create(context)
    leases = WorkConsumer(context.bus, "rollouter", capacity=context.config.rollout.max_groups, drain_s=DRAIN_S + 2 * _CANCEL_S)
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(rollouter.generation.run(ended), name="generation")
        group.create_task(rollouter.sandboxes.run(ended), name="sandboxes")
        group.create_task(rollouter.limit_drain(ended), name="drain")
        group.create_task(rollouter.give_back_old_leases(leases), name="old leases")
        context.ready()
        await leases.run(rollouter.handle, context.stop)
        ended.set()


class Rollouter:
    """One process's share of the work. Its requester id is new at every start, so no answer of an earlier life reaches it."""

    def __init__(self, context: ServiceContext, renderer: ChatRenderer, suite: TaskSuite, manifest: str) -> None:
        config = context.config
        requester = f"{context.instance}-{uuid4().hex[:8]}"
        self._context = context
        self._requester = requester
        self._renderer = renderer
        self._active: set[str] = set()
        self._hand_back = asyncio.Event()
        self._agents: dict[bytes, Agent] = {}
        self.generation = Generation(context.bus, requester, config.rollout.generate_timeout_s, context.health)
        self.sandboxes = Sandboxes(
            context.bus,
            requester,
            config.rollout.sandbox_timeout_s,
            context.health,
            silent_s=config.rollout.sandbox_silent_s,
            heartbeat_s=config.telemetry.heartbeat_s,
        )
        stage = Stage(
            bus=context.bus,
            generation=self.generation,
            sandboxes=self.sandboxes,
            stop_token_ids=renderer.stop_token_ids,
            context_tokens=config.policy.max_context_tokens,
            observation_chars=config.rollout.observation_chars,
            rollouter=requester,
            one_version=config.param_sync.mode == "restart",
        )
        self._groups = Groups(stage, suite, manifest, self._agent_for, context.health)

    @classmethod
    async def create(cls, context: ServiceContext) -> Rollouter:
        """Load tokenizer, template and suite off the event loop."""
        config = context.config
        suite = resolve_suite(config.tasks.suite)
        manifest = await asyncio.to_thread(policy_manifest, config, suite)
        return cls(context, await asyncio.to_thread(ChatRenderer, config.policy.model), suite, manifest.hash())

    async def handle(self, item: Item) -> None:
        """One lease, until all its episodes are sealed. Raises `Retry` to hand it back."""
        lease = item.decode(GroupLease)
        if lease.group in self._active:
            raise Retry(f"{lease.group} is still in work here", delay_s=5.0)
        self._active.add(lease.group)
        self._context.health.set("groups_running", len(self._active))
        try:
            with span("group", item.headers, group=lease.group, task=lease.task_id):
                await self._play_or_hand_back(lease, item.delivery)
        except (GroupTaken, NotClaimed) as error:  # handed back for the case that the other one dies; it keeps its lease
            log.warning("another rollouter holds the group", group=lease.group, reason=str(error))
            await self._groups.release(lease.group, "another rollouter holds the group")
            raise Retry(f"{lease.group}: {error}", delay_s=_TAKEN_S) from error
        except IntegrityError as error:  # the lease is sound; something that it needs is not readable now
            log.error("cannot read what is known of a group", group=lease.group, error=str(error))
            raise Retry(f"{lease.group}: {error}", delay_s=30.0) from error
        finally:
            self._active.discard(lease.group)
            self._context.health.set("groups_running", len(self._active))
        self._context.health.count("groups_done")

    async def _play_or_hand_back(self, lease: GroupLease, delivery: str) -> None:
        work = asyncio.create_task(self._groups.play(lease, delivery), name=lease.group)
        asked = asyncio.create_task(self._hand_back.wait(), name=f"{lease.group} hand-back")
        try:
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            await _end(work)
        if work.cancelled() or not work.done():
            await self._groups.release(lease.group, "the rollouter stops")
            raise Retry(f"{lease.group} is handed back, the rollouter stops", delay_s=0.0)
        work.result()

    async def give_back_old_leases(self, leases: WorkConsumer) -> None:
        """What an earlier process of this instance held when it was killed need not wait until its silence is noticed."""
        try:
            held = await deliveries_of_earlier_lives(self._context.bus, self._context.instance, self._requester)
            given_back = await leases.hand_back(held)
        except BusError as error:  # they come back by themselves, later
            log.warning("cannot tell what an earlier process held", error=str(error))
            return
        if given_back:
            log.info("leases of an earlier process are given back", count=given_back)

    async def limit_drain(self, ended: asyncio.Event) -> None:
        """Once the service stops, bound the time that groups in flight may take; without engines they have no chance anyway."""
        stopping = self._context.stop
        while not ended.is_set() and not await pause(stopping, 1.0):
            pass
        begun = alone_since = time.monotonic()
        while not await pause(ended, 0.25):
            now = time.monotonic()
            if self.generation.fleet.serving():
                alone_since = now
            if now - begun > DRAIN_S or now - alone_since > _DRAIN_WITHOUT_ENGINES_S:
                self._hand_back.set()

    def _agent_for(self, task: Task) -> Agent:
        """The built-in agent for a task's tools; kept, because a parser's making costs more than a turn."""
        key = msgspec.msgpack.encode(task.tools)
        if key not in self._agents:
            parser = make_parser(self._context.config.tasks.parser, self._renderer, task.tools)
            self._agents[key] = LoopAgent(self._renderer, parser)
        return self._agents[key]


async def _end(work: asyncio.Task[None]) -> None:
    """Cancel until it has ended, boundedly: some waits of the bus's client swallow a cancellation."""
    for patience_s in (_CANCEL_S, 2.0, 2.0):
        if work.done():
            return
        work.cancel()
        await asyncio.wait({work}, timeout=patience_s)
    if not work.done():
        log.error("a group did not end in time", group=work.get_name())
