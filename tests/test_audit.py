"""The audit: a consistent run passes, and whatever does not agree is found by its name and place; nothing else is."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from conftest import NatsServer
from damage import flip_bit

from admission.audit import audit
from admission.losses import loss_entry
from loadtests.audit_speed import SyntheticRun, write
from schemas.codec import decode_any, digest, encode
from schemas.dead_letter import DeadLetter, DeadReason
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, LostItem, QuarantineEntry
from schemas.policy import WeightsManifest
from schemas.table import Role, Stream, Subjects
from schemas.training import LostGroup, StepCommit
from services.audit import CheckpointFact, Evidence, Unusable
from services.bus import Bus
from services.config import Config, check, to_toml
from services.continuity import Hole
from services.embedded_server import EmbeddedServers
from services.provision import provision
from services.run_folder import RunFolder
from trainer import checkpoint

ROOT = Path(__file__).resolve().parent.parent
RUN = "audited"
GROUPS, SIBLINGS = 60, 2
pytestmark = pytest.mark.timeout(300)


def evidence(groups: int = GROUPS) -> Evidence:
    """What the audit would read of a consistent run."""
    found = Evidence(RUN)
    last: dict[Stream, int] = {}
    for stream, _, message in SyntheticRun(RUN, groups, SIBLINGS).messages():
        seq = last[stream] = last.get(stream, 0) + 1
        match message:
            case GroupLease():
                found.leases.append((seq, message))
            case ReadyGroup():
                found.ready.append((seq, message))
            case BatchEntry() | QuarantineEntry() | AbandonEntry():
                found.ledger.append((seq, message))
            case StepCommit():
                found.steps.append((seq, message))
            case WeightsManifest():
                found.manifests.append((seq, message))
            case _ if stream is Stream.EPISODES:
                found.episodes[seq] = digest(encode(message))
    found.messages = last
    batches = [(seq, entry) for seq, entry in found.ledger if isinstance(entry, BatchEntry)]
    consumed = tuple(member.group for _, entry in batches for member in entry.groups)
    (at, batch), (_, commit) = batches[-1], found.steps[-1]
    found.checkpoints.append(
        CheckpointFact(
            path="checkpoints/last",
            step=batch.step,
            version=batch.step + 1,
            digest=commit.digest,
            consumed=consumed,
            ledger_position=at,
        )
    )
    return found


def broken(found: Evidence) -> list[tuple[str, str, str]]:
    """Check, item and place of every finding."""
    return [(check.name, finding.item, finding.at) for check in audit(found) for finding in check.findings]


def test_a_consistent_run_passes_every_check() -> None:
    found = evidence()
    checks = audit(found)
    assert broken(found) == []
    assert all(check.looked_at for check in checks), [check.name for check in checks if not check.looked_at]
    assert "leased 60 = consumed 48 + quarantined (stale 6) + abandoned (none) + open 6" in checks[0].note


def change(found: Evidence, name: str, index: int, **changes: object) -> None:
    """Replace fields of one recorded message."""
    recorded = getattr(found, name)
    seq, message = recorded[index]
    recorded[index] = (seq, msgspec.structs.replace(message, **changes))


def place_of(found: Evidence, step: int) -> int:
    """Where a batch stands among the ledger's entries."""
    return next(i for i, (_, e) in enumerate(found.ledger) if isinstance(e, BatchEntry) and e.step == step)


def closed_twice(found: Evidence) -> None:
    entry = next(entry for _, entry in found.ledger if isinstance(entry, QuarantineEntry))
    found.ledger.append((900, msgspec.structs.replace(entry, group="g00000000")))


def lease_lost(found: Evidence) -> None:
    del found.leases[5]


def other_groups_committed(found: Evidence) -> None:
    change(found, "steps", 2, groups=found.steps[3][1].groups)


def trained_twice(found: Evidence) -> None:
    first = found.steps[0][1].groups[0]
    index = place_of(found, 1)
    members = found.ledger[index][1].groups
    twice = (msgspec.structs.replace(members[0], group=first, ready_seq=1), *members[1:])
    change(found, "ledger", index, groups=twice)
    change(found, "steps", 1, groups=tuple(member.group for member in twice))
    found.checkpoints.clear()


