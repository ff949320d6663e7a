"""The trainer's forward: log-probabilities of given tokens under the policy, computed only where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.batch import TrainRow

_WHOLE_HEAD_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded rows and the `N` masked positions to score, in row-major order."""

    ids: torch.Tensor  # int64 [B, T]
    contexts: torch.Tensor  # int64 [N]: flat index `b * T + t - 1` of the hidden state that predicts target n
    targets: torch.Tensor  # int64 [N]: the token at position t
    counts: tuple[int, ...]  # targets of each row, summing to N

    @property
    def tokens(self) -> int:
        """Computed tokens, padding included."""
        return int(self.ids.numel())


def micro_batch(rows: Sequence[TrainRow], device: str) -> MicroBatch:
    """Lay rows out for one forward. Position `t` of `ids[b]` is scored from the hidden state of position `t - 1`."""
    width = max(row.length for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    contexts: list[Any] = []
    for index, row in enumerate(rows):
        ids[index, : row.length] = row.ids
        contexts.append(index * width + np.flatnonzero(row.mask) - 1)
    flat = np.concatenate(contexts) if contexts else np.zeros(0, dtype=np.int64)
    return MicroBatch(
        ids=torch.from_numpy(ids).to(device),
        contexts=torch.from_numpy(flat).to(device),
        targets=torch.from_numpy(ids.reshape(-1)[flat + 1]).to(device),
        counts=tuple(int(row.mask.sum()) for row in rows),
    )


def without_dropout(model: nn.Module) -> nn.Module:
    """`model` with every dropout turned off: ratios between policies must not carry the noise of two dropout masks."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010  (a plain attribute of the model family's own class)
    return model


class TokenScorer(nn.Module):
    """Wraps a causal language model so that one forward returns log-probabilities and entropies of the scored tokens.

    Rows are padded on the right, where causal attention never looks, so no attention mask is built. The output layer runs
    only on the scored positions; logits are raised to float32 and divided by `temperature` before the softmax, so that the
    log-probabilities are those of the distribution that a sampler at this temperature draws from.
    """

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        if not temperature > 0.0:
            raise ValueError(f"temperature: {temperature} must be positive")
        self.model = model
        self.temperature = temperature
        config = getattr(model, "config", None)
        self._whole_head = any(getattr(config, name, None) not in (None, 1.0) for name in _WHOLE_HEAD_SETTINGS)

    def forward(self, ids: torch.Tensor, contexts: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [B, T], contexts [N], targets [N] → log-probabilities and entropies (no gradient), both float32 [N], in nats."""
        lm: Any = self.model
        if self._whole_head:  # the model reshapes its logits after the head: let it
            logits = lm(input_ids=ids, use_cache=False).logits.flatten(0, 1)[contexts]
        else:
            hidden = lm.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            logits = lm.get_output_embeddings()(hidden.flatten(0, 1)[contexts])
        logits = logits.float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        table = torch.log_softmax(logits, dim=-1)
        chosen = table.gather(-1, targets[:, None])[:, 0]
        with torch.no_grad():
            entropy = -(table.exp() * table).sum(-1)
        return chosen, entropy
