"""The trainer: mini-batches of rows in, exactly one optimizer step for each, and the metrics and weights that come out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from services.device import Device
from services.engine.hf_models import load_causal_lm
from trainer.batch import TrainRow, padding_row
from trainer.config import TrainerConfig
from trainer.deepspeed_engine import ShardedModel
from trainer.learning_rate import learning_rate
from trainer.losses import TokenBatch, TokenLoss, objective
from trainer.metrics import StepMetrics, TokenFacts, UpdateMetrics, update_metrics
from trainer.packing import Packing, pack
from trainer.random_state import restore_random_state, save_random_state, seed_everything
from trainer.ranks import barrier, gather_arrays, join_ranks
from trainer.reductions import token_weights
from trainer.scorer import MicroBatch, TokenScorer, micro_batch, without_dropout

Floats = npt.NDArray[np.float32]
_PADDING = padding_row()


class DeepSpeedTrainer:
    """A causal language model under DeepSpeed. With several ranks, every rank calls every method, with the same rows.

    `optimizer_steps` counts the updates since the start of training; it is the position in the learning-rate schedule.
    """

    def __init__(self, config: TrainerConfig, device: Device) -> None:
        """Load `config.model_dir`. Raises `ConfigError`, `ModelLoadError`, `RankError` or `EngineError`, naming the field."""
        self.config = config.checked()
        self.device = device
        torch.set_num_threads(device.threads)
        self.rank, self.ranks = join_ranks(device, config.collective_timeout_s)
        seed_everything(config.seed + self.rank)
        self._model = ShardedModel(self._scorer(config.model_dir), self.config, device)
        self._reference = self._frozen_reference()
        self.optimizer_steps = 0
        self.gradient_norm = 0.0  # of the last update, before clipping

    def train_batch(self, mini_batches: Sequence[Sequence[TrainRow]]) -> StepMetrics:
        """One optimizer step per mini-batch, in order (epochs unrolled, see `trainer.schedule.mini_batches`).

        With the `batch_start` proximal policy, its log-probabilities are taken before the first step.
        Raises `EngineError` for a gradient that is not finite.
        """
        proximal: dict[int, Floats] = {}
        if self.config.objective.proximal == "batch_start":
            for rows in {tuple(map(id, part)): part for part in mini_batches}.values():
                for row, values in zip(rows, self.log_probs(rows), strict=True):
                    proximal[id(row)] = values
        return StepMetrics(updates=tuple(self._update(rows, proximal) for rows in mini_batches))

    def sft_step(self, rows: Sequence[TrainRow], rate: float) -> float:
        """One optimizer step of mean cross-entropy over the masked tokens of `rows`; returns that loss, nats per token."""
        weights = token_weights(rows, "token_mean")
        total = 0.0
        for part, batch, last in self._micro_batches(rows, self._pack(rows)):
            weight = self._tensor([weights[index][rows[index].mask] for index in part])
            self._model.begin(last=last)
            logprobs, _ = self._model.score(batch)
            loss = -(weight * logprobs).sum()
            self._model.accumulate(loss)
            total += float(loss.detach())
        self.gradient_norm = self._model.step(rate)
        self.optimizer_steps += 1
        return self._sum(total)

    def log_probs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        """The present policy's log-probability of each sampled token, float32 [T] per row, 0 off the mask; on every rank."""
        return self._score_rows(rows, self._model.score)

    def policy_bits(self, *, owned: bool = True) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
        """(checkpoint name, bfloat16 bits as uint16, in the tensor's shape) of this rank's tensors, or of all of them.

        Tied weights come once, under the name that the checkpoint uses. All ranks must run the iterator to its end.
        """
        for name, weights in self._model.weights(owned=owned):
            yield name, weights.view(torch.uint16).numpy()

    @property
    def shards(self) -> ShardedModel:
        """Which rank owns which weights, and those of this rank."""
        return self._model

    def save_state(self, folder: str | Path) -> None:
        """Write model, optimizer, random state and step counter; `load_state` continues bit for bit on the same machine."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        self._model.save(target)
        save_random_state(target / f"random-{self.rank:05d}.msgpack", self.optimizer_steps)
        barrier()

    def load_state(self, folder: str | Path) -> None:
        """Continue from a folder of `save_state`, with the same number of ranks. Raises `EngineError` or `OSError`."""
        source = Path(folder)
        self._model.load(source)
        self.optimizer_steps = restore_random_state(source / f"random-{self.rank:05d}.msgpack")
        barrier()

    def close(self) -> None:
        """Free DeepSpeed's buffers."""
        self._model.close()

    def _update(self, rows: Sequence[TrainRow], proximal: dict[int, Floats]) -> UpdateMetrics:
        """One optimizer step on one mini-batch."""
        started = time.monotonic()
        effective = [row if self._computed(row) else _PADDING for row in rows]
        normalised = zip(token_weights(rows, self.config.objective.reduction), effective, strict=True)
        weights = [np.zeros(row.length, np.float32) if row is _PADDING else weight for weight, row in normalised]
        reference = self._reference_logprobs(effective)
        packing = self._pack(effective)
        facts: list[TokenFacts] = []
        total = 0.0
        for part, batch, last in self._micro_batches(effective, packing):
            self._model.begin(last=last)
            logprobs, entropy = self._model.score(batch)
            chosen = [effective[index] for index in part]
            tokens = TokenBatch(
                logprobs=logprobs,
                behaviour=self._tensor([row.logprobs[row.mask] for row in chosen]),
                advantages=self._tensor([np.full(int(row.mask.sum()), row.advantage or 0.0, np.float32) for row in chosen]),
                weights=self._tensor([weights[i][row.mask] for i, row in zip(part, chosen, strict=True)]),
                proximal=self._tensor([proximal[id(row)][row.mask] for row in chosen if row is not _PADDING])
                if proximal
                else None,
                reference=self._tensor([reference[i][effective[i].mask] for i in part]) if reference else None,
            )
            result = objective(tokens, self.config.objective)
            self._model.accumulate(result.loss)
            total += float(result.loss.detach())
            facts.append(_facts(part, chosen, tokens, entropy, result))
        rate = self._rate()
        self.gradient_norm = self._model.step(rate)
        self.optimizer_steps += 1
        return update_metrics(
            rows,
            self._gathered(facts),
            loss=self._sum(total),
            gradient_norm=self.gradient_norm,
            learning_rate=rate,
            padding_waste=packing.waste,
            seconds=time.monotonic() - started,
        )

    def _computed(self, row: TrainRow) -> bool:
        return row.counted and not (self.config.skip_zero_advantage and row.advantage == 0.0)

    def _rate(self) -> float:
        settings = self.config.optimizer
        return learning_rate(
            self.optimizer_steps,
            settings.learning_rate,
            settings.schedule,
            steps=settings.steps,
            warmup_steps=settings.warmup_steps,
            final=settings.final,
        )

    def _pack(self, rows: Sequence[TrainRow]) -> Packing:
        lengths = [row.length for row in rows]
        return pack(lengths, self.ranks, self.config.micro_batch_tokens, self.device.micro_batch_overhead_tokens)

    def _micro_batches(self, rows: Sequence[TrainRow], packing: Packing) -> Iterator[tuple[tuple[int, ...], MicroBatch, bool]]:
        """This rank's (row indices, tensors, is it the last); an empty part runs a padding row, so that collectives line up."""
        parts = packing.micro_batches[self.rank] or ((),)
        for number, part in enumerate(parts, start=1):
            chosen = [rows[index] for index in part] or [_PADDING]
            yield part, micro_batch(chosen, self.device.torch_device), number == len(parts)

    def _score_rows(self, rows: Sequence[TrainRow], score: object) -> list[Floats]:
        assert callable(score)
        counts = [int(row.mask.sum()) for row in rows]
        starts = np.concatenate(([0], np.cumsum(counts)))
        places: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
        values: list[Floats] = [np.zeros(0, np.float32)]
        with torch.no_grad():
            for part, batch, _ in self._micro_batches(rows, self._pack(rows)):
                values.append(score(batch)[0].float().cpu().numpy())
                places.extend(np.arange(starts[index], starts[index + 1]) for index in part)
        flat = np.zeros(int(starts[-1]), np.float32)
        flat[gather_arrays(np.concatenate(places), self.device.torch_device)] = gather_arrays(
            np.concatenate(values), self.device.torch_device
        )
        out = []
        for index, row in enumerate(rows):
            full = np.zeros(row.length, np.float32)
            full[row.mask] = flat[starts[index] : starts[index + 1]]
            out.append(full)
        return out

    def _scorer(self, model_dir: str) -> TokenScorer:
        """Weights start as exactly the checkpoint's bfloat16 values, whatever the compute dtype."""
        model = load_causal_lm(model_dir, "bfloat16", "cpu")
        if self.device.compute_dtype == "float32":
            torch.nn.Module.to(model, torch.float32)
        scorer = TokenScorer(without_dropout(model), self.config.temperature)
        if self.config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return scorer

    def _frozen_reference(self) -> TokenScorer | None:
        if self.config.objective.kl != "reference":
            return None
        return self._scorer(self.config.reference_dir).requires_grad_(False).to(self.device.torch_device).eval()

    def _reference_logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        """The reference policy's log-probabilities: the rows' own where all carry them, else computed now; [] if not needed."""
        frozen = self._reference
        if frozen is None:
            return []
        carried = [row.reference_logprobs for row in rows]
        if all(values is not None or row is _PADDING for values, row in zip(carried, rows, strict=True)):
            return [np.zeros(_PADDING.length, np.float32) if values is None else values for values in carried]
        return self._score_rows(rows, lambda batch: frozen(batch.ids, batch.contexts, batch.targets))

    def _tensor(self, parts: list[Floats]) -> torch.Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        return torch.from_numpy(joined).to(self.device.torch_device)

    def _sum(self, value: float) -> float:
        """Sum over ranks."""
        return float(gather_arrays(np.array([value], np.float64), self.device.torch_device).sum())

    def _gathered(self, parts: list[TokenFacts]) -> TokenFacts:
        """The facts of all micro-batches of all ranks, on every rank."""

        def joined(name: str) -> npt.NDArray[np.generic]:
            return gather_arrays(np.concatenate([getattr(part, name) for part in parts]), self.device.torch_device)

        return TokenFacts(**{name: joined(name) for name in TokenFacts.__slots__})  # type: ignore[arg-type]


def _facts(
    part: Sequence[int], rows: Sequence[TrainRow], tokens: TokenBatch, entropy: torch.Tensor, result: TokenLoss
) -> TokenFacts:
    turns = [row.turn_of_token()[row.mask] for row in rows]
    return TokenFacts(
        row=np.repeat(np.array(part, np.int32), [turn.shape[0] for turn in turns]),
        turn=np.concatenate([np.zeros(0, np.int32), *turns]),
        log_ratio=(tokens.logprobs.detach() - tokens.behaviour).cpu().numpy(),
        entropy=entropy.cpu().numpy(),
        clipped=result.clipped.cpu().numpy(),
        capped=result.capped.cpu().numpy(),
    )
