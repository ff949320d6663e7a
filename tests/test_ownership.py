"""Ownership of a role: one at a time, a second waits by name, and nobody waits for a process that is provably gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from conftest import NatsServer, eventually
from partition import Partition

from schemas.ownership import OWNER, Owner
from schemas.table import Role, Stream
from services.bus import Bus
from services.config import Config, check
from services.consume import fold
from services.health import Health
from services.items import BusError, Fenced
from services.ownership import Ownership, _Silence, owned
from services.process_name import has_ended, process_name
from services.provision import provision
from services.runtime import ServiceContext

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parent.parent
STORE_BYTES = 64 * 2**20


def configuration(run: str, **fencing: float) -> Config:
    return check({"run": {"name": run}, "fencing": {"renew_s": 0.3, "ttl_s": 1.5, **fencing}})


@asynccontextmanager
async def context(url: str, config: Config, instance: str) -> AsyncIterator[ServiceContext]:
    """A service's context with a connection of its own."""
    bus = await Bus.connect(url, config.run.name, Role.PARAM_SYNC, instance)
    try:
        await provision(bus, STORE_BYTES)
        yield ServiceContext(config, bus, Role.PARAM_SYNC, instance, asyncio.Event(), Health(bus, 1.0))
    finally:
        await bus.close()


class Claim:
    """An ownership that is held by a task of the test."""

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self.ownership = Ownership(context)
        self.ended = asyncio.Event()
        self.task = asyncio.create_task(self.ownership.hold(self.ended))

    async def gained(self) -> None:
        assert await asyncio.wait_for(self.ownership.gained(self.context.stop), 60)

    async def end(self) -> None:
        self.ended.set()
        await asyncio.wait_for(self.task, 30)


async def owner_of(bus: Bus) -> Owner:
    item = await bus.last(bus.subjects.service_heartbeat(Role.PARAM_SYNC, OWNER))
    assert item is not None
    return item.decode(Owner)


async def test_a_second_waits_by_name_and_follows_a_clean_end_at_once(nats_url: str, run_name: str) -> None:
    """Invariant 11. The time to live is long, so only the release can have let the second in."""
    config = configuration(run_name, ttl_s=300.0)
    async with context(nats_url, config, "a") as one, context(nats_url, config, "b") as two:
        first = Claim(one)
        await first.gained()
        second = Claim(two)
        await eventually(lambda: two.health.counters.get("standby"), within_s=30)
        (wait,) = two.health.snapshot().waits
        assert wait.what == "the ownership of param_sync"
        assert wait.culprit.startswith("param_sync a on ")
        assert f"process {os.getpid()}, owner since 20" in wait.culprit
        assert (first.ownership.epoch, second.ownership.epoch, second.ownership.held) == (1, 0, False)
        with pytest.raises(Fenced):
            await second.ownership.confirm()
        await first.end()
        await second.gained()
        assert second.ownership.epoch == 2
        assert not two.health.snapshot().waits and two.health.counters["standby"] == 0
        await second.ownership.confirm()
        await second.end()
        assert (await owner_of(two.bus)).released


async def test_an_owner_that_is_cut_off_stops_and_the_second_takes_over(nats_process: NatsServer, run_name: str) -> None:
    """Both are alive. The first may do nothing after its renewals failed, and learns who took over when it is back."""
    config = configuration(run_name)
    async with (
        Partition(nats_process.port) as network,
        context(network.url, config, "a") as one,
        context(nats_process.url, config, "b") as two,
    ):
        first = Claim(one)
        await first.gained()
        second = Claim(two)
        await eventually(lambda: two.health.counters.get("standby"), within_s=30)
        await first.ownership.confirm()
        network.cut()
        await second.gained()
        effect = asyncio.create_task(first.ownership.confirm())
        await asyncio.sleep(1.0)
        assert not effect.done(), "an effect must wait while nobody confirms the ownership"
        assert (await owner_of(two.bus)).instance == "b"
        network.heal()
        with pytest.raises(Fenced, match="param_sync b on"):
            await asyncio.wait_for(effect, 60)
        with pytest.raises(Fenced):
            await asyncio.wait_for(first.task, 60)
        await second.ownership.confirm()
        await second.end()


async def test_an_owner_that_was_cut_off_goes_on_when_nobody_took_over(nats_process: NatsServer, run_name: str) -> None:
    """Longer than the time to live, with answers lost in both directions: the same epoch, and no other owner ever."""
    config = configuration(run_name)
    async with Partition(nats_process.port) as network, context(network.url, config, "a") as one:
        first = Claim(one)
        await first.gained()
        for _ in range(2):
            network.cut()
            await asyncio.sleep(2.5)
            network.heal()
            await asyncio.wait_for(first.ownership.confirm(), 60)
        assert first.ownership.epoch == 1 and not first.task.done()
        await first.end()


async def test_an_owner_that_stays_cut_off_ends(nats_process: NatsServer, run_name: str) -> None:
    config = configuration(run_name, cut_off_s=2.0)
    async with Partition(nats_process.port) as network, context(network.url, config, "a") as one:
        first = Claim(one)
        await first.gained()
        network.cut()
        with pytest.raises(BusError, match="no renewal for 2 s"):
            await asyncio.wait_for(first.task, 60)


async def test_the_server_may_restart_under_an_owner(nats_process: NatsServer, run_name: str) -> None:
    config = configuration(run_name, ttl_s=3.0)
    async with context(nats_process.url, config, "a") as one, context(nats_process.url, config, "b") as two:
        first = Claim(one)
        await first.gained()
        second = Claim(two)
        nats_process.kill()
        await asyncio.sleep(4.0)
        nats_process.start()
        await asyncio.wait_for(first.ownership.confirm(), 60)
        await asyncio.sleep(1.0)
        assert first.ownership.epoch == 1 and not second.ownership.held, "the outage is no silence of the owner"
        await first.end()
        await second.end()


