"""Supervised warm start through the same trainer as RL: `python -m trainer.sft --config PATH`.

Consumes demonstration rows from a generator named in the configuration, produces a checkpoint directory that transformers and
vLLM load. Deterministic for a seed on one machine.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from services.device import DeviceSetting, choose_device, thread_environment
from trainer.batch import TrainRow
from trainer.config import OptimizerConfig, TrainerConfig
from trainer.learning_rate import Schedule, learning_rate


class SftError(RuntimeError):
    """The warm start cannot run as configured; the text names the field or the row."""


class SftPhase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stretch of training with its own data mixture and learning-rate schedule. The optimizer's moments carry over."""

    steps: int
    """Optimizer steps."""
    batch_rows: int = 32
    """Rows per step."""
    learning_rate: float = 1e-3
    """Peak rate."""
    schedule: Schedule = "constant"
    """Shape after the warm-up: `constant`, `linear` or `cosine`."""
    final: float = 0.0
    """Share of the peak rate that `linear` and `cosine` end at."""
    warmup_steps: int = 0
    """Steps of linear rise, counted within `steps`."""
    rows_kwargs: dict[str, Any] = {}
    """Keyword arguments of the row generator in this phase; `seed` is added unless it is given here."""


class SftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[sft]` table."""

    model_dir: str
    """Checkpoint directory to start from."""
    output_dir: str
    """Where the trained checkpoint is written: bfloat16 safetensors, plus configuration and tokenizer of `model_dir`."""
    rows: str
    """`module:function`: called once per phase as `function(seed=..., **rows_kwargs)`; yields objects with `ids` and `mask`."""
    phase: tuple[SftPhase, ...]
    """`[[sft.phase]]` tables, run in order."""
    seed: int = 0
    """Seeds the trainer; phase `p` passes `seed + p` to the row generator."""
    threads: int = 1
    """Threads of the compute libraries."""
    device: DeviceSetting = "auto"
    """`auto`, `cpu` or `cuda`."""
    micro_batch_tokens: int = 2048
    """Largest padded size of one forward, tokens; small batches stay in the CPU's cache."""
    zero_stage: int = 0
    """DeepSpeed ZeRO stage."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay of the first and second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices (embeddings too); norms and biases do not decay."""
    gradient_clipping: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    log_every: int = 20
    """Steps between progress lines."""


class SftRow(Protocol):
    """What the generator yields: token ids int32 [T] and a mask bool [T] of the tokens to learn."""

    @property
    def ids(self) -> npt.NDArray[np.int32]: ...

    @property
    def mask(self) -> npt.NDArray[np.bool_]: ...


def run_sft(config: SftConfig, report: Callable[[str], None] = print) -> float:
    """Train through all phases and write `output_dir`; returns the mean loss (nats per token) of the last progress window.

    Raises `SftError` for a row generator that cannot be found or ends early, and for rows that nothing can be learned from.
    """
    os.environ.update(thread_environment(config.threads))  # before torch loads, which asking for the device may do
    device = choose_device(config.device, threads=config.threads)
    from trainer.deepspeed_trainer import DeepSpeedTrainer
    from trainer.export import write_checkpoint

    generator = _row_function(config.rows)
    trainer = DeepSpeedTrainer(_trainer_config(config), device)
    report(f"{'phase':>5} {'step':>6} {'loss':>8} {'grad':>8} {'rate':>9} {'rows/s':>7} {'tok/s':>8} {'left':>6}")
    mean = float("nan")
    for index, phase in enumerate(config.phase):
        rows = _checked_rows(generator(**{"seed": config.seed + index, **phase.rows_kwargs}), f"phase {index} of {config.rows}")
        mean = _run_phase(trainer, index, phase, rows, config.log_every, report)
    write_checkpoint(config.output_dir, trainer.policy_bits(owned=False), source=config.model_dir)
    trainer.close()
    return mean


def _run_phase(
    trainer: Any, index: int, phase: SftPhase, rows: Iterator[TrainRow], log_every: int, report: Callable[[str], None]
) -> float:
    """One phase; returns the mean loss of its last progress window."""
    losses: list[float] = []
    tokens, started, mean = 0, time.monotonic(), float("nan")
    for step in range(phase.steps):
        batch = list(itertools.islice(rows, phase.batch_rows))
        if len(batch) < phase.batch_rows:
            raise SftError(f"phase {index}: the rows ended at step {step} of {phase.steps}; yield more rows, or lower steps")
        rate = learning_rate(
            step, phase.learning_rate, phase.schedule, steps=phase.steps, warmup_steps=phase.warmup_steps, final=phase.final
        )
        losses.append(trainer.sft_step(batch, rate))
        tokens += sum(row.length for row in batch)
        if (step + 1) % log_every == 0 or step + 1 == phase.steps:
            seconds = time.monotonic() - started
            mean = float(np.mean(losses))
            speed = len(losses) / seconds
            report(
                f"{index:>5} {step + 1:>6} {mean:>8.4f} {trainer.gradient_norm:>8.3f} {rate:>9.2e} "
                f"{speed * phase.batch_rows:>7.1f} {tokens / seconds:>8.0f} {(phase.steps - step - 1) / speed:>5.0f}s"
            )
            losses, tokens, started = [], 0, time.monotonic()
    return mean


def _checked_rows(rows: Any, where: str) -> Iterator[TrainRow]:
    for number, row in enumerate(rows):
        ids, mask = np.asarray(row.ids, dtype=np.int32), np.asarray(row.mask, dtype=np.bool_)
        if ids.ndim != 1 or ids.shape != mask.shape or ids.shape[0] < 2:
            raise SftError(f"{where}: row {number}: ids {ids.shape} and mask {mask.shape} must be 1-D, equal, 2 tokens or more")
        if mask[0] or not mask.any():
            raise SftError(f"{where}: row {number}: mask must select a token, and not the first, which has no context")
        yield TrainRow(ids=ids, mask=mask, logprobs=np.zeros(ids.shape[0], np.float32), advantage=1.0)


def _row_function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not module or not name:
        raise SftError(f"rows: {path!r} must read 'module:function'")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as failure:
        raise SftError(f"rows: {path!r} cannot be found: {failure}") from failure
    return function


def _trainer_config(config: SftConfig) -> TrainerConfig:
    if config.zero_stage not in (0, 1, 2, 3):
        raise SftError(f"zero_stage: {config.zero_stage} must be 0, 1, 2 or 3")
    return msgspec.convert(
        {
            "model_dir": config.model_dir,
            "seed": config.seed,
            "zero_stage": config.zero_stage,
            "gradient_clipping": config.gradient_clipping,
            "micro_batch_tokens": config.micro_batch_tokens,
            "optimizer": msgspec.to_builtins(OptimizerConfig(betas=config.betas, weight_decay=config.weight_decay)),
        },
        TrainerConfig,
    )


def read_config(path: str | Path) -> SftConfig:
    """The `[sft]` table of a TOML file. Raises `SftError` naming the unknown or missing field."""
    with open(path, "rb") as file:
        document = tomllib.load(file)
    try:
        return msgspec.convert(document.get("sft", {}), SftConfig)
    except msgspec.ValidationError as failure:
        raise SftError(f"{path}: [sft]: {failure}") from failure


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="trainer.sft", description="Supervised warm start on demonstration rows.")
    parser.add_argument("--config", required=True, help="TOML file with an [sft] table")
    try:
        config = read_config(parser.parse_args(arguments).config)
        run_sft(config, lambda line: print(line, flush=True))
    except SftError as failure:
        print(f"trainer.sft: {failure}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
