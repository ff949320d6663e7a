"""Two trainers at one checkpoint folder: whoever has it by number can write, whatever the one before does when it wakes up."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
from admission_stage import Stage
from conftest import eventually
from test_trainer_checkpoint import record, write
from trainer_stand import Sampled, commits, configuration, reached, trainer, write_ledger

import param_sync.service
from schemas.table import Role
from trainer import checkpoint, folder_lock, folder_owner
from trainer.folder_owner import FolderTaken

STEPS = 4


def contents(root: Path) -> dict[str, bytes]:
    """Every file of the checkpoints that can be seen."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.glob("step-*/**/*")) if p.is_file()}


def state_of(pid: int) -> str:
    """The process's state letter."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def begin(root: Path, step: int, owner: int) -> Path:
    """A half-written checkpoint."""
    aside = checkpoint.prepare(root, step, owner=owner)
    (aside / "state" / "weights.pt").write_bytes(os.urandom(3000))
    return aside


def test_numbers_only_grow_whatever_the_roles_count_says(tmp_path: Path) -> None:
    assert folder_owner.owner_of(tmp_path) == 0
    assert [folder_owner.take(tmp_path, at_least) for at_least in (1, 5, 2, 9)] == [1, 5, 6, 9]
    folder_owner.check(tmp_path, 9)
    folder_owner.check(tmp_path, 0)
    with pytest.raises(FolderTaken, match="its owner is number 9 by now, we are number 6"):
        folder_owner.check(tmp_path, 6)


def test_an_owner_that_lost_the_folder_changes_nothing_in_it(tmp_path: Path) -> None:
    old = folder_owner.take(tmp_path, 1)
    aside = begin(tmp_path, 2, old)
    new = folder_owner.take(tmp_path, 2)
    assert not list(tmp_path.glob(".partial-*")) and not list(tmp_path.glob(".swept-*"))
    write(tmp_path, 2)
    ours = begin(tmp_path, 3, new)
    before = contents(tmp_path)
    with pytest.raises(FolderTaken):
        checkpoint.prepare(tmp_path, 2, owner=old)
    with pytest.raises(FolderTaken):
        checkpoint.commit(tmp_path, aside, record(2), owner=old)
    with pytest.raises(FolderTaken):
        checkpoint.prune(tmp_path, 1, owner=old)
    assert contents(tmp_path) == before and ours.is_dir()


@pytest.mark.parametrize("begun_again", [False, True])
@pytest.mark.parametrize("damaged", [False, True])
def test_one_that_was_stopped_right_after_its_last_look_fails_at_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun_again: bool, damaged: bool
) -> None:
    """The check itself leaves no gap: the rename needs the folder that the next owner has put aside."""
    old = folder_owner.take(tmp_path, 1)
    if damaged:  # then the late writer means to replace it
        made = write(tmp_path, 2)
        (made.path / "state/random.msgpack").write_bytes(b"")
    aside = begin(tmp_path, 2, old)
    look, looks = folder_owner.check, []

    def stopped_after_it(root: Path, number: int) -> None:
        look(root, number)
        looks.append(number)
        if len(looks) < 2:  # the last look of `commit` is the second
            return
        monkeypatch.setattr(folder_owner, "check", look)
        new = folder_owner.take(tmp_path, 2)
        if begun_again:
            again = begin(tmp_path, 2, new)
            checkpoint.commit(tmp_path, again, record(2), owner=new)

    monkeypatch.setattr(folder_owner, "check", stopped_after_it)
    with pytest.raises(FileNotFoundError):
        checkpoint.commit(tmp_path, aside, record(2), owner=old)
    found = checkpoint.latest(tmp_path).checkpoint
    assert (found is not None) == begun_again
    assert found is None or found.commit.step == 2
    assert len(list(tmp_path.glob("step-*"))) == (1 if begun_again or damaged else 0)


def test_a_file_system_without_locks_leaves_it_to_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    try:
        for number in (errno.ENOLCK, errno.EIO):

            def refuse(*_: object, number: int = number) -> None:
                raise OSError(number, os.strerror(number))

            monkeypatch.setattr("fcntl.flock", refuse)
            if number == errno.EIO:
                with pytest.raises(OSError, match="Input/output"):
                    folder_lock._try(handle)
            else:
                assert folder_lock._try(handle)
    finally:
        os.close(handle)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", ["trained:1", "writing:1", "renamed:1"])
async def test_a_second_trainer_goes_on_beside_one_that_is_stopped_for_good(
    tmp_path: Path, nats_url: str, run_name: str, point: str
) -> None:
    """Invariants 4, 5 and 11. The stopped one keeps its lock; when it wakes up it writes nothing, says nothing, and ends."""
    config = configuration(tmp_path, run_name, nats_url, checkpoint_every=1, keep_checkpoints=9)
    short = {"renew_s": 0.5, "ttl_s": 5.0, "trainer_ttl_s": 8.0, "cut_off_s": 6.0}
    config = config.model_copy(
        update={
            "fencing": config.fencing.model_copy(update=short),
            "run": config.run.model_copy(update={"max_steps": STEPS}),
        }
    )
    root = config.run_folder() / "checkpoints"
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.ROLLOUTER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve)
        await write_ledger(bus, Sampled(bus), range(STEPS))
        with trainer(config, tmp_path / "first.log", instance="first", killed_at=f"{point}:stop") as first:

            def stopped() -> bool:
                assert first.process.poll() is None, first.tail()
                return state_of(first.process.pid) == "T"

            await eventually(stopped, within_s=240)
            with trainer(config, tmp_path / "second.log", instance="second") as second:
                await reached(bus, STEPS - 1, trainer=second)
                await eventually(lambda: second.said("all steps are done"), within_s=120, what=second.tail())
                assert second.said("silent for 8 s") and second.said("the folder's lock is not let go of")
                made, before = await commits(bus), contents(root)
                assert state_of(first.process.pid) == "T"
                first.process.send_signal(signal.SIGCONT)
                assert await first.ended() == 1, first.tail()
                assert first.said("ownership lost") or first.said("its owner is number")
                assert await commits(bus) == made and contents(root) == before
                assert not list(root.glob(".partial-*"))
                second.terminate()
                assert await second.ended() == 0, second.tail()
        assert [(commit.step, commit.incarnation) for commit in made] == [(step, 0) for step in range(STEPS)]
        found = checkpoint.latest(root)
        assert found.checkpoint is not None and not found.damaged and found.checkpoint.commit.step == STEPS - 1
        assert sorted(path.name for path in root.glob("step-*")) == [checkpoint.name_of(step) for step in range(STEPS)]
