"""A recovered trainer that cannot reproduce its bits begins a new incarnation, and everything behind it follows."""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash
from admission_stage import Stage
from conftest import eventually
from trainer_stand import TOKENS, Sampled, TrainerProcess, commits, configuration, ledger_of, line, reached, trainer

import admission.service
import param_sync.service
import services.engine.service
from admission.audit import audit
from admission.audit_command import checkpoint_facts
from admission.conservation import account
from admission.replay import replay
from admission.service import gate_settings
from param_sync.patch.codec import apply as apply_patch
from schemas.codec import decode_any
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import BatchEntry, QuarantineEntry
from schemas.lineage import on_line
from schemas.policy import EngineState, FleetVersions, WeightsManifest
from schemas.table import Role, Stream
from schemas.training import BatchDemand, Branch
from schemas.trajectory import VersionSpan
from services import blobs
from services.audit import gather
from services.bus import Bus
from services.config import Config
from services.consume import read_all
from trainer import checkpoint

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]
STEPS = 10


def perturb(folder: Path) -> None:
    """Change the optimizer's moments in a checkpoint and redo its records, as if another machine had written it."""
    record = checkpoint.read(folder)
    assert isinstance(record, checkpoint.Commit)
    (path,) = [folder / file.path for file in record.files if "optim_states" in file.path]
    state = torch.load(path, weights_only=False)
    changed = 0

    def visit(value: object) -> None:
        nonlocal changed
        if isinstance(value, dict):
            for key, inner in value.items():
                if key == "exp_avg" and isinstance(inner, torch.Tensor):
                    inner.mul_(-3.0)
                    changed += 1
                visit(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                visit(inner)

    visit(state)
    assert changed, f"no first moments in {path}"
    torch.save(state, path)
    files = tuple(
        msgspec.structs.replace(
            file,
            size_bytes=(folder / file.path).stat().st_size,
            digest=xxhash.xxh3_128_hexdigest((folder / file.path).read_bytes()),
        )
        for file in record.files
    )
    body = msgspec.msgpack.encode(msgspec.structs.replace(record, files=files))
    sealed = msgspec.msgpack.encode([body, xxhash.xxh3_128_hexdigest(body)])
    (folder / "commit.msgpack").write_bytes(sealed)
    assert isinstance(checkpoint.verify(folder), checkpoint.Checkpoint)


async def held_by_engines(bus: Bus, incarnation: int, version: int) -> bool:
    """Whether every engine serves this version or a newer one of its incarnation."""
    latest: dict[str, EngineState] = {}
    for item in await read_all(bus, Stream.POLICY, "policy.engine.*"):
        state = item.decode(EngineState)
        latest[state.engine] = state
    return len(latest) == 2 and all(
        state.phase == "serving" and (state.incarnation, state.version) >= (incarnation, version) for state in latest.values()
    )


async def test_a_diverged_trainer_leaves_its_branch_and_the_run_goes_on(tmp_path: Path, nats_url: str, run_name: str) -> None:
    """Invariants 3, 4, 5, 7, 9 and 10, over two divergences and a third crash that reproduces its bits."""
    config = configuration(tmp_path, run_name, nats_url, checkpoint_every=3)
    config = config.model_copy(update={"run": config.run.model_copy(update={"max_steps": STEPS})})
    logs, root = tmp_path / "logs", config.run_folder() / "checkpoints"
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.ROLLOUTER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve)
        await stage.start(Role.ADMISSION, admission.service.serve)
        for name in config.engine.names:
            await stage.start(Role.ENGINE, services.engine.service.serve, name)
        sampled, stop = Sampled(bus), asyncio.Event()
        sampling = asyncio.create_task(sampled.keep_sampling(4, stop))

        async def run_until_killed(number: int, point: str) -> TrainerProcess:
            with trainer(config, logs / f"{number}.log", killed_at=point) as running:
                assert await running.ended(300) == -signal.SIGKILL, running.tail()
                return running

        await run_until_killed(0, "announced:4")
        await eventually(lambda: held_by_engines(bus, 0, 5), within_s=120, what="engines at version 5")
        dead = [
            await sampled.group(VersionSpan(2, TOKENS, 5)),
            await sampled.group(VersionSpan(2, 7, 3), VersionSpan(7, TOKENS, 4)),
        ]
        perturb(root / checkpoint.name_of(2))
        newest_dead = (await commits(bus))[-1].version
        diverged = await run_until_killed(1, "announced:7")  # incarnation 1 begins at step 3, whose version 3 is shared
        assert diverged.said("step came out with other bits")
        await eventually(lambda: held_by_engines(bus, 1, 8), within_s=120, what="engines in incarnation 1")
        shared = await sampled.group(VersionSpan(2, 7, 3), VersionSpan(7, TOKENS, 5, 1))
        again = await run_until_killed(2, "trained:8")  # from the checkpoint of step 5, within incarnation 1
        assert again.said("step reproduced") and not again.said("step came out with other bits")

        faster = config.model_copy(update={"trainer": config.trainer.model_copy(update={"learning_rate": 0.02})})
        with trainer(faster, logs / "3.log") as running:  # another environment: incarnation 2 begins at step 6
            await reached(bus, STEPS - 1, incarnation=2, trainer=running)
            await eventually(lambda: held_by_engines(bus, 2, STEPS), within_s=120, what="engines at the last version")
            running.terminate()
            assert await running.ended() == 0, running.tail()
        stop.set()
        await sampling
        await check_names(bus)
        await check_engines_and_fleet(bus, newest_dead)
        await check_ledger(bus, config, sampled)
        fates = {entry.group: str(entry.reason) for _, entry in await ledger_of(bus) if isinstance(entry, QuarantineEntry)}
        assert [fates.get(group.group) for _, group in dead] == ["dead_branch", "dead_branch"]
        assert shared[1].group not in fates, "both of its versions are on the line of every later incarnation"

        made = await line(bus)
        assert made.branches() == (Branch(1, 3), Branch(2, 6))
        found = checkpoint.latest(root).checkpoint
        last = made.commit_of(STEPS - 1)
        assert found is not None and last is not None
        assert (found.commit.incarnation, found.commit.step, found.commit.digest) == (2, STEPS - 1, last.digest)
        consumed = [
            member.group for _, entry in await ledger_of(bus) if isinstance(entry, BatchEntry) for member in entry.groups
        ]
        evidence = await gather(bus)
        evidence.checkpoints += checkpoint_facts(root, checkpoint.verify)
        assert not [str(finding) for check in audit(evidence) for finding in check.findings]
        assert list(found.commit.consumed_group_ids) == consumed[: STEPS * config.admission.groups_per_batch]


