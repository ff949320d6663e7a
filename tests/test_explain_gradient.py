"""A group's share of its step's gradient, as `headrace explain` says it, against the trainer's own weights and advantages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from admission_stage import make_episode, make_lease, make_ready, with_siblings
from recorded_run import configuration, finished, recording_of

from admission.gradient_mass import MassRule, gradient_mass
from schemas.arrays import Array
from schemas.group import ReadyGroup
from schemas.termination import Termination
from schemas.trajectory import Episode, VersionSpan
from services.cli import main
from services.config import check
from trainer.batch import row_from_episode
from trainer.credit import advantages
from trainer.reductions import token_weights

pytestmark = pytest.mark.timeout(240)
REDUCTIONS = ("episode_sum", "length_normalized", "token_mean", "turn_mass_conserving")


def episode(ordinal: int, slot: int, tokens: int, censored: bool) -> Episode:
    """`tokens` sampled ones after two of the prompt; two turns where there is room."""
    count = tokens + 2
    mask = np.arange(count) >= 2
    starts = [2, 3] if tokens > 1 else [2]
    return make_episode(
        make_lease(ordinal),
        slot,
        termination=Termination.TOKEN_TRUNCATION if censored else Termination.AGENT_FINISH,
        ids=Array.of(np.arange(count, dtype=np.int32)),
        mask=Array.of(mask),
        logprobs=Array.of(np.where(mask, -0.5, 0.0).astype(np.float32)),
        versions=(VersionSpan(2, count, 0),),
        turn_starts=Array.of(np.array(starts, dtype=np.int32)),
        turns=len(starts),
        sampled_tokens=tokens,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("credit", ["rloo", "grpo", "dr_grpo"])
def test_shares_are_those_of_the_trainers_own_weights(reduction: str, credit: str) -> None:
    """The sum of |weight * advantage| over the tokens of each group's rows, from the trainer's functions."""
    random = np.random.default_rng(7)
    groups: list[ReadyGroup] = []
    expected: dict[str, float] = {}
    rows = []
    for ordinal in range(5):
        group = make_ready(ordinal)
        rewards = [float(random.integers(0, 3)), None if ordinal == 3 else float(random.integers(0, 3))]
        tokens = [int(random.integers(1, 40)) for _ in rewards]
        for slot, (reward, count) in enumerate(zip(rewards, tokens, strict=True)):
            group = with_siblings(group, slot, reward=reward, sampled_tokens=count)
        values = advantages(rewards, credit=credit)  # type: ignore[arg-type]
        rows += [
            row_from_episode(episode(ordinal, slot, count, reward is None), value, updating_version=0, reward=reward)
            for slot, (reward, count, value) in enumerate(zip(rewards, tokens, values, strict=True))
        ]
        groups.append(group)
    for row, weights in zip(rows, token_weights(rows, reduction), strict=True):  # type: ignore[arg-type]
        expected[row.group] = expected.get(row.group, 0.0) + float(np.abs(weights * (row.advantage or 0.0)).sum())
    total = sum(expected.values())
    config = check({"trainer": {"reduction": reduction, "credit": credit}, "rollout": {"group_size": 2}})
    shares = gradient_mass(groups, MassRule.of(config, advantages))
    assert total > 0
    assert shares == pytest.approx({name: value / total for name, value in expected.items()}, rel=1e-5)


def test_groups_of_equal_rewards_carry_nothing_and_permuted_rewards_say_nothing() -> None:
    equal = with_siblings(make_ready(0), 0, reward=1.0)
    rule = MassRule.of(check({}), advantages)
    assert gradient_mass([equal, make_ready(1)], rule) == {equal.group: 0.0, "g00000001": 1.0}
    assert gradient_mass([equal], rule) == {equal.group: 0.0}
    assert gradient_mass([make_ready(1)], MassRule.of(check({"trainer": {"shuffle_rewards": True}}), advantages)) == {}


async def test_an_explanation_says_how_much_each_group_carried(
    nats_url: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(run_name, nats_url)
    async with finished(nats_url, config):
        path = await recording_of(config, tmp_path / "r")
    out = tmp_path / "out.json"
    assert main(["explain", "step", "1", "--json", str(out), "--recording", str(path)]) == 0
    facts = json.loads(out.read_text())["facts"]
    shares = {row["group"]: row["gradient_mass"] for row in facts["groups"]}
    assert facts["gradient_mass_by"] == "credit rloo, scale none, reduction episode_sum"
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-5) or not any(shares.values())
    for group, share in shares.items():
        assert main(["explain", "group", group, "--json", str(out), "--recording", str(path)]) == 0
        assert json.loads(out.read_text())["facts"]["gradient_mass"] == pytest.approx(share, abs=1e-6)
    capsys.readouterr()
