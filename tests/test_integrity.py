"""Readers of a store that was really damaged: what is missing is found, named and said aloud; no reader hangs or is fooled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from admission_stage import connected, make_episode, make_lease, make_verdict
from conftest import NatsServer, eventually
from damage import cut_block, damaged, flip_bit

from schemas.dead_letter import DeadLetter, LostRange
from schemas.health import Heartbeat
from schemas.policy import FleetVersions
from schemas.table import Role, Stream
from services.bus import Bus
from services.config import check
from services.consume import events, fold, read_all, read_events, read_latest
from services.continuity import Hole, Standing, runs, without
from services.dead_letters import pass_over
from services.health import Health
from services.high_water import cut_short
from services.items import DIGEST_HEADER, BusError, IntegrityError, Item, Rewound, StreamState
from services.progress import Progress
from services.pull import Damaged

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of its own for a test that damages its store."""
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


async def fill(bus: Bus, ordinals: range, slots: int = 1) -> None:
    """Episodes and verdicts, in turns, on EPISODES: two sequences for each slot."""
    for ordinal in ordinals:
        lease = make_lease(ordinal, group_size=slots)
        for slot in range(slots):
            episode = make_episode(lease, slot)
            stored = await bus.publish_once(bus.subjects.episode(lease.group, slot), episode)
            await bus.publish_once(bus.subjects.verdict(lease.group, slot), make_verdict(episode, stored.digest))


async def lost_ranges(bus: Bus) -> set[tuple[str, int, int, str]]:
    records = [item.decode(LostRange) for item in await read_all(bus, Stream.DEAD, "dead.EPISODES.*")]
    return {(record.stream, record.first_seq, record.last_seq, record.how) for record in records}


def seqs(found: list[Item | Damaged | Hole]) -> list[int]:
    return [event.seq for event in found if isinstance(event, Item)]


def holes(found: list[Item | Damaged | Hole]) -> list[Hole]:
    return [event for event in found if isinstance(event, Hole)]


async def test_a_flipped_bit_that_the_server_passes_over_in_silence_is_found_by_every_reader(
    server: NatsServer, run_name: str
) -> None:
    async with connected(server.url, run_name, Role.BANK) as bus:
        await fill(bus, range(10))
        async with damaged(server):
            flip_bit(server, run_name, Stream.EPISODES, bus.subjects.episode("g00000004", 0))  # sequence 9
            flip_bit(server, run_name, Stream.EPISODES, bus.subjects.verdict("g00000009", 0))  # sequence 20, the last
        state = await bus.stream_state(Stream.EPISODES)
        assert (state.messages, state.deleted) == (20, ()), "the server itself notices nothing"
        whole = await read_events(bus, Stream.EPISODES)
        gone = [Hole(Stream.EPISODES, 9, 9, "unreadable"), Hole(Stream.EPISODES, 20, 20, "unreadable")]
        assert holes(whole) == gone
        assert seqs(whole) == [seq for seq in range(1, 21) if seq not in (9, 20)]
        assert [type(event) for event in whole[7:10]] == [Item, Hole, Item], "a hole stands where it is"
        narrowed = await read_events(bus, Stream.EPISODES, "episode.*.*")
        assert set(holes(narrowed)) == set(gone)
        assert seqs(narrowed) == [seq for seq in range(1, 21, 2) if seq != 9]
        with pytest.raises(IntegrityError, match="sequence 9 is missing"):
            await read_all(bus, Stream.EPISODES)
        assert len(await read_all(bus, Stream.EPISODES, "verdict.*.*")) == 9
        assert bus.alarms["lost_sequences"] == 2
    async with connected(server.url, run_name, Role.OBSERVER) as bus:
        assert await lost_ranges(bus) == {("EPISODES", 9, 9, "unreadable"), ("EPISODES", 20, 20, "unreadable")}


