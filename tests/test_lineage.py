"""The line of versions over several incarnations, against the plain definition on lists; and how a demand carries it."""

from __future__ import annotations

import msgspec
from admission_stage import make_commit
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import decode, encode
from schemas.ledger import BatchEntry
from schemas.lineage import Lineage, on_line
from schemas.training import BatchDemand, Branch, StepCommit


def commit(step: int, incarnation: int = 0) -> StepCommit:
    batch = BatchEntry(
        run="t",
        step=step,
        version=step,
        incarnation=incarnation,
        groups=(),
        ready_high_water=0,
        demand_seq=0,
        settings_hash="",
        max_lag=0,
    )
    return msgspec.structs.replace(make_commit(batch), digest=f"d{incarnation}.{step + 1}")


def test_one_incarnation_is_the_line() -> None:
    line = Lineage()
    assert (line.incarnation, line.branches(), line.commit_of(0)) == (0, (), None)
    for step in range(3):
        assert line.add(commit(step))
    assert not line.began_with(commit(0))
    assert line.commit_of(2) == commit(2)
    assert line.on_line(0, 3) and line.on_line(0, 99)


def test_a_branch_is_left_where_the_next_incarnation_begins() -> None:
    line = Lineage()
    for made in [commit(step) for step in range(6)] + [commit(step, 1) for step in (3, 4)]:
        line.add(made)
    assert line.branches() == (Branch(1, 3),)
    assert line.began_with(commit(3, 1)) and not line.began_with(commit(4, 1))
    assert [line.on_line(0, version) for version in (0, 3, 4, 6)] == [True, True, False, False]
    assert line.on_line(1, 4) and line.on_line(1, 9)
    assert [made and made.digest for made in map(line.commit_of, range(6))] == ["d0.1", "d0.2", "d0.3", "d1.4", "d1.5", None]
    assert not line.add(commit(6)), "what the left trainer still says is of the dead branch"
    assert line.commit_of(6) is None
    line.add(commit(1, 2))  # a third went back further: the second is dead from its beginning
    assert line.branches() == (Branch(1, 3), Branch(2, 1))
    assert not line.on_line(1, 4) and not line.on_line(0, 2) and line.on_line(2, 2)
    assert [made and made.digest for made in map(line.commit_of, range(4))] == ["d0.1", "d2.2", None, None]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=4))
def test_the_line_is_what_the_last_incarnation_can_walk_back_along(runs: list[tuple[int, int]]) -> None:
    """Model: a list of (incarnation, version) that each incarnation cuts back to where it begins and then goes on with."""
    model: list[tuple[int, int]] = []
    line, named = Lineage(), set()
    for incarnation, (back, length) in enumerate(runs):
        begins = max(0, len(model) - back) if incarnation else 0
        model = model[:begins]
        for step in range(begins, begins + length):
            line.add(commit(step, incarnation))
            model.append((incarnation, step + 1))
            named.add((incarnation, step + 1))
    for incarnation, version in named:
        assert line.on_line(incarnation, version) is ((incarnation, version) in model)
        assert on_line(line.branches(), incarnation, version) is line.on_line(incarnation, version)
    for step in range(30):
        made = line.commit_of(step)
        expected = model[step] if step < len(model) else None
        assert (None if made is None else (made.incarnation, made.version)) == expected


def test_a_demand_carries_its_branches_and_none_without() -> None:
    branches = (Branch(1, 3), Branch(2, 4))
    demand = BatchDemand(run="t", step=4, version=4, incarnation=2, groups=8, branches=branches)
    assert decode(encode(demand), BatchDemand).left() == branches
    first = BatchDemand(run="t", step=4, version=4, incarnation=0, groups=8)
    assert b"branches" not in encode(first)
    assert decode(encode(first), BatchDemand).left() == ()
