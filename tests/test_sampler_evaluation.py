"""Evaluation points: what they lease, when they are due, and that censored attempts are neither attempts nor failures."""

from __future__ import annotations

import msgspec
import pytest
from admission_stage import make_lease, make_ready, with_siblings

from rollouter.evaluation import EvalBook, EvalSettings, Point, current_point, plan, score
from schemas.group import ReadyGroup

TASKS = {"heldout_instance": tuple(f"hi-{n}" for n in range(5)), "heldout_template": tuple(f"ht-{n}" for n in range(3))}
SETTINGS = EvalSettings(
    at_start=True,
    at_end=True,
    every_steps=10,
    max_steps=40,
    evaluate_only=False,
    group_size=4,
    full_attempts={"heldout_instance": 12, "heldout_template": 30},
    interim_attempts=2,
    tasks=TASKS,
)


def with_point(group: ReadyGroup, point: str, **changes: object) -> ReadyGroup:
    return msgspec.structs.replace(group, purpose="eval", eval_point=point, split="heldout_instance", **changes)


def test_attempts_go_round_robin_over_the_tasks_and_into_groups_of_one_task() -> None:
    groups = plan(Point(0, "start"), SETTINGS)
    assert [group.index for group in groups] == list(range(len(groups)))
    attempts = {task: sum(g.size for g in groups if g.task_id == task) for tasks in TASKS.values() for task in tasks}
    assert [attempts[f"hi-{n}"] for n in range(5)] == [3, 3, 2, 2, 2]
    assert [attempts[f"ht-{n}"] for n in range(3)] == [10, 10, 10]
    assert max(group.size for group in groups) == 4
    assert [group.size for group in groups if group.task_id == "ht-0"] == [4, 4, 2]
    assert {group.split for group in groups} == set(TASKS)


def test_an_interim_point_has_fewer_attempts_and_leaves_tasks_out() -> None:
    groups = plan(Point(10, "interim"), SETTINGS)
    assert [(group.task_id, group.size) for group in groups] == [("hi-0", 1), ("hi-1", 1), ("ht-0", 1), ("ht-1", 1)]


@pytest.mark.parametrize(
    ("done", "begun", "committed", "serving", "expected"),
    [
        ((), (), 0, 0, Point(0, "start")),
        ((), (), 5, 5, None),  # training went on without one; version 0 is gone
        ((0,), (), 0, 0, None),
        ((0,), (), 9, 9, None),
        ((0,), (), 11, 10, Point(10, "interim")),
        ((0,), (), 11, 9, None),  # committed, but not in rotation yet
        ((0, 10), (), 19, 19, None),
        ((0,), (), 35, 35, Point(30, "interim")),  # what was missed is not made up for
        ((0,), (10,), 35, 35, Point(10, "interim")),  # what was begun is ended first
        ((0, 30), (), 40, 39, None),  # the last version is not in rotation
        ((0, 30), (), 39, 39, None),
        ((0, 30), (), 40, 40, Point(40, "final")),
        ((0, 30, 40), (), 40, 40, None),
        ((0,), (40,), 40, 40, Point(40, "final")),
    ],
)
def test_when_points_are_due(
    done: tuple[int, ...], begun: tuple[int, ...], committed: int, serving: int, expected: Point | None
) -> None:
    book = EvalBook()
    for step in begun:
        book.lease(make_lease(step, purpose="eval", eval_point=f"step-{step:05d}"))
    for step in done:
        book.result(f"step-{step:05d}")
    assert current_point(SETTINGS, book, committed, serving) == expected


def test_a_run_without_end_has_no_last_point_and_no_bound_on_the_others() -> None:
    endless = EvalSettings(**{**{name: getattr(SETTINGS, name) for name in EvalSettings.__slots__}, "max_steps": 0})
    book = EvalBook()
    book.result("step-00000")
    assert current_point(endless, book, 1000, 1000) == Point(1000, "interim")


def test_censored_attempts_are_counted_apart() -> None:
    """Invariant 6: two graded attempts, one success; truncated, timed out and unjudged ones are no failures."""
    graded = with_point(make_ready(0, oldest=3), "step-00000")
    censored = with_siblings(with_point(make_ready(1, oldest=4), "step-00000"), 1, status="censored", reward=None, success=None)
    unjudged = with_siblings(with_point(make_ready(2, oldest=3), "step-00000"), 0, status="verifier_error", success=None)
    result = score("heldout_instance", [graded, censored, unjudged])
    assert (result.successes, result.attempts, result.censored, result.tasks) == (2, 4, 2, 3)
    assert (result.oldest_version, result.newest_version) == (3, 4)
    assert result.by_family == {"files": (2, 4)}
    assert result.by_task == {"task-0": (1, 2), "task-1": (0, 1), "task-2": (1, 1)}


def test_a_tampered_attempt_is_an_attempt_without_success() -> None:
    group = with_siblings(with_point(make_ready(0), "p"), 1, status="tampered", success=True)
    result = score("heldout_instance", [group])
    assert (result.successes, result.attempts, result.censored) == (0, 2, 0)


def test_a_point_is_scored_once_all_its_groups_are_graded() -> None:
    book, point = EvalBook(), Point(0, "start")
    for ordinal in range(2):
        book.lease(make_lease(ordinal, purpose="eval", eval_point=point.name))
    book.lease_stored(point.name, 5_000_000_000)
    book.lease_stored(point.name, 4_000_000_000)
    group = with_point(make_ready(0), point.name)
    book.graded(group, 6_000_000_000)
    book.graded(group, 6_000_000_000)
    assert book.score("t", point, 2) is None
    assert book.in_flight() == 1
    book.graded(with_point(make_ready(1), point.name), 9_500_000_000)
    assert book.score("t", point, 3) is None, "a lease of the plan is still to come"
    result = book.score("t", point, 2)
    assert result is not None
    assert (result.point, result.step, result.seconds) == ("step-00000", 0, 5.5)
    assert [split.split for split in result.splits] == ["heldout_instance"]
    book.result(point.name)
    assert (book.in_flight(), book.unfinished()) == (0, ())


def test_a_point_without_attempts_gives_an_empty_result() -> None:
    result = EvalBook().score("t", Point(0, "start"), 0)
    assert result is not None
    assert result.splits == ()
