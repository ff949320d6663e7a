"""Items that are garbage, damaged or gone: their groups are abandoned by the item's name, the others go on, none is guessed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from admission_stage import Running, Stage, items, make_commit, make_episode, make_lease, make_verdict
from conftest import NatsServer, eventually
from damage import cut_block, damaged, flip_bit

import admission.bank_service
import admission.service
import rollouter.sampler_service
from admission.conservation import account
from admission.losses import Evidence
from admission.replay import replay
from admission.service import LedgerDamaged, gate_settings
from schemas.codec import CodecError, decode_any, digest, encode
from schemas.dead_letter import DeadLetter
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, AbandonReason, BatchEntry, LedgerEntry, LostItem
from schemas.policy import FleetVersions
from schemas.table import Role, Stream
from schemas.training import BatchDemand, EvalResult
from schemas.trajectory import Episode
from services.bus import Bus
from services.config import Config, check
from services.consume import read_all, read_events
from services.items import DIGEST_HEADER, Item, Rewound
from services.pull import Damaged
from services.work import WorkConsumer

pytestmark = pytest.mark.timeout(240)
SLOTS = 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of its own for a test that damages its store."""
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


def configuration(run: str, url: str) -> Config:
    return check(
        {
            "run": {"name": run, "max_steps": 3},
            "nats": {"url": url},
            "tasks": {"pool": 4},
            "window": {"max_groups": 8},
            "rollout": {"group_size": SLOTS},
            "engine": {"kind": "simulated"},
            "admission": {"groups_per_batch": 2, "min_rewards": 1},
            "eval": {"instance_attempts": 4, "template_attempts": 0, "every_steps": 0, "at_end": False},
            "telemetry": {"heartbeat_s": 0.3},
            "fencing": {"ttl_s": 3.0, "renew_s": 0.5},
        }
    )


class Ground:
    """One run's streams, and what its services would write."""

    def __init__(self, stage: Stage, bus: Bus) -> None:
        self.stage = stage
        self.bus = bus
        self.config = stage.config

    async def lease(self, *ordinals: int) -> list[GroupLease]:
        leases = [make_lease(ordinal, group_size=SLOTS) for ordinal in ordinals]
        for lease in leases:
            await self.bus.publish_once(self.bus.subjects.lease(lease.ordinal), lease)
        return leases

    async def play(self, lease: GroupLease, *slots: int) -> None:
        """Seal and judge some slots, all by default."""
        for slot in slots or range(SLOTS):
            await self.judge(lease, slot, await self.seal(lease, slot))

    async def seal(self, lease: GroupLease, slot: int, **changes: object) -> str:
        episode = make_episode(lease, slot, **changes)
        return (await self.bus.publish_once(self.bus.subjects.episode(lease.group, slot), episode)).digest

    async def judge(self, lease: GroupLease, slot: int, sealed: str) -> None:
        verdict = make_verdict(make_episode(lease, slot), sealed, reward=float(slot))
        await self.bus.publish_once(self.bus.subjects.verdict(lease.group, slot), verdict)

    async def demand(self, step: int, groups: int) -> None:
        demand = BatchDemand(run=self.bus.run, step=step, version=step, incarnation=0, groups=groups)
        await self.bus.publish_once(self.bus.subjects.demand(step), demand)

    async def bank(self, instance: str = "0") -> Running:
        return await self.stage.start(Role.BANK, admission.bank_service.serve, instance)

    async def admission(self, instance: str = "0") -> Running:
        return await self.stage.start(Role.ADMISSION, admission.service.serve, instance)

    async def ready(self, count: int) -> None:
        """Wait for so many ready groups."""

        async def there() -> bool:
            return len(await read_events(self.bus, Stream.READY)) >= count

        await eventually(there, within_s=60, what=f"{count} ready groups")

    async def batch(self, step: int) -> BatchEntry:
        (item,) = await eventually(lambda: items(self.bus, Stream.LEDGER, f"ledger.batch.{step}"), within_s=60)
        return item.decode(BatchEntry)

    async def ledger(self) -> list[tuple[int, LedgerEntry]]:
        return [(item.seq, decode_any(item.data)) for item in await read_all(self.bus, Stream.LEDGER)]

    async def abandoned(self) -> dict[str, AbandonEntry]:
        return {entry.group: entry for _, entry in await self.ledger() if isinstance(entry, AbandonEntry)}

    async def check(self, evidence: Evidence | None = None) -> None:
        """Nothing vanished, and every decision comes out of the recorded streams again."""
        leases = [item.decode(GroupLease) for item in await items(self.bus, Stream.TASKS)]
        ledger = await self.ledger()
        total = account(leases, [entry for _, entry in ledger])
        assert total.holds, total.line()
        assert await self.replayed(ledger, evidence or await self.evidence()) is None

    async def replayed(self, ledger: list[tuple[int, LedgerEntry]], evidence: Evidence) -> object:
        ready = []
        for event in await read_events(self.bus, Stream.READY):
            if isinstance(event, Item):
                with suppress(CodecError):
                    group = event.decode(ReadyGroup)
                    ready += [(event.seq, group)] if group.stands_on(event.subject) else []
        train = [(item.seq, decode_any(item.data)) for item in await items(self.bus, Stream.TRAIN)]
        return replay(ready, train, ledger, gate_settings(self.config), evidence=evidence)

    async def evidence(self) -> Evidence:
        leases = [item.decode(GroupLease) for item in await items(self.bus, Stream.TASKS)]
        stands = {event.seq: event.digest for event in await read_events(self.bus, Stream.EPISODES) if isinstance(event, Item)}
        return Evidence({lease.group: lease.family for lease in leases}, stands)


