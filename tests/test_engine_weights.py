"""Requirement W4 over a real server: whatever happens to a patch, an engine or the store, every engine ends with the right
digest or out of rotation, and no turn is ever answered by a mixture. Invariants 5, 10 and 11.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from admission_stage import Stage
from conftest import NatsServer, eventually
from partition import Partition
from weight_line import Line, configuration, served, started, states, traffic

import param_sync.service
import services.engine.service
from schemas.arrays import Array
from schemas.codec import decode
from schemas.generation import GenerateRequest, GenerateResult
from schemas.policy import ApplyOrder, EngineState, FleetVersions
from schemas.table import Role, Stream
from schemas.training import ObjectRef
from schemas.trajectory import SamplingConfig
from services import blobs
from services.bus import Bus
from services.config import Config
from services.consume import read_all
from services.engine import chain_walk
from services.engine.protocol import Engine

pytestmark = pytest.mark.timeout(240)
SLOW = {"step_s": 0.002}


@pytest.fixture(name="built")
def make_built(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The engines inside the services, by name, for tests that spoil them."""
    built: dict[str, Any] = {}
    genuine = services.engine.service.engine_from_config

    def building(config: Config, name: str) -> Engine:
        built[name] = genuine(config, name)
        return built[name]

    monkeypatch.setattr(services.engine.service, "engine_from_config", building)
    return built


async def phases(bus: Bus, engine: str) -> list[EngineState]:
    return [item.decode(EngineState) for item in await read_all(bus, Stream.POLICY, f"policy.engine.{engine}")]


async def test_changed_elements_are_what_engines_take_and_the_pause_is_told(
    tmp_path: Path, nats_url: str, run_name: str
) -> None:
    config = configuration(tmp_path, run_name, nats_url, simulated=SLOW)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        _, *engines = await started(stage, config)
        line = Line(bus, config)
        await eventually(lambda: served(bus, config, 0, line.made[0, 0]), within_s=60)
        async with traffic(stage, line) as answers:
            for version in range(1, 6):
                await line.step(0, version, after=(0, version - 1))
                await eventually(lambda at=line.made[0, version]: served(bus, config, 0, at), within_s=60)
        assert {span.version for answer in answers for span in answer.versions} >= {1, 2, 3, 4}
        for state in (await states(bus, config)).values():
            assert state.weight_path == "changed elements"
            assert 0 < state.frozen_s <= state.paused_s <= state.paused_total_s
        for engine in engines:
            assert engine.context.health.counters["weight_switches_elements"] >= 5
            assert engine.context.health.counters["weights_paused_s"] > 0


async def test_patches_of_level_2_are_followed_link_by_link(tmp_path: Path, nats_url: str, run_name: str) -> None:
    """By engines that are there for each version, and by a late joiner that takes three of them in one go."""
    config = configuration(tmp_path, run_name, nats_url, hidden=64, names=("e0", "e1"), simulated=SLOW)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve, "first")
        await stage.start(Role.ENGINE, services.engine.service.serve, "e0")
        line = Line(bus, config)
        async with traffic(stage, line):
            for version in range(1, 4):
                commit = await line.step(0, version, after=(0, version - 1), elements=3000)
                data = await blobs.get(bus, commit.patches[0])
                assert int.from_bytes(data[10:12], "little") == 2, "the file's own word for its level"
            await stage.start(Role.ENGINE, services.engine.service.serve, "e1")
            await eventually(lambda: served(bus, config, 0, line.made[0, 3]), within_s=60)
        for name in config.engine.names:
            assert not any(state.error for state in await phases(bus, name))


