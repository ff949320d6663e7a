"""Step, checkpoint and announcement: in this order, and each says what the others say."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import param_sync.service
from schemas.table import Role
from tests.admission_stage import Stage
from tests.trainer_stand import Sampled, commits, configuration, reached, trainer, write_ledger
from trainer.checkpoint import Checkpoint, name_of, verify

pytestmark = pytest.mark.timeout(300)


async def test_a_step_is_not_announced_while_its_checkpoint_is_being_written(
    tmp_path: Path, nats_url: str, run_name: str
) -> None:
    """Invariant 4. The trainer dies in the middle of the checkpoint's files: nobody may have heard of the step by then."""
    config = configuration(tmp_path, run_name, nats_url)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.ROLLOUTER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve)
        await write_ledger(bus, Sampled(bus), range(2))
        with trainer(config, tmp_path / "trainer.log", killed_at="writing:1") as running:
            assert await running.ended() == -signal.SIGKILL, running.tail()
        assert [commit.step for commit in await commits(bus)] == [0]
        assert not (config.run_folder() / "checkpoints" / name_of(1)).exists()


async def test_a_checkpoint_names_every_group_that_is_in_its_weights(tmp_path: Path, nats_url: str, run_name: str) -> None:
    """Step, consumed groups and digest are one record, across a restart too."""
    config = configuration(tmp_path, run_name, nats_url)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.ROLLOUTER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve)
        await write_ledger(bus, Sampled(bus), range(4))
        for last in (1, 3):
            with trainer(config, tmp_path / f"{last}.log") as running:
                await reached(bus, last, trainer=running)
                running.kill()
        made = await commits(bus)
        found = verify(config.run_folder() / "checkpoints" / name_of(3))
        assert isinstance(found, Checkpoint)
        assert (found.commit.step, found.commit.digest) == (3, made[3].digest)
        assert found.commit.consumed_group_ids == tuple(group for commit in made for group in commit.groups)
