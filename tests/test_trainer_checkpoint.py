"""A checkpoint is there whole or not there: torn, rotten, interrupted and killed writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from trainer.checkpoint import Checkpoint, CheckpointError, Commit, Damage, commit, latest, prepare, prune, verify

pytestmark = pytest.mark.timeout(60)


def record(step: int, incarnation: int = 0) -> Commit:
    return Commit(
        step=step,
        version=step + 1,
        incarnation=incarnation,
        digest=f"d{step}",
        consumed_group_ids=(f"g{step}a", f"g{step}b"),
        ledger_position=10 * step,
        config_hash="c",
    )


def write(root: Path, step: int, incarnation: int = 0) -> Checkpoint:
    aside = prepare(root, step, incarnation)
    (aside / "state" / "deep").mkdir()
    (aside / "state" / "deep" / "weights.pt").write_bytes(os.urandom(5000))
    (aside / "state" / "random.msgpack").write_bytes(bytes([step]) * 100)
    return commit(root, aside, record(step, incarnation))


def test_what_was_committed_is_found_again(tmp_path: Path) -> None:
    assert latest(tmp_path / "none").checkpoint is None
    for step in (1, 2, 10):
        write(tmp_path, step)
    found = latest(tmp_path)
    assert found.damaged == () and found.checkpoint is not None
    assert found.checkpoint.commit.step == 10 and found.checkpoint.commit.consumed_group_ids == ("g10a", "g10b")
    assert (found.checkpoint.state / "deep" / "weights.pt").stat().st_size == 5000
    assert not list(tmp_path.glob(".partial-*"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: flip(p / "state/deep/weights.pt", 4321), "does not match its digest"),
        (lambda p: (p / "state/deep/weights.pt").write_bytes(b"short"), "has 5 bytes"),
        (lambda p: (p / "state/random.msgpack").unlink(), "is missing"),
        (lambda p: (p / "commit.msgpack").unlink(), "commit.msgpack is missing"),
        (lambda p: (p / "commit.msgpack").write_bytes((p / "commit.msgpack").read_bytes()[:-40]), "cannot be read"),
        (lambda p: flip(p / "commit.msgpack", 12), "commit.msgpack"),
        (lambda p: (p / "commit.msgpack").write_bytes(b""), "cannot be read"),
    ],
)
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, damage: object, reason: str) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    assert callable(damage)
    damage(newest.path)
    found = latest(tmp_path)
    assert found.checkpoint is not None and found.checkpoint.commit.step == 1
    assert [item.path for item in found.damaged] == [newest.path]
    assert reason in found.damaged[0].reason


def test_a_folder_under_a_wrong_name_is_damage(tmp_path: Path) -> None:
    made = write(tmp_path, 3)
    made.path.rename(tmp_path / "step-00000004")
    found = verify(tmp_path / "step-00000004")
    assert isinstance(found, Damage) and "step 3" in found.reason


def test_an_intact_step_is_never_overwritten_but_a_damaged_one_is(tmp_path: Path) -> None:
    made = write(tmp_path, 5)
    with pytest.raises(CheckpointError, match="never written again"):
        write(tmp_path, 5)
    (made.path / "state/random.msgpack").write_bytes(b"")
    write(tmp_path, 5)
    assert isinstance(verify(made.path), Checkpoint)
    for changes in ({"ranks": 2}, {"ranks": 2, "digest": "never announced"}):
        again = commit(tmp_path, prepare(tmp_path, 5), msgspec.structs.replace(record(5), **changes))
        assert verify(made.path) == again


def test_a_newer_incarnation_counts_more_than_a_later_step_and_a_refused_one_is_named(tmp_path: Path) -> None:
    for step, incarnation in ((3, 0), (9, 0), (5, 1), (6, 1)):
        write(tmp_path, step, incarnation)
    newest = latest(tmp_path).checkpoint
    assert newest is not None and newest.path.name == "step-00000006-1"
    assert (newest.commit.step, newest.commit.incarnation) == (6, 1)
    found = latest(tmp_path, lambda record: "" if record.step == 3 else f"step {record.step} is off the line")
    assert found.checkpoint is not None and found.checkpoint.commit.step == 3
    assert [item.reason for item in found.damaged] == [f"step {step} is off the line" for step in (6, 5, 9)]
    newest.path.rename(tmp_path / "step-00000006-2")
    named = verify(tmp_path / "step-00000006-2")
    assert isinstance(named, Damage) and "incarnation 1" in named.reason


def test_pruning_never_removes_the_last_intact_one(tmp_path: Path) -> None:
    for step in range(5):
        write(tmp_path, step)
    for step in (3, 4):
        flip(tmp_path / f"step-0000000{step}" / "state/deep/weights.pt", 100)
    assert [path.name for path in prune(tmp_path, 2)] == ["step-00000000", "step-00000001"]
    found = latest(tmp_path)
    assert found.checkpoint is not None and found.checkpoint.commit.step == 2
    write(tmp_path, 5)
    assert [path.name for path in prune(tmp_path, 2)] == ["step-00000002", "step-00000003"]


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in range(5):
        write(tmp_path, step)
    assert [path.name for path in prune(tmp_path, 2)] == ["step-00000000", "step-00000001", "step-00000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    with pytest.raises(CheckpointError, match="keep"):
        prune(tmp_path, 0)


_WRITER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_trainer_checkpoint import write
step = 0
while True:
    write(Path({root!r}), step)
    print(step, flush=True)
    step += 1
"""


def test_a_writer_killed_at_any_time_leaves_the_last_commit_intact(tmp_path: Path) -> None:
    """What it reported as committed is found, whole; nothing half-written is ever taken for a checkpoint."""
    root = tmp_path / "checkpoints"
    program = _WRITER.format(tests=str(Path(__file__).parent), root=str(root))
    for wait_s in (0.05, 0.11, 0.17):
        if root.exists():
            for path in sorted(root.glob("step-*")):
                for file in path.rglob("*"):
                    if file.is_file():
                        file.unlink()
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent
        ) as process:
            assert process.stdout is not None
            reported = int(process.stdout.readline())
            time.sleep(wait_s)
            os.kill(process.pid, signal.SIGKILL)
            lines = process.stdout.read().split()
        reported = int(lines[-1]) if lines else reported
        found = latest(root)
        assert found.checkpoint is not None and found.checkpoint.commit.step >= reported
        assert found.checkpoint.commit.step <= reported + 1
