"""What a person sees for a mistake: one clear line on standard error, exit code 2, soon, and no traceback."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.cli import main
from services.config import load
from services.nats_server import free_port
from services.run_folder import RunFolder
from services.runtime import EXIT_NO_SERVER


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "--set", "admission.max_lagg=1"], "admission.max_lagg: unknown setting; did you mean admission.max_lag?"),
        (["check", "--config", "/nowhere.toml"], "no configuration file at /nowhere.toml"),
        (["check", "--config", "/"], "/: cannot be read as a TOML file"),
        (["up", "--set", "tasks.suite=nosuch:suite"], "tasks.suite: cannot import 'nosuch'"),
        (["up", "--set", "run.folder=/proc/nowhere"], "run.folder: cannot make /proc/nowhere/main"),
        (["up", "--set", "run.max_steps=-1"], "run.max_steps"),
        (["up", "--set", "policy.model=/nowhere"], "policy.model: /nowhere has no config.json"),
        (["run", "engine"], "no server given; pass --nats URL"),
        (["sft"], "needs --config FILE"),
        (["status", "--run-folder", "/nowhere"], "no configuration file at /nowhere/config.toml"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    written = capsys.readouterr().err
    assert written.startswith("headrace: ")
    assert said in written
    assert "Traceback" not in written


@pytest.mark.parametrize("command", ["status", "watch"])
def test_a_missing_server_is_said_within_a_bound(command: str) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    begun = time.monotonic()
    words = [sys.executable, "-m", "services.cli", command, "--nats", url, "--set", "nats.connect_timeout_s=1.0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        line for line in done.stderr.splitlines() if "no NATS server answered at " + url.removeprefix("nats://") in line
    ]
    assert done.stdout == ""
    assert time.monotonic() - begun < 15


def test_a_service_without_a_server_ends_with_its_reason() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    words = [sys.executable, "-m", "services.cli", "run", "bank", "--nats", url, "--set", "nats.connect_timeout_s=1.0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_NO_SERVER
    assert "no NATS server answered" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_a_second_start_in_the_same_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(__file__).parent.parent / "examples/terminal/model"
    overrides = [f'run.folder="{tmp_path}"', "engine.kind=simulated", f'policy.model="{model}"']
    with RunFolder(load(None, overrides)):
        assert main(["up", *(word for override in overrides for word in ("--set", override))]) == 2
    assert "is in use by process" in capsys.readouterr().err


def test_check_prints_a_configuration_that_check_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--set", "run.name=one", "--nats", "nats://a:4222,nats://b:4222"]) == 0
    first = capsys.readouterr().out
    file = tmp_path / "config.toml"
    file.write_text(first)
    assert main(["check", "--config", str(file)]) == 0
    assert capsys.readouterr().out == first
    assert 'url = "nats://a:4222,nats://b:4222"' in first


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], ["--help"], ["up", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    assert "headrace" in capsys.readouterr().out
