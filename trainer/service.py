"""The trainer service: asks for batches, takes exactly one auditable update per batch, commits, then announces the version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import structlog

from schemas.ledger import BatchEntry
from schemas.policy import WeightsManifest
from schemas.table import Stream
from schemas.training import BatchDemand, StepCommit
from services.bus import BusError, Item, OnceConflict
from services.consume import fold
from services.runtime import ServiceContext
from services.tracing import span
from trainer.intake import fetch, rows_of
from trainer.launch import Followers, rank_of
from trainer.learner import Learner, Outcome
from trainer.publication import put_patch

log = structlog.get_logger()
T = TypeVar("T")
_NAMED_WAIT_S = 600.0


class Diverged(BusError):
    """A step that was published before came out with other bits; its name must not be used again."""


async def serve(context: ServiceContext) -> None:
    """One trainer; with several ranks, rank 0 speaks on the bus and the others follow the same ledger.

    Consumes: `ledger.batch.<s>` and the groups that it names. Produces: `train.demand.<s>`, then, after the
    checkpoint or with the
    ledger as log between checkpoints, the patch and `train.step.<s>`. Waits for: version 0 to be published, then for
    each batch; both
    are named in the status. On error: a rank that dies ends the service, and it restarts as a whole from the last
    checkpoint. On
    stop: a step that was begun is finished and committed, then a checkpoint is written.
    """
    trainer = TrainerService(context)
    with ThreadPoolExecutor(1, thread_name_prefix="learner") as pool, Followers(context.config) as followers:
        await trainer.run(pool, followers)


class TrainerService:
    """The loop of one rank."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._bus = context.bus
        self._config = context.config
        self._rank, self._ranks = rank_of(context.config)
        self._batches: dict[int, Item] = {}
        self._arrived = asyncio.Event()

    async def run(self, pool: ThreadPoolExecutor, followers: Followers) -> None:
        stop = self._context.stop
        loop = asyncio.get_running_loop()

        def work(function: Callable[[], T]) -> asyncio.Future[T]:
            return loop.run_in_executor(pool, function)

        learner = await work(lambda: Learner(self._config))
        step = await work(learner.restore)
        await self._check_base(learner)
        self._context.ready()
        log.info("trainer", rank=self._rank, ranks=self._ranks, step=step, digest=learner.snapshot.digest[:12])
        async with asyncio.TaskGroup() as group:
            ended = asyncio.Event()
            group.create_task(self._follow_ledger(step, ended))
            group.create_task(followers.watch(stop, ended))
            try:
                while not stop.is_set() and not self._is_last(step):
                    begun = time.monotonic()
                    item = await self._batch(step)
                    if not await work(partial(learner.agree, item is not None)) or item is None:
                        break
                    waited = time.monotonic() - begun
                    with span("train", item.headers, step=step):
                        await self._step(learner, work, item, step, waited)
                    step += 1
                await work(learner.save)
                if not stop.is_set():
                    log.info("all steps are done", steps=step)
                    await stop.wait()
            finally:
                ended.set()
        self._context.health.enter("draining")
        await work(learner.close)

    def _is_last(self, step: int) -> bool:
        return self._config.run.evaluate_only or (bool(self._config.run.max_steps) and step >= self._config.run.max_steps)

    async def _check_base(self, learner: Learner) -> None:
        """Training starts only from the very bits that were published as version 0."""
        with self._context.health.waiting("version 0", "param_sync", _NAMED_WAIT_S, "keeps waiting"):
            async for item in fold(self._bus, Stream.POLICY, "policy.anchor.0", stop=self._context.stop):
                if item is None:
                    continue
                published = item.decode(WeightsManifest)
                if published.digest != learner.base_digest:
                    raise BusError(
                        f"policy.model: its digest is {learner.base_digest[:12]}, this run began with {published.digest[:12]}; "
                        "use another run.name for another model"
                    )
                return

    async def _follow_ledger(self, start: int, stop: asyncio.Event) -> None:
        async for item in fold(self._bus, Stream.LEDGER, "ledger.batch.*", stop=stop):
            if item is not None:
                number = int(item.subject.rsplit(".", 1)[1])
                if number >= start:
                    self._batches[number] = item
                    self._arrived.set()

    async def _batch(self, step: int) -> Item | None:
        """The ledger's entry for `step`, asked for if need be; `None` when the service is told to stop."""
        if self._rank == 0:
            for ahead in range(self._config.trainer.demand_ahead + 1):
                if not self._is_last(step + ahead):
                    await self._demand(step + ahead)
        with self._context.health.waiting(f"batch {step}", "admission", _NAMED_WAIT_S, "keeps waiting"):
            while step not in self._batches:
                if self._context.stop.is_set():
                    return None
                self._arrived.clear()
                try:
                    await asyncio.wait_for(self._arrived.wait(), 0.5)
                except asyncio.TimeoutError:
                    continue
        return self._batches.pop(step)

    async def _demand(self, step: int) -> None:
        demand = BatchDemand(
            run=self._bus.run, step=step, version=step, incarnation=0, groups=self._config.admission.groups_per_batch
        )
        await self._bus.publish_once(self._bus.subjects.demand(step), demand)

    async def _step(
        self,
        learner: Learner,
        work: Callable[[Callable[[], Outcome]], asyncio.Future[Outcome]],
        item: Item,
        step: int,
        waited: float,
    ) -> None:
        entry = item.decode(BatchEntry)
        begun = time.monotonic()
        groups = await fetch(self._bus, entry)
        settings = self._config.trainer
        rows = rows_of(
            groups,
            updating_version=entry.version,
            credit=settings.credit,
            scale=settings.group_scale,
            shuffle_seed=self._config.run.seed if settings.shuffle_rewards else None,
        )
        names = tuple(group.group for group in entry.groups)
        outcome = await work(lambda: learner.train(step, rows, names, item.seq))
        if self._rank != 0:
            return
        trained = time.monotonic()
        reference = await put_patch(self._bus, outcome)
        metrics = outcome.metrics | _batch_metrics(entry, [reward for group in groups for reward in group.ready.rewards()])
        commit = StepCommit(
            run=self._bus.run,
            step=step,
            version=step + 1,
            incarnation=entry.incarnation,
            digest=outcome.new.digest,
            base_digest=outcome.old.digest,
            groups=names,
            rows=sum(len(part) for part in rows),
            trained_tokens=outcome.tokens,
            optimizer_steps=outcome.optimizer_steps,
            patches=(reference,),
            patch_bytes=reference.size_bytes,
            metrics=metrics,
            ledger_seq=item.seq,
            checkpoint=outcome.checkpoint,
            wait_s=waited,
            train_s=trained - begun,
            publish_s=time.monotonic() - trained,
            finished_ns=time.time_ns(),
        )
        await self._announce(commit)
        self._context.health.set("step", step)

    async def _announce(self, commit: StepCommit) -> None:
        """Announce once; a step that was announced before a crash must have come out with the same digest."""
        subject = self._bus.subjects.step(commit.step)
        held = await self._bus.last(subject)
        if held is None:
            try:
                await self._bus.publish_once(subject, commit)
                return
            except OnceConflict:
                held = await self._bus.last(subject)
        assert held is not None
        before = held.decode(StepCommit)
        if before.digest != commit.digest:
            raise Diverged(
                f"step {commit.step} was published as {before.digest[:12]} and came out as {commit.digest[:12]} "
                "after recovery; "
                "restart this run from its last checkpoint on the machine that made it, or begin a new run from that checkpoint"
            )
        log.info("step reproduced", step=commit.step, digest=commit.digest[:12])


def _batch_metrics(entry: BatchEntry, rewards: list[float | None]) -> dict[str, float]:
    counted = [reward for reward in rewards if reward is not None]
    lags = [group.lag for group in entry.groups]
    return {
        "reward_mean": sum(counted) / len(counted) if counted else 0.0,
        "rewarded": float(len(counted)),
        "censored": float(len(rewards) - len(counted)),
        "lag_mean": sum(lags) / len(lags),
        "lag_max": float(max(lags)),
    }
