"""A trainer of two ranks in the whole pipeline: both follow the same ledger, one speaks, the checkpoint holds both."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.table import Stream
from schemas.training import StepCommit
from services.consume import read_all
from tests.finished_run import FinishedRun, logs_of, run_up, weights_by_version
from trainer import checkpoint

SETTINGS = [
    "run.name=ranks",
    "run.max_steps=3",
    "engine.kind=transformers",
    "engine.names=['e0']",
    "trainer.ranks=2",
    "trainer.zero_stage=2",
    "admission.groups_per_batch=2",
    "admission.max_lag=1",
    "rollout.group_size=4",
    "window.max_groups=4",
    "eval.every_steps=0",
    "eval.at_start=false",
    "eval.at_end=false",
]


@pytest.mark.slow
@pytest.mark.timeout(420)
async def test_two_ranks_train_and_commit_as_one(tmp_path: Path) -> None:
    result = run_up(tmp_path, "examples/terminal/run.toml", SETTINGS, 360)
    folder = tmp_path / "ranks"
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-2000:]}\n{logs_of(folder)}"
    run = FinishedRun(folder)
    async with run.bus() as bus:
        steps = [item.decode(StepCommit) for item in await read_all(bus, Stream.TRAIN, "train.step.*")]
        weights = await weights_by_version(bus, run.config)
    assert [step.step for step in steps] == [0, 1, 2]
    assert all(weights[step.version].digest == step.digest for step in steps)
    newest = checkpoint.latest(folder / "checkpoints").checkpoint
    assert newest is not None
    assert newest.commit.ranks == 2 and newest.commit.digest == steps[-1].digest
    assert newest.commit.consumed_group_ids == tuple(group for step in steps for group in step.groups)