async def test_a_narrowed_reader_that_stays_goes_on_with_what_comes_after_an_unreadable_message(
    server: NatsServer, run_name: str
) -> None:
    async with connected(server.url, run_name, Role.BANK) as bus:
        await fill(bus, range(3))
        async with damaged(server):
            flip_bit(server, run_name, Stream.EPISODES, bus.subjects.episode("g00000002", 0))
        stop, seen, caught_up = asyncio.Event(), list[int](), asyncio.Event()

        async def read() -> None:
            async for item in fold(bus, Stream.EPISODES, "episode.*.*", stop=stop):
                if item is None:
                    caught_up.set()
                else:
                    seen.append(item.seq)

        reading = asyncio.create_task(read())
        await asyncio.wait_for(caught_up.wait(), 60)
        assert seen == [1, 3]
        await fill(bus, range(3, 5))
        await eventually(lambda: seen == [1, 3, 7, 9], within_s=60)
        stop.set()
        await asyncio.wait_for(reading, 20)


async def test_a_cut_block_is_a_hole_that_the_server_lists_and_readers_name(server: NatsServer, run_name: str) -> None:
    async with connected(server.url, run_name, Role.BANK) as bus:
        await fill(bus, range(10))
        async with damaged(server):
            cut_block(server, run_name, Stream.EPISODES, bus.subjects.episode("g00000007", 0))  # sequence 15 and on
        assert (await bus.stream_state(Stream.EPISODES)).deleted == tuple(range(15, 21))
        await fill(bus, range(20, 22))
        for patterns in ((), ("episode.*.*",), ("verdict.*.*",)):
            found = await read_events(bus, Stream.EPISODES, *patterns)
            assert holes(found) == [Hole(Stream.EPISODES, 15, 20, "deleted")]
        with pytest.raises(IntegrityError, match="sequences 15 to 20 are missing from the store"):
            await read_all(bus, Stream.EPISODES)
        assert len(await read_all(bus, Stream.EPISODES, "episode.*.*")) == 9
        assert bus.alarms["lost_sequences"] == 1


async def test_a_log_that_was_cut_short_is_told_to_whoever_had_read_further(server: NatsServer, run_name: str) -> None:
    """After a crash the server gives the lost sequences to other messages."""
    async with connected(server.url, run_name, Role.BANK) as bus:
        await fill(bus, range(10))
        stop, caught_up = asyncio.Event(), asyncio.Event()

        async def read(*patterns: str) -> None:
            async for item in fold(bus, Stream.EPISODES, *patterns, stop=stop):
                if item is None:
                    caught_up.set()

        whole = asyncio.create_task(read())
        await asyncio.wait_for(caught_up.wait(), 30)
        caught_up.clear()
        narrowed = asyncio.create_task(read("verdict.*.*"))
        await asyncio.wait_for(caught_up.wait(), 30)
        await bus.publish(bus.subjects.service_heartbeat(Role.BANK, "0"), Health(bus, 1.0).snapshot())
        async with damaged(server, crash=True):
            cut_block(server, run_name, Stream.EPISODES, bus.subjects.episode("g00000005", 0))  # sequence 11 and on
        for reading in (whole, narrowed):
            with pytest.raises(Rewound, match="EPISODES: sequences 11 to 20 are gone, the log ends before"):
                await asyncio.wait_for(reading, 60)
        assert await bus.last_sequence(Stream.EPISODES) == 10
        assert holes(await read_events(bus, Stream.EPISODES)) == [], "a new reader cannot know"
        assert await cut_short(bus) == [Hole(Stream.EPISODES, 11, 20, "truncated")], "but heartbeats do"
        assert ("EPISODES", 11, 20, "truncated") in await lost_ranges(bus)


async def test_a_log_that_grew_again_after_it_was_cut_short_does_not_fool_its_reader(server: NatsServer, run_name: str) -> None:
    async with connected(server.url, run_name, Role.BANK) as bus:
        await fill(bus, range(5))
        stop, caught_up = asyncio.Event(), asyncio.Event()

        async def read() -> None:
            async for item in fold(bus, Stream.EPISODES, stop=stop):
                if item is None:
                    caught_up.set()

        reading = asyncio.create_task(read())
        await asyncio.wait_for(caught_up.wait(), 30)
        async with damaged(server, crash=True):
            cut_block(server, run_name, Stream.EPISODES, bus.subjects.verdict("g00000004", 0))  # sequence 10
            server.start()
            async with connected(server.url, run_name, Role.ROLLOUTER) as other:
                await fill(other, range(7, 12))
            server.kill()
        with pytest.raises(Rewound, match="sequence 10 is gone"):
            await asyncio.wait_for(reading, 60)


