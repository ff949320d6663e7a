"""A full disk under the store: the publisher is held with the reason, what was acknowledged stays, and space lets it go on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.table import Role, Stream
from services.bus import Bus
from services.config import check
from services.consume import read_all
from services.embedded_server import EmbeddedServers
from services.items import BusError
from services.logs import PatientStream
from services.provision import provision
from services.provision_run import provision_run
from services.run_folder import MetricsFile, RunFolder
from services.runtime import connect
from tests.conftest import NatsServer, eventually

DISK_BYTES = 24 * 2**20
STORE_BYTES = 64 * 2**20  # more than the disk holds, as when somebody else fills it


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, small enough to fill."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this host does not allow mounting a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


async def _fill(bus: Bus, stored: list[int]) -> None:
    """Store until the bus gives up; `stored` gets what was acknowledged."""
    for number in range(40):
        stored.append(await bus.store(bus.subjects.turn("g1", 0, 0, number), os.urandom(400_000), {}))


@pytest.mark.timeout(90)
async def test_a_full_disk_is_named_and_nothing_acknowledged_is_lost(small_disk: Path, run_name: str) -> None:
    server = NatsServer(small_disk)
    server.start()
    bus = await Bus.connect(server.url, run_name, Role.ROLLOUTER, "0")
    try:
        await provision(bus, STORE_BYTES)
        ballast = small_disk / "ballast"
        ballast.write_bytes(b"x" * (DISK_BYTES - 6 * 2**20))
        bus.give_up_s = 4.0
        stored: list[int] = []
        with pytest.raises(BusError, match=r"not stored within \d+ s; the server does not answer"):
            await _fill(bus, stored)
        assert stored, "the disk had room for some"
        ballast.unlink()
        server.kill()
        server.start()
        bus.give_up_s = 30.0
        await eventually(lambda: bus.client.is_connected, within_s=20)
        await asyncio.sleep(0)
        number = len(stored) + 1
        await bus.store(bus.subjects.turn("g1", 0, 0, number), b"after", {})
        kept = [item.seq for item in await read_all(bus, Stream.TURNS)]
        assert set(stored) <= set(kept)
    finally:
        await bus.close()
        server.kill()


@pytest.mark.timeout(150)
async def test_a_local_run_goes_on_by_itself_when_there_is_room_again(small_disk: Path, run_name: str) -> None:
    """Producers hold while the disk is full; the server, which would not write again, is started again; nothing is lost."""
    config = check(
        {
            "run": {"name": run_name, "folder": str(small_disk)},
            "nats": {"store_bytes": 2 * STORE_BYTES, "connect_timeout_s": 20},
        }
    )
    said: list[str] = []
    with RunFolder(config) as folder:
        servers = EmbeddedServers(config, folder, said.append)
        async with servers.running(said.append):
            reached = config.model_copy(update={"nats": servers.nats})
            await provision_run(reached)
            bus = await connect(reached, Role.ROLLOUTER, "0")
            try:
                await _filled_and_emptied(small_disk, bus, said)
            finally:
                await bus.close()


async def _filled_and_emptied(disk: Path, bus: Bus, said: list[str]) -> None:
    ballast, stored, stop = disk / "ballast", list[int](), asyncio.Event()
    ballast.write_bytes(b"x" * (DISK_BYTES - 8 * 2**20))

    async def produce() -> None:
        while not stop.is_set():
            turn = bus.subjects.turn("g1", 0, 0, len(stored))
            stored.append(await bus.store(turn, os.urandom(200_000), {"Nats-Expected-Last-Subject-Sequence": "0"}))

    producer = asyncio.create_task(produce())
    await eventually(lambda: any("cannot write" in line for line in said), within_s=40)
    assert re.search(r"nats-server cannot write: .*no space left.*MiB are free under", "\n".join(said))
    held_at = len(stored)
    assert held_at, "the disk had room for some"
    await asyncio.sleep(3.0)  # nothing may be acknowledged meanwhile, and that has no event to wait for
    assert len(stored) == held_at
    assert not producer.done(), "it holds"
    assert not any("started again" in line for line in said)
    ballast.unlink()
    await eventually(lambda: len(stored) > held_at, within_s=60)
    stop.set()
    await producer
    assert any("is started again, since there is room now" in line for line in said)
    kept = [item.seq for item in await read_all(bus, Stream.TURNS)]
    assert kept == stored == list(range(1, len(stored) + 1))


def test_logs_and_metrics_outlive_a_full_disk(small_disk: Path) -> None:
    metrics = MetricsFile(small_disk / "metrics.jsonl")
    rows = [{"kind": "step", "step": step} for step in range(3)]
    ballast = small_disk / "ballast"
    with (small_disk / "log").open("a") as file:
        stream = PatientStream(file)
        print("before", file=stream)
        metrics.append(rows[0])
        with pytest.raises(OSError, match="No space left"):
            ballast.write_bytes(b"x" * DISK_BYTES)
        print("x" * 8192, file=stream)
        metrics.append(rows[1] | {"note": "x" * 8192})
        ballast.unlink()
        print("after", file=stream)
        metrics.append(rows[2])
    lines = (small_disk / "log").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert any("log lines were dropped" in line for line in lines)
    written = [json.loads(line) for line in (small_disk / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in written] == [0, 1, 2]
