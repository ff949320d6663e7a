"""A short run with the real bank, admission and sampler on a real server, for tests to record."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from admission_stage import STORE_BYTES, Actors, Stage
from conftest import eventually

import admission.bank_service
import admission.service
import rollouter.sampler_service
from admission.record_command import record_run
from schemas.codec import decode_any, encode
from schemas.lease import GroupLease
from schemas.table import Role, Stream
from schemas.termination import Termination
from services.bus import Bus
from services.config import Config, check
from services.recorded_range import Range
from services.recording import Record
from services.recording_items import items_of
from services.recording_reader import RecordingReader
from services.recording_writer import RecordingWriter

STEPS, BATCH, SIBLINGS = 4, 3, 2


def configuration(run: str, url: str, **admission_changes: object) -> Config:
    """A small run on the example suite; the engines are played by the test."""
    return check(
        {
            "run": {"name": run, "max_steps": STEPS, "seed": 5},
            "nats": {"url": url, "store_bytes": STORE_BYTES},
            "tasks": {"pool": 12},
            "window": {"max_groups": 6},
            "rollout": {"group_size": SIBLINGS},
            "engine": {"kind": "simulated"},
            "admission": {"groups_per_batch": BATCH, "max_lag": 1, "min_rewards": 1, **admission_changes},
            "eval": {"instance_attempts": 2, "template_attempts": 2, "every_steps": 0},
            "telemetry": {"heartbeat_s": 0.3},
        }
    )


def some_fail(lease: GroupLease, slot: int) -> Termination:
    """Every fifth group loses a sibling to infrastructure, every fourth is cut off in all of its siblings."""
    if lease.purpose == "train" and lease.ordinal % 5 == 4 and slot == 0:
        return Termination.INFRA_ABORT
    if lease.purpose == "train" and lease.ordinal % 4 == 3:
        return Termination.TOKEN_TRUNCATION
    return Termination.AGENT_FINISH


@asynccontextmanager
async def finished(url: str, config: Config) -> AsyncIterator[Bus]:
    """The run, to its end; its streams stay on the server."""
    async with Stage(url, config) as stage:
        bus = await stage.bus(Role.OBSERVER)
        actors = Actors(bus, random.Random(3), SIBLINGS, BATCH, terminations=some_fail)
        await stage.start(Role.BANK, admission.bank_service.serve)
        await stage.start(Role.ADMISSION, admission.service.serve)
        await stage.start(Role.SAMPLER, rollouter.sampler_service.serve)
        rolling = asyncio.create_task(actors.roll_out())
        await actors.serve_version(0)
        async with asyncio.timeout(90):
            await actors.train(range(STEPS))
            await eventually(lambda: _evaluated(bus), within_s=60)
        actors.stop.set()
        await rolling
        yield bus


async def _evaluated(bus: Bus) -> bool:
    return await bus.last(bus.subjects.evaluation(f"step-{STEPS:05d}")) is not None


async def recording_of(config: Config, path: Path, *, bodies: bool = False, asked: Range | None = None) -> Path:
    """A recording of the run on its server."""
    await record_run(config, None, path, asked or Range(), bodies=bodies)
    return path


def rewritten(source: Path, target: Path, stream: Stream, seq: int, **changes: object) -> Path:
    """The same recording but for one message, whose fields are changed."""
    with RecordingReader(source) as reader, RecordingWriter(target, reader.manifest) as writer:
        for name in Stream:
            for record in reader.records(name) if name in reader.manifest.parts else []:
                if (name, record.seq) == (stream, seq):
                    changed = msgspec.structs.replace(decode_any(record.data), **changes)
                    record = Record(record.seq, record.time_ns, record.name, record.form, encode(changed))
                message = decode_any(record.data) if record.form == 0 else None
                writer.add(name, record, items_of(name, record.name, message))
    return target
