"""The server away for longer than anything but patience lasts: producers hold what they have in hand and
go on by themselves."""

from __future__ import annotations

import asyncio
import time

import pytest
from admission_stage import make_lease
from conftest import NatsServer, eventually
from structlog.testing import capture_logs
from test_bus_writes import entry

from schemas.table import Role, Stream
from services.bus import Bus
from services.consume import read_all
from services.items import BusError
from services.provision import provision

pytestmark = pytest.mark.timeout(180)
STORE_BYTES = 256 * 2**20
AWAY_S = 12.0  # longer than a publish waits for its acknowledgement and than every pause between tries
WRITERS = 20


async def test_every_producer_holds_and_goes_on_by_itself(nats_process: NatsServer, run_name: str) -> None:
    """Invariants 3, 4 and 11: `publish`, `publish_once` and `append`; nothing lost, nothing doubled, nothing piled up."""
    bus = await Bus.connect(nats_process.url, run_name, Role.SAMPLER, "0")
    await provision(bus, STORE_BYTES)
    stop = asyncio.Event()
    acknowledged: dict[Stream, dict[str, int]] = {Stream.TASKS: {}, Stream.LEDGER: {}, Stream.TURNS: {}}

    async def once(writer: int) -> None:
        number = writer
        while not stop.is_set():
            published = await bus.publish_once(bus.subjects.lease(number), make_lease(number))
            acknowledged[Stream.TASKS][bus.subjects.lease(number)] = published.seq
            number += WRITERS

    async def plain(writer: int) -> None:
        number = 0
        while not stop.is_set():
            subject = bus.subjects.turn(f"g{writer}", 0, 0, number)
            acknowledged[Stream.TURNS][subject] = (await bus.publish(subject, make_lease(number))).seq
            number += 1

    async def ledger() -> None:
        after = 0
        while not stop.is_set():
            subject = bus.subjects.abandon(f"g{after}")
            after = (await bus.append(subject, entry(f"g{after}"), after=after)).seq
            acknowledged[Stream.LEDGER][subject] = after

    def count() -> list[int]:
        return [len(stored) for stored in acknowledged.values()]

    with capture_logs() as said:
        async with asyncio.TaskGroup() as group:
            writing = [group.create_task(write(n)) for n in range(WRITERS) for write in (once, plain)]
            writing.append(group.create_task(ledger()))
            await eventually(lambda: min(count()) > 5, within_s=60)
            nats_process.kill()
            await eventually(lambda: not bus.client.is_connected, within_s=30)
            buffered = bus.client.pending_data_size  # what was being sent when the server died
            before, begun = count(), time.monotonic()
            while time.monotonic() - begun < AWAY_S:
                await asyncio.sleep(0.5)
                assert bus.client.pending_data_size <= buffered, "no try leaves a copy behind"
                assert count() == before
            nats_process.start()
            await eventually(lambda: all(now >= then + 30 for now, then in zip(count(), before, strict=True)), within_s=90)
            stop.set()
        warned = [line for line in said if line["event"] == "publish is held back"]
        assert any("no connection to the server" in line["reason"] and line["for_s"] > 5 for line in warned)
    for stream in (Stream.TASKS, Stream.LEDGER):
        assert {item.subject: item.seq for item in await read_all(bus, stream)} == acknowledged[stream]
        assert await bus.last_sequence(stream) == len(acknowledged[stream])
    turns = await read_all(bus, Stream.TURNS)
    assert {item.subject for item in turns} == set(acknowledged[Stream.TURNS])
    # what was sent when the server died may be stored before and after, once for each writer that had no answer yet
    assert len(turns) - len(acknowledged[Stream.TURNS]) <= WRITERS
    await bus.close()


async def test_a_bound_that_is_over_names_the_reason(nats_process: NatsServer, run_name: str) -> None:
    bus = await Bus.connect(nats_process.url, run_name, Role.SAMPLER, "0")
    await provision(bus, STORE_BYTES)
    nats_process.kill()
    try:
        await eventually(lambda: not bus.client.is_connected, within_s=30)
        with pytest.raises(BusError, match=r"not stored within \d+ s; there is no connection to the server"):
            await bus.publish_once(bus.subjects.lease(0), make_lease(0), give_up_s=1.0)
    finally:
        nats_process.start()
    await eventually(lambda: bus.client.is_connected, within_s=30)
    assert (await bus.publish_once(bus.subjects.lease(0), make_lease(0))).seq == 1
    await bus.close()


async def test_patience_that_is_lost_meanwhile_ends_what_is_held(nats_process: NatsServer, run_name: str) -> None:
    """A service that drains lowers it: a message and a call that began under the longer bound end under the shorter one."""
    bus = await Bus.connect(nats_process.url, run_name, Role.SAMPLER, "0")
    await provision(bus, STORE_BYTES)
    nats_process.kill()
    await eventually(lambda: not bus.client.is_connected, within_s=30)
    held = asyncio.create_task(bus.publish_once(bus.subjects.lease(0), make_lease(0)))
    asked = asyncio.create_task(bus.last_sequence(Stream.TASKS))
    await asyncio.sleep(2)
    assert not held.done() and not asked.done()
    bus.give_up_s = 1.0
    for waiting in (held, asked):
        with pytest.raises(BusError):
            await asyncio.wait_for(waiting, 60)
    nats_process.start()
    await bus.close()


async def test_no_password_is_said_when_no_server_answers() -> None:
    with pytest.raises(BusError, match=r"no NATS server answered at 127\.0\.0\.1:9") as error:
        await Bus.connect("nats://someone:secret@127.0.0.1:9", "r", Role.SAMPLER, "0", timeout_s=0.5)
    assert "secret" not in str(error.value)