@pytest.mark.parametrize("damage", ["lost", "corrupt"])
async def test_a_patch_that_cannot_be_used_is_replaced_by_an_anchor(
    tmp_path: Path, nats_url: str, run_name: str, damage: str
) -> None:
    """A late joiner finds the second of three patches gone, or with other bytes: it says so and is led around it."""
    config = configuration(tmp_path, run_name, nats_url, names=("e0", "e1"), simulated=SLOW)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.PARAM_SYNC)
        trainer = await stage.bus(Role.TRAINER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve, "first")
        await stage.start(Role.ENGINE, services.engine.service.serve, "e0")
        line = Line(trainer, config)
        for version in range(1, 4):
            await line.step(0, version, after=(0, version - 1))

        async def first_serves() -> bool:
            state = (await states(bus, config)).get("e0")
            return state is not None and state.digest == line.made[0, 3].digest

        await eventually(first_serves, within_s=60)
        (reference,) = line.commits[0, 2].patches
        data = await blobs.get(bus, reference)
        await blobs.remove(bus, reference.name)
        if damage == "corrupt":
            await blobs.put(bus, reference.name, data[:-1] + bytes([data[-1] ^ 1]))
        async with traffic(stage, line):
            await stage.start(Role.ENGINE, services.engine.service.serve, "e1")
            await eventually(lambda: served(bus, config, 0, line.made[0, 3]), within_s=90)
        seen = await phases(bus, "e1")
        assert any(reference.name in state.error for state in seen)
        assert all(state.version in (-1, 3) for state in seen), "it never served what it could not verify"
        assert await bus.last(bus.subjects.anchor(3)) is not None


