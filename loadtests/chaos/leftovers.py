"""What a run that ended must not leave behind: processes, mounts, control groups, consumers that nobody will use."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from itertools import product
from pathlib import Path

from loadtests.chaos.local_run import LocalRun, sandbox_marks
from loadtests.chaos.processes import carrying
from schemas.sandbox import LANES
from schemas.table import CONSUMERS, STREAMS
from services.bus import Bus
from services.config import Config
from services.sandbox.mounts import mounts_under, unmount

_GROUPS = Path("/sys/fs/cgroup")
_LIVE = Path("/run")  # where sandboxes live whose root is closed to their users
_REQUESTERS = ("genout-", "sbxout-")  # of rollouters whose names never come back; the server drops them when they stand still


def left_behind(run: LocalRun) -> list[str]:
    """Processes, mounts, folders and control groups of a run that has ended. Other runs on the machine have other names."""
    marks = sandbox_marks(run.config)
    found = [f"process {p.pid} lives on: {p.command()[:120]}" for p in carrying(run.token, str(run.folder), *marks)]
    for mark in marks:
        found += [f"control group {path} is still there" for path in _GROUPS.rglob(mark)]
        found += [f"folder {path} is still there" for path in [_LIVE / mark] if path.exists()]
        found += [f"{point} is still mounted" for point in mounts_under(str(_LIVE / mark))]
    store = str((run.folder / "nats").resolve())  # a small disk that the harness itself has put there
    return found + [f"{point} is still mounted" for point in mounts_under(str(run.folder)) if point != store]


async def settled(run: LocalRun, within_s: float = 15.0) -> list[str]:
    """What is still there some time after the run's end; processes need a moment to go."""
    deadline = time.monotonic() + within_s
    while True:
        left = left_behind(run)
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.2)


def clear(run: LocalRun) -> None:
    """Remove it all, for a run that was ended hard. The run folder stays, to be read."""
    run.kill()
    for mark in sandbox_marks(run.config):
        for point in [*mounts_under(str(_LIVE / mark)), *mounts_under(str(run.folder / "sandboxes"))]:
            unmount(point)
        for group in _GROUPS.rglob(mark):
            for path in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                path.rmdir()
            group.rmdir()
        shutil.rmtree(_LIVE / mark, ignore_errors=True)


async def consumers(bus: Bus, config: Config) -> list[str]:
    """Durable consumers that no row of the table explains, and one-time ones that the server would keep for ever."""
    expected = _expected(config)
    wrong = []
    for spec in STREAMS:
        stream = bus.subjects.stream(spec.stream)
        offset = 0
        while True:
            reply = await bus.request(f"CONSUMER.LIST.{stream}", {"offset": offset})
            for info in reply["consumers"] or []:
                name, settings = info["name"], info["config"]
                if not settings.get("durable_name"):
                    continue
                if name.startswith(_REQUESTERS):
                    if not settings.get("inactive_threshold"):
                        wrong.append(f"consumer {name} of {stream} is a requester's and would be kept for ever")
                elif name not in expected:
                    wrong.append(f"consumer {name} of {stream} is in no row of the table")
            offset += len(reply["consumers"] or [])
            if offset >= int(reply["total"]) or not reply["consumers"]:
                break
    return wrong


def _expected(config: Config) -> set[str]:
    names = {"engine": config.engine.names, "sandbox": config.sandbox.names}
    found = set()
    for spec in CONSUMERS:
        for x, lane in product(names.get(str(spec.role), ("",)), LANES):
            found.add(re.sub(r"\{x\}", x, spec.name).replace("{lane}", lane))
    return found
