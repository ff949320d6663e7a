"""The synchronizer and an engine that is behind: one merged patch, kept while it is needed, and found again after a restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from admission_stage import Stage
from conftest import eventually
from test_param_sync_service import Line, configuration, served, started

import param_sync.service
import services.engine.service
from param_sync.patch.codec import apply
from schemas.policy import ApplyOrder, EngineState
from schemas.table import Role, Stream
from services import blobs
from services.bus import Bus
from services.consume import read_all

pytestmark = pytest.mark.timeout(240)


class Slow:
    """An engine that serves what it has, and never gets to its orders."""

    def __init__(self, bus: Bus, name: str, digest: str) -> None:
        self._bus, self._name, self._digest = bus, name, digest
        self._gone = asyncio.Event()

    async def beat(self) -> None:
        while not self._gone.is_set():
            await self._say("serving")
            await asyncio.sleep(0.5)
        await self._say("draining")

    def leave(self) -> None:
        self._gone.set()

    async def _say(self, phase: str) -> None:
        state = EngineState(
            run=self._bus.run,
            engine=self._name,
            generator="none",
            phase=phase,  # type: ignore[arg-type]
            version=0,
            incarnation=0,
            digest=self._digest,
            at_ns=time.time_ns(),
        )
        await self._bus.publish(self._bus.subjects.engine_heartbeat(self._name), state)


async def orders(bus: Bus, engine: str) -> list[ApplyOrder]:
    return [item.decode(ApplyOrder) for item in await read_all(bus, Stream.POLICY, f"policy.apply.{engine}")]


async def test_it_gets_one_merged_patch_that_stays_as_long_as_it_is_needed(
    tmp_path: Path, nats_url: str, run_name: str
) -> None:
    config = configuration(tmp_path, run_name, nats_url, anchor_every=5, keep_anchors=1)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        first = await stage.start(Role.PARAM_SYNC, param_sync.service.serve, "first")
        line = Line(bus, config)
        for version in range(1, 5):
            await line.step(0, version, after=(0, version - 1))
        await eventually(lambda: bus.last(bus.subjects.staged(4)), within_s=60)
        slow = Slow(await stage.bus(Role.ENGINE), "slow", line.made[0, 0].digest)
        async with asyncio.TaskGroup() as group:
            group.create_task(slow.beat())
            await eventually(lambda: orders(bus, "slow"), within_s=60)
            (order,) = await orders(bus, "slow")
            (link,) = order.links
            assert (link.form, link.base_version, link.version, link.digest) == ("patch", 0, 4, line.made[0, 4].digest)
            (merged,) = link.objects
            singles = [await blobs.find(bus, line.objects[0, version]) for version in range(1, 5)]
            assert merged.size_bytes < sum(single.size_bytes for single in singles if single is not None)
            assert apply(line.made[0, 0], await blobs.get(bus, merged)).digest == line.made[0, 4].digest

            for version in range(5, 21):
                await line.step(0, version, after=(0, version - 1))
            await eventually(lambda: first.context.health.counters.get("links_collected", 0) >= 4, within_s=60)
            await eventually(lambda: bus.last(bus.subjects.anchor(20)), within_s=60)
            assert merged.name in await blobs.names(bus), "the order names it"
            slow.leave()
        for version in range(21, 26):
            await line.step(0, version, after=(0, version - 1))

        async def gone() -> bool:
            return merged.name not in await blobs.names(bus)

        await eventually(gone, within_s=60)


async def test_a_synchronizer_that_starts_anew_finds_the_merged_patch(tmp_path: Path, nats_url: str, run_name: str) -> None:
    config = configuration(tmp_path, run_name, nats_url)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        first, *engines = await started(stage, config)
        for engine in engines[1:]:
            await engine.stop()
        line = Line(bus, config)
        await engines[0].stop()
        for version in range(1, 5):
            await line.step(0, version, after=(0, version - 1))
        await eventually(lambda: bus.last(bus.subjects.staged(4)), within_s=60)
        for name in config.engine.names:
            await stage.start(Role.ENGINE, services.engine.service.serve, name)
        await eventually(lambda: served(bus, config, 0, line.made[0, 4]), within_s=60)
        before = (await orders(bus, "e0"))[-1]
        assert [link.form for link in before.links] == ["anchor", "patch"] and before.links[1].base_version == 0
        await first.stop()
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve, "again")
        slow = Slow(await stage.bus(Role.ENGINE), "slow", line.made[0, 0].digest)
        async with asyncio.TaskGroup() as group:
            group.create_task(slow.beat())
            await eventually(lambda: orders(bus, "slow"), within_s=60)
            slow.leave()
        assert (await orders(bus, "slow"))[0].links == before.links[1:]


async def test_a_merged_patch_that_cannot_be_used_holds_nobody_up(tmp_path: Path, nats_url: str, run_name: str) -> None:
    config = configuration(tmp_path, run_name, nats_url)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve, "first")
        line = Line(bus, config)
        for version in range(1, 5):
            await line.step(0, version, after=(0, version - 1))
        await eventually(lambda: bus.last(bus.subjects.staged(4)), within_s=60)
        digest = line.made[0, 4].digest
        name = f"merged-0-0-4-{digest[:16]}"
        await blobs.put(bus, name, b"these are other bytes")
        for engine in config.engine.names:
            await stage.start(Role.ENGINE, services.engine.service.serve, engine)
        await eventually(lambda: served(bus, config, 0, line.made[0, 4]), within_s=90)
        assert name in {o.name for order in await orders(bus, "e0") for link in order.links for o in link.objects}


async def test_a_merged_patch_leads_past_a_single_one_that_is_lost(tmp_path: Path, nats_url: str, run_name: str) -> None:
    config = configuration(tmp_path, run_name, nats_url)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve, "first")
        line = Line(bus, config)
        for version in range(1, 4):
            await line.step(0, version, after=(0, version - 1))
        await eventually(lambda: bus.last(bus.subjects.staged(3)), within_s=60)
        await blobs.remove(await stage.bus(Role.PARAM_SYNC), line.objects[0, 2])
        for engine in config.engine.names:
            await stage.start(Role.ENGINE, services.engine.service.serve, engine)
        await eventually(lambda: served(bus, config, 0, line.made[0, 3]), within_s=90)
        assert await bus.last(bus.subjects.anchor(3)) is None, "nobody needed one"