def step_missing(found: Evidence) -> None:
    del found.steps[2]


def batch_missing(found: Evidence) -> None:
    del found.ledger[place_of(found, 2)]
    found.checkpoints.clear()


def checkpoint_of_other_groups(found: Evidence) -> None:
    fact = found.checkpoints.pop()
    found.checkpoints.append(CheckpointFact(**{**_fields(fact), "consumed": fact.consumed[1:]}))


def checkpoint_elsewhere(found: Evidence) -> None:
    fact = found.checkpoints.pop()
    found.checkpoints.append(CheckpointFact(**{**_fields(fact), "ledger_position": 3}))


def checkpoint_of_other_weights(found: Evidence) -> None:
    fact = found.checkpoints.pop()
    found.checkpoints.append(CheckpointFact(**{**_fields(fact), "digest": "0" * 64}))


def checkpoint_rotten(found: Evidence) -> None:
    found.checkpoints.append(CheckpointFact("checkpoints/rotten", damage="state/x does not match its digest"))


def _fields(fact: CheckpointFact) -> dict[str, object]:
    return {name: getattr(fact, name) for name in CheckpointFact.__slots__}


def staged_otherwise(found: Evidence) -> None:
    change(found, "manifests", 2, digest="0" * 64)


def chain_broken(found: Evidence) -> None:
    change(found, "steps", 3, base_digest="0" * 64)


def too_stale(found: Evidence) -> None:
    index = place_of(found, 1)
    member, *rest = found.ledger[index][1].groups
    stale = msgspec.structs.replace(found.ready[member.ready_seq - 1][1].siblings[0], oldest_version=-4)
    ready = found.ready[member.ready_seq - 1][1]
    change(found, "ready", member.ready_seq - 1, siblings=(stale, *ready.siblings[1:]))
    change(found, "ledger", index, groups=(msgspec.structs.replace(member, lag=5), *rest))


def lag_misstated(found: Evidence) -> None:
    index = place_of(found, 1)
    member, *rest = found.ledger[index][1].groups
    change(found, "ledger", index, groups=(msgspec.structs.replace(member, lag=1), *rest))


def episode_gone(found: Evidence) -> None:
    del found.episodes[1]


def verdict_changed(found: Evidence) -> None:
    found.episodes[2] = "0" * 64


def ready_gone(found: Evidence) -> None:
    del found.ready[0]


def log_cut(found: Evidence) -> None:
    found.holes.append(Hole(Stream.TURNS, 4, 6, "truncated"))


def garbage_in_the_ledger(found: Evidence) -> None:
    found.unusable.append(Unusable(Stream.LEDGER, 7, "hr.audited.ledger.batch.9", "not a message"))


def garbage_that_nobody_kept(found: Evidence) -> None:
    found.unusable.append(Unusable(Stream.EPISODES, 900, "hr.audited.episode.g00000059.0", "not a message"))


def leave_out(found: Evidence, step: int, *, item: LostItem | None = None, ledger: bool = True) -> str:
    """The step's first group was lost before it could be fetched; the record says so everywhere. Gives the group."""
    seq, commit = found.steps[step]
    _, batch = found.ledger[place_of(found, step)]
    member = batch.groups[0]
    sibling = found.ready[member.ready_seq - 1][1].siblings[0]
    lost = item or LostItem("EPISODES", sibling.episode_seq, sibling.episode_digest)
    left = (LostGroup(member.group, lost),)
    found.steps[step] = (seq, msgspec.structs.replace(commit, groups=commit.groups[1:], lost=left))
    found.episodes.pop(sibling.episode_seq)
    fact = found.checkpoints.pop()
    consumed = tuple(group for group in fact.consumed if group != member.group)
    found.checkpoints.append(CheckpointFact(**{**_fields(fact), "consumed": consumed}))
    if ledger:
        entry = loss_entry(RUN, member.group, "files", member.ready_seq, lost, batch.settings_hash, step=step)
        found.ledger.append((found.ledger[-1][0] + 1, entry))
    return str(member.group)


