"""Slow parties in a whole line of real services: each bound holds in the record, and everything goes on by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from schemas.ledger import QuarantineEntry
from schemas.table import Stream, consumer_of
from services.sandbox.service import capacities
from tests.conftest import eventually
from tests.press_stand import (
    BATCH,
    SIBLINGS,
    WINDOW,
    WITHIN_S,
    Line,
    check_record,
    command,
    consumer,
    has_said,
    left_to_time_outs,
    lower_limit,
    picture,
    running_line,
    said,
    sandbox_requests,
    sealed_episodes,
    settle,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    with running_line(tmp_path_factory.mktemp("line")) as line:
        yield line


async def test_a_slow_trainer_fills_the_window_and_no_more(line: Line) -> None:
    """Ready groups pile up to the window; the sampler stops leasing; then each is consumed, or quarantined with its reason."""
    async with line.bus() as bus:
        await line.flows(bus, steps=2)
        with line.held("trainer-0"):

            async def full() -> set[str]:
                now = await picture(bus)
                ready = now.open_and_ready()
                return ready if len(ready) == len(now.account().open) and len(ready) > WINDOW - BATCH else set()

            piled_up = await eventually(full, within_s=WITHIN_S, what="every open group ready, the window full")
            await settle(2.0)
            held = await picture(bus)
            assert len(held.account().open) <= WINDOW
        now = await line.all_closed(bus, piled_up)
        check_record(now)
        reasons = {entry.reason for _, entry in now.ledger if isinstance(entry, QuarantineEntry) and entry.group in piled_up}
        assert reasons <= {"stale"}
        await line.flows(bus)


async def test_a_slow_verifier_bounds_what_waits_for_it(line: Line) -> None:
    """Sealed and unjudged episodes: at most those of the window; what the stopped verifier was given, at most its capacity."""
    async with line.bus() as bus:
        await line.flows(bus)
        with line.held("verifier-0"):
            before = set((await picture(bus)).account().open)

            async def all_wait() -> bool:
                open_groups = (await picture(bus)).account().open
                sealed, _ = await sealed_episodes(bus)
                return len(open_groups) == WINDOW and {(g, slot) for g in open_groups for slot in range(SIBLINGS)} <= sealed

            await eventually(all_wait, within_s=WITHIN_S, what="a window of groups, all sealed")
            await settle(2.0)
            info = await consumer(bus, "verifier")
            given, waiting = info["num_ack_pending"], info["num_pending"]
            assert given <= min(consumer_of("verifier").max_ack_pending, line.run.config.verifier.concurrency)
            assert given + waiting <= WINDOW * SIBLINGS
            pressed = set((await picture(bus)).account().open) | before
        now = await line.all_closed(bus, pressed)
        check_record(now)
        assert (await sealed_episodes(bus))[1] <= WINDOW * SIBLINGS
        await line.flows(bus)


async def test_a_slow_sandbox_bounds_open_commands(line: Line) -> None:
    """One open request per sibling in play, so at most the window's; none is given up, and each is answered afterwards."""
    async with line.bus() as bus:
        await line.flows(bus)
        with line.held("sandbox-x0"):

            async def all_wait() -> bool:
                return len((await picture(bus)).account().open) == WINDOW and len(await sandbox_requests(bus)) >= WINDOW

            await eventually(all_wait, within_s=WITHIN_S, what="a window of groups whose commands wait")
            await settle(2.0)
            requests, in_work = await sandbox_requests(bus), sum(capacities(line.run.config.sandbox).values())
            assert len(requests) <= WINDOW * SIBLINGS
            assert max(requests.values()) <= 2
            assert sum(requests.values()) <= WINDOW * SIBLINGS + in_work
            pressed = set((await picture(bus)).account().open)
        check_record(await line.all_closed(bus, pressed))
        await line.flows(bus)


async def test_a_full_stream_holds_its_publishers_and_more_room_frees_them(line: Line) -> None:
    """The limit of EPISODES is reached while the run flows: nobody ends, nothing is dropped, log and status name stream, limit
    and since when; `headrace provision` gives it more room, and everything goes on."""
    async with line.bus() as bus:
        await line.flows(bus)
        name = bus.subjects.stream(Stream.EPISODES)
        before = {label: line.run.now(label) for label in line.run.labels()}
        limit = await lower_limit(bus, Stream.EPISODES, room_bytes=6000)
        words = ("rollouter-0", "verifier-0")
        await eventually(lambda: any(said(line, label, "the stream is full", name) for label in words), within_s=WITHIN_S)
        shown = await command(line, "status")
        assert f"room in stream {name}" in shown.replace("\n", "")
        assert f"of max_bytes {limit}" in shown
        await settle(6.0)  # as long as any publisher waits between two tries
        pressed = set((await picture(bus)).account().open)
        told = await command(line, "provision")
        assert f"more room: {name}: max_bytes {limit} -> " in told
        check_record(await line.all_closed(bus, pressed))
        await line.flows(bus)
        assert {label: line.run.now(label) for label in line.run.labels()} == before, line.run.said()
        await eventually(lambda: any(said(line, label, "the stream has room again", name) for label in words), within_s=20)


async def test_everything_drains_and_goes_on_where_it_stood(line: Line) -> None:
    """Exit code 0, no delivery is left that would have to wait for its time-out, and a new start continues the run."""
    async with line.bus() as bus:
        await line.flows(bus)
    assert await line.run.stop() == 0, f"{line.run.said()}\n{line.run.logs()}"
    async with line.bus() as bus:
        check_record(await picture(bus))
        assert await left_to_time_outs(bus) == []
        line.run.start()
        await line.flows(bus)
        check_record(await picture(bus))


async def test_a_server_that_is_gone_is_named_and_all_recovers_by_itself(
    line: Line, record_property: Callable[[str, object], None]
) -> None:
    """Longer than owners hold on to their roles: those end and are started again, the others stay and hold what they have."""
    async with line.bus() as bus:
        await line.flows(bus)
    before, memory = {label: line.run.now(label) for label in line.run.labels()}, line.resident_bytes()
    line.server.kill()
    stay = ("rollouter-0", "sandbox-x0", "verifier-0", "engine-e0", "sampler-0")
    place = f"127.0.0.1:{line.server.port}"
    for label in stay:
        await has_said(line, label, "the server is gone", place)
    await has_said(line, "admission-0", "failed", "no renewal for 4 s")
    shown = await command(line, "status", "--run-folder", str(line.run.folder), code=2)
    assert f"no NATS server answered at {place}" in shown
    assert "; the run has missed it since 20" in shown
    await has_said(line, "admission-0", "waiting", f"nats-server {place}")
    line.server.start()
    async with line.bus() as bus:
        await line.flows(bus, steps=2)
        check_record(await picture(bus))
    assert all(said(line, label, "the server is back", place) for label in stay)
    assert {label: line.run.now(label) for label in stay} == {label: before[label] for label in stay}, line.run.said()
    assert f"the server {place} is gone since" in line.run.said(200)
    assert f"the server {place} is back after" in line.run.said(200)
    record_property("resident_bytes", {label: (memory[label], now) for label, now in line.resident_bytes().items()})
