"""The bus writes: once means for ever, a log has one writer, and nothing is lost while the server is away or full."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from admission_stage import connected, make_lease
from conftest import NatsServer, eventually

from schemas.codec import MAX_WIRE_BYTES, digest, encode
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, AbandonReason
from schemas.table import Role, Stream
from services.bus import Bus
from services.consume import read_all
from services.items import DIGEST_HEADER, BusError, Fenced, IntegrityError, OnceConflict
from services.nats_server import free_port
from services.provision import TableMismatch, provision

pytestmark = pytest.mark.timeout(60)


def entry(name: str) -> AbandonEntry:
    return AbandonEntry(
        run="t", group=name, ready_seq=0, reason=AbandonReason.POISON, detail="", family="files", settings_hash="h"
    )


async def test_once_means_once_for_ever(nats_url: str, run_name: str) -> None:
    """Invariant 4: a repeat is recognised by its bytes, anything else on the subject is refused."""
    async with connected(nats_url, run_name, Role.SAMPLER) as bus:
        lease = make_lease(0)
        first = await bus.publish_once(bus.subjects.lease(0), lease)
        again = await bus.publish_once(bus.subjects.lease(0), lease)
        assert (again.seq, again.digest, again.duplicate, first.duplicate) == (first.seq, first.digest, True, False)
        with pytest.raises(OnceConflict, match=r"task\.lease\.0 already holds"):
            await bus.publish_once(bus.subjects.lease(0), make_lease(0, seed=99))
        assert len(await read_all(bus, Stream.TASKS)) == 1


async def test_of_many_writers_at_once_one_wins_and_all_learn_it(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.SAMPLER, "a") as bus:
        others = [await Bus.connect(nats_url, run_name, Role.SAMPLER, f"b{n}") for n in range(3)]
        same = await asyncio.gather(*(each.publish_once(bus.subjects.lease(1), make_lease(1)) for each in [bus, *others] * 3))
        assert len({published.seq for published in same}) == 1
        assert sum(not published.duplicate for published in same) == 1
        different = await asyncio.gather(
            *(each.publish_once(bus.subjects.lease(2), make_lease(2, seed=n)) for n, each in enumerate([bus, *others])),
            return_exceptions=True,
        )
        assert sum(isinstance(result, OnceConflict) for result in different) == 3
        for other in others:
            await other.close()


async def test_a_log_refuses_a_second_writer(nats_url: str, run_name: str) -> None:
    """Two admissions cannot both decide: the append names the sequence that it was decided after."""
    async with connected(nats_url, run_name, Role.ADMISSION) as bus:
        subject = bus.subjects.abandon
        first = await bus.append(subject("g1"), entry("g1"), after=0)
        assert first.seq == 1
        repeated = await bus.append(subject("g1"), entry("g1"), after=0)
        assert (repeated.seq, repeated.duplicate) == (1, True)
        with pytest.raises(Fenced, match="another writer"):
            await bus.append(subject("g2"), entry("g2"), after=0)
        with pytest.raises(Fenced):
            await bus.append(subject("g1"), entry("g1"), after=1)
        second = await bus.append(subject("g2"), entry("g2"), after=1)
        assert second.seq == 2
        assert [item.subject for item in await read_all(bus, Stream.LEDGER)] == [subject("g1"), subject("g2")]


async def test_a_publish_outlives_a_killed_server(nats_process: NatsServer, run_name: str) -> None:
    """What was asked before the crash is stored once after it; nothing acknowledged is lost."""
    async with connected(nats_process.url, run_name, Role.SAMPLER) as bus:
        stored = [await bus.publish_once(bus.subjects.lease(n), make_lease(n)) for n in range(5)]
        nats_process.kill()
        pending = [asyncio.create_task(bus.publish_once(bus.subjects.lease(n), make_lease(n))) for n in range(5, 9)]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in pending)
        nats_process.start()
        later = await asyncio.wait_for(asyncio.gather(*pending), 30)
        items = await read_all(bus, Stream.TASKS)
        assert sorted(item.seq for item in items) == list(range(1, 10))
        assert {item.digest for item in items} == {published.digest for published in [*stored, *later]}


async def test_a_full_stream_holds_the_publisher_and_drops_nothing(nats_url: str, run_name: str) -> None:
    """Invariant 3: no queue drops silently, none is unbounded."""
    bus = await Bus.connect(nats_url, run_name, Role.SAMPLER, "0")
    await provision(bus, 64 * 2**20)
    noise = np.random.default_rng(0).integers(32, 126, 300_000, dtype=np.uint8).tobytes().decode()
    bus.give_up_s = 1.0
    sent = 0

    async def fill() -> None:
        nonlocal sent
        for n in range(20):
            await bus.publish_once(bus.subjects.lease(n), make_lease(n, environment=noise))
            sent += 1

    with pytest.raises(BusError, match="stream refuses"):
        await fill()
    assert 2 <= sent < 20
    items = await read_all(bus, Stream.TASKS)
    assert [item.decode(GroupLease).ordinal for item in items] == list(range(sent))
    await bus.close()


async def test_a_message_above_the_limit_never_reaches_the_client(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.SAMPLER) as bus:
        with pytest.raises(BusError, match="exceed the message limit"):
            await bus.store(bus.subjects.lease(0), b"x" * (MAX_WIRE_BYTES + 1), {})
        assert await bus.last_sequence(Stream.TASKS) == 0


async def test_single_reads(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.SAMPLER) as bus:
        before = time.time_ns()
        assert await bus.last(bus.subjects.lease(0)) is None
        published = await bus.publish_once(bus.subjects.lease(0), make_lease(0))
        for item in (await bus.last(bus.subjects.lease(0)), await bus.get(Stream.TASKS, 1)):
            assert item is not None
            assert (item.seq, item.digest, item.decode(GroupLease)) == (1, published.digest, make_lease(0))
            assert item.data == encode(make_lease(0))
            assert abs(item.time_ns - before) < 60e9
        with pytest.raises(IntegrityError, match="sequence 2 is missing"):
            await bus.get(Stream.TASKS, 2)


async def test_bytes_that_do_not_match_their_digest_are_an_alarm(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.SAMPLER) as bus:
        good = encode(make_lease(0))
        await bus.jetstream.publish(bus.subjects.lease(0), good[:-1] + b"?", headers={DIGEST_HEADER: digest(good)})
        with pytest.raises(IntegrityError, match="carries digest"):
            await bus.get(Stream.TASKS, 1)
        with pytest.raises(IntegrityError, match="carries digest"):
            await read_all(bus, Stream.TASKS)


async def test_no_server_is_an_error_that_names_it_in_time() -> None:
    begun = time.monotonic()
    port = free_port()
    with pytest.raises(BusError, match=f"no NATS server answered at 127.0.0.1:{port} within 1 s"):
        await Bus.connect(f"nats://127.0.0.1:{port}", "t", Role.BANK, "0", timeout_s=1)
    assert time.monotonic() - begun < 8


async def test_startup_verifies_the_table_and_fails_with_a_diff(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.BANK) as bus:
        await provision(bus, 256 * 2**20)
        with pytest.raises(TableMismatch, match=r"max_bytes: table says \d+, server has \d+"):
            await provision(bus, 512 * 2**20)


async def test_a_client_that_is_closed_says_so(nats_url: str, run_name: str) -> None:
    """A closed client does not come back, so its process must end and be started again."""
    fatal: list[str] = []
    bus = await Bus.connect(nats_url, run_name, Role.BANK, "0", on_fatal=fatal.append)
    await bus.client.close()
    await eventually(lambda: fatal)
    with pytest.raises(BusError, match="closed"):
        await bus.store(bus.subjects.ready("g1"), b"x", {})
