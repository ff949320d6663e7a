"""Objectives and reductions against short float64 references written from the formulas, and finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trainer.batch import TrainRow, padding_row
from trainer.config import ConfigError, ObjectiveConfig, TrainerConfig
from trainer.losses import LossError, TokenBatch, kl_estimate, objective, ppo_clip, reinforce_kl
from trainer.reductions import Reduction, token_weights

Doubles = npt.NDArray[np.float64]
pytestmark = pytest.mark.timeout(60)

GENERATOR = np.random.default_rng(3)
N = 64
LP = GENERATOR.normal(-2.0, 0.8, N)
BEHAVIOUR = LP + GENERATOR.normal(0.0, 0.4, N)
PROXIMAL = LP + GENERATOR.normal(0.0, 0.3, N)
REFERENCE = LP + GENERATOR.normal(0.0, 0.5, N)
ADVANTAGES = GENERATOR.normal(0.0, 1.0, N)
WEIGHTS = GENERATOR.uniform(0.1, 1.0, N)


def batch(
    lp: torch.Tensor, *, proximal: Doubles | None = None, reference: Doubles | None = None, advantages: Doubles = ADVANTAGES
) -> TokenBatch:
    def tensor(values: Doubles | None) -> torch.Tensor | None:
        return None if values is None else torch.from_numpy(values)

    return TokenBatch(
        logprobs=lp,
        behaviour=torch.from_numpy(BEHAVIOUR),
        advantages=torch.from_numpy(advantages),
        weights=torch.from_numpy(WEIGHTS),
        proximal=tensor(proximal),
        reference=tensor(reference),
    )


def ppo_reference(lp: Doubles, low: float, high: float, proximal: Doubles | None, cap: float) -> float:
    total = 0.0
    for i in range(N):
        anchor = BEHAVIOUR[i] if proximal is None else proximal[i]
        r = math.exp(lp[i] - anchor)
        w = math.exp(anchor - BEHAVIOUR[i])
        clipped = min(max(r, 1 - low), 1 + high)
        total += WEIGHTS[i] * -min(w, cap) * min(r * ADVANTAGES[i], clipped * ADVANTAGES[i])
    return total


def numeric_gradient(function: Callable[[Doubles], float], at: Doubles) -> Doubles:
    step = 1e-6
    out = np.zeros_like(at)
    for i in range(at.shape[0]):
        up, down = at.copy(), at.copy()
        up[i] += step
        down[i] -= step
        out[i] = (function(up) - function(down)) / (2 * step)
    return out


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28)])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("cap", [math.inf, 1.1])
def test_ppo_clip_equals_its_formula_and_its_finite_differences(low: float, high: float, decoupled: bool, cap: float) -> None:
    proximal = PROXIMAL if decoupled else None
    lp = torch.from_numpy(LP.copy()).requires_grad_()
    result = ppo_clip(
        batch(lp, proximal=proximal), epsilon_low=low, epsilon_high=high, weight_max=None if math.isinf(cap) else cap
    )
    assert float(result.loss.detach()) == pytest.approx(ppo_reference(LP, low, high, proximal, cap), rel=1e-12)
    result.loss.backward()
    assert lp.grad is not None
    expected = numeric_gradient(lambda at: ppo_reference(at, low, high, proximal, cap), LP)
    np.testing.assert_allclose(lp.grad.numpy(), expected, atol=1e-7)


def test_the_clip_acts_exactly_where_it_should() -> None:
    """A > 0 and r > 1 + eps: gradient exactly 0. A < 0 and r > 1 + eps: the unclipped term stays. And the mirror image."""
    ratios = np.array([1.5, 1.5, 0.5, 0.5, 1.1, 0.9])
    signs = np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    behaviour = torch.full((6,), -2.0, dtype=torch.float64)
    lp = (behaviour + torch.from_numpy(np.log(ratios))).requires_grad_()
    tokens = TokenBatch(
        logprobs=lp, behaviour=behaviour, advantages=torch.from_numpy(signs), weights=torch.ones(6, dtype=torch.float64)
    )
    result = ppo_clip(tokens, epsilon_low=0.2, epsilon_high=0.2)
    result.loss.backward()
    assert lp.grad is not None
    gradient = lp.grad.numpy()
    assert gradient[0] == 0.0 and gradient[3] == 0.0
    np.testing.assert_allclose(gradient[[1, 2, 4, 5]], (-signs * ratios)[[1, 2, 4, 5]], rtol=1e-12)
    assert result.clipped.tolist() == [True, False, False, True, False, False]


def test_asymmetric_clip_frees_the_upper_side() -> None:
    behaviour = torch.zeros(1, dtype=torch.float64)
    lp = torch.tensor([math.log(1.25)], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    tokens = TokenBatch(logprobs=lp, behaviour=behaviour, advantages=one, weights=one)
    assert bool(ppo_clip(tokens, epsilon_low=0.2, epsilon_high=0.2).clipped[0])
    assert not bool(ppo_clip(tokens, epsilon_low=0.2, epsilon_high=0.28).clipped[0])


def test_truncated_weight_has_the_stated_bias_and_no_gradient() -> None:
    """mu = 0.01, pi = 0.20, w_max = 2: weight 20 becomes 2, bias 0.18 f."""
    mu, pi, cap = 0.01, 0.20, 2.0
    behaviour = torch.tensor([math.log(mu)], dtype=torch.float64)
    proximal = torch.tensor([math.log(pi)], dtype=torch.float64, requires_grad=True)
    lp = torch.tensor([math.log(pi)], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    tokens = TokenBatch(logprobs=lp, behaviour=behaviour, advantages=one, weights=one, proximal=proximal.detach())
    result = ppo_clip(tokens, epsilon_low=0.2, epsilon_high=0.2, weight_max=cap)
    assert float(result.loss.detach()) == pytest.approx(-2.0)
    assert result.capped.tolist() == [True]
    assert mu * (pi / mu) - mu * float(-result.loss.detach()) == pytest.approx(0.18)
    result.loss.backward()
    assert lp.grad is not None and float(lp.grad[0]) == pytest.approx(-2.0)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("target", ["none", "behaviour", "reference"])
@pytest.mark.parametrize("cap", [math.inf, 1.1])
def test_reinforce_kl_equals_its_formula(estimator: str, target: str, cap: float) -> None:
    coefficient = 0.3
    anchor = {"none": None, "behaviour": BEHAVIOUR, "reference": REFERENCE}[target]
    frozen = np.minimum(np.exp(LP - BEHAVIOUR), cap)  # the weight is constant under differentiation

    def reference(lp: Doubles) -> float:
        per_token = -frozen * ADVANTAGES * lp
        if anchor is not None:
            gap = anchor - lp
            per_token = per_token + coefficient * (0.5 * gap**2 if estimator == "k2" else np.exp(gap) - 1 - gap)
        return float((WEIGHTS * per_token).sum())

    lp = torch.from_numpy(LP.copy()).requires_grad_()
    config = ObjectiveConfig(
        name="reinforce_kl",
        weight_max=None if math.isinf(cap) else cap,
        kl=target,  # type: ignore[arg-type]
        kl_estimator=estimator,  # type: ignore[arg-type]
        kl_coefficient=coefficient,
    )
    result = objective(batch(lp, reference=REFERENCE), config)
    assert float(result.loss.detach()) == pytest.approx(reference(LP), rel=1e-12)
    result.loss.backward()
    assert lp.grad is not None
    np.testing.assert_allclose(lp.grad.numpy(), numeric_gradient(reference, LP), atol=1e-7)


def test_k3_estimates_the_divergence_on_samples_of_the_policy() -> None:
    """Against the exact KL of two categorical distributions, by weighting each outcome with its own probability."""
    generator = np.random.default_rng(0)
    policy, anchor = generator.dirichlet(np.ones(9), 2)
    exact = float((policy * np.log(policy / anchor)).sum())
    values = kl_estimate(torch.from_numpy(np.log(policy)), torch.from_numpy(np.log(anchor)), "k3").numpy()
    assert float((policy * values).sum()) == pytest.approx(exact, rel=1e-12)
    assert (values >= 0).all()


def test_a_missing_reference_is_an_error_that_names_it() -> None:
    lp = torch.from_numpy(LP.copy())
    with pytest.raises(LossError, match="reference"):
        reinforce_kl(batch(lp), weight_max=None, kl="reference", estimator="k3", coefficient=0.1)


def row(turn_lengths: list[int], advantage: float | None = 1.0) -> TrainRow:
    """Two prompt tokens, then turns of these lengths with one observation token between them."""
    mask, starts = [False, False], []
    for length in turn_lengths:
        starts.append(len(mask))
        mask += [True] * length + [False]
    count = len(mask)
    return TrainRow(
        ids=np.zeros(count, np.int32),
        mask=np.array(mask),
        logprobs=np.zeros(count, np.float32),
        advantage=advantage,
        turn_starts=np.array(starts, np.int32),
    )


ROWS = [row([3, 5]), row([2]), row([1, 1, 4], advantage=-0.5), row([6], advantage=0.0)]


@pytest.mark.parametrize("reduction", ["episode_sum", "length_normalized", "token_mean", "turn_mass_conserving"])
def test_weights_equal_the_reduction_formulas(reduction: Reduction) -> None:
    losses = [np.random.default_rng(i).normal(size=r.length) for i, r in enumerate(ROWS)]
    sampled = [loss[r.mask] for loss, r in zip(losses, ROWS, strict=True)]
    episodes = len(ROWS)
    lengths = [values.shape[0] for values in sampled]
    if reduction == "episode_sum":
        expected = sum(values.sum() for values in sampled) / episodes
    elif reduction == "length_normalized":
        expected = sum(values.mean() for values in sampled) / episodes
    elif reduction == "token_mean":
        expected = sum(values.sum() for values in sampled) / sum(lengths)
    else:
        expected = 0.0
        for values, r, loss in zip(sampled, ROWS, losses, strict=True):
            turns = r.turn_of_token()
            ids = sorted(set(turns[r.mask].tolist()))
            expected += values.shape[0] * np.mean([loss[r.mask & (turns == k)].mean() for k in ids]) / episodes
    weights = token_weights(ROWS, reduction)
    got = sum(float((weight * loss).sum()) for weight, loss in zip(weights, losses, strict=True))
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("reduction", ["episode_sum", "length_normalized", "token_mean", "turn_mass_conserving"])
def test_censored_rows_and_padding_carry_nothing_and_count_for_nothing(reduction: Reduction) -> None:
    plain = token_weights(ROWS, reduction)
    extended = token_weights([*ROWS, row([4, 4], advantage=None), padding_row()], reduction)
    for before, after in zip(plain, extended, strict=False):
        np.testing.assert_array_equal(before, after)
    assert not extended[-1].any() and not extended[-2].any()


def test_turn_mass_conserving_keeps_an_episodes_mass_and_levels_its_turns() -> None:
    for r, even, level in zip(
        ROWS, token_weights(ROWS, "episode_sum"), token_weights(ROWS, "turn_mass_conserving"), strict=True
    ):
        assert level.sum() == pytest.approx(even.sum(), rel=1e-6)
        turns = r.turn_of_token()
        masses = [level[r.mask & (turns == k)].sum() for k in range(r.turn_starts.shape[0])]
        np.testing.assert_allclose(masses, masses[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"lora_rank": 8}, "lora_rank"),
        ({"temperature": 0.0}, "temperature"),
        ({"objective": ObjectiveConfig(kl="behaviour")}, "objective.kl"),
        ({"objective": ObjectiveConfig(name="reinforce_kl", kl="reference", kl_coefficient=0.1)}, "reference_dir"),
        ({"objective": ObjectiveConfig(epsilon_low=1.0)}, "epsilon_low"),
    ],
)
def test_contradictory_settings_are_refused_by_name(change: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        TrainerConfig(model_dir="m", **change).checked()  # type: ignore[arg-type]
