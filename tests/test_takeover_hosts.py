"""The loss of a sandbox host: its episodes are infrastructure aborts, their slots begin anew, and no sibling is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from admission.gates import Abandon, GateSettings, judge
from rollouter.generation import ENGINE_WAIT_S, MAX_ISSUES
from schemas.attempts import AttemptEnded, AttemptOpened
from schemas.health import Heartbeat
from schemas.ledger import AbandonReason
from schemas.table import CONSUMERS, Role
from schemas.termination import Termination
from schemas.trajectory import TurnRecord
from services.bus import Bus
from services.config import Config
from services.runtime import ServiceContext
from services.sandbox.executor import ExecutorConfig
from services.sandbox.host import HostConfig
from services.verifier import service as verifier_service
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
    say,
    serving,
    verdicts_of,
)
from tests.takeover_stand import (
    PATIENCE_S,
    check_journal,
    child,
    joined,
    make_short_leases,
    records_of,
    rollouter,
    sealed,
)

__all__ = ["make_sandbox_root", "make_short_leases"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@asynccontextmanager
async def without_sandboxes(config: Config, engine: ScriptedEngine) -> AsyncIterator[ServiceContext]:
    """Engine, verifier and an observer; the test has its own sandbox hosts."""
    async with AsyncExitStack() as stack:
        contexts = [
            await stack.enter_async_context(serving(config, Role.ENGINE, engine.name, engine.serve)),
            await stack.enter_async_context(serving(config, Role.VERIFIER, "v0", verifier_service.serve)),
        ]
        try:
            yield await stack.enter_async_context(context_of(config, Role.OBSERVER, "o"))
        finally:
            for context in contexts:
                context.stop.set()


async def journalled(bus: Bus, group: str, slot: int, turn: int | str) -> None:
    async def there() -> bool:
        return await bus.last(bus.subjects.turn(group, slot, 0, turn)) is not None

    await eventually(f"turn {turn} of slot {slot}", there, PATIENCE_S)


def test_a_sandbox_outlives_its_lost_holder() -> None:
    """What is left to a successor is still there when the lease comes back, and an episode may wait for engines meanwhile."""
    idle_s = ExecutorConfig(host=HostConfig(root="unused")).idle_s
    rollout = Config().rollout
    assert idle_s > 10 * next(row.ack_wait_s for row in CONSUMERS if row.name == "rollouter")
    assert idle_s > ENGINE_WAIT_S + MAX_ISSUES * rollout.generate_timeout_s


async def test_a_host_that_dies_and_comes_back_costs_its_slots_an_attempt(
    nats_url: str, run_name: str, sandbox_root: str, tmp_path: Path
) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root}, rollout={"sandbox_timeout_s": 10.0})
    one = lease(config, 0, TASKS[0], size=2)
    dead = asyncio.Event()

    async def speak(ask: Ask) -> Words:
        """Slot 1 is done before the host dies; slot 0 has run one command then, and asks for the second one after that."""
        if ask.slot == 0 and ask.turn == 1 and ask.attempt == 0:
            await dead.wait()
        return (
            say("finish") if ask.slot == 1 or ask.turn == 2 else say("shell", f"echo {ask.attempt}.{ask.turn} >> log; cat log")
        )

    async with without_sandboxes(config, ScriptedEngine("e0", speak)) as observer:
        bus = observer.bus
        await bus.publish_once(bus.subjects.lease(0), one)
        with child(Role.SANDBOX, "x0", config, tmp_path) as host:
            async with rollouter(config, "r0") as context:
                kept = await sealed(bus, one.group, 1)
                await journalled(bus, one.group, 0, 0)
                await asyncio.sleep(1.0)  # its command has run
                host.send(signal.SIGKILL)
                await host.killed()
                with child(Role.SANDBOX, "x0", config, tmp_path):
                    dead.set()
                    episode = await sealed(bus, one.group, 0)
                    assert context.health.counters["infra_aborts"] == 1
        turns = await check_journal(bus, one, episode)
        assert (await sealed(bus, one.group, 1)) == kept
        records = await records_of(bus, one.group, 0)
    assert (episode.attempt, episode.termination, kept.attempt) == (1, Termination.AGENT_FINISH, 0)
    assert turns[2].previous is not None and turns[2].previous.observation == b"1.0\n1.1\n"  # a fresh sandbox
    (ended,) = [record for record in records if isinstance(record, AttemptEnded)]
    assert (ended.reason, ended.attempt) == ("infra_abort", 0)
    assert "lost" in ended.detail or "no answer" in ended.detail


async def test_a_host_that_is_gone_for_good_is_a_reason_to_abandon(
    nats_url: str, run_name: str, sandbox_root: str, tmp_path: Path
) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root}, rollout={"sandbox_timeout_s": 5.0})
    one = lease(config, 0, TASKS[0], size=2, slot_retries=1)
    dead = asyncio.Event()

    async def speak(ask: Ask) -> Words:
        if ask.slot == 0:
            await dead.wait()
            return say("shell", "ls")
        return say("finish")

    async with without_sandboxes(config, ScriptedEngine("e0", speak)) as observer:
        bus = observer.bus
        async with rollouter(config, "r0"):
            with child(Role.SANDBOX, "x0", config, tmp_path) as host:
                await host.ready()
                await bus.publish_once(bus.subjects.lease(0), one)
                kept = await sealed(bus, one.group, 1)
                await journalled(bus, one.group, 0, "open")
                host.send(signal.SIGKILL)
                await host.killed()
            dead.set()
            episode = await sealed(bus, one.group, 0)
        await verdicts_of(bus, 2, PATIENCE_S)
        ended = [record for record in await records_of(bus, one.group, 0) if isinstance(record, AttemptEnded)]
        decision = judge(await joined(bus, one), 0, (), GateSettings(max_lag=9))
    assert (kept.termination, episode.termination) == (Termination.AGENT_FINISH, Termination.INFRA_ABORT)
    assert [record.reason for record in ended] == ["infra_abort", "infra_abort"] and "x0" in ended[0].detail
    assert decision == Abandon(AbandonReason.INFRA_ABORT, "slot 0: infra_abort")


@asynccontextmanager
async def beating(config: Config, instance: str) -> AsyncIterator[ServiceContext]:
    """A rollouter in this process that sends its heartbeats."""
    async with rollouter(config, instance) as context:
        beat = asyncio.create_task(context.health.beat(context.stop))
        yield context
        context.stop.set()
        await beat


async def test_nobody_waits_for_a_silent_host_until_the_deadline_of_its_answer(
    nats_url: str, run_name: str, sandbox_root: str, tmp_path: Path
) -> None:
    """Invariant 11. The answer's deadline lies far beyond this test; the host is named, the next attempt is on another one."""
    config = configuration(
        nats_url,
        run_name,
        sandbox={"root": sandbox_root},
        rollout={"sandbox_timeout_s": 10 * PATIENCE_S, "sandbox_silent_s": 3.0},
        telemetry={"heartbeat_s": 0.5},
    )
    one = lease(config, 0, TASKS[0], size=2)

    def speak(ask: Ask) -> Words:
        if ask.slot == 1 or ask.attempt:
            return say("finish")
        return say("shell", "sleep 600")

    async with without_sandboxes(config, ScriptedEngine("e0", speak)) as observer:
        bus = observer.bus
        async with beating(config, "r0") as context:
            with child(Role.SANDBOX, "x0", config, tmp_path) as host:
                await host.ready()
                await bus.publish_once(bus.subjects.lease(0), one)
                kept = await sealed(bus, one.group, 1)
                await journalled(bus, one.group, 0, 0)
                host.send(signal.SIGKILL)
                await host.killed()
            with child(Role.SANDBOX, "x1", config, tmp_path):
                episode = await sealed(bus, one.group, 0)
                assert context.health.counters["sandbox_hosts_gone"] == 1
                assert context.health.counters["sandbox_hosts_given_up"] == 1
        ended = [record for record in await records_of(bus, one.group, 0) if isinstance(record, AttemptEnded)]
    assert (kept.executor, episode.executor, episode.attempt) == ("x0", "x1", 1)
    assert [(record.reason, record.attempt) for record in ended] == [("infra_abort", 0)]
    assert "sandbox host x0 is silent for 3 s" in ended[0].detail


