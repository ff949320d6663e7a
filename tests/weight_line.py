"""A trainer's publications made by the tests, the fleet that follows them, and traffic that checks what it is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from admission_stage import Running, Stage
from tiny_model import write_tiny_model

import param_sync.service
import services.engine.service
from param_sync.patch.bits import Bits
from param_sync.patch.codec import encode, encode_anchor
from param_sync.patch.snapshot import Snapshot
from rollouter.generation import Conversation, Generation
from rollouter.rows import Sampled
from schemas.policy import EngineState, FleetVersions
from schemas.table import Role
from schemas.training import StepCommit
from schemas.trajectory import SamplingConfig
from services import blobs
from services.base_weights import snapshot_of
from services.bus import Bus
from services.config import Config, check
from services.health import Health


def configuration(
    folder: Path,
    run: str,
    url: str,
    *,
    names: tuple[str, ...] = ("e0", "e1"),
    simulated: dict[str, Any] | None = None,
    hidden: int = 32,
    **settings: object,
) -> Config:
    """A run of a tiny model on simulated engines, whose weights are real; `settings` are param_sync's."""
    model = folder / "model"
    if not model.exists():
        write_tiny_model(model, hidden=hidden)
    return check(
        {
            "run": {"name": run, "folder": str(folder / "runs")},
            "nats": {"url": url},
            "policy": {"model": str(model)},
            "engine": {"kind": "simulated", "names": list(names), "simulated": simulated or {}},
            "param_sync": {"anchor_every": 1000, **settings},
            "fencing": {"renew_s": 0.4, "ttl_s": 2.0},
            "telemetry": {"heartbeat_s": 0.5},
        }
    )


class Line:
    """A trainer's publications, made here: real weights, real patches, real anchors."""

    def __init__(self, bus: Bus, config: Config) -> None:
        self._bus = bus
        self.made: dict[tuple[int, int], Snapshot] = {(0, 0): snapshot_of(config.policy.model)}
        self.objects: dict[tuple[int, int], str] = {}
        self.commits: dict[tuple[int, int], StepCommit] = {}

    async def step(self, incarnation: int, version: int, *, after: tuple[int, int], elements: int = 5) -> StepCommit:
        """Commit `version` of `incarnation` as an update of `after`: so many elements of one tensor, or a few less."""
        old = self.made[after]
        random = np.random.default_rng([incarnation, version])
        tensors = dict(old.tensors)
        name = sorted(tensors)[0]
        changed = tensors[name].data.copy()
        changed.reshape(-1)[random.integers(0, changed.size, elements)] ^= 1 + incarnation
        tensors[name] = Bits("bf16", tensors[name].shape, changed)
        new = Snapshot.of(tensors, version=version, incarnation=incarnation)
        begins = after[0] != incarnation
        form = "anchor" if begins else "patch"
        data = (encode_anchor(new) if begins else encode(old, new, level=2)).tobytes()
        reference = await blobs.put(self._bus, f"{form}-{incarnation}-{version}-{new.digest[:16]}", data)
        commit = StepCommit(
            run=self._bus.run,
            step=version - 1,
            version=version,
            incarnation=incarnation,
            digest=new.digest,
            base_digest=old.digest,
            groups=(),
            rows=0,
            trained_tokens=0,
            optimizer_steps=1,
            patches=(reference,),
            patch_bytes=reference.size_bytes,
            metrics={},
            ledger_seq=0,
        )
        self.made[incarnation, version] = new
        await self._bus.publish_once(self._bus.subjects.step(version - 1, incarnation), commit)
        self.objects[incarnation, version] = reference.name
        self.commits[incarnation, version] = commit
        return commit


@asynccontextmanager
async def traffic(
    stage: Stage, line: Line, conversations: int = 4, counters: dict[str, float] | None = None
) -> AsyncIterator[list[Sampled]]:
    """Turns asked for all the time; at the end each of them must name weights that were published, by version and digest."""
    bus = await stage.bus(Role.ROLLOUTER, f"traffic-{uuid4().hex[:6]}")
    health = Health(bus, 1.0)
    generation, stop = Generation(bus, bus.instance, 30.0, health), asyncio.Event()
    answers: list[Sampled] = []
    prompt, sampling = np.arange(8, dtype=np.int32), SamplingConfig(max_tokens=40)

    async def talk(number: int) -> None:
        who = Conversation(session=f"g-{number}-0", group="g", name=f"conversation {number}")
        while not stop.is_set():
            answers.append(await generation.sample(who, prompt, sampling))

    async with asyncio.TaskGroup() as group:
        receiving = asyncio.Event()
        group.create_task(generation.run(receiving))
        async with asyncio.TaskGroup() as talking:
            for number in range(conversations):
                talking.create_task(talk(number))
            try:
                yield answers
            finally:
                stop.set()
        receiving.set()
    if counters is not None:
        counters |= health.counters
    for answer in answers:
        last = answer.versions[-1]
        assert answer.weight_digest == line.made[last.incarnation, last.version].digest, "served by a mixture"


async def states(bus: Bus, config: Config) -> dict[str, EngineState]:
    found = {}
    for name in config.engine.names:
        item = await bus.last(bus.subjects.engine_heartbeat(name))
        if item is not None:
            found[name] = item.decode(EngineState)
    return found


async def served(bus: Bus, config: Config, incarnation: int, snapshot: Snapshot) -> bool:
    """Whether every engine confirms these very weights."""
    held = await states(bus, config)
    wanted = ("serving", incarnation, snapshot.version, snapshot.digest)
    return len(held) == len(config.engine.names) and all(
        (state.phase, state.incarnation, state.version, state.digest) == wanted for state in held.values()
    )


async def fleet(bus: Bus) -> FleetVersions:
    item = await bus.last(bus.subjects.active())
    assert item is not None
    return item.decode(FleetVersions)


async def started(stage: Stage, config: Config) -> list[Running]:
    """The synchronizer and every engine."""
    first = await stage.start(Role.PARAM_SYNC, param_sync.service.serve, "first")
    engines = [await stage.start(Role.ENGINE, services.engine.service.serve, name) for name in config.engine.names]
    return [first, *engines]
