"""A connection that is cut, held or deaf: what was stored counts once, though its publisher never heard of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from loadtests.chaos.proxy import Proxy
from schemas.table import Role, Stream
from services.bus import Bus
from services.consume import fold, read_all
from services.nats_server import free_port
from tests.admission_stage import connected, make_lease
from tests.conftest import NatsServer, eventually

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def proxy(nats_process: NatsServer) -> AsyncIterator[Proxy]:
    proxy = Proxy(free_port())
    proxy.target = nats_process.port
    await proxy.start()
    yield proxy
    await proxy.stop()


async def stored(bus: Bus) -> int:
    return await bus.last_sequence(Stream.TASKS)


async def test_an_acknowledgement_that_is_lost_makes_no_second_message(nats_url: str, run_name: str, proxy: Proxy) -> None:
    """Invariant 4: the publisher tries again, and learns that it was there."""
    async with connected(nats_url, run_name, Role.OBSERVER) as beside:
        bus = await Bus.connect(f"nats://127.0.0.1:{proxy.port}", run_name, Role.SAMPLER, "0")
        async with proxy.disturbed("deaf"):
            publishing = asyncio.create_task(bus.publish_once(bus.subjects.lease(0), make_lease(0)))
            await eventually(lambda: stored(beside), within_s=20, what="the server has it")
            assert not publishing.done()
        published = await asyncio.wait_for(publishing, 60)
        assert published.duplicate and published.seq == 1
        assert proxy.cut_connections >= 1
        await bus.publish_once(bus.subjects.lease(1), make_lease(1))
        assert [item.seq for item in await read_all(beside, Stream.TASKS)] == [1, 2]
        await bus.close()


async def test_a_fold_behind_a_connection_that_is_held_and_cut_sees_every_item_once(
    nats_url: str, run_name: str, proxy: Proxy
) -> None:
    async with connected(nats_url, run_name, Role.SAMPLER) as beside:
        bus = await Bus.connect(f"nats://127.0.0.1:{proxy.port}", run_name, Role.BANK, "0")
        for n in range(20):
            await beside.publish_once(beside.subjects.lease(n), make_lease(n))
        async with proxy.disturbed("hold"):
            reading = asyncio.create_task(read_all(bus, Stream.TASKS))
            await asyncio.sleep(1.0)
            assert not reading.done()
        assert [item.seq for item in await asyncio.wait_for(reading, 60)] == list(range(1, 21))
        async with proxy.disturbed("cut"):
            assert [item.seq for item in await asyncio.wait_for(read_all(bus, Stream.TASKS), 60)] == list(range(1, 21))
        await bus.close()


@pytest.mark.parametrize("patterns", [(), ("task.lease.*",)], ids=["whole", "filtered"])
async def test_what_a_dead_connection_had_been_sent_is_read_again(
    nats_url: str, run_name: str, proxy: Proxy, patterns: tuple[str, ...]
) -> None:
    """Invariants 3 and 11: the last message of a log, which nothing follows that could show the gap; and it is no hole."""
    async with connected(nats_url, run_name, Role.SAMPLER) as beside:
        bus = await Bus.connect(f"nats://127.0.0.1:{proxy.port}", run_name, Role.BANK, "0")
        seen: list[int] = []
        stop = asyncio.Event()

        async def follow() -> None:
            async for item in fold(bus, Stream.TASKS, *patterns, stop=stop):
                if item is not None:
                    seen.append(item.seq)

        following = asyncio.create_task(follow())
        await beside.publish_once(beside.subjects.lease(0), make_lease(0))
        await eventually(lambda: seen == [1], within_s=20)
        await asyncio.sleep(1.5)  # its pull for what comes next waits at the server
        async with proxy.disturbed("deaf"):
            for n in (1, 2):
                await beside.publish_once(beside.subjects.lease(n), make_lease(n))
            await asyncio.sleep(1.0)  # the server has sent them
        await eventually(lambda: len(seen) >= 3 or following.done(), within_s=30, what="what was sent in vain comes again")
        await beside.publish_once(beside.subjects.lease(3), make_lease(3))
        await eventually(lambda: len(seen) >= 4 or following.done(), within_s=30)
        stop.set()
        await asyncio.wait_for(following, 30)
        assert seen == [1, 2, 3, 4]
        assert not bus.alarms
        await bus.close()
