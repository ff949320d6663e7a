"""Items that the store loses between a batch's ledger entry and the trainer's fetch, and commits and manifests that it loses.

The store of a stopped nats-server is damaged, the trainer is the real service in a process of its own.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from admission_stage import Running, Stage
from conftest import NatsServer, eventually
from damage import damaged, flip_bit
from trainer_stand import GROUPS, TOKENS, Sampled, TrainerProcess, commits, configuration, ledger_of, reached, trainer

import admission.service
import param_sync.service
from admission.audit import audit
from admission.conservation import account
from admission.losses import Evidence
from admission.replay import replay
from admission.service import gate_settings
from schemas.codec import decode_any
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, AbandonReason, BatchEntry, LostItem
from schemas.lineage import Lineage
from schemas.policy import WeightsManifest
from schemas.table import Role, Stream
from schemas.training import BatchDemand, LostGroup, StepCommit
from schemas.trajectory import VersionSpan
from services.audit import gather
from services.bus import Bus
from services.config import Config
from services.consume import read_all, read_events
from services.health import Health
from services.items import Item
from services.ownership import owned
from services.runtime import ServiceContext
from trainer.batches import Batches

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
STEPS = 5
HOLES = ("logs have no holes",)  # what stays broken, since the store is


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of its own for a test that damages its store."""
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


@dataclass
class Ground:
    """A run whose batches are in the ledger, decided by the real admission, and not trained on yet."""

    stage: Stage
    bus: Bus
    config: Config
    sampled: Sampled
    folder: Path
    synchronizer: Running
    batches: list[BatchEntry]

    async def admission(self, name: str) -> Running:
        return await self.stage.start(Role.ADMISSION, admission.service.serve, name)

    async def ready(self) -> dict[int, ReadyGroup]:
        events = await read_events(self.bus, Stream.READY)
        return {event.seq: event.decode(ReadyGroup) for event in events if isinstance(event, Item)}

    async def train(self, name: str, step: int = STEPS - 1, config: Config | None = None) -> TrainerProcess:
        """A trainer up to the commit of a step; it ends in order."""
        with trainer(config or self.config, self.folder / f"{name}.log") as running:
            await reached(self.bus, step, trainer=running)
            await eventually(lambda: running.said("all steps are done"), within_s=120, what=running.tail())
            running.terminate()
            assert await running.ended() == 0, running.tail()
        return running

    async def abandoned(self) -> dict[str, AbandonEntry]:
        entries = [entry for _, entry in await ledger_of(self.bus) if isinstance(entry, AbandonEntry)]
        return {entry.group: entry for entry in entries}

    async def check(self, consumed: int, abandoned: int) -> None:
        """Invariants 3 and 9: every group is accounted for once, and every decision comes out of the record again."""
        leases = [item.decode(GroupLease) for item in await read_all(self.bus, Stream.TASKS)]
        ledger = await ledger_of(self.bus)
        total = account(leases, [entry for _, entry in ledger])
        assert total.holds, total.line()
        assert (total.consumed, total.abandoned) == (consumed, {"lost_item": abandoned})
        stands = {e.seq: e.digest for e in await read_events(self.bus, Stream.EPISODES) if isinstance(e, Item)}
        evidence = Evidence({lease.group: lease.family for lease in leases}, stands)
        ready = sorted((await self.ready()).items())
        train = [(e.seq, decode_any(e.data)) for e in await read_events(self.bus, Stream.TRAIN) if isinstance(e, Item)]
        assert replay(ready, train, ledger, gate_settings(self.config), evidence=evidence) is None
        without = [(seq, message) for seq, message in train if not isinstance(message, StepCommit) or message.step]
        nothing = [(seq, _said_nothing(message)) for seq, message in train]
        assert replay(ready, nothing, ledger, gate_settings(self.config), evidence=evidence) is not None
        assert replay(ready, without, ledger, gate_settings(self.config), evidence=evidence) is None, "the item is missing too"

    async def broken(self) -> list[str]:
        """Names of the audit's checks that do not hold."""
        return [check.name for check in audit(await gather(self.bus)) if not check.holds]


