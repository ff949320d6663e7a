"""Generation that outruns training: what the adaptive window gives against the fixed one, side by side in one run.

    python -m loadtests.window [--steps 50] [--step-s 1.0] [--max-lag 4] [--json OUT]

Real: nats-server (every acknowledged message on disk), sampler, bank, admission, and every message between them. Simulated:
rollouter with engines and verifier (a group takes a random time; one in twenty takes `--late-s` longer), and the trainer (a
step takes `--step-s`; the fleet serves its version `--publish-s` later). Both runs have the same settings but for
`window.adapt`, the same times by group, and the same server at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import admission.bank_service
import admission.service
import rollouter.sampler_service
from admission.report_command import gather
from schemas.arrays import Array
from schemas.lease import GroupLease
from schemas.ledger import BatchEntry
from schemas.policy import FleetVersions
from schemas.table import Role, Stream
from schemas.termination import Termination
from schemas.training import BatchDemand, StepCommit
from schemas.trajectory import Episode, Verdict, VersionSpan
from services.bus import Bus
from services.config import Config, check
from services.consume import fold
from services.health import Health
from services.logs import start_logging
from services.nats_server import accepts, binary, configuration, free_port
from services.provision import provision
from services.runtime import Serve, ServiceContext

BATCH, SIBLINGS, STORE_BYTES = 8, 2, 256 * 2**20
SERVICES: tuple[tuple[Role, Serve], ...] = (
    (Role.BANK, admission.bank_service.serve),
    (Role.ADMISSION, admission.service.serve),
    (Role.SAMPLER, rollouter.sampler_service.serve),
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Seconds of the simulated parts. A group takes `median_s`, log-normally spread, and one in twenty `late_s` more."""

    steps: int
    step_s: float
    publish_s: float
    median_s: float
    spread: float
    late_s: float
    max_lag: int
    seed: int

    def group_s(self, ordinal: int) -> float:
        chance = random.Random(f"{self.seed}-{ordinal}")
        return self.median_s * chance.lognormvariate(0, self.spread) + self.late_s * (chance.random() < 0.05)


def config_of(load: Load, name: str, url: str, *, adapt: bool) -> Config:
    """Both runs' settings; only the window differs."""
    return check(
        {
            "run": {"name": name, "max_steps": load.steps, "seed": load.seed},
            "nats": {"url": url, "store_bytes": STORE_BYTES},
            "window": {"max_groups": (load.max_lag + 2) * BATCH, "adapt": adapt},
            "rollout": {"group_size": SIBLINGS},
            "engine": {"kind": "simulated"},
            "admission": {"groups_per_batch": BATCH, "max_lag": load.max_lag, "min_rewards": 1},
            "eval": {"at_start": False, "at_end": False, "every_steps": 0},
        }
    )


@dataclass
class SimulatedParts:
    """Rollouter with engines and verifier, fleet, and trainer of one run; they invent tokens and rewards."""

    bus: Bus
    load: Load
    version: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    waited_s: float = 0.0

    async def roll_out(self) -> None:
        """Every lease, at once and for its time."""
        async with asyncio.TaskGroup() as groups:
            async for item in fold(self.bus, Stream.TASKS, stop=self.stop):
                if item is not None:
                    groups.create_task(self._group(item.decode(GroupLease)))

    async def _group(self, lease: GroupLease) -> None:
        begun = self.version
        await asyncio.sleep(self.load.group_s(lease.ordinal))
        for slot in range(lease.group_size):
            if self.stop.is_set():
                return
            episode = _episode(lease, slot, begun, self.version)
            stored = await self.bus.publish_once(self.bus.subjects.episode(lease.group, slot), episode)
            reward = float(random.Random(f"{lease.seed}-{slot}").random() < 0.5)
            verdict = Verdict(
                run=lease.run,
                group=lease.group,
                slot=slot,
                episode_digest=stored.digest,
                status="graded",
                success=reward > 0,
                reward=reward,
            )
            await self.bus.publish_once(self.bus.subjects.verdict(lease.group, slot), verdict)

    async def serve_version(self, version: int, after_s: float = 0.0) -> None:
        """The whole fleet confirms a version."""
        await asyncio.sleep(after_s)
        self.version = version
        fleet = FleetVersions(
            run=self.bus.run, target=version, incarnation=0, engines={"e0": version}, oldest=version, newest=version
        )
        await self.bus.publish(self.bus.subjects.active(), fleet)

    async def train(self) -> None:
        """Step after step: ask, wait, take the step's time, commit; the version is served a little later."""
        async with asyncio.TaskGroup() as publishing:
            for step in range(self.load.steps):
                asked = time.monotonic()
                demand = BatchDemand(run=self.bus.run, step=step, version=step, incarnation=0, groups=BATCH)
                await self.bus.publish_once(self.bus.subjects.demand(step), demand)
                batch = await self._batch(step)
                self.waited_s += time.monotonic() - asked
                await asyncio.sleep(self.load.step_s)
                await self.bus.publish_once(self.bus.subjects.step(step), _commit(batch))
                publishing.create_task(self.serve_version(step + 1, self.load.publish_s))

    async def _batch(self, step: int) -> BatchEntry:
        async for item in fold(self.bus, Stream.LEDGER, f"ledger.batch.{step}", stop=self.stop):
            if item is not None:
                return item.decode(BatchEntry)
        raise RuntimeError(f"stopped before batch {step}")


