"""A short run of real services for the tests of recordings: nats-server, sandboxes, verifier, rollouter, bank and admission.

The engine is scripted and the trainer's words are written by the test, so that one batch is trained on, two groups go stale,
and another batch follows. What it leaves is the folder of a run that has ended, with its store.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import admission.bank_service
import admission.service
from admission.record import found_by
from admission.recorded import message_of
from schemas.ledger import BatchEntry
from schemas.policy import EngineState, FleetVersions, WeightsManifest
from schemas.table import Role, Stream
from schemas.training import BatchDemand, ObjectRef, StepCommit
from services.bus import Bus
from services.cli import main
from services.config import Config, check
from services.consume import read_all
from services.embedded_server import EmbeddedServers
from services.provision import provision
from services.recording import Record, Recording, group_key
from services.recording_writer import RecordingWriter
from services.run_folder import RunFolder
from tests.rollout_stand import TASKS, ScriptedEngine, eventually, lease, oracle_speech, serving, stand

RUN, SIZE, PER_BATCH, MAX_LAG = "short", 2, 2, 2
FIRST_STEP = 5  # the trainer goes on where a run of five steps stood
TRAINED, STALE, LATER = ("g00000000", "g00000001"), ("g00000002", "g00000003"), ("g00000004", "g00000005")


def configuration(folder: Path, sandboxes: str) -> Config:
    return check(
        {
            "run": {"name": RUN, "folder": str(folder)},
            "nats": {"store_bytes": 512 * 2**20, "embedded_keys": False},
            "rollout": {"group_size": SIZE, "generate_timeout_s": 60.0, "sandbox_timeout_s": 60.0},
            "sandbox": {"root": sandboxes},
            "window": {"max_groups": 8},
            "admission": {"groups_per_batch": PER_BATCH, "max_lag": MAX_LAG, "min_rewards": 1},
        }
    )


@cache
def short_run() -> Path:
    """The folder of the run, made once in this process."""
    return asyncio.run(asyncio.wait_for(_make(), 240))


async def _make() -> Path:
    base = Path(tempfile.mkdtemp(prefix="hr-short-"))  # sandboxes' users must reach it, unlike pytest's folders
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    sandboxes = base / "sandboxes"
    sandboxes.mkdir()
    os.chmod(base, 0o711)
    os.chmod(sandboxes, 0o711)
    config = configuration(base, str(sandboxes))
    with RunFolder(config) as folder:
        servers = EmbeddedServers(config, folder, lambda line: None)
        async with servers.running(lambda reason: None):
            folder.note_url(servers.nats.url)
            running = config.model_copy(update={"nats": servers.nats})
            bus = await Bus.connect(servers.nats.url, RUN, Role.OBSERVER, "test")
            await provision(bus, config.nats.store_bytes)
            await _play(running, bus)
            await bus.close()
    return folder.path


async def _play(config: Config, bus: Bus) -> None:
    leases = [lease(config, n, TASKS[n], SIZE) for n in range(6)]
    engine = ScriptedEngine("e0", oracle_speech({each.group: each.task_id for each in leases}))
    async with (
        stand(config, engine),
        serving(config, Role.BANK, "b0", admission.bank_service.serve),
        serving(config, Role.ADMISSION, "a0", admission.service.serve),
    ):
        for each in leases[:4]:  # one after the other, so that the order of completion is known
            await bus.publish_once(bus.subjects.lease(each.ordinal), each)
            await _whole(bus, each.ordinal + 1)
        await _ask(bus, FIRST_STEP)
        await _commit(bus, FIRST_STEP)
        await _ask(bus, FIRST_STEP + 1)
        await eventually("two stale groups", lambda: _stored(bus, "ledger.quarantine.*", 2), 90)
        engine.version = FIRST_STEP
        for each in leases[4:]:
            await bus.publish_once(bus.subjects.lease(each.ordinal), each)
            await _whole(bus, each.ordinal + 1)
        await _commit(bus, FIRST_STEP + 1)


async def _stored(bus: Bus, pattern: str, count: int) -> bool:
    stream = Stream.LEDGER if pattern.startswith("ledger") else Stream.READY
    return len(await read_all(bus, stream, pattern)) >= count


async def _whole(bus: Bus, count: int) -> None:
    await eventually(f"{count} ready groups", lambda: _stored(bus, "ready.*", count), 90)


async def _ask(bus: Bus, step: int) -> None:
    demand = BatchDemand(run=RUN, step=step, version=step, incarnation=0, groups=PER_BATCH)
    await bus.publish_once(bus.subjects.demand(step), demand)


async def _commit(bus: Bus, step: int) -> None:
    """The step's commit once its batch is there, and what the weights' way says of the version that came out."""
    await eventually(f"batch {step}", lambda: _stored(bus, f"ledger.batch.{step}", 1), 90)
    (item,) = await read_all(bus, Stream.LEDGER, f"ledger.batch.{step}")
    batch = item.decode(BatchEntry)
    made = step + 1
    commit = StepCommit(
        run=RUN,
        step=step,
        version=made,
        incarnation=0,
        digest=f"d{made}",
        base_digest=f"d{step}",
        groups=tuple(member.group for member in batch.groups),
        rows=PER_BATCH * SIZE,
        trained_tokens=100,
        optimizer_steps=1,
        patches=(),
        patch_bytes=0,
        metrics={"loss": 0.5},
        ledger_seq=item.seq,
        wait_s=0.1,
        train_s=0.2,
        finished_ns=item.time_ns + 300_000_000,
    )
    await bus.publish_once(bus.subjects.step(step), commit)
    patch = ObjectRef(name=f"patch-{made}", digest=f"d{made}", size_bytes=1)
    manifest = WeightsManifest(
        run=RUN,
        version=made,
        incarnation=0,
        digest=f"d{made}",
        form="patch",
        base_version=step,
        base_digest=f"d{step}",
        objects=(patch,),
        step=step,
    )
    await bus.publish_once(bus.subjects.staged(made), manifest)
    state = EngineState(
        run=RUN, engine="e0", generator="scripted", phase="serving", version=made, incarnation=0, digest=f"d{made}"
    )
    await bus.publish(bus.subjects.engine_state("e0"), state)
    fleet = FleetVersions(run=RUN, target=made, incarnation=0, engines={"e0": made}, oldest=made, newest=made)
    await bus.publish(bus.subjects.active(), fleet)


def record(out: Path, *words: str) -> Path:
    """`headrace record` on the short run, in this process."""
    assert main(["record", str(out), "--run-folder", str(short_run()), *words]) == 0
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The short run, recorded with bodies."""
    return record(tmp_path_factory.mktemp("whole") / "run.hrr")


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The short run, recorded without bodies."""
    return record(tmp_path_factory.mktemp("lean") / "run.hrr", "--without-bodies")


def rewritten(path: Path, out: Path, change: Callable[[Stream, Record], Record]) -> Path:
    """A copy of a recording in which some records are others; a well-formed file that says something else."""
    with Recording(path) as recording, RecordingWriter(out, recording.header) as writer:
        for name, facts in recording.index.streams.items():
            writer.streams[Stream(name)] = facts
            facts.records = facts.holes = facts.damaged = 0
        for number, block in enumerate(recording.index.blocks):
            for record_ in recording.block(number):
                changed = change(Stream(block.stream), record_)
                groups, steps = found_by(changed.subject, message_of(changed))
                writer.add(Stream(block.stream), changed, {group_key(group) for group in groups}, steps)
    return out