def _said_nothing(message: object) -> object:
    return msgspec.structs.replace(message, lost=msgspec.UNSET) if isinstance(message, StepCommit) else message


@asynccontextmanager
async def ground(server: NatsServer, run: str, folder: Path, **settings: object) -> AsyncIterator[Ground]:
    config = configuration(folder, run, server.url, **settings)
    config = config.model_copy(update={"run": config.run.model_copy(update={"max_steps": STEPS})})
    async with Stage(server.url, config) as stage:
        bus = await stage.bus(Role.ROLLOUTER)
        synchronizer = await stage.start(Role.PARAM_SYNC, param_sync.service.serve)
        writer = await stage.start(Role.ADMISSION, admission.service.serve)
        sampled = Sampled(bus)
        for _ in range(STEPS * GROUPS):
            await sampled.group(VersionSpan(2, TOKENS, 0))
        for step in range(STEPS):  # as the trainer asks, so that its own requests are repeats
            demand = BatchDemand(run=run, step=step, version=step, incarnation=0, groups=GROUPS)
            await bus.publish_once(bus.subjects.demand(step), demand)

        async def decided() -> list[BatchEntry]:
            found = [item.decode(BatchEntry) for item in await read_all(bus, Stream.LEDGER, "ledger.batch.*")]
            return found if len(found) == STEPS else []

        batches = await eventually(decided, within_s=60)
        await writer.stop()
        yield Ground(stage, bus, config, sampled, folder, synchronizer, batches)


async def _published(bus: Bus) -> dict[int, WeightsManifest]:
    links = [item.decode(WeightsManifest) for item in await read_all(bus, Stream.POLICY, "policy.staged.*")]
    return {link.version: link for link in links}


async def test_groups_lost_after_their_batch_are_left_out_by_name_for_ever(
    server: NatsServer, run_name: str, tmp_path: Path
) -> None:
    """Invariants 3, 4, 5 and 9: one batch lost a ready entry, one an episode, one everything; all the others are trained."""
    async with ground(server, run_name, tmp_path) as run:
        subjects = run.bus.subjects
        ready, whole = await run.ready(), await gather(run.bus)
        unready, short = run.batches[0].groups[1], run.batches[1].groups[0]
        empty = run.batches[2].groups
        gone = {unready.group: LostItem("READY", unready.ready_seq, "")}
        for member, slot in ((short, 1), (empty[0], 0), (empty[1], 1)):
            sibling = ready[member.ready_seq].siblings_by_slot()[slot]
            gone[member.group] = LostItem("EPISODES", sibling.episode_seq, sibling.episode_digest)
        async with damaged(server):
            flip_bit(server, run_name, Stream.READY, subjects.ready(unready.group))
            flip_bit(server, run_name, Stream.EPISODES, subjects.episode(short.group, 1))
            flip_bit(server, run_name, Stream.EPISODES, subjects.episode(empty[0].group, 0))
            flip_bit(server, run_name, Stream.EPISODES, subjects.episode(empty[1].group, 1))
        await run.admission("1")
        first = await run.train("first")
        assert first.said("lost_items"), "it is said aloud"

        made = await commits(run.bus)
        assert [(commit.step, commit.incarnation) for commit in made] == [(step, 0) for step in range(STEPS)]
        named = [tuple(member.group for member in batch.groups) for batch in run.batches]
        for commit, batch in zip(made, named, strict=True):
            lost = tuple(LostGroup(group, gone[group]) for group in batch if group in gone)
            assert (commit.left_out(), commit.groups) == (lost, tuple(group for group in batch if group not in gone))
            assert commit.stands_on(batch)
        assert (made[2].optimizer_steps, made[2].rows, made[2].digest) == (0, 0, made[1].digest), "no group, no update"
        assert len({commit.digest for commit in made}) == STEPS - 1

        async def staged() -> bool:
            return len(await _published(run.bus)) == STEPS

        await eventually(staged, within_s=60, what="every version is published, the unchanged one too")

        async def closed() -> bool:
            return set(await run.abandoned()) == set(gone)

        await eventually(closed, within_s=60, what="the groups are taken out of their batches")
        entries = await run.abandoned()
        assert {group: entry.lost for group, entry in entries.items()} == gone
        assert {entry.reason for entry in entries.values()} == {AbandonReason.LOST_ITEM}
        assert [entries[group].step for group in (unready.group, short.group, *(m.group for m in empty))] == [0, 1, 2, 2]
        assert f"step 1 could not fetch it: EPISODES {gone[short.group].seq}" in entries[short.group].detail
        await run.check(STEPS * GROUPS - len(gone), len(gone))
        assert await run.broken() == list(HOLES)
        undamaged = Evidence({}, whole.episodes)
        assert "holds the item" in undamaged.refutes(entries[short.group], gone[short.group], ready)

        # what was left out stays out, though the ready entry is there again: the decision stands in the step's commit
        await run.bus.publish_once(subjects.ready(unready.group), ready[unready.ready_seq])
        shutil.rmtree(run.config.run_folder() / "checkpoints")
        again = await run.train("again")
        assert again.log.read_text().count("step reproduced") == STEPS
        assert await commits(run.bus) == made
        assert await run.broken() == list(HOLES)


