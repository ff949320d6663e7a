"""`headrace up` with a real server and a stand-in for the services: to the end, stopped, killed, resumed, watched."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Process

DRIVER = Path(__file__).with_name("stack_driver.py")
ROOT = DRIVER.parent.parent


class Stack:
    """A local run in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "demo"
        self._base = folder
        self._process: subprocess.Popen[str] | None = None

    def start(self, steps: int, pause_s: float, *more: str) -> subprocess.Popen[str]:
        words = [sys.executable, str(DRIVER), str(self._base), str(steps), str(pause_s), *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        return self._process

    def end(self, within_s: float = 40.0) -> tuple[int, str]:
        assert self._process is not None
        output, _ = self._process.communicate(timeout=within_s)
        return self._process.returncode, output

    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows("step")]

    def rows(self, kind: str) -> list[dict[str, Any]]:
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def pids(self) -> dict[str, int]:
        """The newest process of each child, and the worker that the stand-in started."""
        log = self.folder / "logs" / "supervisor.log"
        events = map(json.loads, log.read_text().splitlines()) if log.exists() else iter(())
        found = {event["child"]: int(event["pid"]) for event in events if event["event"] == "child started"}
        child_log = self.folder / "logs" / "trainer-0.log"
        workers = [
            line for line in (child_log.read_text().splitlines() if child_log.exists() else []) if line.startswith("worker ")
        ]
        return found | ({"worker": int(workers[-1].split()[1])} if workers else {})

    def processes(self) -> dict[str, Process]:
        """The same as processes, to ask later whether they still live."""
        return {name: Process.of(pid) for name, pid in self.pids().items()}


def wait_until(condition: Callable[[], Any], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {inspect.getsource(condition).strip()}"
        time.sleep(0.03)


def gone(processes: dict[str, Process], within_s: float = 15.0) -> None:
    """Fails unless every one of these ends in time, naming those that live on."""
    deadline = time.monotonic() + within_s
    while living := {name: process for name, process in processes.items() if process.alive()}:
        assert time.monotonic() < deadline, f"still alive after {within_s:g} s: {living}"
        time.sleep(0.03)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    yield stack
    if stack._process is not None and stack._process.poll() is None:
        stack._process.kill()
        stack._process.communicate(timeout=20)


def test_a_run_ends_with_its_last_evaluation_and_starting_it_again_only_prints_the_summary(stack: Stack) -> None:
    stack.start(3, 0.0)
    code, output = stack.end()
    assert code == 0, output
    assert stack.steps() == [0, 1, 2]
    assert [row["point"] for row in stack.rows("eval")] == ["step-00000", "step-00003"]
    assert "9 leased = 6 consumed + 3 quarantined (stale 3) + 0 abandoned + 0 open" in output
    assert "8/20) at step 0 -> 0.750 [0.531, 0.888] (15/20) at step 3" in output
    before = (stack.folder / "metrics.jsonl").read_bytes()
    begun = time.monotonic()
    stack.start(3, 0.0)
    code, output = stack.end()
    assert (code, output.splitlines()[0]) == (0, "run demo: complete after 3 steps")
    assert time.monotonic() - begun < 15
    assert (stack.folder / "metrics.jsonl").read_bytes() == before


def test_sigterm_drains_with_exit_code_0_and_the_run_goes_on_where_it_stood(stack: Stack) -> None:
    process = stack.start(6, 0.25)
    wait_until(lambda: len(stack.steps()) >= 2)
    processes = stack.processes()
    process.send_signal(signal.SIGTERM)
    code, output = stack.end()
    assert code == 0, output
    done = len(stack.steps())
    assert 2 <= done < 6
    assert f"stopped after {done} steps" in output
    gone(processes)
    stack.start(6, 0.0)
    code, output = stack.end()
    assert code == 0, output
    assert f"run demo resumes after step {done - 1}" in output
    assert stack.steps() == list(range(6))
    assert "18 leased = 12 consumed" in output


def test_a_second_signal_stops_at_once_and_leaves_no_process(stack: Stack) -> None:
    process = stack.start(500, 5.0)
    wait_until(lambda: len(stack.steps()) >= 1)
    processes = stack.processes()
    os.kill(stack.pids()["trainer-0"], signal.SIGSTOP)  # it cannot drain now
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    code, _ = stack.end(within_s=10)
    assert code == 130
    gone(processes)


def test_a_killed_supervisor_leaves_no_process_and_its_folder_can_be_used_again(stack: Stack) -> None:
    process = stack.start(500, 0.2)
    wait_until(lambda: len(stack.steps()) >= 2)
    processes = stack.processes()
    assert set(processes) == {"nats-server", "trainer-0", "worker"}
    process.kill()
    process.communicate(timeout=10)
    gone(processes)
    seen = len(stack.steps())
    stack.start(seen + 2, 0.0)
    code, output = stack.end()
    assert code == 0, output
    assert stack.steps()[: seen + 2] == list(range(seen + 2))
    assert len(stack.steps()) == len(set(stack.steps()))


def test_a_killed_service_and_a_killed_server_come_back_and_the_run_completes(stack: Stack) -> None:
    stack.start(12, 0.25)
    wait_until(lambda: len(stack.steps()) >= 2)
    for label in ("trainer-0", "nats-server"):
        pid = stack.pids()[label]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda label=label, pid=pid: stack.pids()[label] != pid)
    code, output = stack.end()
    assert code == 0, output
    assert "trainer-0 ended (by SIGKILL)" in output
    assert "nats-server ended (by SIGKILL)" in output
    assert stack.steps() == list(range(12))


def test_fresh_moves_the_old_folder_aside(stack: Stack) -> None:
    stack.start(1, 0.0)
    assert stack.end()[0] == 0
    stack.start(2, 0.0, "fresh")
    code, output = stack.end()
    assert code == 0, output
    aside = [path for path in stack.folder.parent.iterdir() if path.name.startswith("demo.")]
    assert len(aside) == 1
    assert f"the older run folder is now {aside[0]}" in output
    assert stack.steps() == [0, 1]
    assert len((aside[0] / "metrics.jsonl").read_text().splitlines()) == 3  # one step, two evaluations


def test_status_shows_services_and_group_counts_of_a_live_run(stack: Stack) -> None:
    process = stack.start(500, 0.2)
    wait_until(lambda: len(stack.steps()) >= 1)
    words = [sys.executable, "-m", "services.cli", "status", "--run-folder", str(stack.folder)]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=40, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    assert "trainer" in shown.stdout
    assert "ready" in shown.stdout
    assert "quarantined (stale" in shown.stdout
    assert "engines serve" in shown.stdout
    process.send_signal(signal.SIGINT)
    assert stack.end()[0] == 0


def test_watch_shows_the_same_lines_and_writes_nothing_in_a_folder_that_another_owns(stack: Stack) -> None:
    stack.start(8, 0.4)
    wait_until(lambda: len(stack.steps()) >= 1)
    words = [sys.executable, "-m", "services.cli", "watch", "--run-folder", str(stack.folder)]
    watching = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    code, output = stack.end()
    assert code == 0, output
    shown, errors = watching.communicate(timeout=40)
    assert watching.returncode == 0, errors
    wanted = [line for line in output.splitlines() if line[:5].strip().isdigit()]
    assert len(wanted) == 10  # eight steps, two evaluations
    assert sorted(line for line in shown.splitlines() if line[:5].strip().isdigit()) == sorted(wanted)
    assert stack.steps() == list(range(8))