async def test_a_host_that_is_silent_for_less_goes_on_with_its_sandboxes(
    nats_url: str, run_name: str, sandbox_root: str, tmp_path: Path
) -> None:
    config = configuration(
        nats_url,
        run_name,
        sandbox={"root": sandbox_root},
        rollout={"sandbox_timeout_s": PATIENCE_S, "sandbox_silent_s": PATIENCE_S},
        telemetry={"heartbeat_s": 0.3},
    )
    one = lease(config, 0, TASKS[0], size=1, slot_retries=0)
    still = asyncio.Event()
    beats: set[int] = set()

    async def missing() -> bool:
        """Six heartbeats of the rollouter have been stored since the host was stopped."""
        item = await bus.last(bus.subjects.service_heartbeat(Role.ROLLOUTER, "r0"))
        beats.add(0 if item is None else item.seq)
        return len(beats) > 6

    async def speak(ask: Ask) -> Words:
        if ask.turn == 1:
            await still.wait()
        return say("finish") if ask.turn == 2 else say("shell", f"echo {ask.turn} >> log; cat log")

    async with without_sandboxes(config, ScriptedEngine("e0", speak)) as observer:
        bus = observer.bus
        async with beating(config, "r0") as context:
            with child(Role.SANDBOX, "x0", config, tmp_path) as host:
                await host.ready()
                await bus.publish_once(bus.subjects.lease(0), one)
                await journalled(bus, one.group, 0, 0)
                host.send(signal.SIGSTOP)
                still.set()
                await eventually("several of its heartbeats are missing", missing, PATIENCE_S)
                host.send(signal.SIGCONT)
                episode = await sealed(bus, one.group, 0)
                assert not context.health.counters.get("infra_aborts")
        turns = await check_journal(bus, one, episode)
    assert (episode.attempt, episode.termination) == (0, Termination.AGENT_FINISH)
    assert turns[2].previous is not None and turns[2].previous.observation == b"0\n1\n"


