"""The synchronizer over a real server: one at a time, engines led from a dead branch to the living one, and a store that does
not fill."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from admission_stage import Stage
from conftest import eventually
from weight_line import Line, configuration, fleet, served, started

import param_sync.service
import services.engine.service
from param_sync.patch.codec import encode_anchor
from schemas.policy import FleetVersions
from schemas.table import Role
from schemas.training import StepCommit
from services import blobs
from services.bus import Bus, IntegrityError

pytestmark = pytest.mark.timeout(240)


async def test_engines_follow_to_the_living_branch_whatever_its_numbers(tmp_path: Path, nats_url: str, run_name: str) -> None:
    """Invariants 5 and 10: from version 5 of the dead branch to version 3 of the living one, and on past 5."""
    config = configuration(tmp_path, run_name, nats_url)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        await started(stage, config)
        line = Line(bus, config)
        for version in range(1, 6):
            await line.step(0, version, after=(0, version - 1))
        await eventually(lambda: served(bus, config, 0, line.made[0, 5]), within_s=60)
        first = await line.step(1, 3, after=(0, 2))
        await eventually(lambda: served(bus, config, 1, line.made[1, 3]), within_s=60)
        anchor = await bus.last(bus.subjects.anchor(3, 1))
        assert anchor is not None and await bus.last(bus.subjects.staged(3, 1)) is None
        assert (await blobs.get(bus, first.patches[0]))[:4] == encode_anchor(line.made[1, 3]).tobytes()[:4]
        await line.step(0, 6, after=(0, 5))  # the left trainer's last words
        for version in range(4, 7):
            await line.step(1, version, after=(1, version - 1))
        await eventually(lambda: served(bus, config, 1, line.made[1, 6]), within_s=60)
        assert await bus.last(bus.subjects.staged(6)) is None, "nothing of the dead branch is published any more"
        now = await fleet(bus)
        assert (now.target, now.incarnation, now.oldest, now.newest) == (6, 1, 6, 6)


async def test_a_second_stands_by_and_goes_on_where_the_first_was_cut_off(tmp_path: Path, nats_url: str, run_name: str) -> None:
    """Invariants 5 and 11."""
    config = configuration(tmp_path, run_name, nats_url)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        first, *_ = await started(stage, config)
        await eventually(lambda: first.context.health.phase == "ready", within_s=60)
        second = await stage.start(Role.PARAM_SYNC, param_sync.service.serve, "second")
        await eventually(lambda: second.context.health.counters.get("standby"), within_s=60)
        (wait,) = second.context.health.snapshot().waits
        assert wait.culprit.startswith("param_sync first on ")
        line = Line(bus, config)
        for version in range(1, 4):
            await line.step(0, version, after=(0, version - 1))
        await eventually(lambda: served(bus, config, 0, line.made[0, 3]), within_s=60)
        await first.kill()
        for version in range(4, 6):
            await line.step(0, version, after=(0, version - 1))
        await line.step(1, 5, after=(0, 4))
        await eventually(lambda: served(bus, config, 1, line.made[1, 5]), within_s=60)
        assert second.context.health.counters["incarnation"] == 1


async def test_a_late_word_of_an_owner_before_does_not_stand(tmp_path: Path, nats_url: str, run_name: str) -> None:
    """A vector that was held back by an outage and comes after the living owner's would hold the sampler up for ever."""
    config = configuration(tmp_path, run_name, nats_url)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        await started(stage, config)
        line = Line(bus, config)
        await line.step(0, 1, after=(0, 0))
        await eventually(lambda: served(bus, config, 0, line.made[0, 1]), within_s=60)

        async def told() -> bool:
            return (await fleet(bus)).oldest == 1

        await eventually(told, within_s=60)
        late = FleetVersions(run=run_name, target=1, incarnation=0, engines={"e0": 0, "e1": 0}, oldest=0, newest=0)
        await bus.publish(bus.subjects.active(), late)
        await eventually(told, within_s=60)


