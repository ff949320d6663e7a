"""A trainer that is killed or meets damage comes back to the bits that it had published, and each step is committed once."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from admission_stage import Stage
from conftest import NatsServer, eventually
from partition import Partition
from processes import alive
from trainer_stand import Sampled, commits, configuration, reached, trainer, write_ledger

import param_sync.service
from schemas.health import Heartbeat
from schemas.table import Role
from services.bus import Bus
from services.config import Config
from trainer import checkpoint

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]
STEPS = 6
DISK_BYTES = 6 * 2**20


def up_to(config: Config, steps: int) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"max_steps": steps})})


async def test_killed_at_every_point_of_a_step_it_comes_back_to_the_same_bits(
    tmp_path: Path, nats_url: str, run_name: str
) -> None:
    """Invariants 4 and 5. One run is killed six times, another never; they publish the same digests, once each."""
    digests: list[list[str]] = []
    for number, points in enumerate(([], ["trained:0", "uploading:1", "stored:2", "writing:3", "renamed:3", "announced:4"])):
        config = configuration(tmp_path, f"{run_name}-{number}", nats_url)
        async with Stage(nats_url, config) as stage:
            bus = await stage.bus(Role.ROLLOUTER)
            await stage.start(Role.PARAM_SYNC, param_sync.service.serve)
            await write_ledger(bus, Sampled(bus), range(STEPS))
            for place, point in enumerate(points):
                with trainer(config, tmp_path / f"{number}-{place}.log", killed_at=point) as running:
                    assert await running.ended() == -signal.SIGKILL, running.tail()
            with trainer(config, tmp_path / f"{number}-last.log") as running:
                await reached(bus, STEPS - 1, trainer=running)
                running.terminate()
                assert await running.ended() == 0, running.tail()
            made = await commits(bus)
            assert [(commit.step, commit.incarnation) for commit in made] == [(step, 0) for step in range(STEPS)]
            digests.append([commit.digest for commit in made])
    assert len(set(digests[0])) == STEPS, "training moves the weights"
    assert digests[0] == digests[1]


async def test_damaged_checkpoints_are_passed_over_and_the_ledger_stands_in(
    tmp_path: Path, nats_url: str, run_name: str
) -> None:
    """The newest rotten: the one before. All rotten: they are named, and the whole ledger is trained again from the base."""
    config = configuration(tmp_path, run_name, nats_url)
    root = config.run_folder() / "checkpoints"

    def damage(step: int) -> None:
        folder = root / checkpoint.name_of(step)
        (largest,) = sorted(folder.rglob("*.pt"), key=lambda path: path.stat().st_size)[-1:]
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 1
        largest.write_bytes(bytes(data))

    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.ROLLOUTER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve)
        await write_ledger(bus, Sampled(bus), range(8))

        async def run(name: str, steps: int) -> str:
            with trainer(up_to(config, steps), tmp_path / f"{name}.log") as running:
                await reached(bus, steps - 1, trainer=running)
                await eventually(lambda: running.said("all steps are done"), within_s=120)
                running.terminate()
                assert await running.ended() == 0, running.tail()
                return running.log.read_text()

        await run("first", 6)
        assert sorted(path.name for path in root.glob("step-*")) == ["step-00000001", "step-00000003", "step-00000005"]
        damage(5)
        second = await run("second", 8)
        assert "checkpoint passed over" in second and "does not match its digest" in second
        assert second.count("step reproduced") == 2
        before = await commits(bus)
        assert [(commit.step, commit.incarnation) for commit in before] == [(step, 0) for step in range(8)]
        for path in root.glob("step-*"):
            damage(int(path.name.removeprefix("step-")))
        third = await run("third", 8)
        assert "no checkpoint can be used: the whole ledger is trained again" in third
        assert third.count("checkpoint passed over") == 3 and third.count("step reproduced") == 8
        assert await commits(bus) == before
        found = checkpoint.latest(root)
        assert found.checkpoint is not None and not found.damaged
        assert (found.checkpoint.commit.step, found.checkpoint.commit.digest) == (7, before[-1].digest)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, small enough to fill."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this host does not allow mounting a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_full_disk_is_named_and_the_next_step_tries_again(
    tmp_path: Path, small_disk: Path, nats_url: str, run_name: str
) -> None:
    """The last good checkpoint stays, training goes on over the ledger, and the first checkpoint that fits is written."""
    config = configuration(tmp_path, run_name, nats_url, checkpoint_every=1)
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(small_disk), "max_steps": 6})})
    root = config.run_folder() / "checkpoints"
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.ROLLOUTER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve)
        sampled = Sampled(bus)
        await write_ledger(bus, sampled, range(2))
        with trainer(config, tmp_path / "0.log") as running:
            await reached(bus, 1, trainer=running)
            ballast = small_disk / "ballast"
            free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
            ballast.write_bytes(bytes(free - 40_000))
            await write_ledger(bus, sampled, range(2, 4))
            await reached(bus, 3, trainer=running)
            assert running.said("checkpoint not written") and running.said("bytes are free")
            newest = checkpoint.latest(root).checkpoint
            assert newest is not None and newest.commit.step == 1
            assert not list(root.glob(".partial-*")), "the room that the attempt took is given back"
            ballast.unlink()
            await write_ledger(bus, sampled, range(4, 5))
            await reached(bus, 4, trainer=running)
            newest = checkpoint.latest(root).checkpoint
            assert newest is not None and newest.commit.step == 4
            running.kill()
        made = await commits(bus)
        assert [bool(commit.checkpoint) for commit in made] == [True, True, False, False, True]
        await write_ledger(bus, sampled, range(5, 6))
        with trainer(config, tmp_path / "1.log") as running:
            await reached(bus, 5, trainer=running)
            assert not running.said("step reproduced"), "it continued from the checkpoint of step 4"


async def waits_for_the_folder(bus: Bus, instance: str) -> bool:
    """Whether the trainer's heartbeat says that it waits for the folder's lock, by its holder's name."""
    beat = await bus.last(bus.subjects.service_heartbeat(Role.TRAINER, instance))
    waits = () if beat is None else beat.decode(Heartbeat).waits
    return any(wait.what.startswith("the lock of") and wait.culprit.startswith("trainer first on") for wait in waits)


