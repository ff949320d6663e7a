"""A rollouter that was killed and comes back under its name need not wait until its silence is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollouter.claims import Claims, deliveries_of_earlier_lives
from schemas import table
from schemas.table import Role
from tests.rollout_stand import (
    TASKS,
    Ask,
    ScriptedEngine,
    Words,
    configuration,
    context_of,
    lease,
    make_sandbox_root,
    say,
    surroundings,
)
from tests.takeover_stand import check_journal, child, rollouter, sealed

__all__ = ["make_sandbox_root"]  # a fixture
pytestmark = pytest.mark.timeout(240)
NEVER_S = 600.0  # no lease comes back by itself while a test lasts


@pytest.fixture
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(replace(row, ack_wait_s=NEVER_S) if row.name == "rollouter" else row for row in table.CONSUMERS)
    monkeypatch.setattr(table, "CONSUMERS", rows)
    monkeypatch.setenv("HR_TEST_LEASE_S", str(NEVER_S))  # for the process that is killed


def play(ask: Ask) -> Words:
    """Slot 1 is done at once, which is when slot 0's process dies; slot 0 leaves a mark with every command."""
    if ask.slot == 1:
        return say("finish", "at once")
    return say("finish", "done") if ask.turn == 3 else say("shell", f"echo {ask.turn} >> log")


@pytest.mark.slow
@pytest.mark.usefixtures("long_leases")
async def test_a_rollouter_that_comes_back_takes_its_groups_up_at_once(
    nats_url: str, run_name: str, sandbox_root: str, tmp_path: Path
) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one = lease(config, 0, TASKS[0], size=2)
    async with surroundings(config, ScriptedEngine("e0", play)), context_of(config, Role.OBSERVER, "o") as observer:
        await observer.bus.publish_once(observer.bus.subjects.lease(0), one)
        with child(Role.ROLLOUTER, "r0", config, tmp_path, "recorded") as first:
            await first.killed()
        async with rollouter(config, "r0") as second:
            episode = await sealed(observer.bus, one.group, 0)
            assert second.health.counters["takeovers"] == 1
        await check_journal(observer.bus, one, episode)
        assert episode.attempt == 0


async def test_only_what_this_instance_held_last_is_given_back(nats_url: str, run_name: str) -> None:
    config = configuration(nats_url, run_name)
    async with context_of(config, Role.ROLLOUTER, "r0") as context:
        bus = context.bus
        earlier, present, other = (Claims(bus, name) for name in ("r0-aaaa", "r0-bbbb", "r0-x-cccc"))
        await earlier.first("g00000001", "mine")
        await earlier.first("g00000002", "mine, then another's")
        await other.next("g00000002", await other.past("g00000002"), "theirs")
        await present.first("g00000003", "present")
        await earlier.first("g00000004")
        assert await deliveries_of_earlier_lives(bus, "r0", "r0-bbbb") == ["mine"]
