"""Where a recording can come from: a run that goes on or has ended, one server or a cluster; all give the same records."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtests.audit_speed import SyntheticRun, write
from schemas.table import Role
from services.bus import Bus
from services.cli import main
from services.config import Config, load
from services.embedded_server import EmbeddedServers
from services.provision import provision
from services.recording import RECORDED
from services.recording_reader import RecordingReader
from services.run_folder import RunFolder

RUN, GROUPS, SIBLINGS = "kept", 20, 2
pytestmark = pytest.mark.timeout(300)


def configuration(folder: Path, nodes: int) -> Config:
    """A run of which only the streams matter."""
    words = [f'run.name="{RUN}"', f'run.folder="{folder}"', f"nats.store_bytes={2**28}", "nats.embedded_keys=false"]
    return load(None, [*words, f"nats.nodes={nodes}", f"nats.replicas={min(nodes, 3)}", 'engine.kind="simulated"'])


def contents(path: Path) -> list[tuple[str, int, int, str, str]]:
    with RecordingReader(path) as reader:
        return [(str(s), r.seq, r.time_ns, r.name, r.digest) for s in RECORDED for r in reader.records(s)]


@pytest.mark.parametrize("nodes", [1, 3])
async def test_live_and_ended_runs_give_the_same_recording(
    tmp_path: Path, nodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path, nodes)
    with RunFolder(config) as folder:
        servers = EmbeddedServers(config, folder, lambda line: None)
        async with servers.running(lambda reason: None):
            folder.note_url(servers.nats.url)
            bus = await Bus.connect(servers.nats.url, RUN, Role.OBSERVER, "writer")
            await provision(bus, config.nats.store_bytes, config.nats.replicas)
            count = await write(bus, SyntheticRun(RUN, GROUPS, SIBLINGS))
            await bus.close()
            urls = ["--nats", servers.nats.url, "--set", f"run.name={RUN}"]
            assert await asyncio.to_thread(main, ["record", str(tmp_path / "live"), *urls]) == 0
            assert await asyncio.to_thread(main, ["explain", "group", "g00000001", *urls]) == 0
    ended = ["--run-folder", str(tmp_path / RUN)]
    assert await asyncio.to_thread(main, ["record", str(tmp_path / "ended"), *ended]) == 0
    assert await asyncio.to_thread(main, ["explain", "group", "g00000001", *ended]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("g00000001 was trained on in step 0")]
    assert len(said) == 2, "the live run and the folder tell the same"
    assert len(contents(tmp_path / "live")) == count
    assert contents(tmp_path / "live") == contents(tmp_path / "ended")