_OWNER_PROGRAM = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from test_ownership import Claim, configuration, context

async def main():
    async with context({url!r}, configuration({run!r}, ttl_s=300.0), "a") as one:
        claim = Claim(one)
        await claim.gained()
        print("owner", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_nobody_waits_for_a_process_that_was_killed_on_this_machine(nats_url: str, run_name: str) -> None:
    """The record says silence for 300 s; the process table says at once that the owner is gone."""
    program = _OWNER_PROGRAM.format(tests=str(ROOT / "tests"), url=nats_url, run=run_name)
    command = (sys.executable, "-c", program)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        while (line := await process.stdout.readline()) != b"owner\n":
            assert line, "the owner ended early"
        async with context(nats_url, configuration(run_name, ttl_s=300.0), "b") as two:
            second = Claim(two)
            await eventually(lambda: two.health.counters.get("standby"), within_s=30)
            assert (await owner_of(two.bus)).pid == process.pid
            os.kill(process.pid, signal.SIGKILL)
            await second.gained()
            assert second.ownership.epoch == 2
            await second.end()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_owners_follow_one_another_whoever_races(nats_url: str, run_name: str) -> None:
    """Six claims, each ended or cut short as soon as it has won: epochs count up by one, two are never owner at a time."""
    config = configuration(run_name)
    owning: set[str] = set()
    history: list[str] = []

    async def compete(name: str) -> None:
        async with context(nats_url, config, name) as own, owned(own) as ownership:
            assert ownership is not None
            await ownership.confirm()
            assert not owning, f"{name} and {owning} at once"
            owning.add(name)
            history.append(name)
            await asyncio.sleep(0.1)
            owning.remove(name)

    async with context(nats_url, config, "observer") as watching:
        stop = asyncio.Event()
        epochs: list[int] = []

        async def follow() -> None:
            subject = f"reg.service.param_sync.{OWNER}"
            async for item in fold(watching.bus, Stream.REGISTRY, subject, stop=stop, latest_per_subject=True):
                if item is not None:
                    epochs.append(item.decode(Owner).epoch)

        following = asyncio.create_task(follow())
        await asyncio.wait_for(asyncio.gather(*(compete(f"c{n}") for n in range(6))), 90)
        assert (await owner_of(watching.bus)).epoch == 6
        stop.set()
        await following
    assert sorted(history) == [f"c{n}" for n in range(6)]
    assert epochs == sorted(epochs)


async def test_a_service_that_is_stopped_while_it_waits_gets_nothing(nats_url: str, run_name: str) -> None:
    config = configuration(run_name, ttl_s=300.0)
    async with context(nats_url, config, "a") as one, context(nats_url, config, "b") as two:
        first = Claim(one)
        await first.gained()
        asyncio.get_running_loop().call_later(0.5, two.stop.set)
        async with owned(two) as ownership:
            assert ownership is None
        assert first.ownership.held
        await first.end()


async def test_losing_the_role_interrupts_the_body(nats_process: NatsServer, run_name: str) -> None:
    config = configuration(run_name, cut_off_s=1.0)
    interrupted: list[str] = []

    async def work(one: ServiceContext, network: Partition) -> None:
        async with owned(one):
            network.cut()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                interrupted.append("at once")
                raise

    async with Partition(nats_process.port) as network, context(network.url, config, "a") as one:
        with pytest.raises(BaseExceptionGroup) as caught:
            await work(one, network)
        assert interrupted
        assert isinstance(caught.value.exceptions[0], BusError)


async def test_losing_the_role_stops_a_body_that_loses_its_cancellation(nats_process: NatsServer, run_name: str) -> None:
    """As some waits of the bus's client do: the service's stop flag is raised as well."""
    config = configuration(run_name, cut_off_s=1.0)

    async def work(one: ServiceContext, network: Partition) -> None:
        async with owned(one):
            network.cut()
            while not one.stop.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.1)

    async with Partition(nats_process.port) as network, context(network.url, config, "a") as one:
        with pytest.raises(BaseExceptionGroup) as caught:
            await asyncio.wait_for(work(one, network), 60)
        assert isinstance(caught.value.exceptions[0], BusError)


def test_silence_is_counted_without_gaps() -> None:
    """A look that comes late may mean that we stood still and not the owner, so the count begins anew."""
    silence = _Silence(3.0)
    assert [bool(silence.over(7, now)) for now in (0.0, 1.0, 2.0, 2.9)] == [False] * 4
    assert silence.over(7, 3.0)
    assert not silence.over(8, 3.5)
    assert [bool(silence.over(8, now)) for now in (4.5, 5.5, 6.4)] == [False] * 3
    assert silence.over(8, 6.6)
    assert not silence.over(8, 20.0)
    assert [bool(silence.over(8, now)) for now in (21.0, 22.0, 23.0)] == [False, False, True]


def test_a_process_has_a_name_of_its_own() -> None:
    assert process_name(os.getpid()) == process_name(os.getpid())
    assert process_name(os.getpid()).split("/")[2] == str(os.getpid())
    with subprocess.Popen(["sleep", "30"]) as other:
        name = process_name(other.pid)
        assert name != process_name(os.getpid())
        assert not has_ended(other.pid, name)
        other.kill()
        other.wait()
        assert has_ended(other.pid, name)
    assert has_ended(os.getpid(), name.replace(f"/{other.pid}/", f"/{os.getpid()}/")), "another process had this number"
    boot, *rest = name.split("/")
    assert not has_ended(other.pid, "/".join((boot + "x", *rest))), "of another boot nothing can be said"
    assert not has_ended(other.pid, "")
    assert process_name(2**22 + 1) == ""
