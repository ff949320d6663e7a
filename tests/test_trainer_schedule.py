"""The fixed schedule, packing, learning rates: pure decisions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.learning_rate import learning_rate
from trainer.packing import PackingError, pack
from trainer.schedule import ScheduleError, mini_batches, padded_rows, schedule

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("rows", "count", "ranks", "padded"), [(513, 1, 2, 514), (270, 4, 2, 272), (601, 3, 4, 612), (512, 1, 2, 512), (0, 3, 2, 0)]
)
def test_rows_pad_only_to_mini_batches_times_ranks(rows: int, count: int, ranks: int, padded: int) -> None:
    assert padded_rows(rows, count, ranks) == padded


@given(st.integers(0, 300), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 4))
def test_steps_follow_prompts_and_epochs_whatever_the_rows(rows: int, per_step: int, epochs: int, ranks: int) -> None:
    plan = schedule(source_prompts=8, mini_batch_prompts=per_step, rows=rows, ranks=ranks, epochs=epochs)
    assert plan.optimizer_steps == 8 // per_step * epochs
    parts = mini_batches(list(range(rows)), plan, -1)
    assert len(parts) == plan.optimizer_steps
    assert {len(part) for part in parts} == {plan.rows_per_mini_batch}
    assert plan.rows_per_mini_batch % ranks == 0
    once = [row for part in parts[: plan.mini_batches] for row in part]
    assert [row for row in once if row >= 0] == list(range(rows))
    assert len(once) - rows < plan.mini_batches * ranks


def test_a_schedule_that_would_change_the_step_count_is_refused() -> None:
    with pytest.raises(ScheduleError, match="must divide"):
        schedule(source_prompts=8, mini_batch_prompts=3, rows=10, ranks=1)
    with pytest.raises(ScheduleError, match="rows"):
        mini_batches([1, 2], schedule(source_prompts=1, mini_batch_prompts=1, rows=3, ranks=1), 0)


@given(st.lists(st.integers(2, 50), max_size=60), st.integers(1, 4), st.integers(50, 400), st.integers(0, 60))
def test_packing_places_each_row_once_within_budget_and_in_step(
    lengths: list[int], ranks: int, budget: int, overhead: int
) -> None:
    packing = pack(lengths, ranks, budget, overhead)
    placed = [index for parts in packing.micro_batches for part in parts for index in part]
    assert sorted(placed) == list(range(len(lengths)))
    assert len({len(parts) for parts in packing.micro_batches}) == 1
    computed = sum(len(part) * max(lengths[i] for i in part) for parts in packing.micro_batches for part in parts if part)
    assert computed == packing.padded_tokens >= packing.row_tokens == sum(lengths)
    assert all(len(p) * max(lengths[i] for i in p) <= budget for parts in packing.micro_batches for p in parts if p)
    counts = [sum(len(part) for part in parts) for parts in packing.micro_batches]
    assert max(counts) - min(counts) <= 1
    assert packing == pack(lengths, ranks, budget, overhead)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 30))
def test_packing_cuts_where_it_costs_least(lengths: list[int], overhead: int) -> None:
    """Against every way of cutting the sorted rows."""
    budget = 60
    longest_first = sorted(lengths, reverse=True)

    def cheapest(rows: list[int]) -> int:
        if not rows:
            return 0
        sizes = [size for size in range(1, len(rows) + 1) if size * rows[0] <= budget]
        return min(overhead + size * rows[0] + cheapest(rows[size:]) for size in sizes)

    packing = pack(lengths, 1, budget, overhead)
    assert packing.padded_tokens + overhead * len(packing.micro_batches[0]) == cheapest(longest_first)


def test_packing_refuses_a_row_over_the_budget_by_name() -> None:
    with pytest.raises(PackingError, match=r"row 1.*micro_batch_tokens"):
        pack([10, 99], 1, 64)


def test_learning_rate_shapes() -> None:
    assert [learning_rate(s, 1.0, "constant", warmup_steps=4) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = [learning_rate(s, 2.0, "linear", steps=5, final=0.5) for s in range(7)]
    assert linear == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0, 1.0, 1.0])
    cosine = [learning_rate(s, 1.0, "cosine", steps=7, warmup_steps=2, final=0.1) for s in range(7)]
    assert cosine[:3] == pytest.approx([0.5, 1.0, 1.0]) and cosine[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(cosine[1:]))
    with pytest.raises(ValueError, match="steps"):
        learning_rate(3, 1.0, "linear", steps=2, warmup_steps=2)
