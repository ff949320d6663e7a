"""The bus reads: a fold sees every item once and in order, work consumers hand back what they could not do."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest
from admission_stage import connected, make_episode, make_lease
from conftest import NatsServer, eventually
from partition import Partition

from schemas.codec import CodecError, digest, encode
from schemas.lease import GroupLease
from schemas.policy import FleetVersions
from schemas.table import Role, Stream
from services.bus import Bus
from services.consume import fold, read_all, read_latest
from services.feed import Arrival, Feed, Source
from services.health import Health
from services.items import Item
from services.standing_wait import StandingWait
from services.work import Retry, WorkConsumer

pytestmark = pytest.mark.timeout(60)


async def lease_out(bus: Bus, ordinals: range) -> None:
    await asyncio.gather(*(bus.publish_once(bus.subjects.lease(n), make_lease(n)) for n in ordinals))


class Reader:
    """A live fold as a task; what it saw, in order."""

    def __init__(self, bus: Bus, **options: object) -> None:
        self.seen: list[Item | None] = []
        self.stop = asyncio.Event()
        self._task = asyncio.create_task(self._read(bus, options))

    async def _read(self, bus: Bus, options: dict) -> None:
        async for item in fold(bus, Stream.TASKS, stop=self.stop, **options):
            self.seen.append(item)

    def sequences(self) -> list[int]:
        return [item.seq for item in self.seen if item is not None]

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self._task, 5)


async def test_a_fold_gives_everything_in_order_and_says_when_it_has_caught_up(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.BANK) as bus:
        reader = Reader(bus)
        await eventually(lambda: reader.seen == [None], what="an empty log is caught up at once")
        await lease_out(bus, range(600))  # more than one pull
        await eventually(lambda: len(reader.sequences()) == 600)
        assert reader.sequences() == list(range(1, 601))
        late = Reader(bus, start=590)
        await eventually(lambda: late.seen and late.seen[-1] is None)
        assert late.sequences() == list(range(590, 601))
        assert None not in late.seen[:-1], "no word of having caught up before the end"
        await lease_out(bus, range(600, 603))
        await eventually(lambda: reader.sequences()[-1] == late.sequences()[-1] == 603)
        for each in (reader, late):
            await each.end()
        assert len(await read_all(bus, Stream.TASKS)) == 603


async def test_a_fold_lives_through_a_killed_server(nats_process: NatsServer, run_name: str) -> None:
    """Every item once, though the server dies under the reader and forgets its consumer."""
    async with connected(nats_process.url, run_name, Role.BANK) as bus:
        await lease_out(bus, range(50))
        reader = Reader(bus)
        await eventually(lambda: len(reader.sequences()) == 50)
        nats_process.kill()
        await asyncio.sleep(0.2)
        nats_process.start()
        await asyncio.wait_for(lease_out(bus, range(50, 80)), 30)
        await eventually(lambda: len(reader.sequences()) >= 80, within_s=20)
        assert reader.sequences() == list(range(1, 81))
        await reader.end()


async def test_what_is_lost_on_the_way_to_a_reader_is_no_hole(nats_process: NatsServer, run_name: str) -> None:
    """Without acknowledgements the server takes a delivery for done when it has sent it; the reader asks for it again."""
    stop, seen = asyncio.Event(), list[int]()
    async with connected(nats_process.url, run_name, Role.SAMPLER) as writer, Partition(nats_process.port) as network:
        reader = await Bus.connect(network.url, run_name, Role.OBSERVER, "r")
        name = writer.subjects.stream(Stream.TASKS)

        async def follow() -> None:
            async for item in fold(reader, Stream.TASKS, stop=stop):
                if item is not None:
                    seen.append(item.seq)

        async def is_sent() -> bool:
            (consumer,) = (await writer.request(f"CONSUMER.LIST.{name}", {}))["consumers"]
            return bool(consumer["delivered"]["stream_seq"] == 4)

        async with asyncio.TaskGroup() as group:
            group.create_task(follow())
            await writer.publish_once(writer.subjects.lease(0), make_lease(0))
            await eventually(lambda: seen == [1], within_s=20)
            network.lose()
            for n in range(1, 4):
                await writer.publish_once(writer.subjects.lease(n), make_lease(n))
            await eventually(is_sent, within_s=20, what="the server has sent them")
            await network.reset()
            await eventually(lambda: seen == [1, 2, 3, 4], within_s=30, what="the reader has asked for them again")
            await writer.publish_once(writer.subjects.lease(4), make_lease(4))
            await eventually(lambda: seen == [1, 2, 3, 4, 5], within_s=30)
            stop.set()
        assert not reader.alarms
        await reader.close()


async def test_a_fold_may_be_narrowed_and_keeps_the_streams_order(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.BANK) as bus:
        for n in range(4):
            lease = make_lease(n)
            await bus.publish_once(bus.subjects.episode(lease.group, 0), make_episode(lease, 0))
            await bus.publish(
                bus.subjects.active(), FleetVersions(run="t", target=n, incarnation=0, engines={}, oldest=n, newest=n)
            )
        one = await read_all(bus, Stream.EPISODES, "episode.g00000002.*")
        assert [item.subject.rsplit(".", 2)[1] for item in one] == ["g00000002"]
        assert await read_all(bus, Stream.EPISODES, "verdict.*.*") == []
        latest = await read_latest(bus, Stream.POLICY, "policy.active")
        assert [item.decode(FleetVersions).target for item in latest] == [3]
        assert await read_latest(bus, Stream.POLICY, "policy.engine.*") == []


async def collect(feed: Feed, arrivals: list[Arrival], stop: asyncio.Event) -> None:
    while not stop.is_set():
        arrivals += await feed.take(0.1)


async def test_a_feed_follows_several_logs_each_in_its_order_and_knows_when_it_is_complete(
    nats_url: str, run_name: str
) -> None:
    async with connected(nats_url, run_name, Role.SAMPLER) as bus:
        await lease_out(bus, range(40))
        sources = (
            Source(Stream.TASKS),
            Source(Stream.LEDGER),
            Source(Stream.POLICY, ("policy.active",), latest_per_subject=True),
        )
        feed, stop = Feed(bus, sources, limit=8), asyncio.Event()
        assert not feed.complete
        assert feed.behind() == "LEDGER, POLICY, TASKS"
        following = asyncio.create_task(feed.run(stop))
        await asyncio.sleep(0.5)
        first = await feed.take(1.0)
        assert len(first) <= 8 + len(sources), "what nobody takes is not fetched without bound"
        arrivals = list(first)
        collecting = asyncio.create_task(collect(feed, arrivals, stop))
        await eventually(lambda: feed.complete)
        await lease_out(bus, range(40, 45))
        await bus.publish(
            bus.subjects.active(), FleetVersions(run="t", target=1, incarnation=0, engines={}, oldest=1, newest=1)
        )
        await eventually(lambda: sum(a.item is not None for a in arrivals) == 46)
        tasks = [a.item.seq for a in arrivals if a.item is not None and a.stream is Stream.TASKS]
        assert tasks == list(range(1, 46))
        stop.set()
        await asyncio.wait_for(asyncio.gather(following, collecting), 5)


def rollouter(bus: Bus, **options: object) -> WorkConsumer:
    return WorkConsumer(bus, "rollouter", **{"capacity": 4, "drain_s": 3.0, **options})


async def test_work_is_done_within_capacity_and_handed_back_on_retry(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.ROLLOUTER) as bus:
        await lease_out(bus, range(12))
        consumer, stop = rollouter(bus), asyncio.Event()
        tries: Counter[int] = Counter()
        running = most = 0

        async def work(item: Item) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(0.02)
                ordinal = item.decode(GroupLease).ordinal
                tries[ordinal] += 1
                if ordinal % 5 == 0 and tries[ordinal] == 1:
                    raise Retry("not now", delay_s=0.1)
            finally:
                running -= 1

        task = asyncio.create_task(consumer.run(work, stop))
        await eventually(lambda: consumer.done == 12, within_s=20)
        assert set(tries) == set(range(12))
        assert all(tries[n] == (2 if n % 5 == 0 else 1) for n in tries)
        assert most <= 4
        stop.set()
        await asyncio.wait_for(task, 10)


async def test_a_damaged_message_is_refused_and_the_work_goes_on(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.ROLLOUTER) as bus:
        await bus.store(bus.subjects.lease(0), b"no message", {})
        await lease_out(bus, range(1, 3))
        consumer, stop = rollouter(bus), asyncio.Event()
        seen: list[int] = []

        async def work(item: Item) -> None:
            seen.append(item.decode(GroupLease).ordinal)

        task = asyncio.create_task(consumer.run(work, stop))
        await eventually(lambda: sorted(seen) == [1, 2])
        stop.set()
        await asyncio.wait_for(task, 10)
        info = await bus.request(f"CONSUMER.INFO.{consumer.stream}.{consumer.name}", {})
        assert (info["num_ack_pending"], info["num_pending"]) == (0, 0)


async def test_damage_that_a_handler_meets_elsewhere_hands_the_message_back(
    nats_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole message is not thrown away because something else that its handler read is damaged."""
    monkeypatch.setattr("services.work._DAMAGE_RETRY_S", 0.1)
    async with connected(nats_url, run_name, Role.ROLLOUTER) as bus:
        await lease_out(bus, range(1))
        consumer, stop = rollouter(bus), asyncio.Event()
        tries: list[int] = []

        async def work(item: Item) -> None:
            tries.append(item.decode(GroupLease).ordinal)
            if len(tries) == 1:
                raise CodecError("a turn in the journal is damaged")

        task = asyncio.create_task(consumer.run(work, stop))
        await eventually(lambda: consumer.done == 1)
        assert tries == [0, 0]
        stop.set()
        await asyncio.wait_for(task, 10)


