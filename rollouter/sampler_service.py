"""The sampler service: keeps the bounded window of leased groups full, and runs the evaluations."""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from rollouter.evaluation import HELDOUT, EvalSettings
from rollouter.manifest import policy_manifest
from rollouter.sampler import Plan, SamplerSettings, SamplerState, Wait, next_action
from rollouter.suites import environment_of, resolve_suite
from schemas.codec import CodecError, decode_any
from schemas.group import ReadyGroup
from schemas.lease import GroupLease, group_id
from schemas.ledger import AbandonEntry, BatchEntry, QuarantineEntry
from schemas.manifest import PolicyManifest
from schemas.policy import EngineState, FleetVersions
from schemas.table import Stream
from schemas.task import TaskSuite
from schemas.training import BatchDemand, EvalResult, StepCommit
from schemas.trajectory import SamplingConfig
from services.config import Config, ConfigError
from services.dead_letters import pass_over
from services.feed import Arrival, Feed, Source
from services.items import Item, OnceConflict
from services.pull import Damaged
from services.runtime import ServiceContext
from services.sandbox.state import hash_files
from services.sandbox.tar import StateRefused
from services.standing_wait import StandingWait

log = structlog.get_logger()
_TURN_S = 0.5
_NAMED_WAIT_S = 600.0


async def serve(context: ServiceContext) -> None:
    """Lease groups and evaluate until `context.stop`.

    Consumes: TASKS (its own leases), LEDGER, READY, TRAIN, the newest `policy.active`, and the engines' heartbeats.
    Produces: `task.lease.<n>` and `train.eval.<point>`, each once.
    Waits for: a version in rotation, room in the window, the trainer, or an evaluation's groups; always names which.
    On error: an item that cannot be read is passed over with an alarm: its ordinal names no group, its attempts are censored;
    an ordinal that another sampler took is read from TASKS.
    On stop: ends between two publishes; a restart folds the streams and goes on with the next ordinal.
    """
    suite = await asyncio.to_thread(resolve_suite, context.config.tasks.suite)
    manifest = await asyncio.to_thread(policy_manifest, context.config, suite)
    log.info("policy manifest", hash=manifest.hash(), suite=environment_of(suite))
    sources = (
        Source(Stream.TASKS),
        Source(Stream.LEDGER),
        Source(Stream.READY),
        Source(Stream.TRAIN),
        Source(Stream.POLICY, ("policy.active",), latest_per_subject=True),
        Source(Stream.REGISTRY, ("reg.engine.*",), latest_per_subject=True),
    )
    feed = Feed(context.bus, sources)
    async with asyncio.TaskGroup() as group:
        group.create_task(feed.run(context.stop), name="feed")
        await _Sampler(context, feed, suite, manifest).work()


def sampler_settings(config: Config, suite: TaskSuite) -> SamplerSettings:
    """The sampler's settings out of the configuration. Raises `ConfigError` when there is nothing to train on."""
    pool = tuple(suite.task_ids("train"))
    pool = pool[: config.tasks.pool] if config.tasks.pool else pool
    if not pool and not config.run.evaluate_only:
        raise ConfigError(f"tasks.suite: suite {suite.name!r} has no task in its train split")
    return SamplerSettings(
        run=config.run.name,
        seed=config.run.seed,
        eval_seed=config.eval.seed,
        max_groups=config.window.max_groups,
        max_lag=config.admission.max_lag,
        groups_per_batch=config.admission.groups_per_batch,
        max_steps=config.run.max_steps,
        group_size=config.rollout.group_size,
        pool=pool,
        adapt=config.window.adapt,
        evaluation=EvalSettings(
            at_start=config.eval.at_start,
            at_end=config.eval.at_end,
            every_steps=config.eval.every_steps,
            max_steps=config.run.max_steps,
            evaluate_only=config.run.evaluate_only,
            group_size=config.rollout.group_size,
            full_attempts={
                "heldout_instance": config.eval.instance_attempts,
                "heldout_template": config.eval.template_attempts,
            },
            interim_attempts=config.eval.interim_attempts,
            tasks={split: tuple(suite.task_ids(split)) for split in HELDOUT},
        ),
    )