async def test_an_item_that_is_lost_after_its_step_leaves_the_published_line(
    server: NatsServer, run_name: str, tmp_path: Path
) -> None:
    """Invariant 5: a recovered trainer cannot make those bits again, so the version without the group has another name."""
    async with ground(server, run_name, tmp_path, checkpoint_every=100) as run:
        await run.admission("1")
        await run.train("first")
        before = await commits(run.bus)
        shutil.rmtree(run.config.run_folder() / "checkpoints")
        lost = run.batches[3].groups[0].group
        async with damaged(server):
            flip_bit(server, run_name, Stream.EPISODES, run.bus.subjects.episode(lost, 0))
        with trainer(run.config, tmp_path / "again.log") as running:
            await reached(run.bus, STEPS - 1, incarnation=1, trainer=running)
            assert running.log.read_text().count("step reproduced") == 3
        made = await commits(run.bus)
        assert made[:STEPS] == before and [(c.step, c.incarnation) for c in made[STEPS:]] == [(3, 1), (4, 1)]
        assert [left.group for left in made[STEPS].left_out()] == [lost]

        async def closed() -> bool:
            return set(await run.abandoned()) == {lost}

        await eventually(closed, within_s=60)
        await run.check(STEPS * GROUPS - 1, 1)
        assert await run.broken() == list(HOLES)


async def test_ranks_leave_out_the_same_groups(server: NatsServer, run_name: str, tmp_path: Path) -> None:
    async with ground(server, run_name, tmp_path, ranks=2, zero_stage=2) as run:
        lost = run.batches[1].groups[0].group
        async with damaged(server):
            flip_bit(server, run_name, Stream.EPISODES, run.bus.subjects.episode(lost, 0))
        await run.admission("1")
        with trainer(run.config, tmp_path / "first.log") as running:
            await reached(run.bus, STEPS - 1, trainer=running)
            running.terminate()
            assert await running.ended() == 0, running.tail()
        assert [[left.group for left in commit.left_out()] for commit in await commits(run.bus)] == [[], [lost], [], [], []]