async def test_a_patch_that_is_lost_under_a_serving_engine_leaves_it_serving(
    tmp_path: Path, nats_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its verified weights and its traffic until another way is found."""
    config = configuration(tmp_path, run_name, nats_url, simulated=SLOW)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.PARAM_SYNC)
        trainer = await stage.bus(Role.TRAINER)
        await started(stage, config)
        line = Line(trainer, config)
        await line.step(0, 1, after=(0, 0))
        await eventually(lambda: served(bus, config, 0, line.made[0, 1]), within_s=60)
        begun = await bus.last_sequence(Stream.POLICY)
        genuine, tampered = blobs.get, 0

        async def damaged(bus: Bus, reference: ObjectRef) -> bytes:
            nonlocal tampered
            data = await genuine(bus, reference)
            if reference.name.startswith("patch-0-2-"):
                tampered += 1
                return data[:100] + bytes([data[100] ^ 1]) + data[101:]
            return data

        monkeypatch.setattr(chain_walk, "fetch", damaged)
        async with traffic(stage, line):
            await line.step(0, 2, after=(0, 1))
            await eventually(lambda: served(bus, config, 0, line.made[0, 2]), within_s=90)
        assert tampered >= 2
        for name in config.engine.names:
            seen = [state for state in await phases(bus, name) if state.version >= 0]
            assert {state.phase for state in seen} <= {"serving", "applying"}, "nothing took it out of rotation"
            assert any(state.error for state in seen)
        told = [item.decode(FleetVersions) for item in await read_all(bus, Stream.POLICY, "policy.active") if item.seq > begun]
        assert told and not [vector for vector in told if min(vector.engines.values(), default=-1) < 1]


async def test_repeated_and_late_orders_change_nothing(tmp_path: Path, nats_url: str, run_name: str) -> None:
    config = configuration(tmp_path, run_name, nats_url, simulated=SLOW)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.PARAM_SYNC)
        trainer = await stage.bus(Role.TRAINER)
        await started(stage, config)
        line = Line(trainer, config)
        orders: list[ApplyOrder] = []
        for version in range(1, 5):
            await line.step(0, version, after=(0, version - 1))
            await eventually(lambda at=line.made[0, version]: served(bus, config, 0, at), within_s=60)
            item = await bus.last(bus.subjects.apply("e0"))
            assert item is not None
            orders.append(item.decode(ApplyOrder))
        async with traffic(stage, line) as answers:
            for order in (orders[-1], orders[0], orders[2], orders[-1], orders[1]):
                await bus.publish(bus.subjects.apply("e0"), order)
            await line.step(0, 5, after=(0, 4))
            await eventually(lambda: served(bus, config, 0, line.made[0, 5]), within_s=60)
        versions = [state.version for state in await phases(bus, "e0") if state.version >= 0]
        assert versions == sorted(versions), "never backward"
        assert {span.version for answer in answers for span in answer.versions} <= {4, 5}


async def test_an_engine_that_dies_while_it_writes_comes_back_right(tmp_path: Path, nats_url: str, run_name: str) -> None:
    config = configuration(tmp_path, run_name, nats_url, simulated=SLOW | {"load_s": 0.7})
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        _, first, *_ = await started(stage, config)
        line = Line(bus, config)
        await eventually(lambda: served(bus, config, 0, line.made[0, 0]), within_s=60)
        async with traffic(stage, line):
            await line.step(0, 1, after=(0, 0))

            async def writing() -> bool:
                item = await bus.last(bus.subjects.engine_heartbeat("e0"))
                return item is not None and item.decode(EngineState).phase == "applying"

            await eventually(writing, within_s=60)
            await first.kill()
            await line.step(0, 2, after=(0, 1))
            await stage.start(Role.ENGINE, services.engine.service.serve, "e0")
            await eventually(lambda: served(bus, config, 0, line.made[0, 2]), within_s=60)


async def test_a_store_that_is_gone_in_the_middle_of_a_transfer_is_waited_for(
    tmp_path: Path, nats_process: NatsServer, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine's line is cut between two objects of its way. It serves on, and gets there when the line is back."""
    config = configuration(tmp_path, run_name, nats_process.url, simulated=SLOW)
    async with (
        Partition(nats_process.port) as network,
        Stage(nats_process.url, config) as stage,
        Stage(network.url, config) as far,
    ):
        bus = await stage.bus(Role.TRAINER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve, "first")
        await stage.start(Role.ENGINE, services.engine.service.serve, "e0")
        cut = await far.start(Role.ENGINE, services.engine.service.serve, "e1")
        line = Line(bus, config)
        await eventually(lambda: served(bus, config, 0, line.made[0, 0]), within_s=60)
        genuine, cuts = blobs.get, 0

        async def cutting(bus: Bus, reference: ObjectRef) -> bytes:
            nonlocal cuts
            if bus is cut.context.bus and cuts == 0:
                cuts += 1
                network.cut()
                asyncio.get_running_loop().call_later(4.0, network.heal)
            return await genuine(bus, reference)

        monkeypatch.setattr(chain_walk, "fetch", cutting)
        async with traffic(stage, line):
            for version in range(1, 4):
                await line.step(0, version, after=(0, version - 1))
            await eventually(lambda: served(bus, config, 0, line.made[0, 3]), within_s=90)
        assert cuts == 1


async def test_weights_that_rot_in_memory_are_found_and_rebuilt(
    tmp_path: Path, nats_url: str, run_name: str, built: dict[str, Any]
) -> None:
    """A bit turns over where the next patch writes: the engine leaves rotation by itself and comes back from the anchor."""
    config = configuration(tmp_path, run_name, nats_url, simulated=SLOW)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        await started(stage, config)
        line = Line(bus, config)
        await line.step(0, 1, after=(0, 0))
        await eventually(lambda: served(bus, config, 0, line.made[0, 1]), within_s=60)
        words = built["e0"]._weights._words
        name = sorted(words)[0]
        words[name] ^= 1
        await line.step(0, 2, after=(0, 1))
        await eventually(lambda: served(bus, config, 0, line.made[0, 2]), within_s=60)
        assert any(state.phase == "failed" and "not the ones" in state.error for state in await phases(bus, "e0"))
        np.testing.assert_array_equal(words[name], line.made[0, 2].tensors[name].data)


async def test_a_synchronizer_that_dies_in_the_middle_of_a_roll_keeps_to_one_at_a_time(
    tmp_path: Path, nats_url: str, run_name: str
) -> None:
    names = ("e0", "e1", "e2")
    config = configuration(tmp_path, run_name, nats_url, names=names, simulated=SLOW | {"load_s": 1.5})
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        first, *_ = await started(stage, config)
        line = Line(bus, config)
        await eventually(lambda: served(bus, config, 0, line.made[0, 0]), within_s=60)
        begun = (await bus.last_sequence(Stream.POLICY)) + 1
        await line.step(0, 1, after=(0, 0))

        async def someone_writes() -> bool:
            return any(state.phase == "applying" for state in (await states(bus, config)).values())

        await eventually(someone_writes, within_s=60)
        await first.kill()
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve, "second")
        await line.step(0, 2, after=(0, 1))
        await eventually(lambda: served(bus, config, 0, line.made[0, 2]), within_s=60)
        out: set[str] = set()
        most = 0
        for item in await read_all(bus, Stream.POLICY, "policy.engine.*"):
            if item.seq < begun:
                continue
            state = item.decode(EngineState)
            (out.add if state.phase == "applying" else out.discard)(state.engine)
            most = max(most, len(out))
        assert most == 1