@asynccontextmanager
async def ground(url: str, run: str) -> AsyncIterator[Ground]:
    async with Stage(url, configuration(run, url)) as stage:
        yield Ground(stage, await stage.bus(Role.TRAINER))  # any role but the onlooker; keys are not the matter here


async def failure(running: Running) -> pytest.ExceptionInfo[BaseExceptionGroup]:
    """How a service ended by itself."""
    with pytest.raises(BaseExceptionGroup) as ended:
        await asyncio.wait_for(running.task, 90)
    await running._end()
    return ended


def reasons(entries: dict[str, AbandonEntry]) -> set[str]:
    return {str(entry.reason) for entry in entries.values()}


async def test_garbage_on_once_only_subjects_costs_its_groups_alone(nats_url: str, run_name: str) -> None:
    async with ground(nats_url, run_name) as run:
        subjects, bus = run.bus.subjects, run.bus
        leases = await run.lease(*range(9))
        whole = {leases[0].group, leases[7].group, leases[8].group}

        await run.play(leases[0])
        await bus.store(subjects.episode(leases[1].group, 1), b"no episode", {})
        await run.play(leases[1], 0)
        sealed = await run.seal(leases[2], 0)
        good = encode(make_verdict(make_episode(leases[2], 0), sealed))
        await bus.jetstream.publish(
            subjects.verdict(leases[2].group, 0), good[:-1] + b"?", headers={DIGEST_HEADER: digest(good)}
        )
        await run.play(leases[2], 1)
        await bus.store(subjects.ready(leases[3].group), b"not ready", {})
        await run.play(leases[3])
        await run.seal(leases[4], 0)
        await bus.publish_once(subjects.verdict(leases[4].group, 0), make_verdict(make_episode(leases[4], 1), "d"))
        await run.play(leases[4], 1)
        await run.seal(leases[5], 0, task_id="another task")
        await run.play(leases[5], 1)
        await run.judge(leases[5], 0, "d")
        await bus.publish_once(subjects.ready(leases[6].group), _ready_of(leases[0]))
        await bus.store(subjects.ready("g99999999"), b"of a group that nobody leased", {})
        for lease in leases[6:]:
            await run.play(lease)

        bank, writer = await run.bank(), await run.admission()
        await run.demand(0, 3)
        assert {member.group for member in (await run.batch(0)).groups} == whole

        async def all_closed() -> bool:
            return len(await run.abandoned()) == 6

        await eventually(all_closed, within_s=60)
        closed = await run.abandoned()
        assert reasons(closed) == {AbandonReason.LOST_ITEM}
        assert set(closed) == {lease.group for lease in leases} - whole
        seq = {item.subject: item.seq for item in [e.item if isinstance(e, Damaged) else e for e in await _stored(bus)]}
        assert closed[leases[1].group].detail == (
            f"slot 1: its episode at EPISODES {seq[subjects.episode(leases[1].group, 1)]} cannot be used"
        )
        assert closed[leases[2].group].detail == (
            f"slot 0: its verdict at EPISODES {seq[subjects.verdict(leases[2].group, 0)]} cannot be used"
        )
        assert "its ready entry at READY 1 cannot be used" in closed[leases[3].group].detail
        assert closed[leases[3].group].lost == LostItem("READY", 1, "")
        assert "slot 0: its verdict at EPISODES" in closed[leases[4].group].detail
        assert "slot 0: its episode at EPISODES" in closed[leases[5].group].detail
        assert "its ready entry at READY 2 cannot be used" in closed[leases[6].group].detail
        await run.check()

        letters = {item.decode(DeadLetter).subject for item in await read_all(bus, Stream.DEAD)}
        assert letters >= {
            subjects.episode(leases[1].group, 1),
            subjects.verdict(leases[2].group, 0),
            subjects.verdict(leases[4].group, 0),
            *(subjects.ready(name) for name in (leases[3].group, leases[6].group, "g99999999")),
        }
        assert bank.context.bus.alarms["lost_items"] >= 4
        beat = writer.context.health.snapshot()
        assert beat.counters["alarm_unreadable"] == 3