async def test_what_a_lost_rollouter_left_unnamed_goes_with_its_group(
    nats_url: str, run_name: str, sandbox_root: str, tmp_path: Path
) -> None:
    """It died between the reset and the journal, so nobody knows the sandbox; the slot then went on, on another host."""
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root}, telemetry={"heartbeat_s": 0.5})
    one = lease(config, 0, TASKS[0], size=2)

    async with without_sandboxes(config, ScriptedEngine("e0", lambda ask: say("finish"))) as observer:
        bus = observer.bus

        async def counters(host: str) -> dict[str, float]:
            beat = await bus.last(bus.subjects.service_heartbeat(Role.SANDBOX, host))
            return {} if beat is None else beat.decode(Heartbeat).counters

        with child(Role.SANDBOX, "x0", config, tmp_path) as host:
            await host.ready()
            with child(Role.ROLLOUTER, "r0", config, tmp_path, "reset") as first:
                await bus.publish_once(bus.subjects.lease(0), one)
                await first.killed()

            async def orphaned() -> bool:
                return (await counters("x0")).get("sandboxes", 0) >= 1

            await eventually("the orphan", orphaned, PATIENCE_S)
            host.send(signal.SIGSTOP)
            with child(Role.SANDBOX, "x1", config, tmp_path):
                async with rollouter(config, "r1"):
                    episode = await sealed(bus, one.group, 0)
                    host.send(signal.SIGCONT)

                    async def gone() -> bool:
                        found = await counters("x0")
                        return found.get("orphans_removed", 0) >= 1 and found.get("sandboxes") == 0

                    await eventually("the orphan is removed, long before its idle limit", gone, PATIENCE_S)
    assert (episode.executor, episode.termination) == ("x1", Termination.AGENT_FINISH)


