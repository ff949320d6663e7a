"""A group that takes down one rollouter after the other ends as poison, and the run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from admission.gates import Abandon, GateSettings, judge
from rollouter import groups
from rollouter.claims import Claims, NotClaimed
from schemas.attempts import AttemptEnded, GroupClaim
from schemas.ledger import AbandonReason
from schemas.table import Role, Stream
from schemas.termination import Termination
from services.bus import Bus
from services.consume import read_all
from tests.rollout_stand import (
    TASKS,
    Ask,
    ScriptedEngine,
    configuration,
    context_of,
    eventually,
    lease,
    make_sandbox_root,
    say,
    surroundings,
    verdicts_of,
)
from tests.takeover_stand import PATIENCE_S, child, joined, make_short_leases, records_of, rollouter, sealed

__all__ = ["make_sandbox_root", "make_short_leases"]  # fixtures
pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
async def test_a_group_that_kills_every_rollouter_is_abandoned_as_poison(
    nats_url: str, run_name: str, sandbox_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "MAX_TAKEOVERS", 1)
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    poison, sound = lease(config, 0, TASKS[0], size=2), lease(config, 1, TASKS[1], size=2)
    async with (
        surroundings(config, ScriptedEngine("e0", lambda ask: say("finish"))),
        context_of(config, Role.OBSERVER, "o") as observer,
    ):
        bus = observer.bus
        await bus.publish_once(bus.subjects.lease(0), poison)
        for number in range(2):
            with child(Role.ROLLOUTER, f"r{number}", config, tmp_path, "claimed") as victim:
                await victim.killed()
        await bus.publish_once(bus.subjects.lease(1), sound)
        async with rollouter(config, "r2") as survivor:
            episodes = [await sealed(bus, poison.group, slot) for slot in range(2)]
            others = [await sealed(bus, sound.group, slot) for slot in range(2)]
            assert survivor.health.counters["poisonous_groups"] == 1
        verdicts = await verdicts_of(bus, 4, PATIENCE_S)
        records = [record for slot in range(2) for record in await records_of(bus, poison.group, slot)]
        decision = judge(await joined(bus, poison), 0, (), GateSettings(max_lag=9))
    assert {e.termination for e in episodes} == {Termination.POISON}
    assert {e.termination for e in others} == {Termination.AGENT_FINISH}
    assert {(verdicts[poison.group, slot].status, verdicts[poison.group, slot].reward) for slot in range(2)} == {
        ("censored", None)
    }
    assert decision == Abandon(AbandonReason.POISON, "slot 0: poison; slot 1: poison")
    reasons = [record.detail for record in records if isinstance(record, AttemptEnded) and record.reason == "poison"]
    assert len(reasons) == 2 and all("2 holders were lost with it, r1-" in reason for reason in reasons)


async def lose_holders(bus: Bus, group: str, count: int) -> None:
    """As if so many rollouters had died with the group, each before it did anything."""
    for number in range(count):
        record = GroupClaim(run=bus.run, group=group, number=number, rollouter=f"dead{number}", at_ns=1)
        await bus.publish_once(bus.subjects.turn(group, "claim", number, "taken"), record)


async def test_suspects_are_played_one_at_a_time_beside_the_others(nats_url: str, run_name: str, sandbox_root: str) -> None:
    """Else a poisonous group would make poison of every group that happens to stand beside it."""
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one, other, fresh = (lease(config, n, TASKS[n], size=1) for n in range(3))
    release = asyncio.Event()
    asked: list[str] = []

    async def speak(ask: Ask) -> list[int]:
        asked.append(ask.group)
        if ask.group != fresh.group:
            await release.wait()
        return say("finish")

    async with surroundings(config, ScriptedEngine("e0", speak)), context_of(config, Role.ROLLOUTER, "o") as observer:
        bus = observer.bus
        for group in (one.group, other.group):
            await lose_holders(bus, group, groups.SUSPECT_AFTER)
        for each in (one, other, fresh):
            await bus.publish_once(bus.subjects.lease(each.ordinal), each)
        async with rollouter(config, "r0") as context:
            await sealed(bus, fresh.group, 0)

            async def one_suspect_plays() -> bool:
                return len(set(asked) - {fresh.group}) == 1

            await eventually("a suspect's turn", one_suspect_plays, PATIENCE_S)
            claimed = [len(await read_all(bus, Stream.TURNS, f"turn.{g}.claim.*.taken")) for g in (one.group, other.group)]
            assert sorted(claimed) == [groups.SUSPECT_AFTER, groups.SUSPECT_AFTER + 1]  # who waits has claimed nothing
            (waits,) = [wait for wait in context.health.snapshot().waits if "played alone" in wait.what]
            assert waits.culprit in (one.group, other.group) and waits.culprit not in waits.what
            release.set()
            episodes = [await sealed(bus, group, 0) for group in (one.group, other.group)]
    assert {e.termination for e in episodes} == {Termination.AGENT_FINISH}


async def test_a_released_claim_is_no_lost_holder(nats_url: str, run_name: str) -> None:
    async with context_of(configuration(nats_url, run_name), Role.ROLLOUTER, "r") as context:
        mine, others = Claims(context.bus, "r0-a"), Claims(context.bus, "r1-b")
        assert await mine.first("g1") and not await others.first("g1")
        assert (await others.past("g1")).lost == 1
        await mine.release("g1", 0, "the rollouter stops")
        past = await others.past("g1")
        assert (past.number, past.lost, past.holder()) == (0, 0, "r0-a")
        assert await others.next("g1", past) == 1
        with pytest.raises(NotClaimed):
            await mine.next("g1", past)
        assert ((await mine.past("g1")).number, (await mine.past("g1")).lost) == (1, 1)
