"""The trainer service: asks for batches, takes exactly one auditable update per batch, commits, then announces the version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec
import structlog

from schemas.codec import encode
from schemas.ledger import BatchEntry
from schemas.policy import WeightsManifest
from schemas.table import Stream
from schemas.training import StepCommit
from services.consume import fold
from services.health import pause
from services.items import BusError, Item
from services.ownership import Ownership, owned
from services.runtime import ServiceContext
from services.tracing import span
from trainer.batch import TrainRow
from trainer.batches import Batches
from trainer.checkpoint import NotWritten
from trainer.folder_lock import locked
from trainer.intake import TrainingGroup, fetch, rows_of
from trainer.launch import Followers, rank_of
from trainer.learner import Learner, Outcome
from trainer.publication import put_weights
from trainer.step_log import StepLog

log = structlog.get_logger()
T = TypeVar("T")
_NAMED_WAIT_S = 600.0
_SAVE_AGAIN_S = 30.0


async def serve(context: ServiceContext) -> None:
    """One trainer; with several ranks, rank 0 owns the role and speaks on the bus, and the others follow the same ledger.

    Consumes: `ledger.batch.<s>` and the groups that it names. Produces: `train.demand.<s>`, then the weights' object, the
    checkpoint if one is due, and last `train.step.<s>`; between checkpoints the ledger is the log. Waits for: the ownership and
    the checkpoint folder's lock, version 0 to be published, then for each batch; each is named in the status. On error: a rank
    that dies, and a lost ownership, end the process; it restarts as a whole from the newest checkpoint on the published line
    and takes the steps after it again. A step that comes out with other bits than were published begins a new incarnation. A
    checkpoint that cannot be written is named, and tried again after the next step. On stop: a step that was begun is finished
    and committed, then a checkpoint is written.
    """
    if rank_of(context.config)[0] != 0:
        await _train(context, None)
        return
    async with owned(context, end_at_once=True) as ownership:
        if ownership is not None:
            async with locked(context, context.config.run_folder() / "checkpoints") as held:
                if held:
                    await _train(context, ownership)


async def _train(context: ServiceContext, ownership: Ownership | None) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="learner") as pool, Followers(context.config) as followers:
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(followers.watch(context.stop, ended))
            try:
                await TrainerService(context, ownership, pool).run(group, ended)
            finally:
                ended.set()


class TrainerService:
    """The loop of one rank. Only the owner, rank 0, has an `ownership` and a step log."""

    def __init__(self, context: ServiceContext, ownership: Ownership | None, pool: ThreadPoolExecutor) -> None:
        self._context = context
        self._bus = context.bus
        self._config = context.config
        self._ownership = ownership
        self._pool = pool
        self._rank, self._ranks = rank_of(context.config)
        self._announcement = b""  # of the last step

    async def run(self, group: asyncio.TaskGroup, ended: asyncio.Event) -> None:
        stop = self._context.stop
        learner = await self._work(lambda: Learner(self._config))
        self._steps = StepLog(self._bus, learner.base_digest)
        step = await self._recover(learner)
        await self._check_base(learner)
        self._context.ready()
        log.info("trainer", rank=self._rank, ranks=self._ranks, step=step, digest=learner.snapshot.digest[:12])
        batches = Batches(self._context, self._ownership, self._steps.line)
        group.create_task(batches.follow(step, ended))
        while not stop.is_set() and not self._is_last(step):
            begun = time.monotonic()
            item = await batches.take(step, self._config.trainer.demand_ahead, self._config.run.max_steps)
            if not await self._work(partial(learner.agree, item is not None)) or item is None:
                break
            with span("train", item.headers, step=step):
                await self._step(learner, item, step, waited_s=time.monotonic() - begun)
            step += 1
        await self._save_last(learner, step)
        self._context.health.enter("draining")
        await self._work(learner.close)

    def _work(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, function)

    def _is_last(self, step: int) -> bool:
        return self._config.run.evaluate_only or (bool(self._config.run.max_steps) and step >= self._config.run.max_steps)

    # -- recovery ------------------------------------------------------------------------------------------------------------

    async def _recover(self, learner: Learner) -> int:
        """The next step: after the newest checkpoint on the published line. An announcement that a crash prevented is made."""
        if self._ownership is None:
            return await self._work(partial(learner.restore, None))
        await self._steps.read()
        chosen = await self._work(lambda: learner.find(lambda record: self._steps.refusal(record, learner.ranks)))
        if chosen is not None:
            self._announcement = chosen.commit.announcement
            missing = self._steps.unannounced(chosen.commit)
            if missing is not None:
                await self._ownership.confirm()
                await self._steps.announce(missing)
                log.info("announced from the checkpoint", step=missing.step, digest=missing.digest[:12])
        step = await self._work(partial(learner.restore, chosen))
        if again := self._steps.steps_ahead(step):
            log.info("published steps are taken again", first=step, count=again)
        return step

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

    # -- one step ------------------------------------------------------------------------------------------------------------

    async def _step(self, learner: Learner, item: Item, step: int, *, waited_s: float) -> None:
        """Train, name, store the weights, commit, announce: in this order a crash anywhere leaves what can be resumed."""
        entry = item.decode(BatchEntry)
        begun = time.monotonic()
        groups = await fetch(self._bus, entry)
        rows = self._rows(groups, entry)
        names = tuple(group.group for group in entry.groups)
        outcome = await self._work(lambda: learner.train(step, rows, names, item.seq))
        incarnation = 0 if self._ownership is None else self._steps.incarnation_of(step, outcome.new.digest)
        outcome = await self._work(partial(learner.name, outcome, incarnation))
        if self._ownership is None:
            if learner.due():
                await self._save(learner)
            return
        published = self._steps.line.commit_of(step)
        if published is not None and published.incarnation == incarnation:
            log.info("step reproduced", step=step, digest=published.digest[:12])
            self._announcement = encode(published)
            if learner.due():
                await self._save(learner)
        else:
            trained_s = time.monotonic() - begun
            commit = await self._committed(outcome, item, groups, rows, waited_s=waited_s, trained_s=trained_s)
            if learner.due():
                commit = msgspec.structs.replace(commit, checkpoint=learner.place())
                self._announcement = encode(commit)
                if not await self._save(learner):
                    commit = msgspec.structs.replace(commit, checkpoint="")
            self._announcement = encode(commit)
            await self._ownership.confirm()
            await self._steps.announce(commit)
        self._context.health.set("step", step)
        self._context.health.set("incarnation", incarnation)
        self._context.health.set("steps_to_take_again", self._steps.steps_ahead(step + 1))

    def _rows(self, groups: Sequence[TrainingGroup], entry: BatchEntry) -> list[list[TrainRow]]:
        settings = self._config.trainer
        return rows_of(
            groups,
            updating_version=entry.version,
            credit=settings.credit,
            scale=settings.group_scale,
            shuffle_seed=self._config.run.seed if settings.shuffle_rewards else None,
        )

    async def _committed(
        self,
        outcome: Outcome,
        item: Item,
        groups: Sequence[TrainingGroup],
        rows: Sequence[Sequence[TrainRow]],
        *,
        waited_s: float,
        trained_s: float,
    ) -> StepCommit:
        """Store the weights' object, and give the announcement that names it."""
        entry = item.decode(BatchEntry)
        begun = time.monotonic()
        reference = await put_weights(self._bus, outcome)
        return StepCommit(
            run=self._bus.run,
            step=entry.step,
            version=outcome.new.version,
            incarnation=outcome.new.incarnation,
            digest=outcome.new.digest,
            base_digest=outcome.old.digest,
            groups=tuple(group.group for group in entry.groups),
            rows=sum(len(part) for part in rows),
            trained_tokens=outcome.tokens,
            optimizer_steps=outcome.optimizer_steps,
            patches=(reference,),
            patch_bytes=reference.size_bytes,
            metrics=outcome.metrics | _batch_metrics(entry, [reward for group in groups for reward in group.ready.rewards()]),
            ledger_seq=item.seq,
            wait_s=waited_s,
            train_s=trained_s,
            publish_s=time.monotonic() - begun,
            finished_ns=time.time_ns(),
        )

    async def _save(self, learner: Learner) -> bool:
        """The checkpoint, if the disk takes it. The ledger stands in for it until the next step tries again."""
        try:
            await self._write(learner)
        except NotWritten as error:
            log.error("checkpoint not written", error=str(error), then="the next step tries again")
            self._context.health.count("checkpoints_not_written")
            return False
        return True

    async def _write(self, learner: Learner) -> None:
        if self._ownership is not None:
            await self._ownership.confirm()
        await self._work(partial(learner.save, self._announcement))

    async def _save_last(self, learner: Learner, step: int) -> None:
        """The checkpoint of the end. Tried until it is there or the service is told to stop, and then once more."""
        stop = self._context.stop
        while not stop.is_set():
            with suppress(NotWritten):
                await self._write(learner)
                log.info("all steps are done", steps=step)
                await stop.wait()
                return
            disk = f"the disk of {learner.root}"
            with self._context.health.waiting("room for the checkpoint", disk, _NAMED_WAIT_S, "tries again twice a minute"):
                log.error("checkpoint not written", root=str(learner.root), next_try_s=_SAVE_AGAIN_S)
                await pause(stop, _SAVE_AGAIN_S)
        await self._write(learner)


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
