"""Quarantine: what was turned away whole stays readable, with its reason and numbers, on a run and on its recording."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from admission_stage import make_commit
from conftest import NatsServer
from damage import damaged, flip_bit
from recorded_run import recording_of
from test_lost_items import ground

from schemas.ledger import QuarantineEntry, QuarantineReason
from schemas.table import Stream
from schemas.trajectory import VersionSpan
from services.cli import main

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of its own for a test that damages its store."""
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


async def command(*words: str) -> int:
    return await asyncio.to_thread(main, ["quarantine", *words])


async def test_what_was_turned_away_is_listed_and_shown_with_its_numbers(
    server: NatsServer, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two groups are stale at step 4, one was sampled under a version that the trainer has not made; one loses an episode."""
    async with ground(server.url, run_name) as run:
        leases = await run.lease(*range(12))
        for lease in leases[:8]:
            await run.play(lease)
        await run.bank()
        await run.ready(8)
        await run.admission()
        for step in range(3):
            await run.demand(step, 2)
            await run.bus.publish_once(run.bus.subjects.step(step), make_commit(await run.batch(step)))
        for slot in range(2):
            ahead = await run.seal(leases[8], slot, versions=(VersionSpan(2, 5, 9),))
            await run.judge(leases[8], slot, ahead)
        for lease in leases[9:]:
            for slot in range(2):
                await run.judge(lease, slot, await run.seal(lease, slot, versions=(VersionSpan(2, 5, 3),)))
        await run.ready(12)
        await run.demand(3, 2)
        await run.batch(3)
        entries = {e.group: e for _, e in await run.ledger() if isinstance(e, QuarantineEntry)}
        assert {group: str(entry.reason) for group, entry in entries.items()} == {
            leases[6].group: QuarantineReason.STALE,
            leases[7].group: QuarantineReason.STALE,
            leases[8].group: QuarantineReason.INCARNATION,
        }
        before = await recording_of(run.config, tmp_path / "before")
        async with damaged(server):
            flip_bit(server, run_name, Stream.EPISODES, run.bus.subjects.episode(leases[7].group, 1))
        path = await recording_of(run.config, tmp_path / "r")
        live = ["--nats", server.url, "--set", f"run.name={run_name}"]
        capsys.readouterr()
        for source in (["--recording", str(path)], live):
            assert await command("list", "--json", str(tmp_path / "j"), *source) == 0
            said = capsys.readouterr().out
            assert said.splitlines()[-1] == "3 groups in quarantine"
            assert "stale, files: 2" in said
            rows = json.loads((tmp_path / "j").read_text())
            for row in rows:
                entry = entries[row["group"]]
                same = {name: row[name] for name in ("lag", "at_version", "oldest_version", "mean_reward", "detail")}
                assert same == {name: msgspec.to_builtins(entry)[name] for name in same}
            assert await command("list", "--reason", "stale", *source) == 0
            assert capsys.readouterr().out.splitlines()[-1] == "2 groups in quarantine"
            assert await command("show", leases[7].group, "--json", str(tmp_path / "j"), *source) == 0
            said = capsys.readouterr().out
            assert "lag 3 exceeds 2" in said
            shown = json.loads((tmp_path / "j").read_text())
            assert [s["readable"] for s in shown["siblings"]] == ["yes", "no: an item is gone"]
            assert [s["reward"] for s in shown["siblings"]] == [0.0, 1.0]
            assert await command("show", leases[0].group, *source) == 2
            err = capsys.readouterr().err
            assert f"group {leases[0].group} is not in quarantine: {leases[0].group} was trained on in step 0" in err
        assert await command("show", leases[7].group, "--recording", str(before), "--json", str(tmp_path / "j")) == 0
        shown = json.loads((tmp_path / "j").read_text())
        assert [s["readable"] for s in shown["siblings"]] == ["yes", "yes"], "a quarantined group stays readable"