def test_a_group_that_its_step_could_not_fetch_is_no_contradiction() -> None:
    """Its commit, its abandonment and the checkpoint leave it out; it counts once."""
    found = evidence()
    leave_out(found, 1)
    leave_out(found, 2)
    assert broken(found) == []
    assert "consumed 46 + quarantined (stale 6) + abandoned (lost_item 2)" in audit(found)[0].note
    late = evidence()
    leave_out(late, len(late.steps) - 1, ledger=False)
    newest = max(entry.demand_seq for _, entry in late.ledger if isinstance(entry.demand_seq, int))
    assert late.steps[-1][0] >= newest, "nothing was decided after it"
    assert broken(late) == [], "admission has not come to it yet"


def left_out_of_another_item(found: Evidence) -> None:
    leave_out(found, 1, item=LostItem("EPISODES", 1, found.episodes[1]))


def left_out_and_not_abandoned(found: Evidence) -> None:
    leave_out(found, 1, ledger=False)


def left_out_in_silence(found: Evidence) -> None:
    leave_out(found, 1)
    change(found, "steps", 1, lost=msgspec.UNSET)


def abandoned_and_trained(found: Evidence) -> None:
    trained = found.steps[1][1].groups
    leave_out(found, 1)
    change(found, "steps", 1, groups=trained, lost=msgspec.UNSET)


def trained_again_later(found: Evidence) -> None:
    group = leave_out(found, 1)
    change(found, "steps", 3, groups=(group, *found.steps[3][1].groups[1:]))


def abandoned_for_another_item(found: Evidence) -> None:
    leave_out(found, 1)
    found.ledger[-1] = (
        found.ledger[-1][0],
        msgspec.structs.replace(found.ledger[-1][1], lost=LostItem("EPISODES", 1, found.episodes[1])),
    )


def taken_out_of_another_batch(found: Evidence) -> None:
    leave_out(found, 1)
    found.ledger[-1] = (found.ledger[-1][0], msgspec.structs.replace(found.ledger[-1][1], step=2))


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (left_out_of_another_item, "lost groups are left out"),
        (left_out_and_not_abandoned, "lost groups are left out"),
        (left_out_in_silence, "steps follow the ledger"),
        (abandoned_and_trained, "lost groups are left out"),
        (trained_again_later, "lost groups are left out"),
        (abandoned_for_another_item, "lost groups are left out"),
        (taken_out_of_another_batch, "groups are conserved"),
    ],
)
def test_nothing_looser_than_that_is_accepted(damage: Callable[[Evidence], None], check: str) -> None:
    found = evidence()
    damage(found)
    findings = broken(found)
    assert check in {name for name, _, _ in findings}, findings


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (closed_twice, ("groups are conserved", "g00000000", "LEDGER 900")),
        (lease_lost, ("groups are conserved", "lease 5", "TASKS")),
        (lease_lost, ("groups are conserved", "g00000005", "LEDGER 1")),
        (other_groups_committed, ("steps follow the ledger", "step 2", "TRAIN 6")),
        (trained_twice, ("a group is trained once", "g00000000", "TRAIN 4")),
        (step_missing, ("steps follow the ledger", "step 2", "TRAIN")),
        (batch_missing, ("steps follow the ledger", "step 2", "TRAIN 6")),
        (batch_missing, ("steps follow the ledger", "batch 2", "LEDGER")),
        (checkpoint_of_other_groups, ("checkpoints", "checkpoint", "checkpoints/last")),
        (checkpoint_elsewhere, ("checkpoints", "checkpoint", "checkpoints/last")),
        (checkpoint_of_other_weights, ("checkpoints", "checkpoint", "checkpoints/last")),
        (checkpoint_rotten, ("checkpoints", "checkpoint", "checkpoints/rotten")),
        (staged_otherwise, ("a version is one set of weights", "version 2", "POLICY 3")),
        (chain_broken, ("a version is one set of weights", "step 3", "TRAIN 8")),
        (too_stale, ("lag is within its bound", "g00000009", "LEDGER 3")),
        (lag_misstated, ("lag is within its bound", "g00000009", "LEDGER 3")),
        (episode_gone, ("trained groups are whole", "episode of g00000000, slot 0", "EPISODES 1")),
        (verdict_changed, ("trained groups are whole", "verdict of g00000000, slot 0", "EPISODES 2")),
        (ready_gone, ("trained groups are whole", "g00000000", "LEDGER 1")),
        (log_cut, ("logs have no holes", "3 message(s)", "TURNS 4 to 6")),
        (garbage_in_the_ledger, ("messages can be used", "hr.audited.ledger.batch.9", "LEDGER 7")),
        (garbage_that_nobody_kept, ("messages can be used", "hr.audited.episode.g00000059.0", "EPISODES 900")),
    ],
    ids=lambda value: value.__name__ if callable(value) else value[1],
)
def test_what_does_not_agree_is_found_by_name_and_place(
    damage: Callable[[Evidence], None], finding: tuple[str, str, str]
) -> None:
    found = evidence()
    damage(found)
    findings = broken(found)
    assert finding in findings, findings
    if damage not in (lease_lost, trained_twice, batch_missing, other_groups_committed):
        assert {name for name, _, _ in findings} == {finding[0]}, "no other check is broken by it"


