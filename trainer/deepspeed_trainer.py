"""The trainer: mini-batches of rows in, exactly one optimizer step for each, and the metrics and weights that come out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.device import Device
from services.engine.hf_models import load_causal_lm
from trainer.batch import TrainRow
from trainer.config import TrainerConfig
from trainer.deepspeed_engine import ShardedModel
from trainer.packing import pack
from trainer.ranks import join_ranks
from trainer.reductions import token_weights
from trainer.scorer import TokenScorer, micro_batch


class DeepSpeedTrainer:
    def __init__(self, config: TrainerConfig, device: Device) -> None:
        self.config = config.checked()
        self.device = device
        torch.set_num_threads(device.threads)
        rank, _ = join_ranks(device, config.collective_timeout_s)
        _seed(config.seed + rank)
        model = load_causal_lm(config.model_dir, "bfloat16", "cpu").to(torch.float32 if device.compute_dtype == "float32" else torch.bfloat16)
        self._model = ShardedModel(TokenScorer(model, config.temperature), self.config, device)
        self.gradient_norm = 0.0

    def sft_step(self, rows: Sequence[TrainRow], rate: float) -> float:
        """One optimizer step of mean cross-entropy over the masked tokens of `rows`; returns that loss, nats per token."""
        weights = token_weights(rows, "token_mean")
        shares = pack([row.length for row in rows], self._model.ranks, self.config.micro_batch_tokens).micro_batches
        own = shares[self._model.rank]
        total = torch.zeros((), dtype=torch.float64)
        for number, part in enumerate(own):
            batch = micro_batch([rows[index] for index in part], self.device.torch_device)
            weight = torch.from_numpy(np.concatenate([weights[index][rows[index].mask] for index in part]))
            self._model.begin(last=number + 1 == len(own))
            logprobs, _ = self._model.score(batch)
            loss = -(weight * logprobs).sum()
            self._model.accumulate(loss)
            total += loss.detach().double()
        self.gradient_norm = self._model.step(rate)
        return float(total)

    def policy_bits(self, *, owned: bool = True) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
        for name, weights in self._model.weights(owned=owned):
            yield name, weights.view(torch.uint16).numpy()

    def close(self) -> None:
        self._model.close()


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
