"""Backpressure of single services on a real server: a stream without room and a server that is gone hold them, and end none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog
from admission_stage import Actors, Running, Stage
from conftest import NatsServer, eventually

import admission.bank_service
import admission.service
import rollouter.sampler_service
from schemas.health import Heartbeat
from schemas.table import STREAMS, Role, Stream
from services.bus import Bus
from services.config import Config, check
from services.consume import read_latest
from services.provision_run import provision_run
from tests.press_stand import Picture, lower_limit, picture

pytestmark = pytest.mark.timeout(90)
STEPS, BATCH, SIBLINGS, WINDOW = 40, 2, 2, 6


@pytest.fixture
def config(nats_url: str, run_name: str) -> Config:
    return check(
        {
            "run": {"name": run_name, "max_steps": STEPS},
            "nats": {"url": nats_url, "store_bytes": 256 * 2**20},
            "tasks": {"pool": 12},
            "window": {"max_groups": WINDOW, "adapt": False},
            "rollout": {"group_size": SIBLINGS},
            "engine": {"kind": "simulated"},
            "admission": {"groups_per_batch": BATCH, "max_lag": 4, "min_rewards": 1},
            "eval": {"every_steps": 0, "at_start": False, "at_end": False},
            "telemetry": {"heartbeat_s": 0.3},
        }
    )


class Scene:
    """Sampler, bank and admission, the real ones; the rest is played."""

    def __init__(self, bus: Bus, actors: Actors, services: dict[Role, Running]) -> None:
        self.bus = bus
        self.actors = actors
        self.services = services
        self.steps = 0

    async def train(self, steps: int) -> None:
        async with asyncio.timeout(60):
            await self.actors.train(range(self.steps, self.steps + steps))
        self.steps += steps

    def all_run(self) -> bool:
        return not any(service.task.done() for service in self.services.values())


@asynccontextmanager
async def scene(url: str, config: Config) -> AsyncIterator[Scene]:
    async with Stage(url, config) as stage:
        bus = await stage.bus(Role.OBSERVER)
        actors = Actors(bus, random.Random(3), SIBLINGS, BATCH)
        services = {
            Role.BANK: await stage.start(Role.BANK, admission.bank_service.serve),
            Role.ADMISSION: await stage.start(Role.ADMISSION, admission.service.serve),
            Role.SAMPLER: await stage.start(Role.SAMPLER, rollouter.sampler_service.serve),
        }
        rolling = asyncio.create_task(actors.roll_out())
        try:
            await actors.serve_version(0)
            yield Scene(bus, actors, services)
        finally:
            actors.stop.set()
            await asyncio.wait_for(rolling, 30)


def check_books(now: Picture) -> None:
    """Invariant 3, and the window at every instant."""
    books = now.account()
    assert books.holds and not books.abandoned, books.line()
    assert set(books.quarantined) <= {"stale"}, books.line()
    assert now.most_open() <= WINDOW


async def test_without_a_demand_ready_groups_fill_the_window_and_the_sampler_names_why(config: Config, nats_url: str) -> None:
    async with scene(nats_url, config) as on:

        async def full() -> bool:
            return len((await picture(on.bus)).open_and_ready()) == WINDOW

        await eventually(full, within_s=30)
        await asyncio.sleep(1.0)  # for whatever would go beyond
        assert len((await picture(on.bus)).leases) == WINDOW

        async def named() -> bool:
            beats = [item.decode(Heartbeat) for item in await read_latest(on.bus, Stream.REGISTRY, "reg.service.sampler.0")]
            return any(f"room in the window of {WINDOW}" in wait.what for beat in beats for wait in beat.waits)

        await eventually(named, within_s=20)
        await on.train(4)
        check_books(await picture(on.bus))


@pytest.mark.parametrize(
    ("stream", "role"), [(Stream.TASKS, Role.SAMPLER), (Stream.READY, Role.BANK), (Stream.LEDGER, Role.ADMISSION)]
)
async def test_a_full_stream_holds_its_writer_until_there_is_room(
    config: Config, nats_url: str, stream: Stream, role: Role
) -> None:
    """The writer ends with no error and drops nothing; log and heartbeat name stream, limit and since when."""
    async with scene(nats_url, config) as on:
        await on.train(1)
        name = on.bus.subjects.stream(stream)
        with structlog.testing.capture_logs() as logs:
            limit = await lower_limit(on.bus, stream, room_bytes=100)
            training = asyncio.create_task(on.train(2 * WINDOW // BATCH))  # more than was leased

            async def named() -> list[str]:
                beats = [item.decode(Heartbeat) for item in await read_latest(on.bus, Stream.REGISTRY, f"reg.service.{role}.0")]
                return [wait.culprit for beat in beats for wait in beat.waits if wait.what == f"room in stream {name}"]

            (culprit,) = await eventually(named, within_s=30)
            assert f"of max_bytes {limit}" in culprit and "`headrace provision`" in culprit
            (told,) = [entry for entry in logs if entry["event"] == "the stream is full"]
            assert told["stream"] == name and f"of max_bytes {limit}" in told["room"] and told["since"].startswith("20")
            assert on.all_run() and not training.done()
            (raised,) = await provision_run(config)
            assert raised.startswith(f"{name}: max_bytes {limit} -> ")
            await training
            await on.train(1)
            await eventually(lambda: [entry for entry in logs if entry["event"] == "the stream has room again"], within_s=20)
            assert not [entry for entry in logs if entry["log_level"] == "error"]
        assert on.all_run()
        check_books(await picture(on.bus))


async def test_a_limit_is_raised_by_who_is_asked_to_and_never_lowered(config: Config, nats_url: str) -> None:
    """More room than the table says is accepted, so services with the older setting start again beside it."""
    nats = config.nats.model_copy(update={"store_bytes": 2 * config.nats.store_bytes})
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.OBSERVER)
        await bus.store(bus.subjects.ready("g00000000"), b"kept", {})
        before = (await bus.stream_state(Stream.READY)).max_bytes
        assert len(await provision_run(config.model_copy(update={"nats": nats}))) == len(STREAMS) + 1
        assert (await bus.stream_state(Stream.READY)).max_bytes == 2 * before
        assert await provision_run(config) == []
        assert (await bus.stream_state(Stream.READY)).max_bytes == 2 * before
        assert (await bus.get(Stream.READY, 1)).data == b"kept"
        await stage.bus(Role.BANK, "older-setting")


async def test_a_server_that_is_gone_leaves_bounded_buffers_and_everything_goes_on(
    config: Config, nats_process: NatsServer, nats_url: str
) -> None:
    """What is kept meanwhile: a few requests' bytes per client, a handful of named waits, nothing that grows."""
    async with scene(nats_url, config) as on:
        await on.train(1)
        with structlog.testing.capture_logs() as logs:
            nats_process.kill()
            place = f"127.0.0.1:{nats_process.port}"
            training = asyncio.create_task(on.train(3))
            gone = "the server is gone"
            await eventually(lambda: sum(e["event"] == gone and e["server"] == place for e in logs) == 3, within_s=20)
            sizes = []
            for _ in range(3):
                await asyncio.sleep(2.0)
                waits = [len(service.context.health.snapshot().waits) for service in on.services.values()]
                unsent = [service.context.bus.client.pending_data_size for service in on.services.values()]
                sizes.append((max(waits), max(unsent)))
            assert max(waits for waits, _ in sizes) <= 4
            assert max(unsent for _, unsent in sizes) <= 64 * 1024
            culprits = [
                w.culprit for s in on.services.values() for w in s.context.health.snapshot().waits if w.what == "the server"
            ]
            assert culprits == [f"nats-server {place}"] * 3
            assert on.all_run()
            nats_process.start()
            await training
            await on.train(1)
            back = "the server is back"
            await eventually(lambda: sum(e["event"] == back and e["server"] == place for e in logs) == 3, within_s=20)
        assert on.all_run()
        check_books(await picture(on.bus))
