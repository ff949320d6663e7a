"""SIGTERM on a service whose message cannot be stored: it gives it up, says so, and what was acknowledged stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from admission_stage import Actors
from conftest import NatsServer, eventually

from loadtests.chaos.settings import ROOT
from schemas.table import Role, Stream
from services.bus import Bus
from services.config import Config, check, to_toml
from services.consume import read_all, read_latest
from services.provision_run import provision_run
from services.runtime import EXIT_CLEAN, EXIT_FAILED, EXIT_NO_SERVER
from tests.press_stand import lower_limit

pytestmark = pytest.mark.timeout(180)
WITHIN_S = 90.0
INTERRUPTED_START = """
import os, signal, sys

class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == "services.runtime":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, AtImport())
from services.cli import main
main(sys.argv[1:])
"""


def configuration(url: str, run: str) -> Config:
    return check(
        {
            "run": {"name": run},
            "policy": {"model": str(ROOT / "examples/terminal/model")},
            "nats": {"url": url, "store_bytes": 256 * 2**20},
            "engine": {"kind": "simulated", "names": ["e0"]},
            "eval": {"every_steps": 0, "at_start": False, "at_end": False},
            "telemetry": {"heartbeat_s": 0.3},
        }
    )


class Service:
    """A process of `headrace run`, and what it has said."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    async def has_said(self, *words: str) -> None:
        def together() -> bool:
            return any(all(word in line for word in words) for line in self.said().splitlines())

        await eventually(together, within_s=WITHIN_S, what=f"{words} in the log")

    async def drained(self) -> int:
        """Its exit code after one SIGTERM. Fails when it needs a second signal."""
        self._process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self._process.wait(), WITHIN_S)


@asynccontextmanager
async def running(config: Config, role: Role, folder: Path) -> AsyncIterator[Service]:
    instance = config.engine.names[0] if role is Role.ENGINE else "0"
    file = folder / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    argv = [sys.executable, "-m", "services.cli", "run", str(role), "--instance", instance, "--config", str(file)]
    log = folder / "service.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=out, stderr=out
        )
    try:
        yield Service(process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_message_that_its_full_stream_refuses_is_given_up(nats_url: str, run_name: str, tmp_path: Path) -> None:
    config = configuration(nats_url, run_name)
    await provision_run(config)
    bus = await Bus.connect(nats_url, run_name, Role.OBSERVER, "t")
    async with running(config, Role.SAMPLER, tmp_path) as sampler:
        await sampler.has_said("ready")
        await lower_limit(bus, Stream.TASKS, room_bytes=1500)  # now, since whoever starts gives it the room that is configured
        await Actors(bus, random.Random(1), 2, 2).serve_version(0)
        await sampler.has_said("publish is held back", "the stream refuses")
        stored = [item.digest for item in await read_all(bus, Stream.TASKS)]
        assert await sampler.drained() == EXIT_FAILED
        assert "not stored within" in sampler.said()
    assert [item.digest for item in await read_all(bus, Stream.TASKS)] == stored
    await bus.close()


@pytest.mark.parametrize("role", [Role.BANK, Role.ADMISSION, Role.PARAM_SYNC, Role.ROLLOUTER, Role.ENGINE])
async def test_a_service_drains_though_the_server_is_gone(
    nats_process: NatsServer, run_name: str, tmp_path: Path, role: Role
) -> None:
    config = configuration(nats_process.url, run_name)
    await provision_run(config)
    bus = await Bus.connect(nats_process.url, run_name, Role.OBSERVER, "t")
    async with running(config, role, tmp_path) as service:
        beat = f"reg.service.{role}.{'e0' if role is Role.ENGINE else '0'}"
        await eventually(lambda: read_latest(bus, Stream.REGISTRY, beat), within_s=WITHIN_S, what="it is at work")
        nats_process.kill()
        try:
            await service.has_said("the server is gone")
            assert await service.drained() in (EXIT_CLEAN, EXIT_NO_SERVER), service.said()
        finally:
            nats_process.start()
            await bus.close()


async def test_a_service_that_is_asked_to_end_while_it_still_imports_ends_in_order() -> None:
    """It has nothing yet that could be lost, so whoever stops a run in its first second sees no failure."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INTERRUPTED_START, "run", "sampler", "--nats", "nats://127.0.0.1:9", cwd=ROOT
    )
    assert await asyncio.wait_for(process.wait(), WITHIN_S) == EXIT_CLEAN
