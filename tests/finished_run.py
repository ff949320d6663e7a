"""A whole local run for tests: `headrace up` to its end, then its streams read from the store that it left behind."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from param_sync.patch.codec import apply as apply_patch
from param_sync.patch.snapshot import Snapshot
from schemas.policy import WeightsManifest
from schemas.table import Role, Stream
from services import blobs, nats_server
from services.base_weights import snapshot_of
from services.bus import Bus
from services.config import Config, load
from services.consume import read_all
from services.identity import read_seed, run_keys, seed_path

ROOT = Path(__file__).resolve().parent.parent


def run_up(folder: Path, config: str, overrides: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """`headrace up` in a run folder below `folder`, from the repository's root, bounded in time."""
    command = [sys.executable, "-m", "services.cli", "up", "--config", config]
    for override in [f"run.folder={folder}", *overrides]:
        command += ["--set", override]
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


class FinishedRun:
    """The run folder of a run that ended, and its store behind a server of our own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: Config = load(folder / "config.toml")

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        """The run's streams, served again from its store on another port."""
        port = nats_server.free_port()
        text = (self.folder / "nats" / "nats.conf").read_text(encoding="utf-8")
        path = self.folder / "nats" / "reopened.conf"
        path.write_text(re.sub(r'listen: ".*"', f'listen: "127.0.0.1:{port}"', text), encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            nats_server.binary(), "-c", str(path), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            assert await nats_server.accepts(port, 20), "the reopened server does not answer"
            key = seed_path(run_keys(self.folder), Role.OBSERVER)
            seed = read_seed(key) if key.is_file() else None
            bus = await Bus.connect(f"nats://127.0.0.1:{port}", self.config.run.name, Role.OBSERVER, "test", nkeys_seed=seed)
            yield bus
            await bus.close()
        finally:
            process.terminate()
            await process.wait()


async def weights_by_version(bus: Bus, config: Config) -> dict[int, Snapshot]:
    """Every published version, rebuilt link by link from the starting checkpoint; each link verifies its digest."""
    snapshot = snapshot_of(str(ROOT / config.policy.model))
    out = {0: snapshot}
    for item in await read_all(bus, Stream.POLICY, "policy.staged.*"):
        manifest = item.decode(WeightsManifest)
        for reference in manifest.objects:
            snapshot = apply_patch(snapshot, await blobs.get(bus, reference))
        assert snapshot.digest == manifest.digest
        out[manifest.version] = snapshot
    return out


def logs_of(folder: Path, lines: int = 15) -> str:
    """The ends of all service logs, for a failed assertion."""
    parts = []
    for path in sorted((folder / "logs").glob("*.log")):
        parts.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:]))
    return "\n".join(parts)
