"""A whole run under faults: endless while they strike, then to a given step undisturbed, then everything is checked."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtests.chaos import leftovers
from loadtests.chaos.audit_run import headrace_audit
from loadtests.chaos.checks import Findings, check_run
from loadtests.chaos.clocks import LABELS, Clocks
from loadtests.chaos.damage import checkpoints
from loadtests.chaos.disk import SmallDisk
from loadtests.chaos.inject import Injector, Record
from loadtests.chaos.local_run import LocalRun, RunFailed
from loadtests.chaos.observer import Observer, watch_checkpoints
from loadtests.chaos.points import OWNED, SERVER
from loadtests.chaos.processes import TOKEN
from loadtests.chaos.proxy import Proxy
from loadtests.chaos.report import hits
from loadtests.chaos.schedule import Fault, Ground, Kind, faults
from loadtests.chaos.settings import FLOWING, ROOT, overrides
from loadtests.chaos.startup import StartTimes
from loadtests.chaos.store import reopened
from services.nats_server import free_port

_AHEAD = 16  # faults that are looked at for one whose services all work just now
_LOOK_S = 0.05
_NEW_S = 15.0  # a fault that takes longer to get over does not keep others from striking elsewhere
_OVERTIME = 0.25  # of the time that was given, if not enough faults have struck by then
_FIRST_STEPS = 2
_LAST_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """`every_s`: least time between two faults; `at_once`: most faults of the last 15 s that are still at work. With `least`,
    the number that shall have struck by the end, a fault has the run for itself unless they have fallen behind.
    """

    seed: int
    minutes: float
    folder: Path
    every_s: float = 3.5
    at_once: int = 3
    least: int = 0
    most: int = 10**9
    doubles: tuple[str, ...] = ("rollouter", *OWNED)
    proxied: tuple[str, ...] = ("rollouter-1", "verifier-0", *(f"{role}-{n}" for role in OWNED for n in (0, 1)))
    kinds: dict[Kind, int] | None = None
    avoid: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    faketime: Path | None = None  # libfaketimeMT.so.1; without it no clock jumps
    disk_bytes: int = 0  # of a small file system under the store; 0: the store is where the folder is


async def carry_out(campaign: Campaign, say: Callable[[str], None]) -> dict[str, Any]:
    """Run, disturb, let it finish, check; gives what is written to JSON. `problems` is empty when every promise was kept."""
    proxies = {label: Proxy(free_port()) for label in campaign.proxied}
    options = [part for role in campaign.doubles for part in ("--double", role)]
    options += [part for label, proxy in proxies.items() for part in ("--proxy", f"{label}={proxy.port}")]
    clocks = Clocks(campaign.faketime, campaign.folder / "clocks") if campaign.faketime else None
    options += clocks.options() if clocks else []
    starts: dict[str, float] = {}
    settings = overrides(FLOWING, "chaos", campaign.folder, f"run.seed={campaign.seed}", *campaign.settings)
    run = LocalRun(settings, *options)
    _moved_aside(run.folder)
    disk = SmallDisk(run.folder, campaign.disk_bytes) if campaign.disk_bytes else None
    injector = Injector(run, Observer(run.config.run.name), proxies, clocks, disk)
    problems: list[str] = []
    left: list[str] = []
    for proxy in proxies.values():
        await proxy.start()
    try:
        steps = await _disturbed(campaign, injector, starts, say) + _LAST_STEPS
        say(f"{injector.injected} faults struck; on to step {steps - 1} undisturbed")
        problems += await _finished(injector, steps)
        left = await leftovers.settled(run)
    except RunFailed as error:
        steps = 0
        problems.append(str(error))
    finally:
        leftovers.clear(run)
        for proxy in proxies.values():
            await proxy.stop()
    try:
        audited = await asyncio.to_thread(headrace_audit, run.folder)
        findings = await _checked(run, steps)
        retrained = await asyncio.to_thread(retrained_by_itself, run)
    finally:
        if disk is not None:
            disk.remove()
    problems += audited.problems(injector.torn) + findings.violations + left + _unrecovered(injector.records)
    if retrained["different"]:
        problems.append(str(retrained["different"]))
    records = [record.as_dict() | {"whole_s": injector.whole_s.get(record.fault)} for record in injector.records]
    return {
        "seed": campaign.seed,
        "minutes": campaign.minutes,
        "cores": os.cpu_count(),
        "injected": injector.injected,
        "missed": len(injector.missed),
        "start_s": starts,
        "hits": hits(records, injector.pairs),
        "records": records,
        "audit": asdict(audited),
        "findings": asdict(findings),
        "retrained": retrained,
        "problems": problems,
    }


def _moved_aside(folder: Path) -> None:
    """An older run of the same name keeps its store and its logs."""
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}"))


async def _disturbed(campaign: Campaign, injector: Injector, starts: dict[str, float], say: Callable[[str], None]) -> int:
    """The endless part, until it is stopped in order; gives the number of committed steps. `starts` gets the start-up times."""
    run, observer, stop = injector.run, injector.observer, asyncio.Event()
    run.start("run.max_steps=0")
    start_times = StartTimes(run, observer)
    await injector.watch()
    watching = asyncio.create_task(
        watch_checkpoints(observer, lambda: {path.name for path in checkpoints(run.folder)}, stop), name="checkpoints"
    )
    try:
        await _steps_reach(injector, _FIRST_STEPS, 180.0)
        await start_times.of([label for label in run.labels() if label != SERVER], 90.0)
        starts |= start_times.end()
        say("first start, seconds until ready: " + ", ".join(f"{label} {s:.1f}" for label, s in sorted(starts.items())))
        injector.begin()
        ground = Ground(
            labels=run.labels(),
            proxied=campaign.proxied,
            clocked=LABELS if campaign.faketime else (),
            small_disk=bool(campaign.disk_bytes),
        )
        plan = faults(campaign.seed, ground, campaign.kinds, campaign.avoid)
        await _strike(campaign, injector, plan, say)
        await _steps_reach(injector, observer.picture.steps + 1, 240.0)
        code = await run.stop()
        if code != 0:
            raise RunFailed(f"the run ended with exit code {code} when it was stopped:\n{run.said()}")
        return observer.picture.steps
    finally:
        stop.set()
        await watching
        await observer.close()


async def _strike(campaign: Campaign, injector: Injector, plan: Iterator[Fault], say: Callable[[str], None]) -> None:
    """Faults in the plan's order, but for those whose services have not recovered yet: they wait their turn."""
    begun_s, whole_s, next_s, count = time.monotonic(), campaign.minutes * 60, 0.0, 0

    def wanted() -> float:
        """Faults that should have struck by now."""
        return campaign.least * min(1.0, (time.monotonic() - begun_s) / whole_s)

    def over() -> bool:
        late_s = time.monotonic() - begun_s - whole_s
        return count >= campaign.most or late_s > (_OVERTIME * whole_s if injector.injected < campaign.least else 0.0)

    busy: dict[asyncio.Task[list[Record]], tuple[Fault, float]] = {}
    ahead: deque[Fault] = deque()
    async with asyncio.TaskGroup() as group:
        while not over():
            busy = {task: begun for task, begun in busy.items() if not task.done()}
            while len(ahead) < _AHEAD:
                ahead.append(next(plan))
            hit = frozenset[str]().union(*(fault.services() for fault, _ in busy.values()))
            new = sum(time.monotonic() - at_s < _NEW_S for _, at_s in busy.values())
            fault = next((fault for fault in ahead if not fault.services() & hit), None)
            at_once = campaign.at_once if injector.injected + new <= wanted() or not campaign.least else 1
            if fault is None or new >= at_once or time.monotonic() < next_s:
                await asyncio.sleep(_LOOK_S)
                continue
            ahead.remove(fault)
            count, next_s = count + 1, time.monotonic() + campaign.every_s
            task = group.create_task(injector.carry_out(fault), name=f"fault {fault.number}")
            busy[task] = (fault, time.monotonic())
            task.add_done_callback(lambda done, fault=fault: _tell(done, fault, say))  # type: ignore[misc]