async def test_a_second_trainer_waits_and_takes_over_from_one_that_is_cut_off_and_alive(
    tmp_path: Path, nats_process: NatsServer, run_name: str
) -> None:
    """Invariants 4 and 11. The ownership passes on when the first falls silent; the folder's lock when it has ended itself."""
    config = configuration(tmp_path, run_name, nats_process.url, checkpoint_every=3)
    config = config.model_copy(update={"fencing": config.fencing.model_copy(update={"cut_off_s": 25.0})})
    async with Partition(nats_process.port) as network, Stage(nats_process.url, config) as stage:
        bus = await stage.bus(Role.ROLLOUTER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve)
        sampled = Sampled(bus)
        await write_ledger(bus, sampled, range(2))
        with (
            trainer(config, tmp_path / "first.log", instance="first", url=network.url) as first,
            trainer(config, tmp_path / "second.log", instance="second") as second,
        ):
            await eventually(lambda: first.said("another one owns") or second.said("another one owns"), within_s=120)
            if first.said("another one owns"):  # the second was quicker; it is ended in order, and comes again
                second.terminate()
                assert await second.ended() == 0, second.tail()
            await reached(bus, 1, trainer=first)
            with trainer(config, tmp_path / "third.log", instance="third") as third:
                waiting = third if second.process.poll() is not None else second
                await eventually(lambda: waiting.said("trainer first on"), within_s=120)
                if waiting is second:
                    third.sweep()
                network.cut()
                await write_ledger(bus, sampled, range(2, STEPS))
                instance = "second" if waiting is second else "third"
                await eventually(lambda: waits_for_the_folder(bus, instance), within_s=120, what=waiting.tail())
                assert await first.ended() == 1, first.tail()
                assert first.said("ownership lost") and first.said("no renewal for 25 s")
                await reached(bus, STEPS - 1, trainer=waiting)
                assert waiting.said("silent for 20 s") and not waiting.said("the folder's lock is not let go of")
                assert waiting.said("step reproduced"), "steps 0 and 1 had no checkpoint yet"
        made = await commits(bus)
        assert [(commit.step, commit.incarnation) for commit in made] == [(step, 0) for step in range(STEPS)]