async def test_a_wedged_engine_is_named_and_passed_over(
    tmp_path: Path, nats_url: str, run_name: str, built: dict[str, Any]
) -> None:
    """Its write never ends. The others go on to later versions, the one who waits is told for whom, and then no more."""
    config = configuration(tmp_path, run_name, nats_url, simulated=SLOW, apply_timeout_s=6.0)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        first, _, wedged = await started(stage, config)
        line = Line(bus, config)
        await eventually(lambda: served(bus, config, 0, line.made[0, 0]), within_s=60)
        built["e1"]._options = msgspec.structs.replace(built["e1"]._options, load_s=3600.0)
        await line.step(0, 1, after=(0, 0))
        health = first.context.health
        await eventually(lambda: any("e1" in wait.culprit for wait in health.snapshot().waits), within_s=60)
        await eventually(lambda: health.counters.get("engines_passed_over") == 1, within_s=60)
        assert not health.snapshot().waits
        for version in range(2, 4):
            await line.step(0, version, after=(0, version - 1))

        async def others_serve() -> bool:
            return (await states(bus, config))["e0"].digest == line.made[0, 3].digest

        await eventually(others_serve, within_s=60)
        assert (await states(bus, config))["e1"].phase == "applying"
        await wedged.kill()  # it would not drain


async def test_all_at_once_is_possible(tmp_path: Path, nats_url: str, run_name: str) -> None:
    config = configuration(tmp_path, run_name, nats_url, simulated=SLOW | {"load_s": 1.0}, max_unavailable="all")
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        await started(stage, config)
        line = Line(bus, config)
        await eventually(lambda: served(bus, config, 0, line.made[0, 0]), within_s=60)
        await line.step(0, 1, after=(0, 0))

        async def everyone_writes() -> bool:
            return all(state.phase == "applying" for state in (await states(bus, config)).values())

        await eventually(everyone_writes, within_s=60)
        await eventually(lambda: served(bus, config, 0, line.made[0, 1]), within_s=60)


@pytest.mark.parametrize("mode", ["regenerate", "restart"])
async def test_thrown_away_tokens_are_told(tmp_path: Path, nats_url: str, run_name: str, mode: str) -> None:
    """A long turn is cut by a new version: its requester gets a whole turn of one version, and learns what was wasted."""
    config = configuration(tmp_path, run_name, nats_url, simulated={"step_s": 0.05}, mode=mode, grace_s=0.0)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        await started(stage, config)
        line = Line(bus, config)
        await eventually(lambda: served(bus, config, 0, line.made[0, 0]), within_s=60)
        counters: dict[str, float] = {}
        async with traffic(stage, line, counters=counters) as answers:

            async def running() -> bool:
                return all(state.running for state in (await states(bus, config)).values())

            await eventually(running, within_s=60)
            await line.step(0, 1, after=(0, 0))
            await eventually(lambda: served(bus, config, 0, line.made[0, 1]), within_s=60)
        assert all(len(answer.versions) == 1 and answer.ids.size == 40 for answer in answers)
        assert counters["tokens_wasted"] > 0 and counters["tokens_kept"] == sum(answer.ids.size for answer in answers)


async def test_a_request_that_is_delivered_again_is_answered_once(tmp_path: Path, nats_url: str, run_name: str) -> None:
    """Redelivery happens while a long generation still runs; a refusal of the copy would throw the original away."""
    config = configuration(tmp_path, run_name, nats_url, names=("e0",), simulated={"step_s": 0.05})
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.ROLLOUTER, "asker")
        await started(stage, config)
        line = Line(bus, config)
        await eventually(lambda: served(bus, config, 0, line.made[0, 0]), within_s=60)
        request = GenerateRequest(
            request_id="once",
            requester="asker",
            session="s",
            prompt_ids=Array.of(np.arange(8, dtype=np.int32)),
            sampling=SamplingConfig(max_tokens=40),
        )
        answers = await bus.client.subscribe(bus.subjects.generated("asker"))
        for _ in range(3):
            await bus.publish(bus.subjects.generate("e0"), request)
        first = decode((await answers.next_msg(timeout=60)).data, GenerateResult)
        await bus.publish(bus.subjects.generate("e0"), msgspec.structs.replace(request, request_id="later"))
        second = decode((await answers.next_msg(timeout=60)).data, GenerateResult)
    assert (first.request_id, first.status, second.request_id, second.status) == ("once", "ok", "later", "ok")
