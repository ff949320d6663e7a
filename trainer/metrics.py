"""What one update did, from per-token facts: pure numpy, the same numbers however the tokens were cut up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from trainer.batch import TrainRow


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """`N` scored tokens of counted rows, in any order."""

    row: npt.NDArray[np.int32]  # [N] index of the row in its mini-batch
    turn: npt.NDArray[np.int32]  # [N] turn within the row
    log_ratio: npt.NDArray[np.float32]  # [N] policy minus behaviour log-prob, before the update
    entropy: npt.NDArray[np.float32]  # [N] nats
    clipped: npt.NDArray[np.bool_]  # [N]
    capped: npt.NDArray[np.bool_]  # [N]


class UpdateMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step. Fractions are 0 to 1, entropies and divergences in nats."""

    loss: float
    gradient_norm: float  # before clipping
    learning_rate: float
    rows: int  # counted episodes
    tokens: int  # with loss
    padding_waste: float  # share of computed tokens that were padding
    clip_tokens: float
    clip_turns: float  # turns with a clipped token
    clip_episodes: float  # episodes with a clipped token
    capped_tokens: float  # off-policy weight cut to its maximum
    ratio_p50: float  # of exp(policy - behaviour), per token
    ratio_p95: float
    ratio_p99: float
    ratio_max: float
    effective_samples: float  # (sum r)^2 / (N sum r^2)
    kl_k1: float  # KL(behaviour || policy) on the behaviour's samples: mean of -log r
    kl_k3: float  # the same, mean of r - 1 - log r
    drift: float  # D = mean |policy - behaviour|
    entropy: float
    lag_mean: float  # versions
    lag_max: int
    zero_advantage_rows: float
    seconds: float


def update_metrics(
    rows: Sequence[TrainRow],
    facts: TokenFacts,
    *,
    loss: float,
    gradient_norm: float,
    learning_rate: float,
    padding_waste: float,
    seconds: float,
) -> UpdateMetrics:
    """Summarise one update. A mini-batch without counted rows gives zeros (and ratios of 1)."""
    counted = [row for row in rows if row.counted]
    log_ratio = facts.log_ratio.astype(np.float64)
    empty = log_ratio.shape[0] == 0
    ratio = np.ones(1) if empty else np.exp(log_ratio)
    p50, p95, p99 = np.percentile(ratio, (50, 95, 99))
    turns = facts.row.astype(np.int64) * 2**31 + facts.turn
    lags = [row.lag for row in counted]
    return UpdateMetrics(
        loss=loss,
        gradient_norm=gradient_norm,
        learning_rate=learning_rate,
        rows=len(counted),
        tokens=log_ratio.shape[0],
        padding_waste=padding_waste,
        clip_tokens=_mean(facts.clipped),
        clip_turns=_share_of(turns, facts.clipped),
        clip_episodes=_share_of(facts.row, facts.clipped),
        capped_tokens=_mean(facts.capped),
        ratio_p50=float(p50),
        ratio_p95=float(p95),
        ratio_p99=float(p99),
        ratio_max=float(ratio.max()),
        effective_samples=float(ratio.sum() ** 2 / (ratio.shape[0] * np.square(ratio).sum())),
        kl_k1=_mean(-log_ratio),
        kl_k3=0.0 if empty else _mean(ratio - 1.0 - log_ratio),
        drift=_mean(np.abs(log_ratio)),
        entropy=_mean(facts.entropy),
        lag_mean=float(np.mean(lags)) if lags else 0.0,
        lag_max=max(lags, default=0),
        zero_advantage_rows=_mean(np.array([row.advantage == 0.0 for row in counted])),
        seconds=seconds,
    )


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One batch: its updates in order. `drift` and `entropy` are those of the first update, before any weight moved."""

    updates: tuple[UpdateMetrics, ...]

    @property
    def optimizer_steps(self) -> int:
        return len(self.updates)

    @property
    def loss(self) -> float:
        """Mean over the updates."""
        return float(np.mean([update.loss for update in self.updates]))

    @property
    def gradient_norm(self) -> float:
        """Largest of the updates'."""
        return max(update.gradient_norm for update in self.updates)

    @property
    def drift(self) -> float:
        return self.updates[0].drift

    @property
    def entropy(self) -> float:
        return self.updates[0].entropy

    @property
    def seconds(self) -> float:
        return sum(update.seconds for update in self.updates)


def gradient_mass(rows: Sequence[TrainRow], weights: Sequence[npt.NDArray[np.float32]]) -> dict[str, dict[str, float]]:
    """Share of `sum |weight * advantage|` by success (reward above 0), family, number of turns and length (powers of two).

    `weights` are `trainer.reductions.token_weights` of the same rows. Shares of one heading sum to 1 unless no row has signal.
    """
    mass = [abs(row.advantage or 0.0) * float(np.abs(weight).sum()) for row, weight in zip(rows, weights, strict=True)]
    total = sum(mass)
    out: dict[str, dict[str, float]] = {"success": {}, "family": {}, "turns": {}, "length": {}}
    for row, part in zip(rows, mass, strict=True):
        if not row.counted or total == 0.0:
            continue
        sampled = int(row.mask.sum())
        keys = {
            "success": "unknown" if row.reward is None else ("success" if row.reward > 0 else "failure"),
            "family": row.family or "unknown",
            "turns": str(row.turn_starts.shape[0]),
            "length": f"<{1 << sampled.bit_length()}",
        }
        for heading, key in keys.items():
            out[heading][key] = out[heading].get(key, 0.0) + part / total
    return out


def _mean(values: npt.NDArray[np.bool_ | np.floating[Any]]) -> float:
    return float(np.mean(values, dtype=np.float64)) if values.shape[0] else 0.0


def _share_of(owners: npt.NDArray[np.generic], hit: npt.NDArray[np.bool_]) -> float:
    """Share of distinct owners with at least one hit."""
    everyone = np.unique(owners).shape[0]
    return float(np.unique(owners[hit]).shape[0] / everyone) if everyone else 0.0
