"""Bank, admission and sampler over a real server: nothing vanishes, nothing counts twice, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
import random

import pytest
from admission_stage import Actors, Stage, items, make_episode, make_lease, make_verdict
from conftest import NatsServer, eventually

import admission.bank_service
import admission.service
import rollouter.sampler_service
from admission.conservation import Account, account
from admission.replay import replay
from admission.service import gate_settings
from schemas.codec import decode_any, encode
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import BatchEntry, LedgerEntry
from schemas.table import Role, Stream
from schemas.termination import Termination
from schemas.training import BatchDemand, EvalResult
from services.bus import Bus
from services.config import Config, check
from services.policy_manifest import policy_manifest
from services.suites import resolve_suite

STEPS = 5
BATCH = 4
SIBLINGS = 2
WINDOW = 7


def configuration(run: str, url: str, **admission_changes: object) -> Config:
    """A small run on the example suite; the engines are played by the test."""
    return check(
        {
            "run": {"name": run, "max_steps": STEPS, "seed": 5},
            "nats": {"url": url},
            "tasks": {"pool": 12},
            "window": {"max_groups": WINDOW},
            "rollout": {"group_size": SIBLINGS},
            "engine": {"kind": "simulated"},
            "admission": {"groups_per_batch": BATCH, "max_lag": 1, "min_rewards": 1, **admission_changes},
            "eval": {"instance_attempts": 6, "template_attempts": 5, "every_steps": 2, "interim_attempts": 3},
            "telemetry": {"heartbeat_s": 0.3},
        }
    )


async def ledger_of(bus: Bus) -> list[tuple[int, LedgerEntry]]:
    return [(item.seq, decode_any(item.data)) for item in await items(bus, Stream.LEDGER)]


async def account_of(bus: Bus) -> Account:
    leases = [item.decode(GroupLease) for item in await items(bus, Stream.TASKS)]
    return account(leases, [entry for _, entry in await ledger_of(bus)])


async def open_at_every_lease(bus: Bus) -> list[int]:
    """Open training groups just after each lease, by the server's own clock."""
    events: list[tuple[int, int]] = []
    for item in await items(bus, Stream.TASKS):
        if item.decode(GroupLease).purpose == "train":
            events.append((item.time_ns, 1))
    for item in await items(bus, Stream.LEDGER):
        entry = decode_any(item.data)
        events.append((item.time_ns, -len(entry.groups) if isinstance(entry, BatchEntry) else -1))
    counts, now = [], 0
    for _, change in sorted(events):
        now += change
        counts.append(now)
    return counts


def some_fail(lease: GroupLease, slot: int) -> Termination:
    """Every ninth group loses a sibling to infrastructure, every seventh has a truncated one."""
    if lease.purpose == "train" and lease.ordinal % 9 == 4 and slot == 0:
        return Termination.INFRA_ABORT
    if lease.ordinal % 7 == 3 and slot == 1:
        return Termination.TOKEN_TRUNCATION
    return Termination.AGENT_FINISH


@pytest.mark.timeout(80)
async def test_a_run_with_restarts_conserves_every_group_and_trains_each_once(nats_url: str, run_name: str) -> None:
    """Invariants 3, 4, 7, 9: bank and admission are cut off in mid-run, and every message may come twice."""
    config = configuration(run_name, nats_url)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.OBSERVER)
        actors = Actors(bus, random.Random(3), SIBLINGS, BATCH, terminations=some_fail)
        bank = await stage.start(Role.BANK, admission.bank_service.serve)
        writer = await stage.start(Role.ADMISSION, admission.service.serve)
        sampler = await stage.start(Role.SAMPLER, rollouter.sampler_service.serve)
        rolling = asyncio.create_task(actors.roll_out())

        async def cut_services_off(batch: BatchEntry) -> None:
            nonlocal bank, writer, sampler
            if batch.step == 1:
                await bank.kill()
                bank = await stage.start(Role.BANK, admission.bank_service.serve, "1")
            if batch.step == 2:
                await writer.kill()
                writer = await stage.start(Role.ADMISSION, admission.service.serve, "1")
            if batch.step == 3:
                await sampler.stop()
                sampler = await stage.start(Role.SAMPLER, rollouter.sampler_service.serve, "1")

        await actors.serve_version(0)
        async with asyncio.timeout(60):
            await actors.train(range(STEPS), cut_services_off)
            await eventually(lambda: items(bus, Stream.TRAIN, f"train.eval.step-{STEPS:05d}"), within_s=20)
        await asyncio.sleep(0.5)

        final = await account_of(bus)
        assert final.holds, final.line()
        assert final.consumed == STEPS * BATCH
        assert not final.open, "the sampler leased more than the steps needed"
        assert final.abandoned, "the test wants lost groups to be accounted for"
        ready = [(item.seq, item.decode(ReadyGroup)) for item in await items(bus, Stream.READY)]
        train = [(item.seq, decode_any(item.data)) for item in await items(bus, Stream.TRAIN)]
        ledger = await ledger_of(bus)
        assert replay(ready, train, ledger, gate_settings(config)) is None
        points = {item.subject.rsplit(".", 1)[-1] for item in await items(bus, Stream.TRAIN, "train.eval.*")}
        assert {"step-00000", f"step-{STEPS:05d}"} <= points
        assert len({group.group for _, group in ready}) == len(ready)
        manifest = policy_manifest(config, resolve_suite(config.tasks.suite))
        leases = [item.decode(GroupLease) for item in await items(bus, Stream.TASKS)]
        results = [item.decode(EvalResult) for item in await items(bus, Stream.TRAIN, "train.eval.*")]
        assert {lease.policy for lease in leases} == {manifest}
        assert {one.manifest for one in (*leases, *results)} == {manifest.hash()}, "all that is made refers to one manifest"
        assert max(await open_at_every_lease(bus)) <= WINDOW
        actors.stop.set()
        await rolling


