"""The warm start: learns, is deterministic, writes a checkpoint that loads, and refuses bad input by name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from test_trainer_engine import same_environment  # noqa: F401  (an autouse fixture)
from tiny_model import VOCABULARY, write_tiny_model

from services.device import DeviceError, choose_device, thread_environment
from services.engine.hf_models import load_causal_lm
from trainer.sft import SftConfig, SftError, SftPhase, main, read_config, run_sft

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Demonstration:
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]


def copies(seed: int, length: int = 6, count: int = 10**6) -> Iterator[Demonstration]:
    """One token, `length` times: the model learns to repeat what it sees."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        ids = np.full(length, generator.integers(0, VOCABULARY), dtype=np.int32)
        mask = np.ones(length, dtype=np.bool_)
        mask[0] = False
        yield Demonstration(ids, mask)


def first_token_masked(seed: int) -> Iterator[Demonstration]:
    yield dataclasses.replace(next(copies(seed)), mask=np.ones(6, dtype=np.bool_))


def config(folder: Path, **changes: object) -> SftConfig:
    settings: dict[str, object] = {
        "model_dir": str(folder / "model"),
        "output_dir": str(folder / "out"),
        "rows": "test_trainer_sft:copies",
        "log_every": 10,
        "phase": (
            SftPhase(steps=40, batch_rows=16, learning_rate=1e-2, schedule="cosine", warmup_steps=4),
            SftPhase(steps=10, batch_rows=8, learning_rate=1e-3, rows_kwargs={"length": 9}),
        ),
    }
    return SftConfig(**(settings | changes))  # type: ignore[arg-type]


def test_it_learns_is_deterministic_and_loads(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    lines: list[str] = []
    loss = run_sft(config(tmp_path), lines.append)
    assert loss < 0.5 * np.log(VOCABULARY)
    assert len(lines) == 1 + 4 + 1 and len({len(line) for line in lines}) == 1, "a heading and aligned progress lines"
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    run_sft(config(tmp_path, output_dir=str(tmp_path / "again")), lines.append)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in (tmp_path / "model").iterdir()}
    model = load_causal_lm(tmp_path / "out", "bfloat16", "cpu")
    with torch.no_grad():
        predicted = model(input_ids=torch.tensor([[5, 5, 5]])).logits[0, -1].argmax()
    assert int(predicted) == 5


def test_rows_that_end_or_cannot_be_learned_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    few = SftPhase(steps=3, batch_rows=4, rows_kwargs={"count": 6})
    with pytest.raises(SftError, match="phase 0: the rows ended at step 1 of 3"):
        run_sft(config(tmp_path, phase=(few,)), lambda _line: None)
    with pytest.raises(SftError, match="row 0: mask"):
        run_sft(config(tmp_path, rows="test_trainer_sft:first_token_masked", phase=(SftPhase(steps=1),)), lambda _line: None)
    with pytest.raises(SftError, match="rows: 'nowhere:rows'"):
        run_sft(config(tmp_path, rows="nowhere:rows"), lambda _line: None)
    assert not (tmp_path / "out").exists()


def test_the_file_is_checked_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sft.toml"
    path.write_text(
        '[sft]\nmodel_dir="m"\noutput_dir="o"\nrows="a:b"\nthreads=2\n[[sft.phase]]\nsteps=5\nrows_kwargs={share=0.2}\n'
    )
    assert read_config(path).phase[0].rows_kwargs == {"share": 0.2}
    path.write_text('[sft]\nmodel_dir="m"\noutput_dir="o"\nrows="a:b"\nsteps=5\n[[sft.phase]]\nsteps=5\n')
    assert main(["--config", str(path)]) == 2
    assert "steps" in capsys.readouterr().err


def test_the_command_line_runs(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    path = tmp_path / "sft.toml"
    path.write_text(
        f'[sft]\nmodel_dir="{tmp_path / "model"}"\noutput_dir="{tmp_path / "out"}"\nrows="test_trainer_sft:copies"\n'
        "[[sft.phase]]\nsteps=2\nbatch_rows=2\n"
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "trainer.sft", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=here.parent,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(here)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "out" / "model.safetensors").is_file() and "tok/s" in done.stdout


def test_threads_are_set_before_torch_loads() -> None:
    """Torch reads them once, at import; too late, two threads spin and starve every other process on the machine."""
    program = "import sys, trainer.sft, services.device; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent.parent, timeout=60).returncode == 0
    assert thread_environment(2) == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}


def test_devices_are_chosen_in_one_place() -> None:
    cpu = choose_device("cpu", threads=3)
    assert (cpu.torch_device, cpu.compute_dtype, cpu.distributed_backend, cpu.accelerator, cpu.threads) == (
        "cpu",
        "float32",
        "gloo",
        "cpu",
        3,
    )
    assert cpu.environment()["OMP_NUM_THREADS"] == "3"
    assert choose_device("cpu", threads=1, compute_dtype="bfloat16").compute_dtype == "bfloat16"
    if not torch.cuda.is_available():
        assert choose_device("auto").kind == "cpu"
        with pytest.raises(DeviceError, match="cuda"):
            choose_device("cuda")
