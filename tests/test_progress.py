"""What the progress view says: rows and lines from the streams' items, each row once, and when a run is complete."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from standin_run import commit, evaluation, lease, ready

from schemas.lease import group_id
from schemas.ledger import AbandonEntry, AbandonReason, BatchEntry, BatchGroup, QuarantineEntry, QuarantineReason
from schemas.policy import FleetVersions
from schemas.training import SplitScore
from services.config import load
from services.evaluation import as_report, evaluation_config
from services.intervals import interval, over_tasks, wilson
from services.progress import HEADER, eval_line, is_complete, step_line
from services.run_folder import MetricsFile
from services.summary import groups_line, summary
from services.tally import Tally

SECOND = 1_000_000_000


def batch(step: int, lags: tuple[int, ...], groups: tuple[str, ...]) -> BatchEntry:
    chosen = tuple(
        BatchGroup(group=group, ready_seq=1, oldest_version=step - lag, newest_version=step, lag=lag)
        for group, lag in zip(groups, lags, strict=True)
    )
    return BatchEntry(
        run="r",
        step=step,
        version=step,
        incarnation=0,
        groups=chosen,
        ready_high_water=1,
        demand_seq=1,
        settings_hash="s",
        max_lag=2,
    )


def quarantine(group: str) -> QuarantineEntry:
    return QuarantineEntry(
        run="r",
        group=group,
        ready_seq=4,
        reason=QuarantineReason.STALE,
        detail="",
        at_version=1,
        oldest_version=0,
        lag=3,
        family="rename",
        mean_reward=0.5,
        sampled_tokens=10,
        demand_seq=1,
        settings_hash="s",
    )


def abandon(group: str, ready_seq: int) -> AbandonEntry:
    return AbandonEntry(
        run="r",
        group=group,
        ready_seq=ready_seq,
        reason=AbandonReason.INFRA_ABORT,
        detail="",
        family="rename",
        settings_hash="s",
    )


def fleet(oldest: int) -> FleetVersions:
    return FleetVersions(run="r", target=2, incarnation=0, engines={"e1": oldest, "e0": 2}, oldest=oldest, newest=2)


@pytest.fixture
def tally() -> Tally:
    """Six leases; two groups trained in step 0, one quarantined, one abandoned before it was ready, one ready, one running."""
    tally = Tally()
    names = [group_id("train", ordinal) for ordinal in range(6)]
    for ordinal in range(6):
        tally.add(lease("r", ordinal), ordinal * SECOND)
    for ordinal in (0, 1, 2, 4):
        tally.add(ready("r", ordinal, 0), (6 + ordinal) * SECOND)
    tally.add(batch(0, (0, 1), (names[0], names[1])), 11 * SECOND)
    tally.add(quarantine(names[2]), 12 * SECOND)
    tally.add(abandon(names[3], 0), 13 * SECOND)
    tally.add(fleet(1), 14 * SECOND)
    tally.add(commit("r", 0, (names[0], names[1])), 20 * SECOND)
    return tally


def test_groups_are_conserved_at_every_moment(tally: Tally) -> None:
    assert tally.groups() == {"leased": 6, "consumed": 2, "quarantined": 1, "abandoned": 1, "open": 2, "ready": 1}
    for second in range(25):
        groups = tally.groups(second * SECOND)
        assert groups["leased"] == groups["consumed"] + groups["quarantined"] + groups["abandoned"] + groups["open"]
        assert 0 <= groups["ready"] <= groups["open"]
    assert groups_line(tally) == "6 leased = 2 consumed + 1 quarantined (stale 1) + 1 abandoned (infra_abort 1) + 2 open"


def test_an_abandoned_ready_group_is_no_longer_ready(tally: Tally) -> None:
    tally.add(abandon(group_id("train", 4), 9), 21 * SECOND)
    assert tally.groups()["ready"] == 0


def test_a_steps_row_does_not_change_with_what_comes_later(tally: Tally) -> None:
    row = tally.step_row(0)
    assert row["reward_mean"] == 0.5
    assert (row["lag_mean"], row["lag_max"]) == (0.5, 1)
    assert row["tokens_per_s"] == pytest.approx(4 * 100 / 20)  # four groups of two siblings with 50 tokens, in 20 s
    assert row["engines"] == {"e0": 2, "e1": 1}
    tally.add(lease("r", 6), 21 * SECOND)
    tally.add(ready("r", 5, 1), 22 * SECOND)
    tally.add(fleet(2), 23 * SECOND)
    assert tally.step_row(0) == row


def test_steps_that_a_new_incarnation_takes_again_replace_those_of_the_dead_branch(tmp_path: Path) -> None:
    """Invariant 5: the run is complete when the living line is, and each step has a row of each incarnation."""
    tally, file = Tally(), MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(3):
        tally.add(commit("r", step, ()), step * SECOND)
        assert file.append(tally.step_row(step))
    ends = load(None, ["run.max_steps=3", "eval.at_end=false"])
    tally.add(fleet(3), 4 * SECOND)
    assert is_complete(tally, ends)
    again = [msgspec.structs.replace(commit("r", step, ()), incarnation=1, digest=f"other{step}") for step in (1, 2)]
    tally.add(again[0], 10 * SECOND)
    assert sorted(tally.steps) == [0, 1]
    assert not is_complete(tally, ends)
    tally.add(msgspec.structs.replace(commit("r", 3, ()), digest="late"), 11 * SECOND)
    assert sorted(tally.steps) == [0, 1], "what the dead branch still says is not counted"
    tally.add(again[1], 12 * SECOND)
    assert is_complete(tally, ends)
    assert [tally.steps[step].incarnation for step in range(3)] == [0, 1, 1]
    assert [file.append(tally.step_row(step)) for step in range(3)] == [False, True, True]


def test_a_line_is_aligned_with_its_header(tally: Tally) -> None:
    line = step_line(tally.step_row(0))
    ends = {
        name: HEADER.index(name) + len(name)
        for name in ("step", "reward", "ready", "open", "quar", "mean/max", "wait s", "train s")
    }
    words = {
        "step": "0",
        "reward": "0.500",
        "ready": "1",
        "open": "2",
        "quar": "1",
        "mean/max": "0.50/1",
        "wait s": "0.10",
        "train s": "0.20",
    }
    for name, word in words.items():
        assert line[: ends[name]].endswith(" " + word), f"{name} is not under its name:\n{HEADER}\n{line}"
    assert line.endswith("e0:2 e1:1")


def test_a_step_with_nothing_known_beside_its_commit_still_has_a_line() -> None:
    tally = Tally()
    tally.add(commit("r", 0, ("g00000000",)), SECOND)
    line = step_line(tally.step_row(0))
    assert line.split()[:2] == ["0", "-"]
    assert line.endswith("-")


def test_an_evaluation_has_a_line_under_the_same_header() -> None:
    tally = Tally()
    tally.add(evaluation("r", 20, 8), SECOND)
    line = eval_line(tally.eval_row("step-00020"))
    assert line[: HEADER.index("inst / tmpl") + len("inst / tmpl")].split() == ["20", "eval", "0.400", "/", "0.400"]
    assert "8/20 instances, 8/20 templates" in line


def test_metrics_rows_are_written_once_across_restarts(tally: Tally, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tally.add(evaluation("r", 0, 8), SECOND)
    rows = [tally.eval_row("step-00000"), tally.step_row(0)]
    assert [MetricsFile(file).append(row) for row in rows] == [True, True]
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"kind": "step", "step": 1, "rew')  # cut short by a crash
    again = MetricsFile(file)
    assert [again.append(row) for row in rows] == [False, False]
    assert file.read_bytes() == whole
    assert again.append({"kind": "step", "step": 1})
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 0, 1]


@pytest.mark.parametrize(
    ("overrides", "messages", "complete"),
    [
        (["run.max_steps=0"], ["step", "eval-1", "fleet"], False),
        (["run.max_steps=1"], [], False),
        (["run.max_steps=1"], ["step"], False),
        (["run.max_steps=1"], ["step", "eval-0"], False),
        (["run.max_steps=1"], ["step", "eval-1"], True),
        (["run.max_steps=1", "eval.at_end=false"], ["step"], False),
        (["run.max_steps=1", "eval.at_end=false"], ["step", "fleet"], True),
        (["run.max_steps=2", "eval.at_end=false"], ["step", "fleet"], False),
        (["run.max_steps=1", "eval.instance_attempts=0", "eval.template_attempts=0"], ["step", "fleet"], True),
        (["run.evaluate_only=true"], [], False),
        (["run.evaluate_only=true"], ["eval-0"], True),
    ],
)
def test_when_a_run_is_complete(overrides: list[str], messages: list[str], complete: bool) -> None:
    known = {"step": commit("r", 0, ()), "eval-0": evaluation("r", 0, 1), "eval-1": evaluation("r", 1, 1), "fleet": fleet(1)}
    tally = Tally()
    for number, name in enumerate(messages):
        tally.add(known[name], number * SECOND)
    assert is_complete(tally, load(None, overrides)) is complete


def test_the_summary_compares_start_and_end(tally: Tally, tmp_path: Path) -> None:
    tally.add(evaluation("r", 0, 8), SECOND)
    tally.add(evaluation("r", 1, 15), 30 * SECOND)
    text = summary(tally, load(None, ["run.name=demo", "run.max_steps=1"]), tmp_path)
    assert text.splitlines()[0] == "run demo: complete after 1 step"
    assert "new templates        0.400 [0.219, 0.613] (8/20) at step 0 -> 0.750 [0.531, 0.888] (15/20) at step 1" in text
    assert "0.050 steps/s  (20 s" in text


@pytest.mark.parametrize(
    ("successes", "attempts", "low", "high"),
    [(8, 20, 0.2188, 0.6134), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (0, 0, 0.0, 1.0)],
)
def test_wilson_intervals(successes: int, attempts: int, low: float, high: float) -> None:
    """Values of the score interval as published tables give them."""
    assert wilson(successes, attempts) == pytest.approx((low, high), abs=1e-4)


def test_attempts_on_the_same_tasks_widen_the_interval() -> None:
    by_task = {f"t{k}": (10 * (k % 2), 10) for k in range(10)}  # each task is all or nothing: ten facts, not a hundred
    score = SplitScore(
        split="heldout_template",
        successes=50,
        attempts=100,
        censored=0,
        tasks=10,
        oldest_version=0,
        newest_version=0,
        by_task=by_task,
    )
    low, high = interval(score)
    assert (low, high) == pytest.approx(over_tasks(by_task))
    assert high - low > 1.5 * (wilson(50, 100)[1] - wilson(50, 100)[0])


def test_an_evaluation_of_its_own_has_a_name_that_fits() -> None:
    config = evaluation_config(load(None, ["run.name=abcdefgh-ij"]), 48)
    assert config.run.name == "abcdefgh-ev"
    assert (config.run.evaluate_only, config.eval.instance_attempts, config.eval.template_attempts) == (True, 48, 48)
    load(None, [f"run.name={config.run.name}"])


def test_a_report_is_json_with_rate_and_interval() -> None:
    report = json.loads(json.dumps(as_report(evaluation("r", 0, 8))))
    assert report["splits"]["heldout_template"]["rate"] == 0.4
    assert report["splits"]["heldout_template"]["interval"] == pytest.approx([0.2188, 0.6134], abs=1e-4)