def _episode(lease: GroupLease, slot: int, oldest: int, newest: int) -> Episode:
    mask = np.array([False, False, True, True])
    return Episode(
        run=lease.run,
        group=lease.group,
        slot=slot,
        attempt=0,
        task_id=lease.task_id,
        family=lease.family,
        template=lease.template,
        purpose=lease.purpose,
        seed=lease.seed,
        manifest=lease.manifest,
        termination=Termination.AGENT_FINISH,
        ids=Array.of(np.arange(4, dtype=np.int32)),
        mask=Array.of(mask),
        logprobs=Array.of(np.where(mask, -0.5, 0.0).astype(np.float32)),
        versions=(VersionSpan(2, 3, oldest), VersionSpan(3, 4, newest)),
        turn_starts=Array.of(np.array([2], dtype=np.int32)),
        turns=1,
        sampled_tokens=2,
    )


def _commit(batch: BatchEntry) -> StepCommit:
    return StepCommit(
        run=batch.run,
        step=batch.step,
        version=batch.version + 1,
        incarnation=0,
        digest=f"d{batch.version + 1}",
        base_digest=f"d{batch.version}",
        groups=tuple(member.group for member in batch.groups),
        rows=0,
        trained_tokens=0,
        optimizer_steps=1,
        patches=(),
        patch_bytes=0,
        metrics={},
        ledger_seq=0,
    )


async def one_run(load: Load, name: str, url: str, *, adapt: bool) -> dict[str, Any]:
    """One whole run; what its streams say afterwards."""
    config, stop = config_of(load, name, url, adapt=adapt), asyncio.Event()
    buses = {role: await Bus.connect(url, name, role, "0") for role in (Role.OBSERVER, *(role for role, _ in SERVICES))}
    try:
        await provision(buses[Role.OBSERVER], STORE_BYTES)
        parts = SimulatedParts(buses[Role.OBSERVER], load)
        begun = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for role, serve in SERVICES:
                context = ServiceContext(config, buses[role], role, "0", stop, Health(buses[role], 2.0))
                tasks.create_task(_served(serve, context), name=f"{name}-{role}")
            tasks.create_task(parts.roll_out(), name=f"{name}-rollouts")
            await parts.serve_version(0)
            await parts.train()
            seconds = time.monotonic() - begun
            parts.stop.set()
            stop.set()
        fates, _ = await gather(buses[Role.OBSERVER])
    finally:
        for bus in buses.values():
            await bus.close()
    trained, waits_s = fates.trained(), sorted(fates.bank_waits_s(fates.trained()))
    stale = sum(n for one, n in fates.untrained().items() if one.reason == "stale")
    leased = len(fates.leased_ns)
    return {
        "leased": leased,
        "trained": len(trained),
        "stale": stale,
        "stale_share": stale / leased,
        "mean_lag": sum(trained.values()) / len(trained),
        "max_lag": max(trained.values()),
        "bank_wait_s_p50": waits_s[len(waits_s) // 2],
        "most_ready": fates.most_ready()[0],
        "most_open": fates.most_open()[0],
        "trainer_waited_s": parts.waited_s,
        "trainer_idle_share": parts.waited_s / seconds,
        "seconds": seconds,
    }


async def _served(serve: Serve, context: ServiceContext) -> None:
    await serve(context)


@asynccontextmanager
async def server() -> AsyncIterator[str]:
    """A fresh nats-server; gives its URL."""
    with tempfile.TemporaryDirectory(prefix="window-") as folder:
        port = free_port()
        text = configuration(store=Path(folder) / "store", port=port, max_file_bytes=2 * 2**30, name="window")
        (Path(folder) / "nats.conf").write_text(text)
        process = await asyncio.create_subprocess_exec(
            *(binary(), "-c", f"{folder}/nats.conf"), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            if not await accepts(port, 60):
                raise SystemExit(f"the server does not answer on port {port}")
            yield f"nats://127.0.0.1:{port}"
        finally:
            process.kill()
            await process.wait()


async def measure(load: Load) -> dict[str, Any]:
    """Both runs at the same time."""
    async with server() as url, asyncio.TaskGroup() as both:
        fixed = both.create_task(one_run(load, "fixed", url, adapt=False))
        adaptive = both.create_task(one_run(load, "adaptive", url, adapt=True))
    return {"fixed": fixed.result(), "adaptive": adaptive.result()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--step-s", type=float, default=1.0, help="a step of the simulated trainer")
    parser.add_argument("--publish-s", type=float, default=0.1, help="from a step's end until the fleet serves its version")
    parser.add_argument("--median-s", type=float, default=0.15, help="a group of the simulated engines")
    parser.add_argument("--spread", type=float, default=0.6, help="standard deviation of the logarithm of a group's time")
    parser.add_argument("--late-s", type=float, default=1.3, help="what one in twenty groups takes longer")
    parser.add_argument("--max-lag", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="OUT", help="write the result here as well")
    options = vars(parser.parse_args())
    out = options.pop("json")
    load = Load(**options)
    start_logging("window", "0", "error")
    found = asyncio.run(measure(load))
    print(f"simulated engines and trainer; {load.steps} steps of {BATCH} groups, {load.step_s:g} s each, K = {load.max_lag}")
    print(f"{'':<20}{'fixed':>10}{'adaptive':>10}")
    for key in found["fixed"]:
        print(f"{key:<20}{found['fixed'][key]:>10.4g}{found['adaptive'][key]:>10.4g}")
    if out:
        told = {
            "what": "simulated engines, verifier and trainer; real nats-server, sampler, bank and admission",
            "settings": {
                **options,
                "groups_per_batch": BATCH,
                "cpus": os.cpu_count(),
                "load_average_at_end": os.getloadavg()[0],
            },
            **found,
        }
        Path(out).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
