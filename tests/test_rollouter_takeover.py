"""A rollouter may die or stop at any moment: another one finishes its groups, and every slot is sealed once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollouter import service as rollouter_service
from schemas.table import Role, Stream
from schemas.termination import Termination
from services.bus import Bus
from services.config import Config, to_toml
from services.consume import read_all
from tests.conftest import NatsServer
from tests.rollout_stand import (
    TASKS,
    Ask,
    ScriptedEngine,
    Words,
    configuration,
    context_of,
    episodes_of,
    eventually,
    lease,
    make_sandbox_root,
    oracle_speech,
    say,
    serving,
    stand,
    surroundings,
    turns_of,
    verdicts_of,
)

__all__ = ["make_sandbox_root"]  # a fixture
PROGRAM = """
import sys
from rollouter.service import serve
from schemas.table import Role
from services.config import load
from services.runtime import run_service
sys.exit(run_service(Role.ROLLOUTER, "r0", load(sys.argv[1]), serve))
"""


@contextmanager
def rollouter_process(config: Config, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A rollouter in a process of its own."""
    path = folder / "config.toml"
    path.write_text(to_toml(config))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdout=log, stderr=log, cwd=os.getcwd())
        try:
            yield process
        finally:
            process.kill()
            process.wait(10)


def two_of_four_hang(ask: Ask) -> Words:
    """With the first rollouter, slots 2 and 3 never get their second turn."""
    if ask.turn == 0:
        return say("shell", "touch made")
    return None if ask.slot >= 2 and ask.request.requester.startswith("r0") else say("finish")


async def half_done(bus: Bus, group: str) -> None:
    """Two slots are sealed, the other two have journalled their first turn."""

    async def reached() -> bool:
        sealed = await read_all(bus, Stream.EPISODES, f"episode.{group}.*")
        waiting = await read_all(bus, Stream.TURNS, f"turn.{group}.2.0.0", f"turn.{group}.3.0.0")
        return len(sealed) == 2 and len(waiting) == 2

    await eventually("half of the group", reached)


async def only_these_sandboxes_live(counters: dict[str, float], count: int) -> None:
    async def so() -> bool:
        return counters.get("sandboxes") == count

    await eventually(f"{count} living sandboxes", so)


@pytest.mark.slow
async def test_another_rollouter_finishes_what_a_killed_one_began(
    nats_url: str, run_name: str, sandbox_root: str, tmp_path: Path
) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one = lease(config, 0, TASKS[0])
    async with (
        surroundings(config, ScriptedEngine("e0", two_of_four_hang)) as sandbox,
        context_of(config, Role.OBSERVER, "o") as observer,
    ):
        await observer.bus.publish_once(observer.bus.subjects.lease(0), one)
        with rollouter_process(config, tmp_path) as process:
            await half_done(observer.bus, one.group)
            os.kill(process.pid, signal.SIGKILL)
        first = {item.subject: item.digest for item in await read_all(observer.bus, Stream.EPISODES, "episode.*.*")}
        async with serving(config, Role.ROLLOUTER, "r1", rollouter_service.serve) as second:
            episodes = {e.slot: e for e in await episodes_of(observer.bus, 4)}
            await verdicts_of(observer.bus, 4)
            assert second.health.counters["takeovers"] == 1
        await only_these_sandboxes_live(sandbox.health.counters, 0)
        items = await read_all(observer.bus, Stream.EPISODES, "episode.*.*")
        turns = await turns_of(observer.bus)
    assert len(items) == 4  # leased = sealed, none twice
    assert first.items() <= {item.subject: item.digest for item in items}.items()
    assert [episodes[slot].attempt for slot in range(4)] == [0, 0, 0, 0]
    assert [episodes[slot].rollouter.split("-")[0] for slot in range(4)] == ["r0", "r0", "r1", "r1"]
    assert {e.termination for e in episodes.values()} == {Termination.AGENT_FINISH}
    assert sorted((t.attempt, t.turn) for t in turns if t.slot == 3) == [(0, 0), (0, 1)]


