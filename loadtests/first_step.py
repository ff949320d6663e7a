"""From nothing to the first optimizer step: how long `make run` takes in a bare checkout, and how much memory it holds.

`python -m loadtests.first_step --checkout DIR --steps 5 --json OUT`. DIR is a fresh clone without `.venv`. `make run` is
started there, watched until the run's metrics hold that many steps, and then interrupted as Ctrl-C does. Memory is the sum of
the proportional set sizes (PSS, bytes) of the command and all its descendants, sampled every second; it includes the file
pages that they map, shared ones once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

INTERVAL_S = 1.0
DRAIN_S = 120.0


def memory_of(process: psutil.Process) -> int:
    """PSS of a process and its descendants, bytes; those that end while being looked at count nothing."""
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def steps_in(metrics: Path) -> int:
    """Committed optimizer steps in a run's metrics file, which may not be there yet."""
    if not metrics.is_file():
        return 0
    return sum(json.loads(line)["kind"] == "step" for line in metrics.read_text().splitlines())


def measure(checkout: Path, metrics: Path, steps: int, limit_s: float, command: Sequence[str]) -> dict[str, Any]:
    """Run the command until `steps` steps are committed. Raises `RuntimeError` when it ends or the time is up before."""
    begun = time.monotonic()
    first_step_s: float | None = None
    installed_s: float | None = None
    peak = 0
    child = subprocess.Popen(command, cwd=checkout, start_new_session=True)
    try:
        process = psutil.Process(child.pid)
        while (done := steps_in(metrics)) < steps:
            spent = time.monotonic() - begun
            if child.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with code {child.returncode} after {spent:.0f} s")
            if spent > limit_s:
                raise RuntimeError(f"{done} of {steps} steps after {limit_s:.0f} s")
            if installed_s is None and metrics.parent.is_dir():
                installed_s = spent
            if first_step_s is None and done:
                first_step_s = spent
            peak = max(peak, memory_of(process))
            with suppress(subprocess.TimeoutExpired):
                child.wait(INTERVAL_S)
        if first_step_s is None:
            first_step_s = time.monotonic() - begun
        os.killpg(child.pid, signal.SIGINT)
        code = child.wait(DRAIN_S)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    return {
        "cores": os.cpu_count(),
        "run_folder_after_s": installed_s,
        "first_step_after_s": first_step_s,
        "steps": steps,
        "peak_pss_bytes": peak,
        "exit_code": code,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a fresh clone")
    parser.add_argument("--run", default="runs/terminal", help="the run folder that the command makes, below the checkout")
    parser.add_argument("--steps", type=int, default=5, help="stop after this many")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("command", nargs="*", default=["make", "run"])
    options = parser.parse_args()
    metrics = options.checkout / options.run / "metrics.jsonl"
    if metrics.exists():
        parser.error(f"--checkout: {metrics} is there already; take a fresh clone")
    result = measure(options.checkout, metrics, options.steps, options.limit, options.command)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