async def test_a_stream_that_was_made_anew_ends_its_readers(server: NatsServer, run_name: str) -> None:
    async with connected(server.url, run_name, Role.BANK) as bus:
        await fill(bus, range(3))
        stop, caught_up = asyncio.Event(), asyncio.Event()

        async def read() -> None:
            async for item in fold(bus, Stream.EPISODES, stop=stop):
                if item is None:
                    caught_up.set()

        reading = asyncio.create_task(read())
        await asyncio.wait_for(caught_up.wait(), 30)
        await bus.request(f"STREAM.DELETE.{bus.subjects.stream(Stream.EPISODES)}", {})
        async with connected(server.url, run_name, Role.ROLLOUTER) as other:
            await fill(other, range(4))
            with pytest.raises(BusError, match=r"stream not found|the stream was made anew"):  # whichever it sees first
                await asyncio.wait_for(reading, 60)


def test_what_the_server_says_of_a_log_is_held_against_what_was_read_of_it() -> None:
    def state(**changes: object) -> StreamState:
        whole = StreamState(created="then", messages=10, first_seq=1, last_seq=10, deleted=(), max_bytes=-1)
        return replace(whole, **changes)

    standing = Standing(Stream.READY, 1)
    assert standing.look(state(deleted=(2, 3))) == [Hole(Stream.READY, 2, 3, "deleted")]
    assert standing.look(state(deleted=(2, 3))) == [], "told once"
    assert standing.end_at(4) == [Hole(Stream.READY, 1, 1, "unreadable"), Hole(Stream.READY, 4, 4, "unreadable")]
    standing.pass_to(5, 0)
    assert standing.look(state(deleted=(2, 3, 6))) == [Hole(Stream.READY, 6, 6, "deleted")]
    with pytest.raises(Rewound, match="sequence 5 is missing from the store, though it had been read"):
        standing.look(state(deleted=(2, 3, 5, 6)))
    with pytest.raises(Rewound, match="sequence 5 is gone, the log ends before"):
        standing.look(state(last_seq=4, messages=4))
    with pytest.raises(Rewound, match="made anew"):
        standing.look(state(created="now"))
    assert Standing(Stream.READY, 1).look(state(first_seq=4)) == [Hole(Stream.READY, 1, 3, "deleted")]
    assert Standing(Stream.READY, 4).look(state(first_seq=4)) == []
    assert Standing(Stream.READY, 1).look(state(messages=0, first_seq=11)) == [Hole(Stream.READY, 1, 10, "deleted")]
    assert Standing(Stream.READY, 1).look(state(messages=0, first_seq=0, last_seq=0)) == []


async def test_bytes_that_are_not_those_of_their_digest_are_passed_over_and_kept(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.BANK) as bus:
        await fill(bus, range(2))
        subject = bus.subjects.episode("g00000002", 0)
        await bus.jetstream.publish(subject, b"other bytes", headers={DIGEST_HEADER: "0" * 64, "From": "nobody"})
        await fill(bus, range(3, 4))
        found = await read_events(bus, Stream.EPISODES)
        (bad,) = [event for event in found if isinstance(event, Damaged)]
        assert (bad.item.seq, bad.declared, bad.item.data) == (5, "0" * 64, b"other bytes")
        assert "carries digest 000000000000" in bad.reason
        for _ in range(2):
            await pass_over(bus, bad)
        assert bus.alarms["unreadable"] == 1
        letters = [item.decode(DeadLetter) for item in await read_all(bus, Stream.DEAD)]
        (letter,) = letters
        assert (letter.reason, letter.subject, letter.stream, letter.seq) == ("digest_mismatch", subject, "EPISODES", 5)
        assert (letter.body, letter.declared_digest, letter.headers["From"]) == (b"other bytes", "0" * 64, "nobody")
        assert (letter.refused_by, letter.digest) == ("bank-0", bad.item.digest)