def _ready_of(lease: GroupLease) -> ReadyGroup:
    from admission_stage import make_ready

    return make_ready(lease.ordinal)


async def _stored(bus: Bus) -> list[Item | Damaged]:
    return [event for event in await read_events(bus, Stream.EPISODES) if isinstance(event, Item | Damaged)]


async def test_items_that_the_store_lost_before_the_batch_abandon_their_groups(server: NatsServer, run_name: str) -> None:
    """The bank had seen them whole; the trainer could not fetch them, and would stand still."""
    async with ground(server.url, run_name) as run:
        leases = await run.lease(*range(4))
        for lease in leases:
            await run.play(lease)
        await run.bank()
        await run.ready(4)
        subjects = run.bus.subjects
        named = {item.subject: (item.seq, item.digest) for item in await read_all(run.bus, Stream.EPISODES)}
        gone = {
            leases[1].group: named[subjects.episode(leases[1].group, 0)],
            leases[2].group: named[subjects.verdict(leases[2].group, 1)],
        }
        whole = await run.evidence()
        async with damaged(server):
            flip_bit(server, run_name, Stream.EPISODES, subjects.episode(leases[1].group, 0))
            flip_bit(server, run_name, Stream.EPISODES, subjects.verdict(leases[2].group, 1))
        writer = await run.admission()
        await run.demand(0, 2)
        assert [member.group for member in (await run.batch(0)).groups] == [leases[0].group, leases[3].group]
        closed = await run.abandoned()
        assert {name: (entry.lost.seq, entry.lost.digest) for name, entry in closed.items()} == gone
        assert all(entry.lost.stream == "EPISODES" and entry.ready_seq for entry in closed.values())
        assert writer.context.bus.alarms["lost_items"] == 2
        await run.check()
        difference = await run.replayed(await run.ledger(), whole)
        assert "holds the item" in difference.why, "a replay of an undamaged recording does not believe it"
        assert "EPISODES was not read" in (await run.replayed(await run.ledger(), Evidence())).why


async def test_what_was_acknowledged_as_written_and_is_not_there_is_lost(server: NatsServer, run_name: str) -> None:
    """Nobody had read these items before the log was cut short; only the workers' acknowledgements say that they were there."""
    async with ground(server.url, run_name) as run:
        leases = await run.lease(*range(4))
        stop = asyncio.Event()
        rollouter = WorkConsumer(run.bus, "rollouter", capacity=1)
        verifier = WorkConsumer(run.bus, "verifier", capacity=1)

        async def roll_out(item: Item) -> None:
            lease = item.decode(GroupLease)
            if lease.ordinal < 3:
                for slot in range(SLOTS):
                    await run.seal(lease, slot)
            else:  # the last one stays in work
                await run.seal(lease, 0)
                await stop.wait()

        async def judge(item: Item) -> None:
            episode = item.decode(Episode)
            await run.judge(make_lease(episode.seed, group_size=SLOTS), episode.slot, item.digest)

        working = [asyncio.create_task(rollouter.run(roll_out, stop)), asyncio.create_task(verifier.run(judge, stop))]
        await eventually(lambda: rollouter.done == 3 and verifier.done == 7, within_s=60)
        cut_at = next(item for item in await read_all(run.bus, Stream.EPISODES) if item.subject.endswith("g00000001.1"))
        async with damaged(server, crash=True):
            cut_block(server, run_name, Stream.EPISODES, cut_at.subject)
        await run.bank()
        await run.admission()
        await run.demand(0, 2)

        async def both_lost() -> bool:
            return {leases[1].group, leases[2].group} <= set(await run.abandoned())

        await eventually(both_lost, within_s=90)
        closed = await run.abandoned()
        assert reasons(closed) == {AbandonReason.LOST_ITEM}
        assert "is missing from EPISODES" in closed[leases[2].group].detail
        assert leases[3].group not in closed, "a group in work has lost nothing that is known"
        stop.set()
        await asyncio.wait(working, timeout=30)
        await run.check()


