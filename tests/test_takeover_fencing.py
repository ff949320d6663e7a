"""Two rollouters on one group, since the first only seemed to be dead: the newer claim holds, and the other changes nothing."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from rollouter.journal import AttemptName, AttemptTaken, Holder, Journal, SlotLog
from rollouter.sandbox_client import Sandbox
from rollouter.takeover import histories
from schemas.attempts import AttemptEnded, AttemptTakeover
from schemas.codec import CodecError, decode_any
from schemas.table import Role, Stream
from schemas.termination import Termination
from services.bus import Bus
from services.consume import read_all, read_events
from services.items import Item
from tests.rollout_stand import (
    TASKS,
    Ask,
    ScriptedEngine,
    Words,
    configuration,
    context_of,
    eventually,
    lease,
    make_sandbox_root,
    rival_turn,
    say,
    surroundings,
)
from tests.takeover_stand import PATIENCE_S, check_journal, child, make_short_leases, records_of, rollouter, sealed

__all__ = ["make_sandbox_root", "make_short_leases"]  # fixtures
pytestmark = pytest.mark.timeout(300)
SHUT_OUT = "another rollouter holds the group"


async def everything(bus: Bus) -> dict[str, str]:
    """Digest of every record of the journal and every episode, by subject; but for the word of who gives its claim up."""
    items = [*await read_all(bus, Stream.TURNS), *await read_all(bus, Stream.EPISODES, "episode.*.*")]
    return {item.subject: item.digest for item in items if not item.subject.endswith(".released")}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while the other plays", "when the other is done"])
async def test_a_suspended_rollouter_that_wakes_up_changes_nothing(
    nats_url: str, run_name: str, sandbox_root: str, tmp_path: Path, moment: str
) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one = lease(config, 0, TASKS[0], size=2)
    suspended, shut_out = asyncio.Event(), asyncio.Event()

    async def speak(ask: Ask) -> Words:
        """The first rollouter gets its second turn only when it is suspended, the other its third when the first has woken."""
        if ask.turn == 1 and ask.request.requester.startswith("r0"):
            await suspended.wait()
        if ask.turn == 2 and moment == "while the other plays":
            await shut_out.wait()
        return say("finish") if ask.turn == 3 else say("shell", f"echo {ask.turn} >> log; cat log")

    async with surroundings(config, ScriptedEngine("e0", speak)) as sandbox, context_of(config, Role.OBSERVER, "o") as observer:
        bus = observer.bus
        await bus.publish_once(bus.subjects.lease(0), one)
        with child(Role.ROLLOUTER, "r0", config, tmp_path) as first:

            async def both_have_begun() -> bool:
                return all([await bus.last(bus.subjects.turn(one.group, slot, 0, 0)) for slot in range(2)])

            await eventually("the first turn of both slots", both_have_begun, PATIENCE_S)
            await asyncio.sleep(1.0)  # its requests for the second turn are out
            first.send(signal.SIGSTOP)
            suspended.set()  # the answers wait for it

            async def first_is_shut_out() -> bool:
                return SHUT_OUT in first.said()

            async with rollouter(config, "r1"):
                if moment == "while the other plays":

                    async def other_has_turn_1() -> bool:
                        return all([await bus.last(bus.subjects.turn(one.group, slot, 0, 1)) for slot in range(2)])

                    await eventually("the second turn of both slots", other_has_turn_1, PATIENCE_S)
                    first.send(signal.SIGCONT)
                    await eventually("that the first notices", first_is_shut_out, PATIENCE_S)
                    shut_out.set()
                episodes = [await sealed(bus, one.group, slot) for slot in range(2)]
            before = await everything(bus)
            if moment == "when the other is done":
                first.send(signal.SIGCONT)
                await eventually("that the first notices", first_is_shut_out, PATIENCE_S)
            assert first.process.poll() is None  # it lives on, for other groups

            async def nothing_left() -> bool:
                return sandbox.health.counters.get("sandboxes") == 0

            await eventually("no sandbox is left", nothing_left, PATIENCE_S)
            assert await everything(bus) == before
        for episode in episodes:
            turns = await check_journal(bus, one, episode)
            assert (episode.attempt, episode.termination) == (0, Termination.AGENT_FINISH)
            assert turns[3].previous is not None and turns[3].previous.observation == b"0\n1\n2\n"
            takeovers = [r for r in await records_of(bus, one.group, episode.slot) if isinstance(r, AttemptTakeover)]
            assert [(t.claim, t.rollouter.split("-")[0]) for t in takeovers] == [(1, "r1")]


async def test_a_slots_log_has_one_writer(nats_url: str, run_name: str) -> None:
    """Whoever was shut out can neither write a turn, nor give the attempt up, nor begin another."""
    config = configuration(nats_url, run_name)
    one = lease(config, 0, TASKS[0])
    async with context_of(config, Role.ROLLOUTER, "r") as context:
        bus = context.bus

        def log_of(claim: int, last_seq: int = 0) -> SlotLog:
            return SlotLog(bus, one.group, 0, Holder(rollouter=f"r{claim}", claim=claim), last_seq)

        old = log_of(0)
        journal = Journal(old, AttemptName(lease=one, slot=0, attempt=0))
        await journal.open(Sandbox(name="box", executor="x0", state_hash="h"), 1)
        await journal.confirm()
        await bus.store(bus.subjects.turn(one.group, 1, 0, 0), b"another slot's", {})  # is no concern of this one
        await old.append(0, "0", rival_turn(one, 0, 0))
        (history,) = histories(await read_events(bus, Stream.TURNS, f"turn.{one.group}.*.*.*"), [0]).values()
        new = log_of(1, history.last_seq)
        await new.take_over(0)
        for shut_out in (
            old.append(0, "1", rival_turn(one, 0, 0)),
            old.end(0, "infra_abort", "it did not answer"),
            log_of(0).append(1, "open", rival_turn(one, 0, 1)),
            log_of(2, history.last_seq).take_over(0),
            journal.end("infra_abort", "it did not answer"),
        ):
            with pytest.raises(AttemptTaken):
                await shut_out
        assert journal.named  # so its sandbox is not its own to remove
        await new.end(0, "infra_abort", "lost")
        (after,) = histories(await read_events(bus, Stream.TURNS, f"turn.{one.group}.*.*.*"), [0]).values()
        assert (after.current, after.aborts, after.newest_claim, after.continuable()) == (1, 1, 1, None)
        assert [box.name for box in after.left_sandboxes()] == ["box"]


async def test_an_opening_that_is_refused_leaves_the_sandbox_to_its_maker(nats_url: str, run_name: str) -> None:
    """No record names it, so nobody else will remove it."""
    config = configuration(nats_url, run_name)
    one = lease(config, 0, TASKS[0])
    async with context_of(config, Role.ROLLOUTER, "r") as context:
        slow, quick = (SlotLog(context.bus, one.group, 0, Holder(rollouter=f"r{n}", claim=n)) for n in range(2))
        await quick.end(0, "orphaned", "nothing was journalled")
        journal = Journal(slow, AttemptName(lease=one, slot=0, attempt=0))
        await journal.open(Sandbox(name="box", executor="x0", state_hash="h"), 1)
        with pytest.raises(AttemptTaken):
            await journal.confirm()
        assert not journal.named


async def test_an_unreadable_record_ends_its_attempt_and_no_other(nats_url: str, run_name: str, sandbox_root: str) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one = lease(config, 0, TASKS[0], size=2)
    async with (
        surroundings(config, ScriptedEngine("e0", lambda ask: say("finish"))),
        context_of(config, Role.ROLLOUTER, "o") as observer,
    ):
        bus = observer.bus
        await bus.store(bus.subjects.turn(one.group, "claim", 0, "taken"), b"garbage", {})
        await bus.store(bus.subjects.turn(one.group, 0, 3, 0), b"garbage", {})
        await bus.store(bus.subjects.turn(one.group, 1, 0, "open"), b"x", {"Hr-Digest": "0" * 64})  # a flipped bit
        await bus.publish_once(bus.subjects.lease(0), one)
        async with rollouter(config, "r0"):
            episodes = [await sealed(bus, one.group, slot) for slot in range(2)]
        records = await records_of_readable(bus, one.group)
    assert [(e.attempt, e.termination) for e in episodes] == [(4, Termination.AGENT_FINISH), (1, Termination.AGENT_FINISH)]
    assert [r.reason for r in records if isinstance(r, AttemptEnded)] == ["orphaned", "orphaned"]


async def records_of_readable(bus: Bus, group: str) -> list[object]:
    found: list[object] = []
    for event in await read_events(bus, Stream.TURNS, f"turn.{group}.*.*.*"):
        try:
            found.append(decode_any(event.data) if isinstance(event, Item) else event)
        except CodecError as error:
            found.append(error)
    return found
