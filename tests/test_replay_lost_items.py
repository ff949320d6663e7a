"""Recordings of runs that lost items, or whose trainer came back as a new incarnation: they decide again as they decided.

An explanation says what was taken out of which step. Bank and admission are real; the store of a stopped server is damaged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from admission_stage import items, make_commit
from conftest import NatsServer, eventually
from damage import cut_block, damaged, flip_bit
from recorded_run import recording_of, rewritten
from test_lost_items import Ground, ground

from admission import recorded
from admission.audit import audit
from admission.verify import Verified, verify
from schemas.ledger import AbandonEntry, BatchEntry, LostItem, QuarantineEntry
from schemas.table import Stream
from schemas.training import BatchDemand, Branch, LostGroup, StepCommit
from schemas.trajectory import VersionSpan
from services.audit import gather
from services.bus import Bus
from services.cli import main
from services.recorded_range import Range
from services.recording_reader import RecordingReader

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of its own for a test that damages its store."""
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


def verified(path: Path) -> Verified:
    with RecordingReader(path) as reader:
        return verify(reader)


async def replayed(path: Path) -> int:
    return await asyncio.to_thread(main, ["replay", str(path), "--verify"])


async def explained(path: Path, *words: str) -> int:
    return await asyncio.to_thread(main, ["explain", *words, "--recording", str(path)])


async def ends_with_abandoned(run: Ground, group: str) -> AbandonEntry:
    async def there() -> AbandonEntry | None:
        return (await run.abandoned()).get(group)

    return await eventually(there, within_s=60)


async def commit(run: Ground, batch: BatchEntry, *lost: LostGroup, **changes: object) -> StepCommit:
    """As a trainer that could not fetch these groups commits."""
    out = {left.group for left in lost}
    made = msgspec.structs.replace(
        make_commit(batch),
        groups=tuple(member.group for member in batch.groups if member.group not in out),
        lost=lost or msgspec.UNSET,
        **changes,
    )
    await run.bus.publish_once(run.bus.subjects.step(made.step, made.incarnation), made)
    return made


async def episode_of(bus: Bus, group: str, slot: int) -> LostItem:
    (item,) = await items(bus, Stream.EPISODES, f"episode.{group}.{slot}")
    return LostItem("EPISODES", item.seq, item.digest)