async def test_lost_commits_and_manifests_stop_nobody(server: NatsServer, run_name: str, tmp_path: Path) -> None:
    """A hole in TRAIN or POLICY is named; ledger and checkpoints say what happened, and no version gets a second digest."""
    async with ground(server, run_name, tmp_path, checkpoint_every=2, keep_checkpoints=9) as run:
        subjects = run.bus.subjects
        await run.admission("1")
        early = run.config.model_copy(update={"run": run.config.run.model_copy(update={"max_steps": 4})})
        with trainer(early, tmp_path / "first.log") as running:
            await reached(run.bus, 3, trainer=running)
            running.terminate()
            await running.ended()

        async def staged(count: int) -> bool:
            return len(await _published(run.bus)) >= count

        await eventually(lambda: staged(4), within_s=60)
        before, links = await commits(run.bus), await _published(run.bus)
        await run.synchronizer.kill()
        async with damaged(server):
            flip_bit(server, run_name, Stream.TRAIN, subjects.step(1))
            flip_bit(server, run_name, Stream.POLICY, subjects.staged(2))
            flip_bit(server, run_name, Stream.POLICY, subjects.staged(4))
        shutil.rmtree(run.config.run_folder() / "checkpoints")  # so every step is taken again
        await run.stage.start(Role.PARAM_SYNC, param_sync.service.serve, "1")
        again = await run.train("again")
        assert again.said("lost_sequences")
        made = {commit.step: commit for commit in await commits(run.bus)}
        assert sorted(made) == list(range(STEPS)) and {commit.incarnation for commit in made.values()} == {0}
        assert [made[commit.step].digest for commit in before] == [commit.digest for commit in before]
        await eventually(lambda: staged(STEPS), within_s=60)
        healed = await _published(run.bus)
        assert {version: healed[version] for version in links} == links
        assert healed[5].base_digest == links[4].digest
        assert await run.broken() == list(HOLES)


async def test_a_version_whose_commit_is_lost_before_it_was_published_is_published(
    server: NatsServer, run_name: str, tmp_path: Path
) -> None:
    """Invariant 10's chain has no gap: the next commit names the digest, and the patch is in the store under that name. The
    trainer's own checkpoint lies beyond the hole, so it goes on without taking the step again."""
    async with ground(server, run_name, tmp_path, checkpoint_every=1) as run:
        await run.admission("1")
        early = run.config.model_copy(update={"run": run.config.run.model_copy(update={"max_steps": 4})})
        await eventually(lambda: read_all(run.bus, Stream.POLICY, "policy.anchor.0"), within_s=60)
        await run.synchronizer.kill()
        await run.train("first", 3, early)
        made = await commits(run.bus)
        async with damaged(server):
            flip_bit(server, run_name, Stream.TRAIN, run.bus.subjects.step(1))
        await run.stage.start(Role.PARAM_SYNC, param_sync.service.serve, "1")

        async def staged(count: int) -> bool:
            return len(await _published(run.bus)) >= count

        await eventually(lambda: staged(4), within_s=60)
        links = await _published(run.bus)
        assert [links[version].digest for version in range(1, 5)] == [commit.digest for commit in made]
        last = await run.train("last")
        assert not last.said("step reproduced")
        await eventually(lambda: staged(STEPS), within_s=60)
        findings = [(check.name, str(f)) for check in audit(await gather(run.bus)) for f in check.findings]
        assert {name for name, _ in findings} == {*HOLES, "steps follow the ledger"}, findings
        assert any("step 1 (TRAIN): is not committed, though later ones are" in text for _, text in findings)


async def test_a_request_for_a_batch_that_the_store_lost_is_made_again(
    server: NatsServer, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody answers it, so the trainer would wait for ever."""
    monkeypatch.setattr("trainer.batches._ASK_AGAIN_S", 0.5)
    config = configuration(tmp_path, run_name, server.url)
    async with Stage(server.url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        context = ServiceContext(config, bus, Role.TRAINER, "test", asyncio.Event(), Health(bus, 1.0))
        subject, ended = bus.subjects.demand(0), asyncio.Event()
        async with owned(context) as ownership, asyncio.TaskGroup() as group:
            batches = Batches(context, ownership, Lineage())
            group.create_task(batches.follow(0, ended))
            taken = group.create_task(batches.take(0, 0, 0))
            first = await eventually(lambda: bus.last(subject), within_s=30)
            async with damaged(server):
                flip_bit(server, run_name, Stream.TRAIN, subject)
            again = await eventually(lambda: bus.last(subject), within_s=60, what="the demand stands there again")
            assert (again.data, again.seq) == (first.data, first.seq + 1)
            context.stop.set()
            assert await taken is None
            ended.set()
