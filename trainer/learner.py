"""One rank's learner: the DeepSpeed trainer between named weights before and after, what leads there, and its checkpoints."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import structlog
import torch
import torch.distributed as dist

from param_sync.patch.container import Encoded
from services.config import Config
from services.device import choose_device
from services.engine.checkpoint_files import digest_of, tensors_of
from trainer import checkpoint, folder_owner
from trainer.batch import TrainRow, padding_row
from trainer.config import ObjectiveConfig, OptimizerConfig, TrainerConfig
from trainer.deepspeed_trainer import DeepSpeedTrainer
from trainer.folder_owner import FolderTaken
from trainer.metrics import StepMetrics
from trainer.ranks import exchange
from trainer.schedule import Schedule, mini_batches, schedule
from trainer.weight_shards import Name, WeightShards

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one step made: both sets of weights, by digest, what leads to the new ones, and the step's numbers."""

    old: Name
    new: Name
    patch: Encoded | None
    """From `old` to `new`, on rank 0."""
    anchor: Encoded | None = None
    """All of `new`, on rank 0, where it begins an incarnation."""
    metrics: dict[str, float]
    tokens: int
    optimizer_steps: int


class Learner:
    """Blocking; the service calls it on one thread. Every rank makes the same calls in the same order.

    `overdue`: a checkpoint was due and could not be written; the next step tries again.
    """

    def __init__(self, config: Config) -> None:
        settings = config.trainer
        self._config = config
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = choose_device(
            settings.device, threads=settings.threads, local_rank=local_rank, compute_dtype=settings.compute_dtype
        )
        os.environ.update(device.environment())
        self._trainer = DeepSpeedTrainer(trainer_config(config), device)
        self._root = config.run_folder() / "checkpoints"
        self._consumed: list[str] = []
        self._ledger_position = 0
        self._saved_step = 0
        self._owner = 0
        self._step = 0  # the next one
        self.overdue = False
        self._shards = WeightShards(
            self._trainer.shards,
            lambda outgoing: exchange(outgoing, self._trainer.device.torch_device),
            level=config.param_sync.patch_level,
        )
        self.base_digest = digest_of(tensors_of(config.policy.model))
        self.weights = Name(0, 0, self._shards.read())
        if self.weights.digest != self.base_digest:
            raise checkpoint.CheckpointError(
                f"policy.model: the trainer holds digest {self.weights.digest[:12]} after loading a checkpoint of digest "
                f"{self.base_digest[:12]}; are its weights bfloat16 and its tied tensors stored once?"
            )

    @property
    def root(self) -> Path:
        """Where checkpoints are."""
        return self._root

    @property
    def ranks(self) -> int:
        return self._trainer.ranks

    def find(self, refuse: Callable[[checkpoint.Commit], str]) -> checkpoint.Checkpoint | None:
        """The newest intact checkpoint that may be continued from; each that is passed over is named. For rank 0."""
        found = checkpoint.latest(self._root, refuse)
        for damage in found.damaged:
            log.error("checkpoint passed over", path=str(damage.path), reason=damage.reason)
        if found.checkpoint is None and found.damaged:
            log.error(
                "no checkpoint can be used: the whole ledger is trained again from the base", passed_over=len(found.damaged)
            )
        return found.checkpoint

    def restore(self, chosen: checkpoint.Checkpoint | None, owner: int = 0) -> int:
        """Continue from the checkpoint that rank 0 has chosen, or from the base; gives the next step.

        `owner`: rank 0's number in the checkpoint folder.
        """
        place = [-1, 0] if chosen is None else [chosen.commit.step, chosen.commit.incarnation]
        step, incarnation, self._owner = self._shared([*place, owner])
        if step < 0:
            return 0
        folder = self._root / checkpoint.name_of(step, incarnation)
        record = checkpoint.read(folder)
        if isinstance(record, checkpoint.Damage):
            raise checkpoint.CheckpointError(f"{folder}: {record.reason}")
        if record.config_hash != config_hash(self._config):
            log.warning("the configuration changed since the checkpoint", step=record.step)
        self._trainer.load_state(folder / "state")
        self._consumed = list(record.consumed_group_ids)
        self._ledger_position = record.ledger_position
        self._step = self._saved_step = record.step + 1
        self.weights = Name(record.version, record.incarnation, self._shards.read())
        if self.weights.digest != record.digest:
            raise checkpoint.CheckpointError(
                f"{folder}: its weights have digest {self.weights.digest[:12]}, its record says {record.digest[:12]}"
            )
        log.info("checkpoint restored", step=record.step, version=record.version, digest=record.digest[:12])
        return self._step

    def train(
        self, step: int, groups: Sequence[Sequence[TrainRow]], names: Sequence[str], ledger_seq: int, *, lost: int = 0
    ) -> Outcome:
        """The batch's optimizer steps. What they made has no name before `name`.

        `lost`: groups of the batch that are not among `groups`. Without any group there is no optimizer step: weights,
        optimizer and learning rate stay as they are.
        """
        rows = [row for group in groups for row in group]
        plan = self._plan(len(groups), len(rows), lost) if groups else None
        begun = time.monotonic()
        result = self._trainer.train_batch(mini_batches(rows, plan, padding_row())) if plan is not None else None
        old = self.weights
        self.weights, patch = self._shards.step(old, step + 1)
        self._consumed.extend(names)
        self._ledger_position = ledger_seq
        self._step = step + 1
        return Outcome(
            old=old,
            new=self.weights,
            patch=patch,
            metrics=({} if result is None else _flat(result)) | {"learn_s": time.monotonic() - begun},
            tokens=0 if result is None else sum(update.tokens for update in result.updates),
            optimizer_steps=0 if plan is None else plan.optimizer_steps,
        )

    def _plan(self, groups: int, rows: int, lost: int) -> Schedule:
        """As many mini-batches as the whole batch gives, if there are groups for each."""
        settings, ranks, prompts = self._config.trainer, self._trainer.ranks, groups + lost
        size = settings.mini_batch_groups or prompts
        plan = schedule(source_prompts=prompts, mini_batch_prompts=size, rows=rows, ranks=ranks, epochs=settings.epochs)
        if not lost:
            return plan
        count = min(plan.mini_batches, groups)
        return schedule(source_prompts=count, mini_batch_prompts=1, rows=rows, ranks=ranks, epochs=settings.epochs)

    def name(self, outcome: Outcome, incarnation: int) -> Outcome:
        """Put the step's weights under the incarnation that rank 0 decided on; the others' number is not looked at."""
        (decided,) = self._shared([incarnation])
        self.weights = replace(self.weights, incarnation=decided)
        return replace(outcome, new=self.weights, anchor=self.anchor() if decided != outcome.old.incarnation else None)

    def anchor(self) -> Encoded | None:
        """The full snapshot of the present weights, on rank 0; all ranks take part."""
        return self._shards.anchor(self.weights)

    def due(self) -> bool:
        """Whether the step just taken is one to write a checkpoint after."""
        return self.overdue or self._step % self._config.trainer.checkpoint_every == 0

    def place(self) -> str:
        """Path of the checkpoint of the last finished step."""
        return str(self._root / checkpoint.name_of(self._step - 1, self.weights.incarnation))

    def save(self, announcement: bytes) -> None:
        """Write the checkpoint of the last finished step, which commits step, groups, version and digest, unless it is there.

        `announcement`: of this step, published only afterwards. Raises `NotWritten` with the reason when the disk does not take
        it and there is one rank; of several, the others would be left waiting in the middle of it, so any error is the end.
        Raises `FolderTaken` when another trainer has the folder by now.
        """
        if self._step == self._saved_step:
            return
        self.overdue = True
        aside = checkpoint.aside_of(self._root, self._step - 1, self.weights.incarnation, owner=self._owner)
        try:
            self._write(aside, announcement)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            if self._trainer.ranks > 1 or isinstance(error, (checkpoint.CheckpointError, FolderTaken)):
                raise
            folder_owner.check(self._root, self._owner)  # then it was no full disk
            shutil.rmtree(aside, ignore_errors=True)
            free = shutil.disk_usage(self._root).free
            raise checkpoint.NotWritten(f"{aside.name} was not written, {free} bytes are free: {error}") from error
        self._saved_step, self.overdue = self._step, False

    def _write(self, aside: Path, announcement: bytes) -> None:
        last = self._step - 1
        main = self._trainer.rank == 0
        if main:
            checkpoint.prepare(self._root, last, self.weights.incarnation, owner=self._owner)
        self._barrier()
        self._trainer.save_state(aside / "state")
        if main:
            record = checkpoint.Commit(
                step=last,
                version=self.weights.version,
                incarnation=self.weights.incarnation,
                digest=self.weights.digest,
                consumed_group_ids=tuple(self._consumed),
                ledger_position=self._ledger_position,
                config_hash=config_hash(self._config),
                ranks=self._trainer.ranks,
                written_ns=time.time_ns(),
                announcement=announcement,
            )
            checkpoint.commit(self._root, aside, record, owner=self._owner)
            checkpoint.prune(self._root, self._config.trainer.keep_checkpoints, owner=self._owner)
        self._barrier()

    def agree_on(self, marks: Sequence[int]) -> list[int]:
        """The highest mark that any rank gives each place, on every rank."""
        if self._trainer.ranks == 1:
            return list(marks)
        shared = torch.tensor(list(marks), dtype=torch.int64, device=self._trainer.device.torch_device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return [int(mark) for mark in shared.tolist()]

    def close(self) -> None:
        self._trainer.close()

    def _shared(self, numbers: list[int]) -> list[int]:
        """Rank 0's numbers, on every rank."""
        if self._trainer.ranks == 1:
            return numbers
        shared = torch.tensor(numbers, dtype=torch.int64, device=self._trainer.device.torch_device)
        dist.broadcast(shared, src=0)
        return [int(number) for number in shared.tolist()]

    def _barrier(self) -> None:
        if self._trainer.ranks > 1:
            dist.barrier()


def trainer_config(config: Config) -> TrainerConfig:
    """The run's configuration as the trainer's own settings."""
    settings = config.trainer
    return TrainerConfig(
        model_dir=config.policy.model,
        seed=config.run.seed,
        zero_stage=settings.zero_stage,  # type: ignore[arg-type]
        gradient_clipping=settings.max_grad_norm,
        micro_batch_tokens=settings.micro_batch_tokens,
        temperature=config.rollout.temperature,
        activation_checkpointing=settings.activation_checkpointing,
        optimizer=OptimizerConfig(
            learning_rate=settings.learning_rate,
            warmup_steps=settings.warmup_steps,
            betas=settings.betas,
            epsilon=settings.eps,
            weight_decay=settings.weight_decay,
        ),
        objective=ObjectiveConfig(
            name=settings.objective,
            reduction=settings.reduction,
            epsilon_low=settings.clip_low,
            epsilon_high=settings.clip_high,
            proximal=settings.proximal,
            weight_max=settings.weight_max or None,
            kl=settings.kl,
            kl_estimator=settings.kl_estimator,
            kl_coefficient=settings.kl_coefficient,
        ),
    )


def config_hash(config: Config) -> str:
    """Of what the update depends on: model, sampler and trainer settings."""
    parts = {"policy": config.policy, "rollout": config.rollout, "trainer": config.trainer, "admission": config.admission}
    text = msgspec.json.encode({name: part.model_dump() for name, part in parts.items()})
    return hashlib.sha256(text).hexdigest()[:16]


def _flat(result: StepMetrics) -> dict[str, float]:
    """The step's numbers, averaged over its updates where there are several."""
    fields = [msgspec.structs.asdict(update) for update in result.updates]
    out = {name: sum(float(f[name]) for f in fields) / len(fields) for name in fields[0]}
    out["grad_norm"] = out.pop("gradient_norm")
    return out