class _Sampler:
    """The sampler's core with its reads and writes."""

    def __init__(self, context: ServiceContext, feed: Feed, suite: TaskSuite, manifest: PolicyManifest) -> None:
        self.context = context
        self.bus = context.bus
        self.health = context.health
        self.feed = feed
        self.suite = suite
        self.manifest = manifest
        self.environment = environment_of(suite)
        self.settings = sampler_settings(context.config, suite)
        self.state = SamplerState()
        self.waiting = StandingWait(context.health, _NAMED_WAIT_S)
        self.taken = -1  # an ordinal that another sampler took and TASKS has not shown us yet

    async def work(self) -> None:
        """The loop: take what came, lease and publish all that may be, say what is waited for."""
        while not self.context.stop.is_set():
            for arrival in await self.feed.take(_TURN_S):
                await self.fold(arrival)
            if not self.feed.complete:
                self.waiting.on("the recorded streams", f"nats-server: {self.feed.behind()}", "nothing is leased before")
                continue
            if self.health.phase == "starting":
                self.skip_names_in_use()
                self.context.ready()
            await self.act()
            self.report()
        self.waiting.over()

    async def fold(self, arrival: Arrival) -> None:
        """One item into the state. One that cannot be read is passed over."""
        item = arrival.item
        if item is None:
            if isinstance(arrival.damage, Damaged):
                await self.pass_over(arrival.damage.item, arrival.damage)
            return
        try:
            message = decode_any(item.data)
        except CodecError as error:
            await self.pass_over(item, item, error)
            return
        match message:
            case GroupLease():
                self.state.lease(message, item.time_ns)
            case BatchEntry() | QuarantineEntry() | AbandonEntry():
                self.state.entry(item.seq, message, item.time_ns)
            case ReadyGroup():
                self.state.whole(item.seq, message, item.time_ns)
            case StepCommit():
                self.state.step(message)
            case BatchDemand():
                self.state.demand(item.seq, item.time_ns)
            case EvalResult():
                self.state.result(message)
            case EngineState():
                self.state.engine(message)
            case FleetVersions():
                self.state.active(message)

    async def pass_over(self, item: Item, found: Item | Damaged, error: CodecError | None = None) -> None:
        """Go on without an item."""
        await pass_over(self.bus, found, error)
        kind, _, name = item.subject.removeprefix(self.bus.subjects.prefix).rpartition(".")
        if kind == "task.lease" and name.isdecimal():
            self.state.lost_lease(int(name))
        elif kind == "graded":
            self.state.book.lost(name, item.time_ns)

    def skip_names_in_use(self) -> None:
        """A lease that TASKS has lost still has its traces elsewhere; its name is never given again."""
        if self.state.highest_closed >= self.state.next_ordinal:
            what = f"TASKS ends before lease {self.state.next_ordinal}, the ledger names {self.state.highest_closed}"
            self.bus.alarm("lost_leases", what=what)
            self.state.lost_lease(self.state.highest_closed)

    async def act(self) -> None:
        """Lease and publish until there is somebody to wait for."""
        while not self.context.stop.is_set():
            action = next_action(self.state, self.settings)
            if isinstance(action, Wait):
                self.waiting.on(action.what, action.culprit, "the wait goes on and is named again")
                return
            if isinstance(action, EvalResult):
                await self.publish_result(action)
            elif action.ordinal == self.taken:
                self.waiting.on(f"lease {self.taken} in TASKS", "another sampler took it", "the wait goes on")
                return
            else:
                await self.lease(action)
            self.waiting.over()

    async def lease(self, plan: Plan) -> None:
        """Publish one lease, once."""
        lease = self._lease_of(plan)
        try:
            await self.bus.publish_once(self.bus.subjects.lease(plan.ordinal), lease)
        except OnceConflict:
            log.warning("another sampler took the ordinal", ordinal=plan.ordinal)
            self.health.count("conflicts")
            self.taken = plan.ordinal
            return
        self.state.lease(lease)

    def _lease_of(self, plan: Plan) -> GroupLease:
        task = self.suite.task(plan.task_id)
        rollout = self.context.config.rollout
        try:
            snapshot = hash_files(task.files)
        except StateRefused as error:  # the reset will be refused as well, and the group then ends with that reason
            log.error("task files are not admissible", task=plan.task_id, error=str(error))
            snapshot = ""
        return GroupLease(
            run=self.settings.run,
            group=group_id(plan.purpose, plan.ordinal),
            ordinal=plan.ordinal,
            purpose=plan.purpose,
            task_id=plan.task_id,
            family=task.family,
            template=task.template,
            split=plan.split,
            group_size=plan.group_size,
            manifest=self.manifest.hash(),
            policy=self.manifest,
            environment=self.environment,
            base_snapshot=snapshot,
            sampling=SamplingConfig(
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                max_tokens=task.budget.max_action_tokens,
            ),
            seed=plan.seed,
            stream=plan.stream,
            propensity=plan.propensity,
            leased_at_version=self.state.serving,
            eval_point=plan.eval_point,
            slot_retries=rollout.slot_retries,
        )

    async def publish_result(self, result: EvalResult) -> None:
        """Publish an evaluation's result, once."""
        result = msgspec.structs.replace(result, manifest=self.manifest.hash())
        try:
            await self.bus.publish_once(self.bus.subjects.evaluation(result.point), result)
        except OnceConflict as error:
            log.warning("the evaluation has another result already", point=result.point, error=str(error))
        self.state.result(result)
        for split in result.splits:
            log.info(
                "evaluated",
                point=result.point,
                split=split.split,
                successes=split.successes,
                attempts=split.attempts,
                censored=split.censored,
            )

    def report(self) -> None:
        """Counters for the status."""
        self.health.set("leased", self.state.leased)
        self.health.set("open_groups", len(self.state.open_groups()))
        self.health.set("open_eval_groups", self.state.book.in_flight())
        self.health.set("window", self.state.flow.window(self.settings.window(), self.state.load()).ahead)
        self.health.set("consumed", self.state.consumed)
        self.health.set("turned_away", self.state.turned_away)
        self.health.set("serving_version", self.state.serving)
