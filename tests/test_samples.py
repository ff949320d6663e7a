"""Sampled and quarantined trajectories in the run folder: readable, complete, each written once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
from conftest import eventually
from standin_run import commit, ready

from schemas.arrays import Array
from schemas.group import ReadyGroup
from schemas.lease import group_id
from schemas.ledger import QuarantineEntry, QuarantineReason
from schemas.table import Role
from schemas.termination import Termination
from schemas.trajectory import Episode, Verdict, VersionSpan
from services.bus import Bus
from services.config import load
from services.provision import provision
from services.samples import Samples

MODEL = Path(__file__).parent.parent / "examples" / "terminal" / "model"


def episode(run: str, group: str, slot: int) -> Episode:
    """Prompt, turn, observation, turn: four parts; the policy changed within the second turn."""
    mask = np.array([0, 0, 0, 1, 1, 0, 0, 1, 1, 1], dtype=bool)
    return Episode(
        run=run,
        group=group,
        slot=slot,
        attempt=0,
        task_id="rename-t00-s0000",
        family="rename",
        template="rename-t00",
        termination=Termination.AGENT_FINISH,
        ids=Array.of(np.arange(40, 50, dtype=np.int32)),
        mask=Array.of(mask),
        logprobs=Array.of(np.where(mask, -0.5, 0.0).astype(np.float32)),
        versions=(VersionSpan(3, 5, 1), VersionSpan(7, 9, 1), VersionSpan(9, 10, 2)),
        turn_starts=Array.of(np.array([3, 7], dtype=np.int32)),
        turns=2,
        sampled_tokens=5,
        engines=("e0",),
    )


async def store_group(bus: Bus, ordinal: int) -> ReadyGroup:
    """A ready group whose siblings point at stored episodes and verdicts."""
    group = ready(bus.run, ordinal, 1)
    siblings = []
    for sibling in group.siblings:
        sealed = await bus.publish_once(
            bus.subjects.episode(group.group, sibling.slot), episode(bus.run, group.group, sibling.slot)
        )
        verdict = Verdict(
            run=bus.run, group=group.group, slot=sibling.slot, episode_digest=sealed.digest, status="graded", reward=1.0
        )
        judged = await bus.publish_once(bus.subjects.verdict(group.group, sibling.slot), verdict)
        fields = {name: getattr(sibling, name) for name in sibling.__struct_fields__}
        siblings.append(type(sibling)(**fields | {"episode_seq": sealed.seq, "verdict_seq": judged.seq}))
    fields = {name: getattr(group, name) for name in group.__struct_fields__}
    group = ReadyGroup(**fields | {"siblings": tuple(siblings)})
    await bus.publish_once(bus.subjects.ready(group.group), group)
    return group


async def test_a_step_and_a_quarantined_group_leave_readable_files(nats_url: str, run_name: str, tmp_path: Path) -> None:
    config = load(
        None, [f"run.name={run_name}", f'nats.url="{nats_url}"', f'policy.model="{MODEL}"', f"nats.store_bytes={2**28}"]
    )
    bus = await Bus.connect(nats_url, run_name, Role.OBSERVER, "test")
    await provision(bus, config.nats.store_bytes)
    for ordinal in range(2):
        await store_group(bus, ordinal)
    samples, stop = Samples(bus, config, tmp_path), asyncio.Event()
    task = asyncio.create_task(samples.run(stop))
    await samples.put(commit(run_name, 0, (group_id("train", 0),)))
    quarantine = QuarantineEntry(
        run=run_name,
        group=group_id("train", 1),
        ready_seq=2,
        reason=QuarantineReason.STALE,
        detail="lag 3 exceeds 2",
        at_version=4,
        oldest_version=1,
        lag=3,
        family="rename",
        mean_reward=0.5,
        sampled_tokens=10,
        demand_seq=1,
        settings_hash="s",
    )
    await samples.put(quarantine)
    await eventually(lambda: (tmp_path / "quarantine/g00000001.json").exists())
    files = sorted(path.name for path in (tmp_path / "trajectories").iterdir())
    assert files == ["step-00000-g00000000-0.json", "step-00000-g00000000-1.json"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    await samples.put(commit(run_name, 0, (group_id("train", 0),)))  # as after a restart
    await samples.put(quarantine)
    stop.set()
    await asyncio.wait_for(task, 20)
    await bus.close()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == before
    record = json.loads((tmp_path / "trajectories" / files[0]).read_text())
    assert [(part["by"], part["tokens"]) for part in record["parts"]] == [
        ("environment", 3),
        ("policy", 2),
        ("environment", 2),
        ("policy", 3),
    ]
    assert [part.get("versions") for part in record["parts"]] == [None, [1], None, [1, 2]]
    assert all(part["text"] for part in record["parts"])
    held = json.loads((tmp_path / "quarantine/g00000001.json").read_text())
    assert (held["reason"], held["lag"], len(held["trajectories"])) == ("stale", 3, 2)


async def test_a_group_that_cannot_be_read_is_skipped(nats_url: str, run_name: str, tmp_path: Path) -> None:
    config = load(None, [f"run.name={run_name}", f'nats.url="{nats_url}"', f"nats.store_bytes={2**28}"])
    bus = await Bus.connect(nats_url, run_name, Role.OBSERVER, "test")
    await provision(bus, config.nats.store_bytes)
    await bus.publish_once(bus.subjects.ready(group_id("train", 0)), ready(run_name, 0, 0))  # its episodes are not there
    await store_group(bus, 1)
    samples, stop = Samples(bus, config, tmp_path), asyncio.Event()
    task = asyncio.create_task(samples.run(stop))
    await samples.put(commit(run_name, 0, (group_id("train", 0),)))
    await samples.put(commit(run_name, 1, (group_id("train", 1),)))
    stop.set()
    await asyncio.wait_for(task, 20)
    await bus.close()
    assert {path.name[:10] for path in (tmp_path / "trajectories").iterdir()} == {"step-00001"}
