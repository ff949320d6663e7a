"""A full disk under the store: the publisher is held with the reason, what was acknowledged stays, and space lets it go on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schemas.table import Role, Stream
from services.bus import Bus
from services.config import load
from services.consume import read_all
from services.disk_watch import ROOM_BYTES, no_room
from services.embedded_server import EmbeddedServers
from services.items import BusError
from services.provision import provision
from services.provision_run import provision_run
from services.run_folder import RunFolder
from services.runtime import connect
from tests.conftest import NatsServer, eventually
from tests.standin_run import lease

DISK_BYTES = 24 * 2**20
STORE_BYTES = 64 * 2**20  # more than the disk holds, as when somebody else fills it


@contextmanager
def mounted(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of its own, small enough to fill."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], check=False)
    if done.returncode != 0:
        pytest.skip("this host does not allow mounting a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path, DISK_BYTES) as folder:
        yield folder


@pytest.fixture
def small_store(tmp_path: Path) -> Iterator[Path]:
    """Where the run `full` will have its servers' stores."""
    home = tmp_path / "full" / "nats"
    home.mkdir(parents=True)
    with mounted(home, 64 * 2**20) as folder:
        yield folder


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
        with pytest.raises(BusError, match="not stored within 4 s"):
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


def test_only_want_of_room_is_taken_for_a_full_disk() -> None:
    said = "JetStream stream '$G > hr_t_TURNS' write error: write /s/2.blk: no space left on device"
    assert no_room(json.dumps({"status": "unavailable", "error": said})) == said
    assert not no_room(json.dumps({"status": "unavailable", "error": "JetStream stream is not current"}))
    assert not no_room(json.dumps({"status": "unavailable", "error": "write error: input/output error"}))
    assert not no_room('{"status": "ok"}')
    assert not no_room("[]")
    assert not no_room("")


@pytest.mark.timeout(240)
async def test_the_embedded_server_writes_again_by_itself_when_there_is_room(tmp_path: Path, small_store: Path) -> None:
    """Producers hold and say what for; the disk is named; nobody starts anything; nothing acknowledged is lost or doubled."""
    base = load(None, ["run.name=full", f'run.folder="{tmp_path}"', f"nats.store_bytes={STORE_BYTES}"])
    said, lost, acknowledged, stop = list[str](), list[str](), dict[str, int](), asyncio.Event()
    with RunFolder(base) as folder:
        servers = EmbeddedServers(base, folder, said.append)
        async with servers.running(lost.append):
            config = base.model_copy(update={"nats": servers.nats})
            await provision_run(config)
            bus = await connect(config, Role.ROLLOUTER, "0", lost.append)
            first = servers.pid("nats-server")

            async def write(writer: int) -> None:
                number = 0
                while not stop.is_set():
                    subject = bus.subjects.turn(f"g{writer}", 0, 0, number)
                    acknowledged[subject] = (await bus.publish_once(subject, lease(bus.run, number))).seq
                    number += 1

            try:
                async with asyncio.TaskGroup() as group:
                    for writer in range(4):
                        group.create_task(write(writer))
                    await eventually(lambda: len(acknowledged) > 50, within_s=60)
                    ballast = small_store / "ballast"
                    fill(ballast)
                    await eventually(lambda: any("is full" in line for line in said), within_s=90, what="the disk is named")
                    await eventually(lambda: bus.holds.wait(), within_s=60, what="a publisher says that it waits")
                    wait = bus.holds.wait()
                    assert wait is not None
                    assert config.nats.url.removeprefix("nats://") in wait.culprit
                    assert "is its disk full?" in wait.culprit
                    assert servers.pid("nats-server") == first, "without room it would not help"
                    before = len(acknowledged)
                    ballast.unlink()
                    await eventually(lambda: len(acknowledged) > before + 50, within_s=90, what="all go on by themselves")
                    stop.set()
                assert servers.pid("nats-server") != first
                assert bus.holds.wait() is None
                stored = {item.subject: item.seq for item in await read_all(bus, Stream.TURNS)}
                assert stored == acknowledged
                assert not lost
            finally:
                await bus.close()
    home = small_store.resolve()
    full = next(line for line in said if "is full" in line)
    assert re.search(rf"the store under {home}/store \(disk {home}\) is full: \d+ bytes free, {ROOM_BYTES} needed", full)
    assert "no space left on device" in full
    again = [line for line in said if "has room again" in line]
    assert len(again) == 1
    assert re.search(r"\d+ bytes free; starting nats-server again", again[0])


def fill(ballast: Path) -> None:
    """Leave nothing, as when somebody else's files grow."""
    state = os.statvfs(ballast.parent)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_frsize)