async def test_a_takeover_from_a_host_that_is_gone_begins_anew(
    nats_url: str, run_name: str, sandbox_root: str, tmp_path: Path
) -> None:
    """The rollouter and the host of its sandboxes die together, as on one machine; the next attempt is on another host."""
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root}, rollout={"sandbox_timeout_s": 10.0})
    one = lease(config, 0, TASKS[0], size=2)
    stuck = asyncio.Event()

    async def speak(ask: Ask) -> Words:
        if ask.slot == 1:
            return say("finish")
        if ask.turn == 1 and ask.request.requester.startswith("r0"):
            stuck.set()
            return None
        return say("finish") if ask.turn == 1 else say("shell", "echo x >> log; cat log")

    async with without_sandboxes(config, ScriptedEngine("e0", speak)) as observer:
        bus = observer.bus
        await bus.publish_once(bus.subjects.lease(0), one)
        with child(Role.SANDBOX, "x0", config, tmp_path) as host, child(Role.ROLLOUTER, "r0", config, tmp_path) as first:
            await sealed(bus, one.group, 1)
            async with asyncio.timeout(PATIENCE_S):
                await stuck.wait()
            for each in (host, first):
                each.send(signal.SIGKILL)
                await each.killed()
        with child(Role.SANDBOX, "x1", config, tmp_path):
            async with rollouter(config, "r1"):
                episode = await sealed(bus, one.group, 0)
        turns = await check_journal(bus, one, episode)
        opened = [record for record in await records_of(bus, one.group, 0) if isinstance(record, AttemptOpened)]
    assert (episode.attempt, episode.termination, episode.executor) == (1, Termination.AGENT_FINISH, "x1")
    assert [(record.attempt, record.executor) for record in opened] == [(0, "x0"), (1, "x1")]
    assert turns[1].previous is not None and turns[1].previous.observation == b"x\n"


async def test_a_stopping_host_answers_what_it_cannot_finish(
    nats_url: str, run_name: str, sandbox_root: str, tmp_path: Path
) -> None:
    """A command that outlasts the drain is cut off and answered `lost`; a short one is finished; the process ends cleanly."""
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one = lease(config, 0, TASKS[0], size=2, slot_retries=0)

    def speak(ask: Ask) -> Words:
        if ask.turn == 1:
            return say("finish")
        return say("shell", f"sleep {0.5 if ask.slot else 60}; echo done")

    async with without_sandboxes(config, ScriptedEngine("e0", speak)) as observer:
        bus = observer.bus
        await bus.publish_once(bus.subjects.lease(0), one)
        with child(Role.SANDBOX, "x0", config, tmp_path, "short-drain") as host:
            async with rollouter(config, "r0"):
                for slot in range(2):
                    await journalled(bus, one.group, slot, 0)
                await asyncio.sleep(0.5)
                host.send(signal.SIGTERM)
                assert await asyncio.to_thread(host.process.wait, PATIENCE_S) == 0, host.said()[-3000:]
                episodes = [await sealed(bus, one.group, slot) for slot in range(2)]
        records = [await records_of(bus, one.group, slot) for slot in range(2)]
    assert episodes[0].termination is Termination.INFRA_ABORT
    (ended,) = [record for record in records[0] if isinstance(record, AttemptEnded)]
    assert "the executor stopped" in ended.detail and "lost" in ended.detail
    (finish,) = [record for record in records[1] if isinstance(record, TurnRecord) and record.turn == 1]
    assert finish.previous is not None and finish.previous.observation == b"done\n"
