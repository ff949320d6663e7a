"""The supervisor with real processes: restarts, giving up, draining in stages, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import alive

from services.child import ChildSpec
from services.supervisor import GaveUp, Limits, Supervisor

QUICK = Limits(first_backoff_s=0.05, last_backoff_s=0.2, failures=4, drain_s=2.0)
SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
WITH_WORKER = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
TELLS_WHEN_ENDED = """
import signal, sys, time
def end(*_):
    print(time.monotonic_ns(), flush=True)
    time.sleep(0.3)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print('up', flush=True)
time.sleep(600)
"""


def child(folder: Path, label: str, code: str, stage: int = 0) -> ChildSpec:
    return ChildSpec(label=label, argv=(sys.executable, "-c", code), log=folder / f"{label}.log", stage=stage)


async def running(supervisor: Supervisor, label: str, *, other_than: int | None = None) -> int:
    """Process id of a child, once it runs."""
    async with asyncio.timeout(10):
        while (pid := supervisor.pid(label)) in (None, other_than):
            await asyncio.sleep(0.02)
    assert pid is not None
    return pid


async def logged(file: Path, lines: int = 1) -> list[str]:
    async with asyncio.timeout(10):
        while not file.exists() or len(file.read_text().splitlines()) < lines:
            await asyncio.sleep(0.02)
    return file.read_text().splitlines()


async def ends(pid: int) -> None:
    async with asyncio.timeout(10):
        while alive(pid):
            await asyncio.sleep(0.02)


async def test_a_killed_child_is_started_again_and_its_workers_are_swept(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor, stop = Supervisor([child(tmp_path, "a", WITH_WORKER)], said.append, QUICK), asyncio.Event()
    task = asyncio.create_task(supervisor.run(stop))
    for round_ in range(1, 4):
        pid = await running(supervisor, "a")
        worker = int((await logged(tmp_path / "a.log", round_))[-1])
        os.kill(pid, signal.SIGKILL)
        await running(supervisor, "a", other_than=pid)
        await ends(worker)
        supervisor.ready("a", supervisor.pid("a") or 0)
    assert supervisor.restarts() == {"a": 3}
    assert all("by SIGKILL" in line for line in said)
    stop.set()
    assert await task is False  # it has no handler for SIGTERM, so it did not drain


async def test_a_child_that_never_works_stops_everything_with_the_end_of_its_log(tmp_path: Path) -> None:
    bad = child(tmp_path, "bad", "import sys; sys.exit('policy.model: no such folder')")
    good = child(tmp_path, "good", TELLS_WHEN_ENDED, stage=1)
    said: list[str] = []
    supervisor = Supervisor([bad, good], said.append, QUICK)
    begun = time.monotonic()
    with pytest.raises(GaveUp, match=r"(?s)bad failed 4 times in a row \(exit code 1\).*policy.model: no such folder"):
        await supervisor.run(asyncio.Event())
    assert time.monotonic() - begun < 20
    assert said[0].startswith("bad ended (exit code 1: policy.model: no such folder); starting it again in 0.05 s")
    assert supervisor.pid("good") is None


async def test_a_child_that_was_ready_once_is_never_given_up(tmp_path: Path) -> None:
    supervisor, stop = (
        Supervisor([child(tmp_path, "a", "import time; time.sleep(0.2)")], lambda _: None, QUICK),
        asyncio.Event(),
    )
    task = asyncio.create_task(supervisor.run(stop))
    async with asyncio.timeout(30):
        while supervisor.restarts()["a"] < 6:
            supervisor.ready("a", supervisor.pid("a") or 0)
            await asyncio.sleep(0.02)
    assert not task.done()
    stop.set()
    await task


async def test_a_report_of_an_earlier_process_does_not_make_a_child_ready(tmp_path: Path) -> None:
    supervisor = Supervisor([child(tmp_path, "a", "raise SystemExit(3)")], lambda _: None, QUICK)
    task = asyncio.create_task(supervisor.run(asyncio.Event()))
    while not task.done():
        supervisor.ready("a", 1)
        await asyncio.sleep(0.02)
    with pytest.raises(GaveUp):
        await task


async def test_children_drain_stage_by_stage(tmp_path: Path) -> None:
    specs = [child(tmp_path, "late", TELLS_WHEN_ENDED, 1), child(tmp_path, "early", TELLS_WHEN_ENDED, 0)]
    supervisor, stop = Supervisor(specs, lambda _: None, QUICK), asyncio.Event()
    task = asyncio.create_task(supervisor.run(stop))
    for label in ("late", "early"):
        await logged(tmp_path / f"{label}.log")
    stop.set()
    assert await task is True
    early, late = [int((await logged(tmp_path / f"{label}.log", 2))[1]) for label in ("early", "late")]
    assert late - early >= 0.3e9  # the second stage heard of it only when the first had ended


async def test_a_child_that_does_not_drain_is_stopped_hard(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor, stop = Supervisor([child(tmp_path, "a", STUBBORN)], said.append, QUICK), asyncio.Event()
    task = asyncio.create_task(supervisor.run(stop))
    await logged(tmp_path / "a.log")
    pid = await running(supervisor, "a")
    stop.set()
    assert await asyncio.wait_for(task, 10) is False
    assert not alive(pid)
    assert said == ["a did not drain within 2 s and is stopped hard"]


async def test_a_cancelled_supervisor_leaves_no_process(tmp_path: Path) -> None:
    supervisor = Supervisor([child(tmp_path, "a", SLEEP)], lambda _: None, QUICK)
    task = asyncio.create_task(supervisor.run(asyncio.Event()))
    pid = await running(supervisor, "a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await ends(pid)


async def test_a_command_that_cannot_be_executed_is_given_up(tmp_path: Path) -> None:
    spec = ChildSpec(label="a", argv=("/nowhere/nothing",), log=tmp_path / "a.log")
    with pytest.raises(GaveUp, match="a failed 4 times"):
        await Supervisor([spec], lambda _: None, QUICK).run(asyncio.Event())
