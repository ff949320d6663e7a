"""Damage in the message store of a run that ended: whatever is missing or changed is named, never read past in silence."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtests.chaos.checks import Findings, audit
from loadtests.chaos.damage import blocks, flip, truncate
from loadtests.chaos.store import reopened
from schemas.table import Stream
from tests.faults.ordeal import STEPS, Ordeal, undisturbed_run

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ordeal:
    return undisturbed_run(tmp_path_factory)


async def _audited(folder: Path) -> Findings:
    async with reopened(folder) as (bus, config):
        return await audit(bus, config, folder, at_least_steps=STEPS)


def rot(path: Path) -> None:
    """One bit in the middle of a block."""
    flip(path, path.stat().st_size // 2)


def tear(path: Path) -> None:
    """The end of a block never reached the disk."""
    truncate(path, path.stat().st_size // 3)


@pytest.mark.parametrize("damage", [rot, tear])
@pytest.mark.parametrize("stream", [Stream.TASKS, Stream.TURNS, Stream.EPISODES, Stream.READY, Stream.LEDGER, Stream.TRAIN])
def test_damage_is_named(undisturbed: Ordeal, tmp_path: Path, stream: Stream, damage: Callable[[Path], None]) -> None:
    assert not undisturbed.findings.violations, "\n".join(undisturbed.findings.violations)
    finished = undisturbed.folder
    folder = tmp_path / "damaged"
    shutil.copytree(finished, folder, symlinks=True)
    config = folder / "nats" / "nats.conf"
    config.write_text(config.read_text(encoding="utf-8").replace(str(finished), str(folder)), encoding="utf-8")
    found = blocks(folder, "ordeal", stream)
    assert found, f"{stream} has no block"
    damage(found[-1])
    findings = asyncio.run(_audited(folder))
    assert findings.violations, f"nobody noticed; {findings.account}"
