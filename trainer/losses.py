"""Objectives over the scored tokens of a micro-batch. Sums, never means: the weights carry the only normalisation.

Three policies, three names: *behaviour* sampled the tokens, *proximal* is the denominator of the update ratio, *reference* is
what a KL penalty pulls towards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from trainer.config import ObjectiveConfig

KlEstimator = Literal["k2", "k3"]


class LossError(ValueError):
    """The objective lacks an input; the text names it."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What is known about `N` scored tokens. All tensors are float32 [N]; only `logprobs` carries a gradient."""

    logprobs: torch.Tensor  # of the policy that is being updated
    behaviour: torch.Tensor  # of the sampler
    advantages: torch.Tensor
    weights: torch.Tensor  # see `trainer.reductions`; 0 on tokens without loss
    proximal: torch.Tensor | None = None  # None: the behaviour policy is the proximal one
    reference: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of a micro-batch and what happened to each token."""

    loss: torch.Tensor  # scalar, `sum(weights * per-token loss)`
    clipped: torch.Tensor  # bool [N]: the clip removed the token's gradient
    capped: torch.Tensor  # bool [N]: the off-policy weight was cut to `weight_max`


def ppo_clip(batch: TokenBatch, *, epsilon_low: float, epsilon_high: float, weight_max: float | None = None) -> TokenLoss:
    """`-min(w, w_max) * min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)` [PPO; DAPO; decoupled: Hilton 2022].

    `r = exp(lp - lp_prox)` is the update ratio; `w = exp(lp_prox - lp_beh)` corrects for tokens that another policy (or another
    engine's arithmetic) sampled, carries no gradient and is capped apart from the clip. Without `proximal`, `w` is 1.
    """
    proximal = batch.behaviour if batch.proximal is None else batch.proximal
    ratio = torch.exp(batch.logprobs - proximal)
    unclipped = ratio * batch.advantages
    bounded = torch.clamp(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high) * batch.advantages
    weight, capped = _capped_weight(proximal - batch.behaviour, weight_max)
    loss = -(batch.weights * weight * torch.minimum(unclipped, bounded)).sum()
    over = (batch.advantages > 0) & (ratio > 1.0 + epsilon_high)
    under = (batch.advantages < 0) & (ratio < 1.0 - epsilon_low)
    return TokenLoss(loss, (over | under).detach(), capped)


def reinforce_kl(
    batch: TokenBatch, *, weight_max: float | None, kl: str, estimator: KlEstimator, coefficient: float
) -> TokenLoss:
    """`-min(w, w_max) A lp + coefficient * KL`, with the off-policy weight `w = exp(lp_now - lp_beh)` held constant.

    With `proximal` given, `w = exp(lp_prox - lp_beh)`. The penalty pulls towards the reference (or the behaviour) policy `q`,
    per token: `k2 = (lp - lp_q)^2 / 2` or `k3 = exp(lp_q - lp) - 1 - (lp_q - lp)`. Both estimate KL(policy || q) on samples of
    the policy; on stale samples they are only a penalty. (`k1` is not offered: as a loss its expected gradient is zero.)
    Raises `LossError` when the policy of the penalty has no log-probabilities in the batch.
    """
    against = batch.logprobs.detach() if batch.proximal is None else batch.proximal
    weight, capped = _capped_weight(against - batch.behaviour, weight_max)
    per_token = -weight * batch.advantages * batch.logprobs
    if kl != "none" and coefficient > 0.0:
        anchor = batch.behaviour if kl == "behaviour" else batch.reference
        if anchor is None:
            raise LossError("reference: the KL penalty is to the reference policy, but the rows carry no reference log-probs")
        per_token = per_token + coefficient * kl_estimate(batch.logprobs, anchor, estimator)
    loss = (batch.weights * per_token).sum()
    return TokenLoss(loss, torch.zeros_like(capped), capped)


def kl_estimate(logprobs: torch.Tensor, anchor: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Per-token estimate [N] of KL(policy || anchor) on samples of the policy, in nats (Schulman, approximating KL)."""
    gap = anchor - logprobs
    return 0.5 * gap.square() if estimator == "k2" else torch.expm1(gap) - gap


def objective(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    """The configured objective."""
    if config.name == "ppo_clip":
        return ppo_clip(batch, epsilon_low=config.epsilon_low, epsilon_high=config.epsilon_high, weight_max=config.weight_max)
    return reinforce_kl(
        batch, weight_max=config.weight_max, kl=config.kl, estimator=config.kl_estimator, coefficient=config.kl_coefficient
    )


def _capped_weight(log_weight: torch.Tensor, weight_max: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated importance weight [N] without gradient, and where the cap acted."""
    weight = torch.exp(log_weight.detach())
    if weight_max is None:
        return weight, torch.zeros_like(weight, dtype=torch.bool)
    return weight.clamp(max=weight_max), weight > weight_max
