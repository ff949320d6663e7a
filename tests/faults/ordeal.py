"""One bounded run under chosen faults, one after another, and everything that is checked of it afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadtests.chaos.audit_run import headrace_audit
from loadtests.chaos.checks import Findings, check_run, line_of
from loadtests.chaos.damage import checkpoints
from loadtests.chaos.inject import Injector, Record
from loadtests.chaos.leftovers import clear, consumers, settled
from loadtests.chaos.local_run import LocalRun, RunFailed
from loadtests.chaos.observer import Observer, watch_checkpoints
from loadtests.chaos.points import point
from loadtests.chaos.proxy import Proxy
from loadtests.chaos.schedule import CUTS_S, CutMode, Fault
from loadtests.chaos.settings import DETERMINISTIC, overrides
from loadtests.chaos.store import reopened
from schemas.table import Stream
from schemas.training import StepCommit
from schemas.trajectory import Episode
from services.consume import read_all
from services.nats_server import free_port

STEPS = 8  # committed steps of a run, at least
_STEP_WITHIN_S = 240.0
_STOP_WITHIN_S = 280.0


@dataclass(frozen=True)
class Ordeal:
    """What came of it. `tokens`: (group, slot) → sampled attempt and token ids; `digests`: of the weights after each step."""

    folder: Path
    code: int
    records: list[Record]
    missed: list[Fault]
    findings: Findings
    left: list[str]
    digests: list[str]
    tokens: dict[tuple[str, int], tuple[int, bytes]]

    def unrecovered(self) -> list[Record]:
        return [record for record in self.records if record.unit_s is None and record.kind != "duplicate"]


def kill(name: str, besides: str = "") -> Fault:
    """SIGKILL at an observed point; `besides` is the label of a second process that dies in the same instant."""
    return Fault(number=0, kind="pair" if besides else "kill", point=point(name), label=besides)


def torn(name: str) -> Fault:
    """SIGKILL at an observed point, and the newest checkpoint is torn before the next process looks at it."""
    return Fault(number=0, kind="torn checkpoint", point=point(name))


def pause(label: str, seconds: float) -> Fault:
    return Fault(number=0, kind="pause", label=label, seconds=seconds)


def cut(label: str, mode: CutMode) -> Fault:
    return Fault(number=0, kind="cut", label=label, mode=mode, seconds=CUTS_S[mode])


def repeated(*words: str) -> Fault:
    return Fault(number=0, kind="duplicate", words=words)


def spoiled_patch() -> Fault:
    """The patch of the next version with an anchor beside it rots before an engine reads it."""
    return Fault(number=0, kind="corrupt patch")


def go_through(
    folder: Path,
    base: tuple[str, ...],
    faults: Sequence[Fault],
    *,
    steps: int,
    doubles: Sequence[str] = (),
    cuts: Sequence[str] = (),
) -> Ordeal:
    """Run until every fault was carried out and `steps` steps are committed, then stop in order and check."""
    return asyncio.run(_go_through(folder, base, faults, steps, doubles, cuts))


_undisturbed: list[Ordeal] = []


def undisturbed_run(folders: pytest.TempPathFactory) -> Ordeal:
    """The run without faults that others are held against; once for all modules, since it is the same every time."""
    if not _undisturbed:
        _undisturbed.append(go_through(folders.mktemp("undisturbed"), DETERMINISTIC, (), steps=STEPS))
    return _undisturbed[0]


async def _go_through(
    folder: Path, base: tuple[str, ...], faults: Sequence[Fault], steps: int, doubles: Sequence[str], cuts: Sequence[str]
) -> Ordeal:
    proxies = {label: Proxy(free_port()) for label in cuts}
    options = [part for role in doubles for part in ("--double", role)]
    options += [part for label, proxy in proxies.items() for part in ("--proxy", f"{label}={proxy.port}")]
    run = LocalRun(overrides(base, "ordeal", folder), *options)
    injector = Injector(run, Observer(run.config.run.name), proxies)
    stop = asyncio.Event()
    for proxy in proxies.values():
        await proxy.start()
    try:
        run.start()
        await injector.watch()
        names = asyncio.create_task(
            watch_checkpoints(injector.observer, lambda: {path.name for path in checkpoints(run.folder)}, stop)
        )
        await _steps_reach(injector, 1)
        for fault in faults:
            await injector.carry_out(fault)
        await _steps_reach(injector, max(steps, injector.observer.picture.steps + 1))
        code = await run.stop(_STOP_WITHIN_S)
        left = await settled(run)
        stop.set()
        await names
    finally:
        stop.set()
        await injector.observer.close()
        clear(run)
        for proxy in proxies.values():
            await proxy.stop()
    return await _looked_at(injector, code, left, steps)


async def _steps_reach(injector: Injector, steps: int) -> None:
    run, deadline = injector.run, time.monotonic() + _STEP_WITHIN_S
    while injector.observer.picture.steps < steps:
        if not run.running() or time.monotonic() > deadline:
            raise RunFailed(f"step {steps - 1} is not committed within {_STEP_WITHIN_S:g} s:\n{run.said()}\n{run.logs()}")
        await asyncio.sleep(0.1)


async def _looked_at(injector: Injector, code: int, left: list[str], steps: int) -> Ordeal:
    run = injector.run
    audited = await asyncio.to_thread(headrace_audit, run.folder)
    async with reopened(run.folder) as (bus, config):
        findings = await check_run(bus, config, at_least_steps=steps)
        left += await consumers(bus, config)
        commits = line_of([item.decode(StepCommit) for item in await read_all(bus, Stream.TRAIN, "train.step.*")])
        episodes = [item.decode(Episode) for item in await read_all(bus, Stream.EPISODES, "episode.*.*")]
    findings.violations += audited.problems(injector.torn)
    return Ordeal(
        folder=run.folder,
        code=code,
        records=injector.records,
        missed=injector.missed,
        findings=findings,
        left=left,
        digests=[commit.digest for commit in commits],
        tokens={(each.group, each.slot): (each.attempt, each.ids.data) for each in episodes},
    )
