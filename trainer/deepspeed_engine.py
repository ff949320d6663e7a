"""The one door to `deepspeed`: a scored model under ZeRO that accumulates exact gradient sums and takes one step when told.

What it pins down:

* gradients are *sums*: DeepSpeed divides by the world size and by the accumulation steps; the accumulation setting stays 1
  and the loss is multiplied by the world size, so what the caller's loss is normalised by is the only normalisation;
* the number of micro-batches is free: the caller names the last one;
* the forward runs on bfloat16-exact weights and the served bits are those weights: in bfloat16 through DeepSpeed's own
  float32 masters, in float32 through the masters of `RoundedAdamW`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from services.device import Device
from trainer.config import TrainerConfig
from trainer.ranks import join_ranks
from trainer.rounded_adamw import RoundedAdamW
from trainer.scorer import MicroBatch, TokenScorer
from trainer.slices import Slice, cut, deal

_TAG = "deepspeed"
_GATHER_BYTES = 256 * 2**20


class EngineError(RuntimeError):
    """DeepSpeed cannot be started as configured, or did not take a step it was told to take."""


class ShardedModel:
    """A `TokenScorer` and its AdamW under DeepSpeed ZeRO 0 to 3. Every rank must call every method, in the same order."""

    def __init__(self, scorer: TokenScorer, config: TrainerConfig, device: Device) -> None:
        """Raises `EngineError` for a stage that the compute dtype rules out and for a missing compiler where one is needed."""
        if config.zero_stage == 0 and device.compute_dtype == "bfloat16":
            raise EngineError(
                "zero_stage: 0 with bfloat16 compute accumulates gradients in bfloat16 inside DeepSpeed; use stage 1, "
                "which costs the same on one rank and keeps float32 accumulators"
            )
        self._deepspeed = _import_deepspeed(device, config.shared_memory_collectives)
        self.device = device
        self.rank, self.ranks = join_ranks(device, config.collective_timeout_s)
        self._deepspeed.init_distributed(dist_backend=device.distributed_backend, auto_mpi_discovery=False, verbose=False)
        self.stage = config.zero_stage
        settings = config.optimizer
        optimizer_class = RoundedAdamW if device.compute_dtype == "float32" else torch.optim.AdamW
        trained = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.ndim > 1]
        vectors = [parameter for parameter in trained if parameter.ndim <= 1]
        # One group where nothing decays: ZeRO flattens per group, and fewer, larger pieces are faster.
        decayed: Any = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}] if settings.weight_decay else trained
        optimizer = optimizer_class(
            decayed,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        with contextlib.redirect_stdout(io.StringIO()):  # its bf16 optimizer prints memory tables
            self._engine, self._optimizer, _, _ = self._deepspeed.initialize(
                model=scorer, optimizer=optimizer, config=_deepspeed_config(config, device), dist_init_required=False
            )
        self._engine.train()
        self._names = [(name.removeprefix("model."), p) for name, p in self._engine.module.named_parameters()]
        self._parameters: dict[str, Any] = dict(self._names)

    def begin(self, *, last: bool) -> None:
        """Announce a micro-batch before its forward; `last`: the optimizer step follows its backward."""
        self._engine.set_gradient_accumulation_boundary(last)

    def score(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies float32 [N] of the batch's targets, see `TokenScorer.forward`."""
        scores: tuple[torch.Tensor, torch.Tensor] = self._engine(batch.ids, batch.contexts, batch.targets)
        return scores

    def accumulate(self, loss: torch.Tensor) -> None:
        """Add the gradient of this rank's scalar `loss` to the sum over micro-batches and ranks."""
        self._engine.backward(loss * float(self.ranks))

    def step(self, rate: float) -> float:
        """Apply the accumulated gradients with this learning rate; returns their global norm before clipping.

        Raises `EngineError` when the gradients are not finite: no weights change then, and no step is counted.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = self._norm_without_zero() if self.stage == 0 else None
        if norm is None or math.isfinite(norm):
            self._engine.step()
            norm = self._engine.get_global_grad_norm() if norm is None else norm
        applied = self._engine.was_step_applied()
        if not applied or norm is None or not math.isfinite(norm):
            self._engine.zero_grad()
            raise EngineError(f"the gradient norm is {norm}: the step was not applied; look for the rows with extreme ratios")
        return float(norm)

    def weights(self, *, owned: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, bfloat16 weights on the CPU) of the tensors of this rank, or of all; tied weights come once.

        Owners are dealt by size, so that ranks hold nearly equal bytes. At ZeRO 3 all ranks gather bounded groups of tensors
        together, in the same order, and keep their own.
        """
        owners = {part.name: part.rank for part in deal([(name, _numel(p)) for name, p in self._names], self.ranks)}
        for group in _buckets(self._names, _GATHER_BYTES):
            with self._gathered([parameter for _, parameter in group]):
                kept = [(name, p) for name, p in group if not owned or owners[name] == self.rank]
                mine = [(name, p.detach().to("cpu", torch.bfloat16, copy=True)) for name, p in kept]
            yield from mine

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its checkpoint name; tied weights come once."""
        return {name: tuple(int(n) for n in getattr(p, "ds_shape", p.shape)) for name, p in self._names}

    def slices(self) -> list[Slice]:
        """What each rank owns, of all ranks, each element once: at ZeRO 3 its partition of every tensor; at 1 and 2 its stretch
        of the optimizer's flat buffers, with whole tensors for what is not trained; at 0 whole tensors.
        """
        sizes = {name: _numel(p) for name, p in self._names}
        if self.stage == 3:
            return [part for name, p in self._names for part in cut([(name, 0, sizes[name])], int(p.ds_tensor.ds_numel))]
        layout = self._flat_layout() if self.stage else []
        found = [part for tensors, partition in layout for part in cut(tensors, partition)]
        placed = {part.name for part in found}
        return [*found, *deal([(name, size) for name, size in sizes.items() if name not in placed], self.ranks)]

    def words(self, part: Slice) -> torch.Tensor:
        """The bfloat16 weights [elements] of a slice that this rank owns, on the CPU. No rank takes part but this one."""
        parameter = self._parameters[part.name]
        if self.stage == 3:
            held = parameter.ds_tensor.narrow(0, 0, part.elements)
        else:
            held = parameter.detach().reshape(-1).narrow(0, part.start, part.elements)
        weights: torch.Tensor = held.to("cpu", torch.bfloat16, copy=True)
        return weights

    def save(self, folder: Path) -> None:
        """Write everything that DeepSpeed needs to continue bit for bit: one file per rank and one of the model."""
        self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Continue from `save`'s folder with the same number of ranks. Raises `EngineError` when DeepSpeed finds no state."""
        path, _ = self._engine.load_checkpoint(str(folder), tag=_TAG)
        if path is None:
            raise EngineError(f"{folder}: no DeepSpeed state under {_TAG!r}; was it saved with another number of ranks?")

    def close(self) -> None:
        """Free DeepSpeed's buffers and hooks; the process group stays."""
        self._engine.destroy()

    def _flat_layout(self) -> list[tuple[list[tuple[str, int, int]], int]]:
        """Each flat buffer of ZeRO 1 or 2: its tensors as (name, offset, elements), and the elements that each rank owns.

        Found by address, so that no order or padding inside a buffer has to be known.
        """
        flats = getattr(self._optimizer, "bit16_groups_flat", None) or self._optimizer.bf16_groups_flat
        layout = []
        for flat in flats:
            begin, width = flat.data_ptr(), flat.element_size()
            places = [(name, (p.data_ptr() - begin) // width, p.numel()) for name, p in self._names]
            inside = [place for place in places if 0 <= place[1] < flat.numel()]
            layout.append((inside, flat.numel() // self.ranks))
        return layout

    def _gathered(self, parameters: list[torch.nn.Parameter]) -> Any:
        return self._deepspeed.zero.GatheredParameters(parameters, enabled=self.stage == 3)

    def _norm_without_zero(self) -> float:
        """Global gradient norm at stage 0, where DeepSpeed does not report it; the gradients are already summed over ranks."""
        gradients = [p.grad for _, p in self._names if p.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in gradients])))


def _import_deepspeed(device: Device, shared_memory: bool) -> Any:
    """DeepSpeed, told which accelerator to use before its first import, and whether it may compile its CPU collectives."""
    os.environ["DS_ACCELERATOR"] = device.accelerator
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.kind == "cpu":
        if shared_memory and not (shutil.which("c++") or shutil.which("g++")):
            raise EngineError("shared_memory_collectives: no C++ compiler on PATH; install g++ or set it to false for gloo")
        if shared_memory and not shutil.which("ninja"):
            raise EngineError("shared_memory_collectives: ninja is not on PATH; install it or set it to false for gloo")
        if not shared_memory:  # otherwise the first start compiles C++ for half a minute, or fails without a compiler
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _deepspeed_config(config: TrainerConfig, device: Device) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.zero_stage, "overlap_comm": device.kind == "cuda"}
    if config.zero_stage == 3 and device.kind == "cpu":
        zero["stage3_param_persistence_threshold"] = 0
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "steps_per_print": 2**62,
    }
    if device.compute_dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _numel(parameter: Any) -> int:
    """Elements of a parameter, also when ZeRO 3 has taken its storage away."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _buckets(names: list[tuple[str, Any]], limit_bytes: int) -> Iterator[list[tuple[str, Any]]]:
    """Consecutive parameters whose float32 sizes sum to at most the limit, or one that alone is larger."""
    group: list[tuple[str, Any]] = []
    held = 0
    for name, parameter in names:
        size = 4 * _numel(parameter)
        if group and held + size > limit_bytes:
            yield group
            group, held = [], 0
        group.append((name, parameter))
        held += size
    if group:
        yield group