async def test_what_no_engine_needs_is_removed_and_everyone_still_arrives(tmp_path: Path, nats_url: str, run_name: str) -> None:
    """Thirty versions with an anchor at every fifth: the store keeps the last two and what follows them, a lagging engine's way
    included, and a synchronizer or an engine that starts anew finds everything that it needs."""
    config = configuration(tmp_path, run_name, nats_url, anchor_every=5, keep_anchors=2)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        first, *engines = await started(stage, config)
        line = Line(bus, config)
        for version in range(1, 31):
            await line.step(0, version, after=(0, version - 1))
            if version % 5 == 0:
                await eventually(lambda at=line.made[0, version]: served(bus, config, 0, at), within_s=60)
        await eventually(lambda: first.context.health.counters.get("links_collected", 0) >= 20, within_s=60)
        stored = await blobs.names(bus)
        anchors = {name for name in stored if name.startswith("anchor-")}
        assert {name.split("-")[2] for name in anchors} == {"25", "30"}
        kept = {version for (_, version), name in line.objects.items() if name in stored}
        assert {26, 27, 28, 29, 30} <= kept and min(kept) >= 20
        with pytest.raises(IntegrityError, match="not in the store"):
            await blobs.get(bus, (await _commit(bus, 0)).patches[0])
        await first.stop()
        await engines[0].stop()
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve, "again")
        await stage.start(Role.ENGINE, services.engine.service.serve, "e0")
        await line.step(0, 31, after=(0, 30))
        await eventually(lambda: served(bus, config, 0, line.made[0, 31]), within_s=60)


@pytest.mark.parametrize("damage", ["lost", "corrupt"])
async def test_engines_get_past_a_patch_that_nobody_can_use(tmp_path: Path, nats_url: str, run_name: str, damage: str) -> None:
    """Invariant 10: no anchor lies beyond it, so one is published when engines have failed on it; they come back by it."""
    config = configuration(tmp_path, run_name, nats_url)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve, "first")
        line = Line(bus, config)
        for version in range(1, 4):
            await line.step(0, version, after=(0, version - 1))
        await eventually(lambda: bus.last(bus.subjects.staged(3)), within_s=60)
        name = line.objects[0, 2]
        collector = await stage.bus(Role.PARAM_SYNC)
        await blobs.remove(collector, name)
        if damage == "corrupt":
            await blobs.put(bus, name, b"these are other bytes")
        for engine in config.engine.names:
            await stage.start(Role.ENGINE, services.engine.service.serve, engine)
        await eventually(lambda: served(bus, config, 0, line.made[0, 3]), within_s=90)
        assert await bus.last(bus.subjects.anchor(3)) is not None
        await line.step(0, 4, after=(0, 3))
        await eventually(lambda: served(bus, config, 0, line.made[0, 4]), within_s=60)


async def _commit(bus: Bus, step: int) -> StepCommit:
    item = await bus.last(bus.subjects.step(step))
    assert item is not None
    return item.decode(StepCommit)


async def test_removed_objects_give_their_room_back(tmp_path: Path, nats_url: str, run_name: str) -> None:
    config = configuration(tmp_path, run_name, nats_url)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.PARAM_SYNC)
        data = np.random.default_rng(0).bytes(3 * 2**20)
        references = [await blobs.put(bus, f"object-{n}", data + bytes([n])) for n in range(3)]
        assert await blobs.names(bus) == {"object-0", "object-1", "object-2"}
        info = await bus.request(f"STREAM.INFO.{bus.subjects.blob_stream()}", {})
        full = int(info["state"]["bytes"])
        assert await blobs.remove(bus, "object-1")
        assert not await blobs.remove(bus, "object-1")
        assert await blobs.names(bus) == {"object-0", "object-2"}
        info = await bus.request(f"STREAM.INFO.{bus.subjects.blob_stream()}", {})
        assert full - int(info["state"]["bytes"]) > 3 * 2**20
        assert await blobs.get(bus, references[2]) == data + bytes([2])
        assert await blobs.put(bus, "object-1", data + bytes([1])) == references[1]
        assert await blobs.get(bus, references[1]) == data + bytes([1])
