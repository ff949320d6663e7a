"""Damage in the message store of a run that ended: `headrace audit` names whatever is missing or changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtests.chaos.audit_run import headrace_audit
from loadtests.chaos.damage import blocks, flip, truncate
from schemas.table import Stream
from tests.faults.ordeal import Ordeal, undisturbed_run

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ordeal:
    return undisturbed_run(tmp_path_factory)


def rot(path: Path) -> None:
    """One bit in the middle of a block."""
    flip(path, path.stat().st_size // 2)


def tear(path: Path) -> None:
    """The end of a block never reached the disk."""
    truncate(path, path.stat().st_size // 3)


@pytest.mark.parametrize("damage", [rot, tear])
@pytest.mark.parametrize("stream", [Stream.TASKS, Stream.TURNS, Stream.EPISODES, Stream.READY, Stream.LEDGER, Stream.TRAIN])
def test_damage_is_named(undisturbed: Ordeal, tmp_path: Path, stream: Stream, damage: Callable[[Path], None]) -> None:
    """The undisturbed run itself was audited, and nothing was found."""
    assert not undisturbed.findings.violations, "\n".join(undisturbed.findings.violations)
    folder = tmp_path / "damaged"
    shutil.copytree(undisturbed.folder, folder, symlinks=True)
    found = blocks(folder, "ordeal", stream)
    assert found, f"{stream} has no block"
    damage(found[-1])
    audited = headrace_audit(folder)
    assert audited.code == 1 and audited.findings, audited.output