async def test_a_rank_that_dies_ends_the_others_and_the_trainer_comes_back_whole(
    tmp_path: Path, nats_url: str, run_name: str
) -> None:
    """Each rank is killed in turn, between two steps and in the middle of one; the run without a kill gives the digests."""
    digests: list[list[str]] = []
    for number, victims in enumerate(([], [0, 1])):
        config = configuration(tmp_path, f"{run_name}-{number}", nats_url, ranks=2, zero_stage=2, checkpoint_every=2)
        async with Stage(nats_url, config) as stage:
            bus = await stage.bus(Role.ROLLOUTER)
            await stage.start(Role.PARAM_SYNC, param_sync.service.serve)
            sampled, done = Sampled(bus), 0
            for place, victim in enumerate(victims):
                await write_ledger(bus, sampled, range(done, done := done + 2))
                with trainer(config, tmp_path / f"{number}-{place}.log") as running:
                    await reached(bus, done - 1, trainer=running)
                    ranks = [running.process.pid, *children_of(running.process.pid)]
                    assert len(ranks) == 2, running.tail()
                    os.kill(ranks[victim], signal.SIGKILL)
                    code = await running.ended(30)
                    assert code == (-signal.SIGKILL if victim == 0 else 1), running.tail()
                    await eventually(
                        lambda left=ranks: not any(map(alive, left)), within_s=30, what=f"rank {victim} leaves others"
                    )
            await write_ledger(bus, sampled, range(done, STEPS))
            with trainer(config, tmp_path / f"{number}-last.log") as running:
                await reached(bus, STEPS - 1, trainer=running)
                running.terminate()
                assert await running.ended() == 0, running.tail()
            made = await commits(bus)
            assert [(commit.step, commit.incarnation) for commit in made] == [(step, 0) for step in range(STEPS)]
            digests.append([commit.digest for commit in made])
            found = checkpoint.latest(config.run_folder() / "checkpoints").checkpoint
            assert found is not None and (found.commit.ranks, found.commit.step) == (2, STEPS - 1)
    assert digests[0] == digests[1]


def children_of(pid: int) -> list[int]:
    """Direct children that run Python's command line, not its helpers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and b"services.cli" in command:
            found.append(int(path.parent.name))
    return found


async def test_a_checkpoint_of_other_ranks_is_passed_over(tmp_path: Path, nats_url: str, run_name: str) -> None:
    """It cannot be loaded, so the ledger is trained again; whatever comes out, no name gets two digests."""
    config = configuration(tmp_path, run_name, nats_url, checkpoint_every=1)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.ROLLOUTER)
        await stage.start(Role.PARAM_SYNC, param_sync.service.serve)
        sampled = Sampled(bus)
        await write_ledger(bus, sampled, range(2))
        with trainer(config, tmp_path / "0.log") as running:
            await reached(bus, 1, trainer=running)
            running.kill()
        await write_ledger(bus, sampled, range(2, 3))
        more = config.model_copy(update={"trainer": config.trainer.model_copy(update={"ranks": 2})})
        with trainer(more, tmp_path / "1.log") as running:
            await reached(bus, 2, trainer=running)
            assert running.said("it holds 1 ranks, this trainer has 2")
        names = {(commit.incarnation, commit.version) for commit in await commits(bus)}
        assert len(names) == len(await commits(bus))