async def check_names(bus: Bus) -> None:
    """Invariant 5: whatever was published, a name has one digest, and each incarnation starts from an anchor of its own."""
    digests: dict[tuple[int, int], set[str]] = defaultdict(set)
    for commit in await commits(bus):
        digests[commit.incarnation, commit.version].add(commit.digest)
    anchors: dict[int, list[WeightsManifest]] = defaultdict(list)
    for item in await read_all(bus, Stream.POLICY, "policy.staged.*", "policy.anchor.*"):
        link = item.decode(WeightsManifest)
        digests[link.incarnation, link.version].add(link.digest)
        if link.form == "anchor":
            anchors[link.incarnation].append(link)
    for item in await read_all(bus, Stream.POLICY, "policy.engine.*"):
        state = item.decode(EngineState)
        if state.phase == "serving" and state.version >= 0:
            digests[state.incarnation, state.version].add(state.digest)
    assert all(len(found) == 1 for found in digests.values()), digests
    made = await line(bus)
    for branch in made.branches():
        first = made._commits[branch.incarnation, branch.version]
        anchor = anchors[branch.incarnation][0]
        assert (anchor.version, anchor.digest) == (branch.version + 1, first.digest)
        (reference,) = anchor.objects
        rebuilt = apply_patch(None, await blobs.get(bus, reference))
        assert (rebuilt.incarnation, rebuilt.version, rebuilt.digest) == (branch.incarnation, branch.version + 1, first.digest)


async def check_engines_and_fleet(bus: Bus, newest_dead: int) -> None:
    """Engines were on the dead branch, at versions that the living one had not reached, and moved; none went back."""
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for item in await read_all(bus, Stream.POLICY, "policy.engine.*"):
        state = item.decode(EngineState)
        assert state.phase != "failed", state.error
        if state.phase == "serving" and state.version >= 0:
            seen[state.engine].append((state.incarnation, state.version))
    for name, places in seen.items():
        assert places == sorted(places), f"{name} went back: {places}"
        assert (0, newest_dead) in places
        assert any(incarnation == 1 and version <= newest_dead for incarnation, version in places)
    fleets = [item.decode(FleetVersions) for item in await read_all(bus, Stream.POLICY, "policy.active")]
    assert fleets[-1].oldest == fleets[-1].newest == STEPS
    assert all(-1 <= fleet.oldest <= max(fleet.engines.values(), default=-1) for fleet in fleets)
    first = next(fleet for fleet in fleets if fleet.incarnation == 1)
    assert set(first.engines.values()) == {-1}, "engines on the dead branch serve no version of the line"


async def check_ledger(bus: Bus, config: Config, sampled: Sampled) -> None:
    """Invariants 3, 4, 7 and 9: every group has one fate, dead groups are turned away, and the recording replays."""
    ledger = await ledger_of(bus)
    leases = [item.decode(GroupLease) for item in await read_all(bus, Stream.TASKS)]
    counts = account(leases, [entry for _, entry in ledger])
    assert counts.holds, counts.line()
    ready = [(item.seq, item.decode(ReadyGroup)) for item in await read_all(bus, Stream.READY)]
    train = [(item.seq, decode_any(item.data)) for item in await read_all(bus, Stream.TRAIN)]
    assert replay(ready, train, ledger, gate_settings(config)) is None
    demands = {seq: message for seq, message in train if isinstance(message, BatchDemand)}
    batches = [entry for _, entry in ledger if isinstance(entry, BatchEntry)]
    assert [entry.step for entry in batches] == list(range(len(batches)))
    for entry in batches:
        branches = demands[entry.demand_seq].left()
        for member in entry.groups:
            assert all(on_line(branches, span.incarnation, span.version) for span in sampled.made[member.group])
    turned_away = [entry for _, entry in ledger if isinstance(entry, QuarantineEntry)]
    dead = [entry for entry in turned_away if entry.reason == "dead_branch"]
    assert dead and dead == turned_away, counts.line()
    for entry in dead:
        branches = demands[entry.demand_seq].left()
        assert not all(on_line(branches, span.incarnation, span.version) for span in sampled.made[entry.group])
    trained = {commit.step: commit.groups for commit in await commits(bus)}
    for commit in await commits(bus):
        assert commit.groups == trained[commit.step] == tuple(member.group for member in batches[commit.step].groups)
