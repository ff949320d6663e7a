"""A stand-in for all services at once: writes a whole run's decisions to a real server, from where the streams stand.

Run as `python tests/standin_run.py CONFIG URL PAUSE_S`; stays until SIGTERM once the run is written, and then exits 0.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

from schemas.group import ReadyGroup, Sibling
from schemas.lease import GroupLease, group_id
from schemas.ledger import BatchEntry, BatchGroup, QuarantineEntry, QuarantineReason
from schemas.policy import FleetVersions
from schemas.table import Role, Stream
from schemas.termination import Termination
from schemas.training import EvalResult, SplitScore, StepCommit
from schemas.trajectory import SamplingConfig
from services.bus import Bus
from services.child import follow_lifeline
from services.config import load
from services.consume import read_all
from services.runtime import ServiceContext, run_service

GROUPS = 2  # of each batch; a third one of each step is quarantined


def lease(run: str, ordinal: int) -> GroupLease:
    return GroupLease(
        run=run,
        group=group_id("train", ordinal),
        ordinal=ordinal,
        purpose="train",
        task_id="rename-t00-s0000",
        family="rename",
        template="rename-t00",
        split="train",
        group_size=2,
        manifest="m",
        environment="terminal",
        base_snapshot="",
        sampling=SamplingConfig(),
        seed=0,
    )


def ready(run: str, ordinal: int, version: int) -> ReadyGroup:
    siblings = tuple(
        Sibling(
            slot=slot,
            episode_seq=0,
            episode_digest="",
            verdict_seq=0,
            verdict_digest="",
            termination=Termination.AGENT_FINISH,
            status="graded",
            reward=float(slot),
            success=bool(slot),
            oldest_version=version,
            newest_version=version,
            incarnation=0,
            sampled_tokens=50,
            total_tokens=90,
            turns=2,
            manifest="m",
        )
        for slot in range(2)
    )
    return ReadyGroup(
        run=run,
        group=group_id("train", ordinal),
        ordinal=ordinal,
        purpose="train",
        task_id="rename-t00-s0000",
        family="rename",
        template="rename-t00",
        split="train",
        manifest="m",
        group_size=2,
        siblings=siblings,
    )


def commit(run: str, step: int, groups: tuple[str, ...]) -> StepCommit:
    return StepCommit(
        run=run,
        step=step,
        version=step + 1,
        incarnation=0,
        digest=f"d{step + 1}",
        base_digest=f"d{step}",
        groups=groups,
        rows=4,
        trained_tokens=200,
        optimizer_steps=1,
        patches=(),
        patch_bytes=0,
        metrics={"grad_norm": 0.5},
        ledger_seq=1,
        wait_s=0.1,
        train_s=0.2,
        publish_s=0.05,
    )


def evaluation(run: str, step: int, successes: int) -> EvalResult:
    splits = tuple(
        SplitScore(split=split, successes=successes, attempts=20, censored=0, tasks=5, oldest_version=step, newest_version=step)
        for split in ("heldout_instance", "heldout_template")
    )
    return EvalResult(run=run, point=f"step-{step:05d}", step=step, splits=splits, seconds=1.0)


async def write_step(bus: Bus, step: int) -> None:
    """Leases, groups, decisions and the commit of one step, each once for ever."""
    run, subjects = bus.run, bus.subjects
    ordinals = [step * (GROUPS + 1) + k for k in range(GROUPS + 1)]
    for ordinal in ordinals:
        await bus.publish_once(subjects.lease(ordinal), lease(run, ordinal))
    for ordinal in ordinals:
        await bus.publish_once(subjects.ready(group_id("train", ordinal)), ready(run, ordinal, step))
    names = [group_id("train", ordinal) for ordinal in ordinals]
    chosen = tuple(
        BatchGroup(group=g, ready_seq=1, oldest_version=step, newest_version=step, lag=k) for k, g in enumerate(names[:2])
    )
    batch = BatchEntry(
        run=run,
        step=step,
        version=step,
        incarnation=0,
        groups=chosen,
        ready_high_water=1,
        demand_seq=1,
        settings_hash="s",
        max_lag=2,
    )
    await bus.publish_once(subjects.batch(step), batch)
    quarantine = QuarantineEntry(
        run=run,
        group=names[2],
        ready_seq=1,
        reason=QuarantineReason.STALE,
        detail="lag 3 exceeds 2",
        at_version=step,
        oldest_version=step - 3,
        lag=3,
        family="rename",
        mean_reward=0.5,
        sampled_tokens=100,
        demand_seq=1,
        settings_hash="s",
    )
    await bus.publish_once(subjects.quarantine(names[2]), quarantine)
    await bus.publish_once(subjects.step(step), commit(run, step, tuple(names[:2])))
    fleet = FleetVersions(
        run=run, target=step + 1, incarnation=0, engines={"e0": step + 1, "e1": step}, oldest=step, newest=step + 1
    )
    await bus.publish(subjects.active(), fleet)


async def serve(context: ServiceContext, steps: int, pause_s: float) -> None:
    """Write the steps that are not there yet, and an evaluation at either end."""
    bus = context.bus
    context.ready()
    await bus.publish_once(bus.subjects.evaluation("step-00000"), evaluation(bus.run, 0, 8))
    done = len(await read_all(bus, Stream.TRAIN, "train.step.*"))
    for step in range(done, steps):
        if context.stop.is_set():
            return
        await write_step(bus, step)
        await asyncio.sleep(pause_s)
    await bus.publish_once(bus.subjects.evaluation(f"step-{steps:05d}"), evaluation(bus.run, steps, 15))
    await context.stop.wait()


if __name__ == "__main__":
    follow_lifeline()
    worker = subprocess.Popen(["sleep", "600"])  # as a service has workers of its own; it must never outlive the stack
    print(f"worker {worker.pid}", flush=True)
    config = load(sys.argv[1], [f'nats.url="{sys.argv[2]}"', "telemetry.heartbeat_s=0.2"])
    pause_s = float(sys.argv[3])
    sys.exit(run_service(Role.TRAINER, "0", config, lambda context: serve(context, config.run.max_steps, pause_s)))