def test_a_dead_letter_of_a_group_is_listed_and_breaks_nothing() -> None:
    found = evidence()
    garbage_that_nobody_kept(found)
    bad = found.unusable[0]
    letter = DeadLetter(
        run=RUN,
        stream="EPISODES",
        seq=bad.seq,
        subject=bad.subject,
        reason=DeadReason.UNREADABLE,
        detail=bad.why,
        digest="d",
        declared_digest="d",
        size_bytes=1,
        body=b"x",
        headers={},
        stored_ns=1,
        refused_by="bank-0",
    )
    found.letters.append((1, letter))
    assert broken(found) == []


def test_a_branch_that_the_trainer_left_is_no_contradiction() -> None:
    """Steps 2 and 3 were published, came out otherwise after a crash, and were taken again as incarnation 1."""
    found = evidence()
    kept = found.steps[:4]
    again: list[tuple[int, StepCommit]] = []
    base = kept[1][1].digest
    for seq, (_, commit) in enumerate(kept[2:], 50):
        new = msgspec.structs.replace(commit, incarnation=1, digest=f"other-{commit.step}", base_digest=base)
        base = new.digest
        again.append((seq, new))
    found.steps = [*kept, *again]
    found.manifests = found.manifests[:5]
    for seq, (_, commit) in enumerate(again, 60):
        manifest = msgspec.structs.replace(
            found.manifests[commit.version][1],
            incarnation=1,
            digest=commit.digest,
            base_digest=commit.base_digest,
            form="patch" if commit.step > 2 else "anchor",
        )
        found.manifests.append((seq, manifest))
    found.checkpoints.clear()
    assert broken(found) == []
    wrong = msgspec.structs.replace(again[1][1], base_digest=kept[2][1].digest)
    found.steps[-1] = (again[1][0], wrong)
    assert ("a version is one set of weights", "step 3", "TRAIN 51") in broken(found)


# -- the command -------------------------------------------------------------------------------------------------------------


