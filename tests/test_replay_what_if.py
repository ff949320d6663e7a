"""Other settings over a recording: what is exact is counted by hand, what is modelled says so and follows from the times."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from admission_stage import make_ready, with_siblings
from recorded_run import configuration, finished, recording_of

from admission import recorded
from admission.gates import GateSettings
from admission.what_if import Decided, GroupTimes, Outcome, RunTimes, StepTimes, Trial, over_recorded_groups, simulate
from admission.what_if_strata import Stratum, stratum_of, thirds
from admission.what_if_turns import InFlight, Play, thrown_away
from schemas.ledger import BatchEntry
from schemas.training import Branch
from services.cli import main
from services.recording_reader import RecordingReader

pytestmark = pytest.mark.timeout(240)


def regular(steps: int = 40, ready_s: float = 1.0, work_s: float = 1.0, publish_s: float = 0.0) -> RunTimes:
    """Every group takes as long as every other, and so does every step of two groups."""
    made = RunTimes(groups_per_batch=2)
    made.groups = [GroupTimes(make_ready(n), ready_s) for n in range(2 * steps)]
    made.steps = [StepTimes(n, n * 2.0, n * 2.0 + 1, n * 2.0 + 2, work_s, publish_s) for n in range(steps)]
    return made


def trial(max_lag: int = 0, window: int = 8, groups_per_batch: int = 2, **gates: object) -> Trial:
    settings = GateSettings(max_lag=max_lag, min_rewards=1, **gates)  # type: ignore[arg-type]
    return Trial(gates=settings, groups_per_batch=groups_per_batch, window=window, demand_ahead=0)


def test_synchronous_is_generation_and_training_in_turn() -> None:
    """K = 0: each step waits for its own groups, so a step takes the sum of both, and the trainer idles half of the time."""
    out = simulate(regular(), trial(max_lag=0))
    assert out.steps == 40
    assert out.seconds == pytest.approx(80.0)
    assert out.mean_wait_s() == pytest.approx(1.0)
    assert out.idle == pytest.approx(0.5)
    assert out.lags == Counter({0: 80})


def test_with_lag_allowed_generation_is_hidden_behind_training() -> None:
    """K = 2: after the first batch nothing is waited for, and no group is staler than allowed."""
    out = simulate(regular(), trial(max_lag=2))
    assert out.seconds == pytest.approx(41.0)
    assert sum(out.waits_s) == pytest.approx(1.0)
    assert max(out.lags) <= 2
    assert not out.turned_away


def test_a_window_of_one_batch_makes_stragglers_felt() -> None:
    """Every fourth group takes four times as long; a wider window hides it."""
    times = regular()
    times.groups = [GroupTimes(g.group, 4.0 if n % 4 == 0 else 1.0) for n, g in enumerate(times.groups)]
    narrow, wide = simulate(times, trial(max_lag=8, window=2)), simulate(times, trial(max_lag=8, window=16))
    assert wide.mean_wait_s() < narrow.mean_wait_s()
    assert wide.seconds < narrow.seconds


def test_what_gates_refuse_is_leased_again_and_counted() -> None:
    """Both rewards of every second group are equal; skipped ones come to nothing, and each step still has its groups."""
    times = regular()
    equal = make_ready(0)
    siblings = tuple(type(s)(**{f: getattr(s, f) for f in s.__struct_fields__} | {"reward": 1.0}) for s in equal.siblings)
    flat = type(equal)(**{f: getattr(equal, f) for f in equal.__struct_fields__} | {"siblings": siblings})
    times.groups = [GroupTimes(flat if n % 2 else g.group, g.ready_s) for n, g in enumerate(times.groups)]
    out = simulate(times, trial(max_lag=2, zero_variance="skip"))
    assert out.steps == 40
    assert sum(out.mix.values()) == 80
    assert {(reason, of.family, of.reward) for reason, of in out.turned_away} == {("zero_variance", "files", "high")}
    assert out.turned_away.total() == pytest.approx(80, abs=8)


def test_a_slow_publication_costs_freshness() -> None:
    """Groups are leased under what engines serve, not under what the trainer has made."""
    wide = trial(max_lag=20, window=4)
    quick, slow = simulate(regular(), wide), simulate(regular(publish_s=2.0), wide)
    assert slow.mean_lag() > quick.mean_lag()


def test_gates_over_recorded_groups_are_exact() -> None:
    times = RunTimes(groups=[GroupTimes(make_ready(n, oldest=n), 1.0) for n in range(6)])
    decided = {f"g{n:08d}": Decided(5) for n in range(6)}
    lags, turned_away = over_recorded_groups(times, decided, GateSettings(max_lag=2, min_rewards=1))
    assert lags == Counter({0: 1, 1: 1, 2: 1})
    assert Counter({(r, of.family): n for (r, of), n in turned_away.items()}) == Counter({("stale", "files"): 3})
    lags, turned_away = over_recorded_groups(times, decided, GateSettings(max_lag=9, min_rewards=1), frozenset({"g00000005"}))
    assert lags.total() == 5
    assert [reason for reason, _ in turned_away] == ["lost_item"], "lost whatever the gates say"
    decided["g00000003"] = Decided(5, (Branch(1, 2),))
    lags, turned_away = over_recorded_groups(times, decided, GateSettings(max_lag=9, min_rewards=1))
    assert [reason for reason, _ in turned_away] == ["dead_branch"], "by the branches of its own demand"


def test_strata_are_family_length_and_reward() -> None:
    groups = [with_siblings(make_ready(n), 0, sampled_tokens=10 * n) for n in range(9)]
    bounds = thirds(groups)
    found = Counter(stratum_of(group, bounds) for group in groups)
    assert found == Counter(
        {Stratum("files", length, "middle"): 3 for length in ("short", "middle", "long")}  # type: ignore[arg-type]
    )


TURNS = ((0.0, 2.0), (3.0, 5.0), (6.0, 8.0))  # seconds of generation, one second of sandbox after each


@pytest.mark.parametrize(
    ("mode", "at_s", "cost_s"),
    [
        ("regenerate", 4.0, 1.0),  # a second into the second turn
        ("regenerate", 2.5, 0.0),  # its command runs
        ("restart", 4.0, 4.0),
        ("continue", 4.0, 0.0),
        ("finish_old", 4.0, 0.0),
        ("restart", 9.0, 0.0),  # it has ended
    ],
)
def test_what_a_change_of_weights_throws_away(mode: InFlight, at_s: float, cost_s: float) -> None:
    assert thrown_away(TURNS, at_s, mode) == cost_s
    play = Play(leased_s=0.0, ready_s=9.0, turns=[TURNS])
    assert play.change(at_s, mode) == bool(cost_s)
    assert play.end_s() == 9.0 + cost_s


def test_in_flight_modes_trade_time_for_freshness() -> None:
    """Restarted groups are never stale and take longest; regenerated ones have no turn of two versions."""
    times = regular(work_s=2.5, ready_s=9.0)
    times.groups = [GroupTimes(g.group, 9.0, (TURNS, TURNS)) for g in times.groups]
    outs = {
        mode: simulate(times, replace(trial(max_lag=6, window=8), in_flight=mode))
        for mode in ("finish_old", "continue", "regenerate", "restart")
    }
    assert outs["continue"].seconds == outs["finish_old"].seconds
    assert outs["regenerate"].seconds > outs["continue"].seconds
    assert outs["restart"].mean_lag() < outs["regenerate"].mean_lag()
    mixed = simulate(times, replace(trial(max_lag=6, window=8, versions="homogeneous"), in_flight="restart"))
    assert not mixed.turned_away, "what is begun anew with each version has one"


def test_an_empty_outcome_has_figures() -> None:
    assert Outcome().mean_wait_s() == Outcome().mean_lag() == 0.0
    assert simulate(RunTimes(), trial()).steps == 0


async def test_the_command_tells_recorded_from_modelled(
    nats_url: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(run_name, nats_url)
    async with finished(nats_url, config):
        path = await recording_of(config, tmp_path / "r")
    with RecordingReader(path) as reader:
        batches = [entry for _, entry in recorded.ledger(reader) if isinstance(entry, BatchEntry)]
    capsys.readouterr()
    words = ["replay", str(path), "--set", "admission.max_lag=0", "--set", "window.max_groups=12"]
    assert main([*words, "--json", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    lag_line = next(line for line in said.splitlines() if line.strip().startswith("lag, largest"))
    assert lag_line.count("(modelled)") == 2, "the recorded figure is none"
    found = json.loads((tmp_path / "out.json").read_text())
    lags = Counter(str(member.lag) for batch in batches for member in batch.groups)
    assert found["recorded"]["lags"] == {"value": dict(sorted(lags.items())), "modelled": False}
    assert set(found["tried"]["lags"]["value"]) == {"0"}
    assert all(figure["modelled"] for figure in found["tried"].values())
    assert found["settings"]["tried"]["gates"]["max_lag"] == 0
    assert found["settings"]["tried"]["window"] == 12
    exact = found["gates_over_recorded_groups"]
    assert set(exact["lags"]) <= {"0"}
    assert exact["lags"].get("0", 0) == lags["0"]

    svg = tmp_path / "out.svg"
    assert main(["replay", str(path), "--sweep", "admission.max_lag=0,1,2", "--svg", str(svg)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("admission.max_lag=")]
    assert len(rows) == 3
    assert all("(modelled)" in row for row in rows)
    root = ElementTree.parse(svg).getroot()
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 4 * 3, "a point for each value in each panel"

    for word, answer in (
        ("admission.max_lagg=1", "admission.max_lagg: unknown setting; did you mean admission.max_lag?"),
        ("admission.versions=homogenous", "is none of mixed, homogeneous; did you mean homogeneous?"),
        ("trainer.ranks=2", "trainer.ranks is a setting, but not one that a replay can try"),
        ("admission.max_lag=-1", "admission.max_lag: Input should be greater than or equal to 0"),
    ):
        assert main(["replay", str(path), "--set", word]) == 2
        assert answer in capsys.readouterr().err
