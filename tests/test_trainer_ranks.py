"""Two ranks over gloo take the same steps as one, at every ZeRO stage, and resume bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import bits_of, write_tiny_model
from trainer_rank import STAGES

from services.device import choose_device
from services.nats_server import free_port
from trainer.ranks import RankError, join_ranks

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


def launch(ranks: int, folder: Path, model_dir: Path) -> list[Any]:
    """Start the ranks, wait, return what each wrote."""
    here = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    environment |= choose_device("cpu", threads=1).environment()
    environment |= {"PYTHONPATH": f"{here.parent}{os.pathsep}{here}", "WORLD_SIZE": str(ranks)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(ranks):
        command = [sys.executable, "-W", "ignore", str(here / "trainer_rank.py"), str(model_dir)]
        command += [str(folder / f"{ranks}-{rank}.npz"), str(folder / f"state{ranks}")]
        own = environment | {"RANK": str(rank), "LOCAL_RANK": "0"}
        with (folder / f"{ranks}-{rank}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
    try:
        codes = [process.wait(150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    texts = "\n".join((folder / f"{ranks}-{rank}.log").read_text()[-2000:] for rank in range(ranks))
    assert codes == [0] * ranks, texts
    return [dict(np.load(folder / f"{ranks}-{rank}.npz")) for rank in range(ranks)]


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    model_dir = write_tiny_model(tmp_path / "model")
    (alone,) = launch(1, tmp_path, model_dir)
    first, second = launch(2, tmp_path, model_dir)
    for stage in STAGES:
        for key in ("loss", "norm", "drift", "tokens", "logprobs"):
            name = f"{stage}/{key}"
            np.testing.assert_array_equal(first[name], second[name], err_msg=f"{name}: ranks disagree")
            np.testing.assert_allclose(
                first[name], alone[name], rtol=2e-3 if key == "logprobs" else 1e-5, atol=1e-6, err_msg=name
            )
        weights = [name for name in alone if name.startswith(f"{stage}/weights/")]
        for name in weights:
            np.testing.assert_array_equal(first[name], second[name], err_msg=f"{name}: ranks disagree")
            left, right = bits_of({"w": first[name]})["w"], bits_of({"w": alone[name]})["w"]
            np.testing.assert_allclose(left, right, rtol=2**-7, atol=1e-6, err_msg=name)
        for result in (alone, first, second):
            assert bool(result[f"{stage}/resumed"]), f"stage {stage} did not resume bit for bit"
        owned = [set(result[f"{stage}/owned"].tolist()) for result in (first, second)]
        assert not owned[0] & owned[1] and all(owned)
        assert owned[0] | owned[1] == {name.removeprefix(f"{stage}/weights/") for name in weights}


def test_an_incomplete_launch_names_the_missing_variable() -> None:
    program = (
        "from services.device import choose_device\nfrom trainer.ranks import join_ranks\n"
        "join_ranks(choose_device('cpu', threads=1), 5.0, {'WORLD_SIZE': '2', 'RANK': '0', 'MASTER_ADDR': '127.0.0.1'})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent.parent
    )
    assert "MASTER_PORT" in done.stderr and RankError.__name__ in done.stderr
    assert join_ranks.__doc__