def headrace(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "services.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT, env=environment, check=False)


def configuration(folder: Path) -> Config:
    nats = {"store_bytes": 2**28, "embedded_keys": False}
    return check({"run": {"name": RUN, "folder": str(folder)}, "nats": nats, "engine": {"kind": "simulated"}})


@pytest.fixture
async def ended_run(tmp_path: Path) -> Path:
    """The folder of a local run that has ended: streams in its own store, one checkpoint."""
    config = configuration(tmp_path)
    with RunFolder(config) as folder:
        servers = EmbeddedServers(config, folder, lambda line: None)
        async with servers.running(lambda reason: None):
            folder.note_url(servers.nats.url)
            bus = await Bus.connect(servers.nats.url, RUN, Role.OBSERVER, "writer")
            await provision(bus, config.nats.store_bytes)
            await write(bus, SyntheticRun(RUN, GROUPS, SIBLINGS))
            await bus.close()
    found = evidence()
    fact = found.checkpoints[0]
    root = folder.path / "checkpoints"
    aside = checkpoint.prepare(root, fact.step)
    (aside / "state" / "weights.bin").write_bytes(b"\0" * 1000)
    record = checkpoint.Commit(
        step=fact.step,
        version=fact.version,
        incarnation=0,
        digest=fact.digest,
        consumed_group_ids=fact.consumed,
        ledger_position=fact.ledger_position,
        config_hash="c",
    )
    checkpoint.commit(root, aside, record)
    return folder.path


async def test_an_ended_run_is_audited_from_its_folder_and_stays_as_it_was(ended_run: Path) -> None:
    before = (ended_run / "config.toml").read_text()
    shown = await asyncio.to_thread(headrace, "audit", "--run-folder", str(ended_run), "--json", str(ended_run / "audit.json"))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "audit of run audited: everything agrees" in shown.stdout
    result = json.loads((ended_run / "audit.json").read_text())
    assert result["holds"] and all(check["looked_at"] for check in result["checks"])
    assert result["messages"]["EPISODES"] == 2 * SIBLINGS * GROUPS
    assert (ended_run / "config.toml").read_text() == before
    again = await asyncio.to_thread(headrace, "audit", "--run-folder", str(ended_run))
    assert again.returncode == 0, "the folder's lock was given back"

    moved = ended_run.rename(ended_run.with_name("set-aside"))
    elsewhere = await asyncio.to_thread(headrace, "audit", "--run-folder", str(moved))
    assert elsewhere.returncode == 0, elsewhere.stdout + elsewhere.stderr


async def test_real_damage_to_an_ended_run_is_found(ended_run: Path) -> None:
    server = NatsServer.__new__(NatsServer)
    server._config = ended_run / "nats" / "nats.conf"
    subject = Subjects(RUN).episode("g00000000", 1)
    flip_bit(server, RUN, Stream.EPISODES, subject)
    (weights,) = ended_run.glob("checkpoints/*/state/weights.bin")
    weights.write_bytes(b"\0" * 999 + b"\1")
    shown = await asyncio.to_thread(headrace, "audit", "--run-folder", str(ended_run))
    assert shown.returncode == 1, shown.stdout + shown.stderr
    assert "episode of g00000000, slot 1 (EPISODES 3)" in shown.stdout
    assert "EPISODES: sequence 3 is missing: the server passes over what it cannot read" in shown.stdout
    assert "state/weights.bin does not match its digest" in shown.stdout
    assert "audit of run audited: 3 finding(s)" in shown.stdout


async def test_status_of_an_ended_run_says_so(ended_run: Path) -> None:
    (ended_run / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 5, "at_ns": 10**18}) + "\n")
    shown = await asyncio.to_thread(headrace, "status", "--run-folder", str(ended_run))
    assert shown.returncode == 0, shown.stderr
    assert "run audited has ended; its last step was 5" in shown.stdout
    letters = await asyncio.to_thread(headrace, "dead-letters", "list", "--run-folder", str(ended_run))
    assert (letters.returncode, letters.stdout.strip()) == (0, "no dead letters"), letters.stderr


async def test_a_live_run_is_audited_on_its_own_server(nats_url: str, run_name: str, tmp_path: Path) -> None:
    bus = await Bus.connect(nats_url, run_name, Role.OBSERVER, "writer")
    await provision(bus, 2**28)
    await write(bus, SyntheticRun(run_name, 20, SIBLINGS))
    words = ("audit", "--nats", nats_url, "--set", f"run.name={run_name}", "--set", f"run.folder={tmp_path}")
    shown = await asyncio.to_thread(headrace, *words)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    await bus.store(bus.subjects.batch(77), b"garbage", {})
    shown = await asyncio.to_thread(headrace, *words)
    assert shown.returncode == 1
    assert f"{bus.subjects.batch(77)} (LEDGER 5)" in shown.stdout, shown.stdout
    await bus.close()


async def test_a_folder_that_holds_no_run_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(configuration(tmp_path)))
    shown = await asyncio.to_thread(headrace, "audit", "--run-folder", str(tmp_path))
    assert shown.returncode == 2
    assert "no run is known" in shown.stderr


def test_the_synthetic_run_is_what_the_codec_reads() -> None:
    for _, _, message in SyntheticRun(RUN, 12, SIBLINGS).messages():
        assert decode_any(encode(message)) == message
