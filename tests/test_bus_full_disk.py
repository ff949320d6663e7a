"""A full disk under the store: the publisher is held with the reason, what was acknowledged stays, and space lets it go on."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.table import Role, Stream
from services.bus import Bus, BusError
from services.consume import read_all
from services.provision import provision
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