async def test_ready_entries_that_are_gone_are_written_again_and_train_no_group_twice(
    server: NatsServer, run_name: str
) -> None:
    async with ground(server.url, run_name) as run:
        leases = await run.lease(*range(4))
        for lease in leases:
            await run.play(lease)
        bank, writer = await run.bank(), await run.admission()
        await run.ready(4)
        await run.demand(0, 2)
        first = await run.batch(0)
        async with damaged(server, crash=True):
            cut_block(server, run_name, Stream.READY, run.bus.subjects.ready(leases[1].group))  # one consumed, two open
        for running in (bank, writer):
            assert (await failure(running)).group_contains(Rewound, match="READY: sequences 2 to 4 are gone")
        await run.bank("1")
        await run.ready(4)
        await run.admission("1")
        await run.demand(1, 2)
        second = await run.batch(1)
        names = [member.group for member in (*first.groups, *second.groups)]
        assert sorted(names) == [lease.group for lease in leases]
        leased = [item.decode(GroupLease) for item in await items(run.bus, Stream.TASKS)]
        assert account(leased, [entry for _, entry in await run.ledger()]).holds


async def test_batches_that_the_ledger_lost_are_decided_again_only_if_they_come_out_the_same(
    server: NatsServer, run_name: str
) -> None:
    async with ground(server.url, run_name) as run:
        leases = await run.lease(*range(6))
        for lease in leases:
            await run.play(lease)
        await run.bank()
        writer = await run.admission()
        batches = []
        for step in range(2):
            await run.demand(step, 2)
            batches.append(await run.batch(step))
            await run.bus.publish_once(run.bus.subjects.step(step), make_commit(batches[-1]))
        await writer.kill()
        async with damaged(server, crash=True):
            cut_block(server, run_name, Stream.LEDGER, run.bus.subjects.batch(1))
        assert len(await run.ledger()) == 1
        second = await run.admission("1")
        assert await run.batch(1) == batches[1]
        await eventually(lambda: second.context.bus.alarms["ledger_restored"] == 1, within_s=30)
        await run.check()


async def test_nothing_is_decided_beside_a_ledger_with_a_hole(server: NatsServer, run_name: str) -> None:
    async with ground(server.url, run_name) as run:
        for lease in await run.lease(*range(6)):
            await run.play(lease)
        await run.bank()
        writer = await run.admission()
        for step in range(2):
            await run.demand(step, 2)
            await run.batch(step)
        await writer.kill()
        async with damaged(server):
            flip_bit(server, run_name, Stream.LEDGER, run.bus.subjects.batch(0))
        await run.demand(2, 2)
        second = await run.admission("1")
        ended = await failure(second)
        assert ended.group_contains(LedgerDamaged, match=r"LEDGER: sequence 1 is missing.*restore the store from a copy")
        assert second.context.bus.alarms["ledger_damaged"] == 1
        left = [event for event in await read_events(run.bus, Stream.LEDGER) if isinstance(event, Item)]
        assert [item.seq for item in left] == [2]


async def test_a_committed_batch_that_cannot_be_decided_again_stops_admission(server: NatsServer, run_name: str) -> None:
    """The ledger lost a batch that was trained on, and READY lost what it was decided from."""
    async with ground(server.url, run_name) as run:
        for lease in await run.lease(*range(4)):
            await run.play(lease)
        bank, writer = await run.bank(), await run.admission()
        await run.demand(0, 2)
        batch = await run.batch(0)
        await run.bus.publish_once(run.bus.subjects.step(0), make_commit(batch))
        await writer.kill()
        async with damaged(server, crash=True):
            cut_block(server, run_name, Stream.LEDGER, run.bus.subjects.batch(0))
            cut_block(server, run_name, Stream.READY, run.bus.subjects.ready(batch.groups[0].group))
        assert (await failure(bank)).group_contains(Rewound)
        for lease in await run.lease(7, 8):
            await run.play(lease)
            await run.bus.publish_once(run.bus.subjects.ready(lease.group), await _as_ready(run, lease))
        second = await run.admission("1")
        assert (await failure(second)).group_contains(LedgerDamaged, match="LEDGER has no batch 0, which was committed with")
        assert await run.ledger() == []