async def test_a_stopping_rollouter_hands_back_what_it_cannot_finish(nats_url: str, run_name: str, sandbox_root: str) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one = lease(config, 0, TASKS[0])
    engine = ScriptedEngine("e0", two_of_four_hang)
    async with surroundings(config, engine) as sandbox, context_of(config, Role.OBSERVER, "o") as observer:
        await observer.bus.publish_once(observer.bus.subjects.lease(0), one)
        async with serving(config, Role.ROLLOUTER, "r0", rollouter_service.serve):
            await half_done(observer.bus, one.group)
            engine.phase = "draining"  # nothing can finish, so the drain ends soon
        assert len(await read_all(observer.bus, Stream.EPISODES, "episode.*.*")) == 2
        await only_these_sandboxes_live(sandbox.health.counters, 2)  # those that the next one goes on in
        engine.phase = "serving"
        async with serving(config, Role.ROLLOUTER, "r1", rollouter_service.serve):
            episodes = {e.slot: e for e in await episodes_of(observer.bus, 4, 10.0)}  # sooner than the lease's own deadline
        await only_these_sandboxes_live(sandbox.health.counters, 0)
    assert [episodes[slot].attempt for slot in range(4)] == [0, 0, 0, 0]
    assert [episodes[slot].rollouter.split("-")[0] for slot in range(4)] == ["r0", "r0", "r1", "r1"]


async def test_a_stopping_rollouter_finishes_what_it_can(nats_url: str, run_name: str, sandbox_root: str) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    release = asyncio.Event()

    async def speak(ask: Ask) -> Words:
        if ask.turn == 1:
            await release.wait()
        return say("shell", "ls") if ask.turn == 0 else say("finish")

    engine = ScriptedEngine("e0", speak)
    async with surroundings(config, engine), context_of(config, Role.OBSERVER, "o") as observer:
        await observer.bus.publish_once(observer.bus.subjects.lease(0), lease(config, 0, TASKS[0]))
        await observer.bus.publish_once(observer.bus.subjects.lease(1), lease(config, 1, TASKS[1]))
        async with serving(config, Role.ROLLOUTER, "r0", rollouter_service.serve) as first:

            async def all_wait() -> bool:
                return len(await turns_of(observer.bus)) == 8

            await eventually("all slots in their second turn", all_wait)
            first.stop.set()
            await asyncio.sleep(0.5)
            release.set()
        episodes = await episodes_of(observer.bus, 8, 1.0)
    assert {e.attempt for e in episodes} == {0}


@pytest.mark.slow
async def test_a_server_that_is_killed_costs_no_turn(nats_process: NatsServer, run_name: str, sandbox_root: str) -> None:
    config = configuration(nats_process.url, run_name, sandbox={"root": sandbox_root})
    leases = [lease(config, n, TASKS[n]) for n in range(3)]
    speech = oracle_speech({each.group: each.task_id for each in leases})
    async with stand(config, ScriptedEngine("e0", speech), ScriptedEngine("e1", speech)) as context:
        for each in leases:
            await context.bus.publish_once(context.bus.subjects.lease(each.ordinal), each)

        async def some() -> bool:
            return len(await turns_of(context.bus)) > 6

        await eventually("some turns", some)
        nats_process.kill()
        await asyncio.sleep(0.3)
        nats_process.start()
        episodes = await episodes_of(context.bus, 12)
        verdicts = await verdicts_of(context.bus, 12)
        turns = await turns_of(context.bus)
    assert {v.success for v in verdicts.values()} == {True}
    assert len(verdicts) == len(episodes) == 12
    for episode in episodes:
        mine = [t for t in turns if (t.group, t.slot, t.attempt) == (episode.group, episode.slot, episode.attempt)]
        mine.sort(key=lambda t: t.turn)
        row = [i for t in mine for part in (t.prompt_ids, t.sampled_ids) for i in part.numpy().tolist()]
        assert row == episode.ids.numpy().tolist()