async def test_a_damaged_value_is_passed_over_since_another_one_follows(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.PARAM_SYNC) as bus:
        fleets = [FleetVersions(run="t", target=n, incarnation=0, engines={}, oldest=n, newest=n) for n in range(2)]
        await bus.publish(bus.subjects.active(), fleets[0])
        await bus.jetstream.publish(bus.subjects.active(), b"other bytes", headers={DIGEST_HEADER: "0" * 64})
        assert await read_latest(bus, Stream.POLICY, "policy.active") == []
        await bus.publish(bus.subjects.active(), fleets[1])
        found = [item.decode(FleetVersions) for item in await read_all(bus, Stream.POLICY, "policy.active")]
        assert found == fleets
        assert bus.alarms["unreadable"] == 1
        (letter,) = [item.decode(DeadLetter) for item in await read_all(bus, Stream.DEAD)]
        assert (letter.stream, letter.seq) == ("POLICY", 2)


async def test_alarms_and_high_water_marks_stand_in_the_heartbeat(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.BANK) as bus:
        await fill(bus, range(2))
        bus.alarm("lost_items", group="g1")
        await bus.publish(bus.subjects.service_heartbeat(Role.BANK, "0"), Health(bus, 1.0).snapshot())
        (beat,) = [item.decode(Heartbeat) for item in await read_latest(bus, Stream.REGISTRY)]
        assert (beat.counters["alarm_lost_items"], beat.counters["seen_EPISODES"]) == (1, 4)


def test_runs_and_what_is_left_of_one() -> None:
    assert list(runs([])) == []
    assert list(runs([1, 2, 3, 7, 9, 10])) == [(1, 3), (7, 7), (9, 10)]
    assert without((1, 10), []) == [(1, 10)]
    assert without((1, 10), [(3, 4), (8, 12)]) == [(1, 2), (5, 7)]
    assert without((1, 10), [(0, 20)]) == []
    assert without((5, 6), [(1, 4), (7, 9)]) == [(5, 6)]


async def test_a_reader_in_the_middle_of_a_log_says_nothing_of_what_lies_before(server: NatsServer, run_name: str) -> None:
    async with connected(server.url, run_name, Role.BANK) as bus:
        await fill(bus, range(6))
        async with damaged(server):
            flip_bit(server, run_name, Stream.EPISODES, bus.subjects.episode("g00000001", 0))  # sequence 3
        assert holes(await read_events(bus, Stream.EPISODES, start=5)) == []
        assert holes(await read_events(bus, Stream.EPISODES, start=3)) == [Hole(Stream.EPISODES, 3, 3, "unreadable")]
        stop, given = asyncio.Event(), 0
        async for event in events(bus, Stream.EPISODES, "verdict.*.*", start=7, stop=stop, live=False):
            given += isinstance(event, Item)
            assert not isinstance(event, Hole)
        assert given == 3


async def test_the_view_of_a_run_goes_on_over_a_log_that_was_cut_short(server: NatsServer, run_name: str) -> None:
    async with connected(server.url, run_name, Role.OBSERVER) as bus:
        for ordinal in range(4):
            await bus.publish_once(bus.subjects.lease(ordinal), make_lease(ordinal))
        said: list[str] = []
        progress = Progress(bus, check({"run": {"name": run_name}}), said.append, None, None)
        stop = asyncio.Event()
        running = asyncio.create_task(progress.run(stop))
        await asyncio.wait_for(progress.caught_up.wait(), 30)
        async with damaged(server, crash=True):
            cut_block(server, run_name, Stream.TASKS, bus.subjects.lease(2))
        await eventually(lambda: any("TASKS: sequences 3 to 4 are gone" in line for line in said), within_s=60)
        for ordinal in (7, 8):
            await bus.publish_once(bus.subjects.lease(ordinal), make_lease(ordinal))
        await eventually(lambda: progress.tally.groups()["leased"] == 6, within_s=60)
        stop.set()
        await asyncio.wait_for(running, 30)
