"""A rollouter is killed at one named point after the other; another one goes on from the journal as if nothing had happened."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from pathlib import Path

import pytest

from schemas.attempts import AttemptEnded, AttemptOpened, AttemptPlayed, AttemptTakeover, GroupClaim
from schemas.codec import decode_any
from schemas.sandbox import SandboxRun
from schemas.table import Role, Stream
from schemas.termination import Termination
from schemas.trajectory import Episode, TurnRecord
from services.consume import read_all
from tests.rollout_stand import (
    END,
    RENDERER,
    TASKS,
    Ask,
    ScriptedEngine,
    Words,
    configuration,
    context_of,
    eventually,
    lease,
    lose_sandbox,
    make_sandbox_root,
    say,
    surroundings,
    verdicts_of,
)
from tests.takeover_child import POINTS
from tests.takeover_stand import PATIENCE_S, check_journal, child, make_short_leases, records_of, rollouter, sealed

__all__ = ["make_sandbox_root", "make_short_leases"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = (
    say("shell", "echo zero >> log"),
    say("shell", "sleep 0.4; echo one >> log"),
    [RENDERER.token_id("<|tool|>"), END],  # no action
    say("shell", "cat log"),
    say("finish", "done"),
)


def play(ask: Ask) -> Words:
    """Slot 1 is done at once; slot 0 leaves a mark with every command."""
    return say("finish", "at once") if ask.slot == 1 else SCRIPT[ask.turn]


def files_of(episode: Episode) -> dict[str, bytes]:
    """The sealed files."""
    assert episode.terminal_state is not None and episode.terminal_state.inline is not None
    with tarfile.open(fileobj=io.BytesIO(episode.terminal_state.inline)) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers() if m.isfile()}  # type: ignore[union-attr]


@pytest.mark.parametrize("point", [point for point in POINTS if point != "claimed"])
async def test_a_takeover_goes_on_where_the_journal_ends(
    nats_url: str, run_name: str, sandbox_root: str, tmp_path: Path, point: str
) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one = lease(config, 0, TASKS[0], size=2)
    engine = ScriptedEngine("e0", play)
    async with surroundings(config, engine) as sandbox, context_of(config, Role.OBSERVER, "o") as observer:
        bus = observer.bus
        await bus.publish_once(bus.subjects.lease(0), one)
        with child(Role.ROLLOUTER, "r0", config, tmp_path, point) as first:
            await first.killed()
        before = await records_of(bus, one.group, 0)
        sibling = await bus.last(bus.subjects.episode(one.group, 1))
        assert sibling is not None and await bus.last(bus.subjects.episode(one.group, 0)) is None
        engine.version += 10  # what is sampled from now on says so
        async with rollouter(config, "r1") as second:
            episode = await sealed(bus, one.group, 0)
            assert second.health.counters["takeovers"] == 1

            async def nothing_left() -> bool:
                return sandbox.health.counters.get("sandboxes") == 0

            await eventually("no sandbox is left", nothing_left, PATIENCE_S)
        turns = await check_journal(bus, one, episode)
        after = await records_of(bus, one.group, 0)
        assert await bus.last(bus.subjects.episode(one.group, 1)) == sibling
        verdicts = await verdicts_of(bus, 2, PATIENCE_S)
    assert after[: len(before)] == before
    assert (episode.termination, episode.turns, episode.invalid_actions) == (Termination.AGENT_FINISH, len(SCRIPT), 1)
    assert episode.rollouter.startswith("r1-") and sibling.decode(Episode).rollouter.startswith("r0-")
    assert verdicts[one.group, 0].status == "graded"
    # Every command ran exactly once, whoever asked for it: the file says so, and what the agent read of it.
    assert files_of(episode)["log"] == b"zero\none\n"
    assert turns[4].previous is not None and turns[4].previous.observation == b"zero\none\n"
    if point == "reset":  # nothing was journalled, so the slot began anew
        assert episode.attempt == 1 and isinstance(after[0], AttemptEnded) and after[0].reason == "orphaned"
        return
    assert episode.attempt == 0 and isinstance(after[len(before)], AttemptTakeover)
    assert len([record for record in after if isinstance(record, AttemptOpened)]) == 1  # one sandbox from first to last
    journalled = sum(isinstance(record, TurnRecord) for record in before)
    assert journalled == {"opened": 0, "sampled": 1, "recorded": 2, "sent": 2, "ran": 2, "finished": 5, "sealed": 5}[point]
    assert [min(span.version for span in turn.versions) >= 10 for turn in turns] == [n >= journalled for n in range(5)]
    assert episode.started_ns < turns[0].started_ns


async def test_what_the_last_command_did_is_journalled_though_no_turn_follows(
    nats_url: str, run_name: str, sandbox_root: str
) -> None:
    """And a takeover after that asks for nothing again."""
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one = lease(config, 0, TASKS[0], size=1)
    engine = ScriptedEngine("e0", lambda ask: say("shell", f"echo {ask.turn} >> log; cat log"))
    async with surroundings(config, engine), context_of(config, Role.OBSERVER, "o") as observer:
        bus = observer.bus
        await bus.publish_once(bus.subjects.lease(0), one)
        async with rollouter(config, "r0"):
            episode = await sealed(bus, one.group, 0)
        turns = await check_journal(bus, one, episode)
        (last,) = [record for record in await records_of(bus, one.group, 0) if isinstance(record, AttemptPlayed)]
    assert episode.termination is Termination.TASK_BUDGET and len(turns) == 8
    assert last.last.observation == b"".join(b"%d\n" % turn for turn in range(8)) == files_of(episode)["log"]
    assert episode.terminal_state is not None and last.last.state_after == episode.terminal_state.state_hash


async def test_a_takeover_after_the_last_command_ends_where_its_predecessor_did(
    nats_url: str, run_name: str, sandbox_root: str, tmp_path: Path
) -> None:
    """The state is sealed, the sandbox is gone, and no turn tells what the last command did: its executor still knows."""
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one = lease(config, 0, TASKS[0], size=2)

    def speak(ask: Ask) -> Words:
        return say("finish") if ask.slot == 1 else say("shell", f"echo {ask.turn} >> log; cat log")

    async with surroundings(config, ScriptedEngine("e0", speak)), context_of(config, Role.OBSERVER, "o") as observer:
        bus = observer.bus
        await bus.publish_once(bus.subjects.lease(0), one)
        with child(Role.ROLLOUTER, "r0", config, tmp_path, "sealed") as first:
            await first.killed()
        before = await records_of(bus, one.group, 0)
        async with rollouter(config, "r1"):
            episode = await sealed(bus, one.group, 0)
        await check_journal(bus, one, episode)
        after = await records_of(bus, one.group, 0)
    assert isinstance(before[-1], AttemptPlayed)
    assert [type(record) for record in after[len(before) :]] == [AttemptTakeover]
    assert (episode.attempt, episode.termination, episode.turns) == (0, Termination.TASK_BUDGET, 8)
    assert files_of(episode)["log"] == before[-1].last.observation


async def test_a_stopping_rollouter_leaves_its_sandboxes_to_the_next_one(
    nats_url: str, run_name: str, sandbox_root: str
) -> None:
    """Time and again, and no such end counts as a lost holder."""
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one = lease(config, 0, TASKS[0], size=2)
    stuck = asyncio.Event()

    def speak(ask: Ask) -> Words:
        """Each rollouter gets one turn further."""
        if ask.turn > int(ask.request.requester[1]):
            stuck.set()
            return None
        return SCRIPT[ask.turn]

    engine = ScriptedEngine("e0", speak)
    async with surroundings(config, engine) as sandbox, context_of(config, Role.OBSERVER, "o") as observer:
        bus = observer.bus
        await bus.publish_once(bus.subjects.lease(0), one)
        for number in range(4):
            async with rollouter(config, f"r{number}"):

                async def journalled(turn: int = number) -> bool:
                    held = [await bus.last(bus.subjects.turn(one.group, slot, 0, turn)) for slot in range(2)]
                    return all(held) and stuck.is_set()

                await eventually(f"turn {number} of both slots", journalled, PATIENCE_S)
                engine.phase = "draining"  # nothing can finish, so the drain ends soon
            engine.phase = "serving"
            stuck.clear()
        assert sandbox.health.counters["sandboxes"] == 2
        async with rollouter(config, "r4"):
            episodes = [await sealed(bus, one.group, slot) for slot in range(2)]
        for episode in episodes:
            await check_journal(bus, one, episode)
            assert (episode.attempt, episode.turns, files_of(episode)["log"]) == (0, 5, b"zero\none\n")
        claims = [decode_any(item.data) for item in await read_all(bus, Stream.TURNS, f"turn.{one.group}.claim.*.*")]
    assert sum(isinstance(claim, GroupClaim) for claim in claims) == 5
    assert len(claims) == 9  # all but the last were released


async def test_a_sandbox_that_stands_elsewhere_is_not_gone_on_with(nats_url: str, run_name: str, sandbox_root: str) -> None:
    """Something ran in it that the journal does not know, so its state is not the trajectory's any more."""
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one = lease(config, 0, TASKS[0], size=1)

    def speak(ask: Ask) -> Words:
        return None if ask.turn == 2 and ask.request.requester.startswith("r0") else SCRIPT[ask.turn]

    engine = ScriptedEngine("e0", speak)
    async with surroundings(config, engine) as sandbox, context_of(config, Role.ROLLOUTER, "o") as observer:
        bus = observer.bus
        await bus.publish_once(bus.subjects.lease(0), one)
        async with rollouter(config, "r0"):

            async def two_turns() -> bool:
                return len([ask for ask in engine.asked if ask.requester.startswith("r0")]) == 3

            await eventually("the third turn's request", two_turns, PATIENCE_S)
            engine.phase = "draining"
        engine.phase = "serving"
        (opened,) = [record for record in await records_of(bus, one.group, 0) if isinstance(record, AttemptOpened)]
        foreign = SandboxRun(
            command_id="foreign",
            requester="somebody",
            sandbox=opened.sandbox,
            command="true",
            timeout_s=5.0,
            deadline_ns=time.time_ns() + 60 * 10**9,
        )
        await bus.publish(bus.subjects.sandbox("command", opened.executor), foreign)

        async def it_ran() -> bool:
            return await bus.last(bus.subjects.sandbox_result("somebody")) is not None

        await eventually("the foreign command's result", it_ran, PATIENCE_S)
        async with rollouter(config, "r1"):
            episode = await sealed(bus, one.group, 0)

            async def nothing_left() -> bool:
                return sandbox.health.counters.get("sandboxes") == 0

            await eventually("no sandbox is left", nothing_left, PATIENCE_S)
        await check_journal(bus, one, episode)
        (ended,) = [record for record in await records_of(bus, one.group, 0) if isinstance(record, AttemptEnded)]
    assert (episode.attempt, episode.turns, files_of(episode)["log"]) == (1, 5, b"zero\none\n")
    assert ended.reason == "infra_abort" and "after command foreign" in ended.detail


