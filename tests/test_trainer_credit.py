"""Credit against the formulas, and what censored siblings may and may not do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.credit import Credit, CreditError, advantages, has_signal

pytestmark = pytest.mark.timeout(60)
REWARDS = [1.0, 0.0, 0.25, 1.0, 0.0]


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    expected = [r - (sum(REWARDS) - r) / (len(REWARDS) - 1) for r in REWARDS]
    assert advantages(REWARDS) == pytest.approx(expected)


def test_grpo_and_dr_grpo() -> None:
    centred = np.array(REWARDS) - np.mean(REWARDS)
    assert advantages(REWARDS, credit="grpo") == pytest.approx((centred / (np.std(REWARDS) + 1e-6)).tolist())
    assert advantages(REWARDS, credit="dr_grpo") == pytest.approx(centred.tolist())


def test_scaled_rloo() -> None:
    plain = advantages(REWARDS)
    scaled = advantages(REWARDS, scale="std")
    assert scaled == pytest.approx([value / (np.std(REWARDS) + 1e-6) for value in plain if value is not None])


@pytest.mark.parametrize("credit", ["rloo", "grpo", "dr_grpo"])
def test_a_censored_sibling_has_no_advantage_and_moves_nobodys_baseline(credit: Credit) -> None:
    assert advantages([1.0, None, 0.0, 0.5, None], credit=credit) == pytest.approx(
        _with_none(advantages([1.0, 0.0, 0.5], credit=credit), (1, 4))
    )


@pytest.mark.parametrize("credit", ["rloo", "grpo", "dr_grpo"])
def test_degenerate_groups_give_exactly_zero(credit: Credit) -> None:
    assert advantages([0.1] * 7, credit=credit) == [0.0] * 7
    assert advantages([None, 0.7], credit=credit) == [None, 0.0]
    assert advantages([None, None], credit=credit) == [None, None]
    assert not has_signal(advantages([0.1] * 7, credit=credit))


def test_refusals_name_the_slot_and_the_setting() -> None:
    with pytest.raises(CreditError, match="slot 1"):
        advantages([0.0, float("nan")])
    with pytest.raises(CreditError, match="dr_grpo"):
        advantages([0.0, 1.0], credit="dr_grpo", scale="std")


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_unscaled_advantages_sum_to_zero(rewards: list[float]) -> None:
    for credit in ("rloo", "dr_grpo"):
        values = advantages(rewards, credit=credit)  # type: ignore[arg-type]
        assert sum(value for value in values if value is not None) == pytest.approx(0.0, abs=1e-9)


def _with_none(values: list[float | None], places: tuple[int, ...]) -> list[float | None]:
    out = list(values)
    for place in places:
        out.insert(place, None)
    return out