async def test_what_a_stopped_worker_could_not_finish_comes_to_another_at_once(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.ROLLOUTER) as bus:
        await lease_out(bus, range(3))
        started: list[int] = []

        async def never(item: Item) -> None:
            started.append(item.seq)
            await asyncio.sleep(60)

        first, stop = rollouter(bus, drain_s=0.2), asyncio.Event()
        task = asyncio.create_task(first.run(never, stop))
        await eventually(lambda: len(started) == 3)
        stop.set()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 10)
        done: list[int] = []

        async def finish(item: Item) -> None:
            done.append(item.seq)

        second, stop = rollouter(bus), asyncio.Event()
        task = asyncio.create_task(second.run(finish, stop))
        await eventually(lambda: sorted(done) == [1, 2, 3], within_s=8, what="well before ack_wait")
        stop.set()
        await asyncio.wait_for(task, 10)


async def test_work_goes_on_after_a_killed_server(nats_process: NatsServer, run_name: str) -> None:
    """Redelivery may repeat work, never lose it; once-only writes make the repeat harmless."""
    async with connected(nats_process.url, run_name, Role.ROLLOUTER) as bus:
        consumer, stop = rollouter(bus), asyncio.Event()

        async def work(item: Item) -> None:
            lease = item.decode(GroupLease)
            await bus.publish_once(bus.subjects.episode(lease.group, 0), make_episode(lease, 0))

        task = asyncio.create_task(consumer.run(work, stop))
        await lease_out(bus, range(10))
        nats_process.kill()
        await asyncio.sleep(0.2)
        nats_process.start()
        await asyncio.wait_for(lease_out(bus, range(10, 20)), 30)
        await eventually(lambda: bus.last_sequence(Stream.EPISODES), within_s=20)

        async def whole() -> bool:
            return await bus.last_sequence(Stream.EPISODES) == 20

        await eventually(whole, within_s=30)
        subjects = {item.subject for item in await read_all(bus, Stream.EPISODES)}
        assert len(subjects) == 20
        assert all(digest(item.data) == item.digest for item in await read_all(bus, Stream.EPISODES))
        stop.set()
        await asyncio.wait_for(task, 15)


