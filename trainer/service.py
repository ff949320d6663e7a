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
from schemas.ledger import BatchEntry, LostItem
from schemas.policy import WeightsManifest
from schemas.table import Stream
from schemas.training import LostGroup, StepCommit
from services.bus import BusError, Item
from services.consume import events
from services.dead_letters import pass_over
from services.health import pause
from services.ownership import Ownership, owned
from services.pull import Damaged
from services.runtime import ServiceContext
from services.tracing import span
from trainer import folder_owner
from trainer.anchor_requests import AnchorRequests
from trainer.batch import TrainRow
from trainer.batches import Batches
from trainer.checkpoint import NotWritten
from trainer.folder_lock import locked
from trainer.intake import Found, TrainingGroup, look, marks_of, rows_of, settle
from trainer.launch import Followers, rank_of
from trainer.learner import Learner, Outcome
from trainer.publication import put_weights
from trainer.step_log import StepLog

log = structlog.get_logger()
T = TypeVar("T")
_NAMED_WAIT_S = 600.0
_SAVE_AGAIN_S = 30.0
_LOST_AFTER_S = 8.0  # a bank that lost ready entries writes them again within a few seconds of its restart
_LOOK_AGAIN_S = 1.0


async def serve(context: ServiceContext) -> None:
    """One trainer; with several ranks, rank 0 owns the role and speaks on the bus, and the others follow the same ledger.

    Consumes: `ledger.batch.<s>` and the groups that it names. Produces: `train.demand.<s>`, then the weights' object, the
    checkpoint if one is due, and last `train.step.<s>`; between checkpoints the ledger is the log. Waits for: the ownership and
    the checkpoint folder's lock, version 0 to be published, then for each batch; each is named in the status. On error: a rank
    that dies, a lost ownership, and a folder that is another one's by now, end the process; it restarts as a whole from the
    newest checkpoint on the published line and takes the steps after it again. A step that comes out with other bits than were
    published begins a new incarnation. A checkpoint that cannot be written is named, and tried again after the next step. A
    group of which the store lost an item is
    left out of its step by name, and the commit says so for ever; a step that lost all leaves the weights as they are.
    On `policy.wanted.anchor`: an anchor of the present weights, before the next step. On stop: a step that was begun is
    finished and committed, then a checkpoint is written.
    """
    if rank_of(context.config)[0] != 0:
        await _train(context, None)
        return
    async with owned(context, end_at_once=True) as ownership:
        if ownership is not None:
            async with locked(context, context.config.run_folder() / "checkpoints") as go_on:
                if go_on:
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
        self._requests = AnchorRequests(context, ownership, self._work)

    async def run(self, group: asyncio.TaskGroup, ended: asyncio.Event) -> None:
        stop = self._context.stop
        learner = await self._work(lambda: Learner(self._config))
        self._steps = StepLog(self._bus, learner.base_digest)
        await self._requests.begin(learner)
        step = await self._recover(learner)
        await self._check_base(learner)
        self._context.ready()
        log.info("trainer", rank=self._rank, ranks=self._ranks, step=step, digest=learner.weights.digest[:12])
        self._batches = Batches(self._context, self._ownership, self._steps.line)
        group.create_task(self._batches.follow(step, ended))
        group.create_task(self._requests.follow(ended))
        while not stop.is_set() and not self._is_last(step):
            begun = time.monotonic()
            if (item := await self._next(learner, step)) is None:
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

    async def _next(self, learner: Learner, step: int) -> Item | None:
        """The step's batch, once every rank has it; None when a rank is told to stop."""
        item: Item | None = None
        while True:
            if item is None:
                ahead, last = self._config.trainer.demand_ahead, self._config.run.max_steps
                item = await self._batches.take(step, ahead, last, unless=self._requests.pending)
            stop, served = await self._requests.meet(learner, ready=item is not None)
            if stop or not served:
                return None if stop else item

    # -- recovery ------------------------------------------------------------------------------------------------------------

    async def _recover(self, learner: Learner) -> int:
        """The next step: after the newest checkpoint on the published line. An announcement that a crash prevented is made."""
        if self._ownership is None:
            return await self._work(partial(learner.restore, None))
        await self._ownership.confirm()
        owner = await self._work(lambda: folder_owner.take(learner.root, self._ownership.epoch if self._ownership else 0))
        await self._steps.read()
        chosen = await self._work(lambda: learner.find(lambda record: self._steps.refusal(record, learner.ranks)))
        if chosen is not None:
            self._announcement = chosen.commit.announcement
            missing = self._steps.unannounced(chosen.commit)
            if missing is not None:
                await self._ownership.confirm()
                await self._steps.announce(missing)
                log.info("announced from the checkpoint", step=missing.step, digest=missing.digest[:12])
        step = await self._work(partial(learner.restore, chosen, owner))
        if again := self._steps.steps_ahead(step):
            log.info("published steps are taken again", first=step, count=again)
        return step

    async def _check_base(self, learner: Learner) -> None:
        """Training starts only from the very bits that were published as version 0."""
        with self._context.health.waiting("version 0", "param_sync", _NAMED_WAIT_S, "keeps waiting"):
            places = ("policy.anchor.0", "policy.staged.1")  # the second is enough where the store has lost the first
            async for event in events(self._bus, Stream.POLICY, *places, stop=self._context.stop):
                if isinstance(event, Damaged):
                    await pass_over(self._bus, event)
                if not isinstance(event, Item):
                    continue
                link = event.decode(WeightsManifest)
                began = link.digest if link.form == "anchor" else link.base_digest
                if began != learner.base_digest:
                    raise BusError(
                        f"policy.model: its digest is {learner.base_digest[:12]}, this run began with {began[:12]}; "
                        "use another run.name for another model"
                    )
                return

    # -- one step ------------------------------------------------------------------------------------------------------------

    async def _step(self, learner: Learner, item: Item, step: int, *, waited_s: float) -> None:
        """Train, name, store the weights, commit, announce: in this order a crash anywhere leaves what can be resumed."""
        entry = item.decode(BatchEntry)
        begun = time.monotonic()
        groups, lost = await self._fetch(learner, entry)
        rows = self._rows(groups, entry)
        names = tuple(group.ready.group for group in groups)
        outcome = await self._work(lambda: learner.train(step, rows, names, item.seq, lost=len(lost)))
        incarnation = 0 if self._ownership is None else self._steps.incarnation_of(step, outcome.new.digest, names)
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
            commit = await self._committed(outcome, item, groups, lost, rows, waited_s=waited_s, trained_s=trained_s)
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

    async def _fetch(self, learner: Learner, entry: BatchEntry) -> tuple[list[TrainingGroup], tuple[LostGroup, ...]]:
        """The batch's groups, and those that are left out: lost by what was decided before, or since no other copy was found.

        All ranks leave out the same ones. What an earlier commit or the ledger left out stays out, though it can be read again.
        """
        known = self._known_lost(entry)
        found = await look(self._bus, entry, known)
        if missing := _missing(found, known, entry):
            at_deadline = "the step is taken without them, and they are abandoned as lost_item"
            with self._context.health.waiting(missing, "nats-server, bank", _LOST_AFTER_S, at_deadline):
                deadline = time.monotonic() + _LOST_AFTER_S
                while _missing(found, known, entry) and time.monotonic() < deadline:
                    await asyncio.sleep(_LOOK_AGAIN_S)  # also while the service stops: a step that was begun is finished
                    found = await look(self._bus, entry, known)
        marks = await self._work(partial(learner.agree_on, marks_of(found)))
        groups, lost = settle(entry, found, marks)
        for left in lost:
            item = left.item
            self._bus.alarm("lost_items", group=left.group, step=entry.step, stream=item.stream, seq=item.seq)
        return groups, lost

    def _known_lost(self, entry: BatchEntry) -> dict[str, LostItem]:
        """What was decided before. Only rank 0 reads it; its marks tell the others."""
        if self._ownership is None:
            return {}
        return {**self._batches.taken_out(entry.step), **self._steps.lost_of(entry.step)}

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
        lost: tuple[LostGroup, ...],
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
            groups=tuple(group.ready.group for group in groups),
            rows=sum(len(part) for part in rows),
            trained_tokens=outcome.tokens,
            optimizer_steps=outcome.optimizer_steps,
            patches=(reference,),
            patch_bytes=reference.size_bytes,
            metrics=outcome.metrics | _batch_metrics(entry, groups),
            ledger_seq=item.seq,
            wait_s=waited_s,
            train_s=trained_s,
            publish_s=time.monotonic() - begun,
            finished_ns=time.time_ns(),
            lost=lost or msgspec.UNSET,
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
                await self._requests.stay(learner)
                return
            disk = f"the disk of {learner.root}"
            with self._context.health.waiting("room for the checkpoint", disk, _NAMED_WAIT_S, "tries again twice a minute"):
                log.error("checkpoint not written", root=str(learner.root), next_try_s=_SAVE_AGAIN_S)
                await pause(stop, _SAVE_AGAIN_S)
        await self._write(learner)


def _missing(found: Sequence[Found], known: dict[str, LostItem], entry: BatchEntry) -> str:
    """The groups that the store lacks beside those that are known to be lost; empty when there are none."""
    lost = [each.group for each, has in zip(entry.groups, found, strict=True) if has.group is None and each.group not in known]
    return f"items of {', '.join(lost)}, of batch {entry.step}" if lost else ""


def _batch_metrics(entry: BatchEntry, groups: Sequence[TrainingGroup]) -> dict[str, float]:
    rewards = [reward for group in groups for reward in group.ready.rewards()]
    counted = [reward for reward in rewards if reward is not None]
    trained = {group.ready.group for group in groups}
    lags = [group.lag for group in entry.groups if group.group in trained]
    return {
        "reward_mean": sum(counted) / len(counted) if counted else 0.0,
        "rewarded": float(len(counted)),
        "censored": float(len(rewards) - len(counted)),
        "lag_mean": sum(lags) / len(lags) if lags else 0.0,
        "lag_max": float(max(lags, default=0)),
        "lost_groups": float(len(entry.groups) - len(trained)),
    }
