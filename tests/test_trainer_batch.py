"""Rows are exactly what was sampled; an episode that contradicts itself is refused with the field's name."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from schemas.arrays import Array
from schemas.termination import Termination
from schemas.trajectory import Episode, VersionSpan
from trainer.batch import BatchError, padding_row, row_from_episode
from trainer.metrics import TokenFacts, gradient_mass, update_metrics
from trainer.reductions import token_weights

pytestmark = pytest.mark.timeout(60)

MASK = np.array([False, False, True, True, False, True, True])


def episode(**changes: Any) -> Episode:
    whole = Episode(
        run="t",
        group="g1",
        slot=2,
        attempt=0,
        task_id="task",
        family="files",
        template="t0",
        termination=Termination.AGENT_FINISH,
        ids=Array.of(np.arange(10, 17, dtype=np.int32)),
        mask=Array.of(MASK),
        logprobs=Array.of(np.where(MASK, -0.5, 0.0).astype(np.float32)),
        versions=(VersionSpan(2, 4, 3), VersionSpan(5, 7, 5)),
        turn_starts=Array.of(np.array([2, 5], dtype=np.int32)),
        turns=2,
    )
    return msgspec.structs.replace(whole, **changes)


def test_a_row_is_the_episodes_own_arrays() -> None:
    row = row_from_episode(episode(), 0.75, updating_version=6, reward=1.0)
    np.testing.assert_array_equal(row.ids, np.arange(10, 17))
    np.testing.assert_array_equal(row.mask, MASK)
    np.testing.assert_array_equal(row.logprobs, np.where(MASK, np.float32(-0.5), 0))
    assert (row.advantage, row.reward, row.group, row.slot, row.family) == (0.75, 1.0, "g1", 2, "files")
    assert row.lag == 3, "the version about to be updated minus the oldest sampled one"
    assert row.turn_of_token().tolist() == [-1, -1, 0, 0, 0, 1, 1]
    assert row.counted and not padding_row().counted
    assert not row_from_episode(episode(), None, updating_version=6).counted


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ids": Array.of(np.arange(6, dtype=np.int32))}, "ids"),
        ({"ids": Array.of(np.arange(7, dtype=np.int64))}, "ids"),
        ({"mask": Array.of(np.ones(7, dtype=np.bool_)), "versions": (VersionSpan(0, 7, 1),)}, "mask"),
        ({"logprobs": Array.of(np.full(7, np.nan, dtype=np.float32))}, "logprobs"),
        ({"logprobs": Array.of(np.full(7, 0.5, dtype=np.float32))}, "logprobs"),
        ({"versions": (VersionSpan(2, 4, 3),)}, "versions"),
        ({"versions": (VersionSpan(2, 7, 9),)}, "versions"),
        ({"turn_starts": Array.of(np.array([2, 4], dtype=np.int32))}, "turn_starts"),
        ({"turn_starts": Array.of(np.array([5, 2], dtype=np.int32))}, "turn_starts"),
        ({"turn_starts": Array.of(np.array([5], dtype=np.int32))}, "turn_starts"),
        ({"turn_starts": Array.of(np.array([2, 5, 6], dtype=np.int32))}, "turn_starts"),
    ],
)
def test_contradictions_are_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(BatchError, match=f"group 'g1' slot 2: {field}"):
        row_from_episode(episode(**changes), 1.0, updating_version=6)


def test_an_advantage_that_is_not_finite_is_refused() -> None:
    with pytest.raises(BatchError, match="advantage"):
        row_from_episode(episode(), float("inf"), updating_version=6)


def test_metrics_count_clips_by_token_turn_and_episode() -> None:
    rows = [
        row_from_episode(episode(), 1.0, updating_version=6),
        row_from_episode(episode(), 0.0, updating_version=5),
        padding_row(),
    ]
    ratios = np.array([1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    facts = TokenFacts(
        row=np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int32),
        turn=np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int32),
        log_ratio=np.log(ratios).astype(np.float32),
        entropy=np.full(8, 0.5, np.float32),
        clipped=ratios > 1.5,
        capped=np.zeros(8, np.bool_),
    )
    metrics = update_metrics(rows, facts, loss=1.0, gradient_norm=2.0, learning_rate=0.1, padding_waste=0.0, seconds=1.0)
    assert (metrics.rows, metrics.tokens) == (2, 8)
    assert (metrics.clip_tokens, metrics.clip_turns, metrics.clip_episodes) == (1 / 8, 1 / 4, 1 / 2)
    assert metrics.ratio_max == pytest.approx(2.0) and metrics.ratio_p50 == 1.0
    assert metrics.effective_samples == pytest.approx(9.0**2 / (8 * 11.0))
    assert metrics.drift == pytest.approx(np.log(2) / 8)
    assert metrics.kl_k3 == pytest.approx((1.0 - np.log(2)) / 8, rel=1e-6)
    assert (metrics.lag_mean, metrics.lag_max, metrics.zero_advantage_rows) == (2.5, 3, 0.5)


def test_metrics_of_nothing_are_zeros() -> None:
    none = np.zeros(0, np.int32)
    facts = TokenFacts(
        none, none, none.astype(np.float32), none.astype(np.float32), none.astype(np.bool_), none.astype(np.bool_)
    )
    metrics = update_metrics(
        [padding_row()], facts, loss=0.0, gradient_norm=0.0, learning_rate=0.1, padding_waste=0.0, seconds=0.0
    )
    assert (metrics.rows, metrics.tokens, metrics.drift, metrics.ratio_max) == (0, 0, 0.0, 1.0)


def test_gradient_mass_is_shared_out_by_heading() -> None:
    rows = [
        row_from_episode(episode(), 1.5, updating_version=6, reward=1.0),
        row_from_episode(episode(family="json"), -0.5, updating_version=6, reward=0.0),
        row_from_episode(episode(), None, updating_version=6),
    ]
    mass = gradient_mass(rows, token_weights(rows, "episode_sum"))
    assert mass["success"] == pytest.approx({"success": 0.75, "failure": 0.25})
    assert mass["family"] == pytest.approx({"files": 0.75, "json": 0.25})
    assert mass["turns"] == pytest.approx({"2": 1.0}) and mass["length"] == pytest.approx({"<8": 1.0})