async def test_a_consumer_that_differs_from_the_table_is_an_error(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.ROLLOUTER) as bus:
        consumer = rollouter(bus)
        config = {"durable_name": consumer.name, "filter_subject": consumer.filter, "ack_policy": "none"}
        api = f"CONSUMER.CREATE.{consumer.stream}.{consumer.name}.{consumer.filter}"
        await bus.request(api, {"stream_name": consumer.stream, "config": {"name": consumer.name, **config}})
        with pytest.raises(RuntimeError, match=r"rollouter|consumer"):
            await consumer.create()


async def test_a_standing_wait_keeps_its_since_until_its_reason_changes(nats_url: str, run_name: str) -> None:
    """Invariant 11: the culprit is named with the time since which one waits for it."""
    async with connected(nats_url, run_name, Role.BANK) as bus:
        health = Health(bus, 1.0)
        waiting = StandingWait(health, 60)
        waiting.on("a demand", "trainer", "the wait goes on")
        (first,) = health.snapshot().waits
        await asyncio.sleep(0.01)
        waiting.on("a demand", "trainer", "the wait goes on")
        assert health.snapshot().waits == (first,)
        assert first.deadline_ns - first.since_ns == 60_000_000_000
        waiting.on("a group", "bank", "the wait goes on")
        (second,) = health.snapshot().waits
        assert (second.culprit, second.since_ns > first.since_ns) == ("bank", True)
        waiting.over()
        waiting.over()
        assert health.snapshot().waits == ()
        assert encode(health.snapshot())
