"""The curriculum: draws are a function of seed and ordinal, uniform within a stream, and their propensity is true."""

from __future__ import annotations

from collections import Counter

import pytest

from rollouter.curriculum import UNIFORM, CurriculumSettings, Outcomes, draw, seed_for, stream_of, streams_of

POOL = tuple(f"task-{n}" for n in range(8))
ADAPTIVE = CurriculumSettings(min_attempts=8)


def test_the_same_ordinal_draws_the_same_task_and_seeds_differ() -> None:
    streams = streams_of(POOL, {}, UNIFORM)
    first = [draw(0, ordinal, streams, UNIFORM) for ordinal in range(200)]
    assert first == [draw(0, ordinal, streams, UNIFORM) for ordinal in range(200)]
    assert first != [draw(1, ordinal, streams, UNIFORM) for ordinal in range(200)]


def test_draws_are_uniform_and_say_so() -> None:
    streams = streams_of(POOL, {}, UNIFORM)
    draws = [draw(3, ordinal, streams, UNIFORM) for ordinal in range(4000)]
    assert {(d.stream, d.propensity) for d in draws} == {("learnable", 1 / 8)}
    counts = Counter(d.task_id for d in draws)
    assert set(counts) == set(POOL)
    assert all(abs(n - 500) < 5 * (500 * 7 / 8) ** 0.5 for n in counts.values())


@pytest.mark.parametrize(
    ("outcomes", "stream"),
    [
        (Outcomes(7, 0), "learnable"),
        (Outcomes(8, 4), "learnable"),
        (Outcomes(8, 0), "hard"),
        (Outcomes(40, 39), "retain"),
        (Outcomes(6, 6, 4), "quarantined"),
        (Outcomes(0, 0, 8), "quarantined"),
    ],
)
def test_streams_follow_what_was_observed(outcomes: Outcomes, stream: str) -> None:
    assert stream_of(outcomes, ADAPTIVE) == stream
    assert stream_of(outcomes, UNIFORM) == "learnable"


def test_propensities_sum_to_one_and_match_the_frequencies() -> None:
    observed = {"task-0": Outcomes(8, 0), "task-1": Outcomes(8, 8), "task-2": Outcomes(0, 0, 9)}
    streams = streams_of(POOL, observed, ADAPTIVE)
    assert streams["hard"] == ("task-0",)
    draws = [draw(0, ordinal, streams, ADAPTIVE) for ordinal in range(6000)]
    propensity = {d.task_id: d.propensity for d in draws}
    assert "task-2" not in propensity, "quarantined tasks are not drawn"
    assert sum(propensity.values()) == pytest.approx(1)
    counts = Counter(d.task_id for d in draws)
    for task, p in propensity.items():
        assert counts[task] / 6000 == pytest.approx(p, abs=5 * (p * (1 - p) / 6000) ** 0.5)


def test_empty_streams_give_their_weight_away_and_nothing_to_draw_is_an_error() -> None:
    all_hard = {task: Outcomes(8, 0) for task in POOL}
    drawn = draw(0, 0, streams_of(POOL, all_hard, ADAPTIVE), ADAPTIVE)
    assert (drawn.stream, drawn.propensity) == ("hard", 1 / 8)
    none_left = {task: Outcomes(0, 0, 9) for task in POOL}
    with pytest.raises(ValueError, match="no stream with a task has a weight"):
        draw(0, 0, streams_of(POOL, none_left, ADAPTIVE), ADAPTIVE)


def test_seeds_are_stable_over_processes() -> None:
    assert seed_for("train", 0, 1) == 224425486438653  # the first 48 bits of the SHA-256 of "train/0/1"
    assert len({seed_for("train", 0, n) for n in range(1000)}) == 1000