async def test_what_a_step_was_taken_without_is_decided_and_told_again(
    server: NatsServer, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One group loses an episode after its batch, one its ready entry; both commits say so and the ledger follows."""
    async with ground(server.url, run_name) as run:
        for lease in await run.lease(*range(7)):
            await run.play(lease)
        await run.bank()
        await run.ready(7)
        writer = await run.admission()
        for step in range(2):
            await run.demand(step, 3)
        first, second = await run.batch(0), await run.batch(1)
        await writer.stop()
        out, unready = first.groups[1], second.groups[0]
        item = await episode_of(run.bus, out.group, 0)
        async with damaged(server):
            flip_bit(server, run_name, Stream.EPISODES, run.bus.subjects.episode(out.group, 0))
            flip_bit(server, run_name, Stream.READY, run.bus.subjects.ready(unready.group))
        await commit(run, first, LostGroup(out.group, item))
        gone = LostItem("READY", unready.ready_seq, "")
        await commit(run, second, LostGroup(unready.group, gone))
        early = await recording_of(run.config, tmp_path / "early")
        await run.admission("1")
        taken = await ends_with_abandoned(run, out.group)
        await ends_with_abandoned(run, unready.group)
        assert (taken.step, taken.lost) == (0, item)
        path = await recording_of(run.config, tmp_path / "r")
        by_steps = await recording_of(run.config, tmp_path / "steps", asked=Range(from_step=1, to_step=1))
        checks = {check.name: check.findings for check in audit(await gather(run.bus))}
        assert not checks["lost groups are left out"], "the audit accepts what the replay accepts"

    for file in (early, path, by_steps):
        found = verified(file)
        assert found.same, (file.name, found.bank.difference, found.admission.difference)
        assert not found.admission.trusted, "the commits prove what was lost"
        assert found.gone == {"READY": str(unready.ready_seq)}
    assert verified(path).bank.lost == 1, "the group whose episode is gone cannot be joined again"
    capsys.readouterr()
    assert await replayed(path) == 0
    said = capsys.readouterr().out
    assert "1 not checked, since the store has lost items of theirs" in said
    assert f"gone       READY {unready.ready_seq}: the store no longer had them" in said

    assert await explained(path, "group", out.group) == 0
    said = capsys.readouterr().out
    place = f"item lost: EPISODES {item.seq} ({item.digest[:12]})"
    assert said.splitlines()[1].startswith(f"{out.group} was taken out of step 0: {place}; it is abandoned: step 0 could not")
    assert f"takes {out.group} out of step 0: {place}" in said
    assert "abandons it, which takes it out of batch 0: lost_item" in said
    assert await explained(early, "group", out.group) == 0
    assert f"taken out of step 0: {place}; no ledger entry abandons it yet" in capsys.readouterr().out
    assert await explained(path, "step", "0") == 0
    said = capsys.readouterr().out
    assert f"out of 2 groups; {out.group} taken out of it: item lost" in said.splitlines()[1]
    row = next(line for line in said.splitlines() if line.strip().startswith(out.group) and "lost" in line)
    assert "taken out: item lost" in row
    assert await explained(path, "group", unready.group) == 0
    assert f"taken out of step 1: item lost: READY {unready.ready_seq}; it is abandoned" in capsys.readouterr().out

    with RecordingReader(path) as reader:
        ledger = recorded.ledger(reader)
        seq = next(seq for seq, e in ledger if isinstance(e, AbandonEntry) and e.group == out.group)
        at = next(r.seq for r, m in recorded.messages(reader, Stream.TRAIN) if isinstance(m, StepCommit) and m.step == 0)
    other = LostItem("EPISODES", item.seq + 1, item.digest)
    for file, why in (
        (rewritten(path, tmp_path / "a", Stream.LEDGER, seq, step=1), "batch 1 does not hold"),
        (rewritten(path, tmp_path / "b", Stream.LEDGER, seq, lost=other), "no commit of step 0 names this loss"),
        (rewritten(path, tmp_path / "c", Stream.TRAIN, at, lost=msgspec.UNSET), "no commit of step 0 names this loss"),
    ):
        difference = verified(file).admission.difference
        assert difference is not None
        assert difference.seq == seq
        assert why in difference.why


async def test_a_loss_before_the_batch_is_seen_in_the_recording_and_in_a_part_of_it(
    server: NatsServer, run_name: str, tmp_path: Path
) -> None:
    """The abandoned group's item must be missing in the file as well; a range of steps keeps that group for it."""
    async with ground(server.url, run_name) as run:
        leases = await run.lease(*range(6))
        for lease in leases:
            await run.play(lease)
        await run.bank()
        await run.ready(6)
        async with damaged(server):
            flip_bit(server, run_name, Stream.EPISODES, run.bus.subjects.episode(leases[1].group, 0))
        await run.admission()
        for step in range(2):
            await run.demand(step, 2)
            await commit(run, await run.batch(step))
        closed = (await run.abandoned())[leases[1].group]
        assert closed.step is msgspec.UNSET
        path = await recording_of(run.config, tmp_path / "r")
        steps = await recording_of(run.config, tmp_path / "steps", asked=Range(from_step=1))
        later = await recording_of(run.config, tmp_path / "later", asked=Range(seqs={Stream.EPISODES: (20, 0)}))
    for file in (path, steps):
        found = verified(file)
        assert found.same
        assert not found.admission.trusted
    assert verified(steps).bank.outside, "the groups of step 0 are not in it"
    found = verified(later)
    assert found.same
    assert [why for _, why in found.admission.trusted] == [
        f"EPISODES {closed.lost.seq} is outside of the range, so that it was lost cannot be seen"
    ]
    with RecordingReader(path) as reader:
        seq = next(seq for seq, e in recorded.ledger(reader) if isinstance(e, AbandonEntry))
        verdict = next(r for r in reader.records(Stream.EPISODES) if r.name == f"verdict.{leases[1].group}.0")
    there = LostItem("EPISODES", verdict.seq, verdict.digest)
    difference = verified(rewritten(path, tmp_path / "a", Stream.LEDGER, seq, lost=there)).admission.difference
    assert difference is not None
    assert difference.why == f"EPISODES {verdict.seq} holds the item"


async def test_ready_entries_and_demands_that_are_gone_are_taken_from_the_record_and_named(
    server: NatsServer, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained groups lost their ready entries, which the bank wrote anew behind later ones; an answered demand is gone too."""
    async with ground(server.url, run_name) as run:
        leases = await run.lease(*range(6))
        for lease in leases:
            await run.play(lease)
        bank, writer = await run.bank(), await run.admission()
        await run.ready(6)
        for step in range(2):
            await run.demand(step, 2)
            await commit(run, await run.batch(step))
        for running in (bank, writer):
            await running.stop()
        batch = await run.batch(0)
        async with damaged(server, crash=True):
            cut_block(server, run_name, Stream.READY, run.bus.subjects.ready(batch.groups[1].group))
        async with damaged(server):
            flip_bit(server, run_name, Stream.TRAIN, run.bus.subjects.demand(1))
        await run.bank("1")
        await run.ready(6)
        await run.admission("1")
        await run.demand(2, 2)
        await commit(run, await run.batch(2))
        path = await recording_of(run.config, tmp_path / "r")
    found = verified(path)
    assert found.same, (found.bank.difference, found.admission.difference)
    assert [why for _, why in found.admission.trusted][:1] == [f"the demand of step 1, TRAIN {demand_of_second(path)}, is gone"]
    capsys.readouterr()
    assert await replayed(path) == 0
    said = capsys.readouterr().out
    assert "1 in part taken from the record" in said
    assert "every decision of which the recording holds all that it came from comes out again" in said


def demand_of_second(path: Path) -> int:
    with RecordingReader(path) as reader:
        batches = [e for _, e in recorded.ledger(reader) if isinstance(e, BatchEntry)]
    return batches[1].demand_seq


async def test_a_ready_entry_that_was_lost_after_its_step_is_trusted_and_no_other(
    server: NatsServer, run_name: str, tmp_path: Path
) -> None:
    async with ground(server.url, run_name) as run:
        for lease in await run.lease(*range(4)):
            await run.play(lease)
        await run.bank()
        await run.admission()
        await run.ready(4)
        await run.demand(0, 2)
        batch = await run.batch(0)
        await commit(run, batch)
        whole = await recording_of(run.config, tmp_path / "whole")
        async with damaged(server):
            flip_bit(server, run_name, Stream.READY, run.bus.subjects.ready(batch.groups[1].group))
        path = await recording_of(run.config, tmp_path / "r")
    found = verified(path)
    assert found.same
    gone = batch.groups[1]
    assert found.admission.trusted == ((1, f"the ready entry of {gone.group}, READY {gone.ready_seq}, is gone"),)
    assert verified(whole).whole
    other = msgspec.structs.replace(batch.groups[0], lag=5)
    altered = rewritten(path, tmp_path / "a", Stream.LEDGER, 1, groups=(other, batch.groups[1]))
    difference = verified(altered).admission.difference
    assert difference is not None, "what is still there is decided again"
    assert difference.why.startswith("groups: recorded")


async def test_a_ledger_with_a_hole_is_refused(server: NatsServer, run_name: str, tmp_path: Path) -> None:
    async with ground(server.url, run_name) as run:
        for lease in await run.lease(*range(4)):
            await run.play(lease)
        await run.bank()
        writer = await run.admission()
        for step in range(2):
            await run.demand(step, 2)
            await run.batch(step)
        await writer.stop()
        async with damaged(server):
            flip_bit(server, run_name, Stream.LEDGER, run.bus.subjects.batch(0))
        path = await recording_of(run.config, tmp_path / "r")
    assert await replayed(path) == 2


async def test_a_new_incarnation_is_decided_again_and_its_dead_branch_is_named(
    nats_url: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer comes back, takes step 1 again as incarnation 1 from the same ledger entry, and asks again for step 2."""
    async with ground(nats_url, run_name) as run:
        leases = await run.lease(*range(8))
        for lease in leases[:5]:
            await run.play(lease)
        await run.bank()
        await run.ready(5)
        await run.admission()
        for step in range(2):
            await run.demand(step, 2)
            await commit(run, await run.batch(step))
        await run.demand(2, 3)  # of incarnation 0, never answered
        second = await run.batch(1)
        await commit(run, second, incarnation=1, digest="other")
        demand = BatchDemand(run=run_name, step=2, version=2, incarnation=1, groups=2, branches=(Branch(1, 1),))
        await run.bus.publish_once(run.bus.subjects.demand(2, 1), demand)
        for slot in range(2):  # sampled under version 2 of incarnation 0, which was left at version 1
            sealed = await run.seal(leases[5], slot, versions=(VersionSpan(2, 5, 2),))
            await run.judge(leases[5], slot, sealed)
        await run.play(leases[6])
        third = await run.batch(2)
        await commit(run, third, incarnation=1)
        path = await recording_of(run.config, tmp_path / "r")
        steps = await recording_of(run.config, tmp_path / "steps", asked=Range(from_step=2, to_step=2))
    with RecordingReader(path) as reader:
        entries = [entry for _, entry in recorded.ledger(reader)]
    dropped = next(entry for entry in entries if isinstance(entry, QuarantineEntry))
    assert (dropped.group, dropped.reason) == (leases[5].group, "dead_branch")
    assert third.incarnation == 1
    for file in (path, steps):
        found = verified(file)
        assert found.same, (found.bank.difference, found.admission.difference)
        assert not found.admission.trusted
    assert await explained(path, "step", "1") == 0
    said = capsys.readouterr().out
    assert said.splitlines()[1].startswith("step 1 made version 2 of incarnation 1 (other) out of 2 groups")
    assert "commits step 1: version 2, digest d2; training has left this branch since" in said
    assert await explained(path, "group", second.groups[0].group) == 0
    assert "which made version 2 of incarnation 1" in capsys.readouterr().out.splitlines()[1]
    assert await explained(path, "group", dropped.group) == 0
    said = capsys.readouterr().out
    assert f"{dropped.group} was quarantined because dead_branch: {dropped.detail}" in said
    assert await explained(path, "token", f"{dropped.group}/0@3") == 0
    assert "under version 2" in capsys.readouterr().out