def _tell(done: asyncio.Task[list[Record]], fault: Fault, say: Callable[[str], None]) -> None:
    if done.cancelled() or done.exception() is not None:
        return
    for record in done.result():
        unit = "no unit" if record.unit_s is None else f"next unit after {record.unit_s:.1f} s"
        say(f"{record.at_s:8.1f} s  {fault.number:4d} {record.kind:16} {record.label:14} {record.point}; {unit} {record.note}")
    if not done.result():
        wanted = fault.point.name if fault.point else fault.label or ".".join(fault.words)
        say(f"           {fault.number:4d} {fault.kind:16} never met its point: {wanted}")


async def _finished(injector: Injector, steps: int) -> list[str]:
    """The same run again, without faults, to its last step."""
    injector.run.start(f"run.max_steps={steps}")
    await injector.server()
    code = await injector.run.ended(360.0)
    return [] if code == 0 else [f"the run to its end has exit code {code}:\n{injector.run.said()}"]


async def _steps_reach(injector: Injector, steps: int, within_s: float) -> None:
    run, deadline = injector.run, time.monotonic() + within_s
    while injector.observer.picture.steps < steps:
        if not run.running() or time.monotonic() > deadline:
            raise RunFailed(f"step {steps - 1} is not committed within {within_s:g} s:\n{run.said()}\n{run.logs()}")
        await asyncio.sleep(0.2)


async def _checked(run: LocalRun, steps: int) -> Findings:
    async with reopened(run.folder) as (bus, config):
        findings = await check_run(bus, config, at_least_steps=steps)
        findings.violations += await leftovers.consumers(bus, config)
    return findings


def retrained_by_itself(run: LocalRun) -> dict[str, Any]:
    """What `loadtests.chaos.retrain` says of the run, in a process of its own."""
    command = [sys.executable, "-m", "loadtests.chaos.retrain", str(run.folder)]
    environment = {**os.environ, TOKEN: run.token, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(run.config.trainer.threads)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, env=environment, check=False)
    if done.returncode != 0:
        return {"steps": 0, "different": f"training again failed: {done.stderr[-1500:]}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _unrecovered(records: list[Record]) -> list[str]:
    return [
        f"{record.label} did not work again within the time given (fault {record.fault}, {record.kind}, {record.point})"
        for record in records
        if record.unit_s is None and record.kind != "duplicate"
    ]