async def _as_ready(run: Ground, lease: GroupLease) -> ReadyGroup:
    from admission.joining import Bank, episode_fact, verdict_fact
    from schemas.trajectory import Verdict

    bank = Bank()
    bank.lease(lease)
    for item in await read_all(run.bus, Stream.EPISODES, f"*.{lease.group}.*"):
        slot = int(item.subject.rsplit(".", 1)[1])
        if ".episode." in item.subject:
            ready = bank.episode(episode_fact(lease.group, slot, item.seq, item.digest, item.decode(Episode)))
        else:
            ready = bank.verdict(verdict_fact(lease.group, slot, item.seq, item.digest, item.decode(Verdict)))
    assert ready is not None
    return ready


async def test_a_lease_that_is_garbage_costs_its_ordinal_and_the_run_goes_on(nats_url: str, run_name: str) -> None:
    async with ground(nats_url, run_name) as run:
        await run.bus.store(run.bus.subjects.lease(1), b"no lease", {})
        sampler = await run.stage.start(Role.SAMPLER, rollouter.sampler_service.serve)
        fleet = FleetVersions(run=run_name, target=0, incarnation=0, engines={"e0": 0}, oldest=0, newest=0)
        await run.bus.publish(run.bus.subjects.active(), fleet)

        async def leased() -> list[GroupLease]:
            events = await read_events(run.bus, Stream.TASKS)
            good = [event for event in events if isinstance(event, Item) and event.data != b"no lease"]
            return [item.decode(GroupLease) for item in good]

        await eventually(lambda: leased(), within_s=60)

        async def two() -> bool:
            return len(await leased()) >= 2

        await eventually(two, within_s=60, what="the next ordinal is leased")
        assert [lease.ordinal for lease in await leased()][:2] == [2, 3]
        assert sampler.context.bus.alarms["unreadable"] == 1


async def test_the_name_of_a_lease_that_tasks_has_lost_is_not_given_again(nats_url: str, run_name: str) -> None:
    async with ground(nats_url, run_name) as run:
        await run.lease(0, 1)
        entry = AbandonEntry(
            run=run_name,
            group="g00000005",
            ready_seq=0,
            reason=AbandonReason.INFRA_ABORT,
            detail="",
            family="files",
            settings_hash="h",
        )
        await run.bus.append(run.bus.subjects.abandon(entry.group), entry, after=0)
        sampler = await run.stage.start(Role.SAMPLER, rollouter.sampler_service.serve)
        fleet = FleetVersions(run=run_name, target=0, incarnation=0, engines={"e0": 0}, oldest=0, newest=0)
        await run.bus.publish(run.bus.subjects.active(), fleet)

        async def third() -> list[Item]:
            return (await read_all(run.bus, Stream.TASKS))[2:]

        first, *_ = await eventually(third, within_s=60)
        assert first.decode(GroupLease).ordinal == 6
        assert sampler.context.bus.alarms["lost_leases"] == 1


async def test_an_evaluation_ends_though_a_graded_entry_is_garbage(nats_url: str, run_name: str) -> None:
    async with ground(nats_url, run_name) as run:
        await run.stage.start(Role.SAMPLER, rollouter.sampler_service.serve)
        fleet = FleetVersions(run=run_name, target=0, incarnation=0, engines={"e0": 0}, oldest=0, newest=0)
        await run.bus.publish(run.bus.subjects.active(), fleet)

        async def evaluation() -> list[GroupLease]:
            leases = [item.decode(GroupLease) for item in await items(run.bus, Stream.TASKS)]
            return [lease for lease in leases if lease.purpose == "eval"]

        async def all_leased() -> bool:
            return sum(lease.group_size for lease in await evaluation()) == 4

        await eventually(all_leased, within_s=60)
        first, *rest = await evaluation()
        await run.bus.store(run.bus.subjects.graded(first.group), b"garbage", {})
        for lease in rest:
            for slot in range(lease.group_size):
                await run.judge(lease, slot, await run.seal(lease, slot))
        await run.bank()
        (item,) = await eventually(lambda: items(run.bus, Stream.TRAIN, "train.eval.*"), within_s=60)
        (score,) = item.decode(EvalResult).splits
        assert (score.censored, score.attempts) == (first.group_size, 4 - first.group_size)