@pytest.mark.timeout(90)
async def test_a_second_writer_waits_by_name_and_takes_over_when_the_first_is_gone(nats_url: str, run_name: str) -> None:
    """Invariants 4, 7 and 11 with two admissions under different settings: one log, one writer at a time."""
    config = configuration(run_name, nats_url)
    other = configuration(run_name, nats_url, max_lag=0)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.OBSERVER)
        await stage.start(Role.BANK, admission.bank_service.serve)
        first = await stage.start(Role.ADMISSION, admission.service.serve, "first")
        await eventually(lambda: first.context.health.phase == "ready", within_s=30)
        second = await stage.start(Role.ADMISSION, admission.service.serve, "second", other)
        await eventually(lambda: second.context.health.counters.get("standby"), within_s=30)

        async def demand(step: int) -> None:
            message = BatchDemand(run=run_name, step=step, version=step, incarnation=0, groups=BATCH)
            await bus.publish_once(bus.subjects.demand(step), message)

        async def offer(ordinals: range, oldest: int) -> None:
            for ordinal in ordinals:
                lease = make_lease(ordinal, group_size=1)
                await bus.publish_once(bus.subjects.lease(ordinal), lease)
                episode = make_episode(lease, 0, version=oldest)
                stored = await bus.publish_once(bus.subjects.episode(lease.group, 0), episode)
                await bus.publish_once(bus.subjects.verdict(lease.group, 0), make_verdict(episode, stored.digest))

        async def train(step: int) -> None:
            await offer(range(step * BATCH, (step + 1) * BATCH), oldest=step)
            await demand(step)
            await eventually(lambda: items(bus, Stream.LEDGER, f"ledger.batch.{step}"), within_s=30)

        for step in range(4):
            await train(step)
        assert {entry.settings_hash for _, entry in await ledger_of(bus)} == {gate_settings(config).hash()}
        (wait,) = second.context.health.snapshot().waits
        assert (wait.what, wait.culprit.split(",")[0].split(" on ")[0]) == ("the ownership of admission", "admission first")
        await first.kill()
        await train(4)
        assert second.context.health.counters["standby"] == 0
        entries = await ledger_of(bus)
        assert [entry.step for _, entry in entries if isinstance(entry, BatchEntry)] == list(range(5))
        assert entries[-1][1].settings_hash == gate_settings(other).hash()
        assert len({encode(entry) for _, entry in entries}) == len(entries)


@pytest.mark.timeout(80)
async def test_two_of_each_service_and_a_killed_server_change_no_count(nats_process: NatsServer, run_name: str) -> None:
    """Invariants 3 and 4: replicas race for every once-only write, and the server dies in the middle."""
    config = configuration(run_name, nats_process.url, groups_per_batch=3)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"at_start": False, "every_steps": 0})})
    async with Stage(nats_process.url, config) as stage:
        bus = await stage.bus(Role.OBSERVER)
        actors = Actors(bus, random.Random(8), SIBLINGS, 3, terminations=some_fail)
        running = [
            await stage.start(role, serve, instance)
            for instance in ("a", "b")
            for role, serve in (
                (Role.BANK, admission.bank_service.serve),
                (Role.ADMISSION, admission.service.serve),
                (Role.SAMPLER, rollouter.sampler_service.serve),
            )
        ]
        rolling = asyncio.create_task(actors.roll_out())

        async def kill_the_server(batch: BatchEntry) -> None:
            if batch.step == 1:
                nats_process.kill()
                await asyncio.sleep(0.2)
                nats_process.start()

        await actors.serve_version(0)
        async with asyncio.timeout(60):
            await actors.train(range(STEPS), kill_the_server)
        final = await account_of(bus)
        assert final.holds, final.line()
        assert final.consumed == STEPS * 3
        assert max(await open_at_every_lease(bus)) <= WINDOW
        leases = [item.decode(GroupLease) for item in await items(bus, Stream.TASKS)]
        assert [lease.ordinal for lease in leases] == list(range(len(leases)))
        ready = [(item.seq, item.decode(ReadyGroup)) for item in await items(bus, Stream.READY)]
        train = [(item.seq, decode_any(item.data)) for item in await items(bus, Stream.TRAIN)]
        assert replay(ready, train, await ledger_of(bus), gate_settings(config)) is None
        assert not [service.task for service in running if service.task.done()], "a service ended by itself"
        actors.stop.set()
        await rolling