async def test_a_slots_retries_are_counted_across_takeovers(nats_url: str, run_name: str, sandbox_root: str) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one = lease(config, 0, TASKS[0], size=1, slot_retries=1)
    stuck = asyncio.Event()

    async def speak(ask: Ask) -> Words:
        """The sandbox of every attempt is lost at its second turn; the first rollouter does not get that far again."""
        if ask.turn == 0:
            return say("shell", "ls")
        if ask.attempt == 1 and ask.request.requester.startswith("r0"):
            stuck.set()
            return None
        await lose_sandbox(observer.bus, ask)
        return say("shell", "ls")

    engine = ScriptedEngine("e0", speak)
    async with surroundings(config, engine), context_of(config, Role.ROLLOUTER, "o") as observer:
        bus = observer.bus
        await bus.publish_once(bus.subjects.lease(0), one)
        async with rollouter(config, "r0"):
            async with asyncio.timeout(PATIENCE_S):
                await stuck.wait()
            engine.phase = "draining"
        engine.phase = "serving"
        async with rollouter(config, "r1"):
            episode = await sealed(bus, one.group, 0)
        ended = [record for record in await records_of(bus, one.group, 0) if isinstance(record, AttemptEnded)]
    assert (episode.attempt, episode.termination) == (1, Termination.INFRA_ABORT)
    assert [(record.attempt, record.reason, record.claim) for record in ended] == [(0, "infra_abort", 0), (1, "infra_abort", 1)]
