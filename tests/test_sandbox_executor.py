"""The executor: every request once by its id, exact resets, sealed exports, and nothing left behind by any death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.trajectory import StateRef
from services.sandbox.command import CommandResult, Limits, Outcome
from services.sandbox.executor import Executor, ExecutorConfig
from services.sandbox.host import HostConfig
from services.sandbox.journal import Ended, Journal, JournalError, Opened, Ran, Record, Sealed
from services.sandbox.lane_rules import Lane, LaneSpec
from services.sandbox.lanes import LaneBusy
from services.sandbox.mounts import mounts_under
from services.sandbox.refusals import (
    BadSandboxId,
    ExecutorStopped,
    SandboxConflict,
    SandboxLost,
    SandboxSealed,
    SnapshotMismatch,
    TooManySandboxes,
    UnknownSandbox,
)
from services.sandbox.snapshots import SnapshotUnknown
from services.sandbox.state import PackedState, hash_files, unpack
from tests.sandbox_ground import needs_bwrap, processes_naming, sandbox_root, token, wait_until

pytestmark = [needs_bwrap, pytest.mark.timeout(60)]
FILES = {"a.txt": b"one\n", "d/b.json": b"{}"}
LIMITS = Limits(memory_bytes=128 * 2**20, processes=40, disk_bytes=4 * 2**20, max_files=200, output_bytes=4096)


@pytest.fixture
def root() -> Iterator[str]:
    with sandbox_root() as folder:
        yield folder


def config(root: str, **changes: object) -> ExecutorConfig:
    lanes = {lane: LaneSpec(run_permits=2, start_permits=2, queue_bound=8) for lane in Lane}
    base = {"host": HostConfig(root=root, threads=16), "limits": LIMITS, "lanes": lanes, "max_sandboxes": 6}
    return ExecutorConfig(**{**base, **changes})  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def started(root: str, **changes: object) -> AsyncIterator[Executor]:
    executor = await Executor.start(config(root, **changes))
    try:
        yield executor
    finally:
        async with asyncio.timeout(30):
            await executor.close()


@pytest.fixture
async def executor(root: str) -> AsyncIterator[Executor]:
    async with started(root) as opened:
        yield opened


async def test_every_reset_gives_the_same_state(executor: Executor) -> None:
    hashes = {(await executor.reset(f"s{number}", FILES)).state_hash for number in range(4)}
    assert hashes == {hash_files(FILES)}
    assert await executor.reset("s0", FILES) == await executor.reset("s0", FILES)
    with pytest.raises(SandboxConflict):
        await executor.reset("s0", {"a.txt": b"two\n"})
    assert (await executor.reset("s4", FILES, hash_files(FILES))).state_hash == hash_files(FILES)
    with pytest.raises(SnapshotMismatch, match="asked for"):
        await executor.reset("s5", FILES, "0" * 64)
    with pytest.raises(SnapshotMismatch, match="not admissible"):
        await executor.reset("s5", {"../x": b""})
    assert executor.status().sandboxes == 5


async def test_a_command_runs_once_by_its_id(executor: Executor) -> None:
    await executor.reset("s", FILES)
    first = await executor.run("s", "c1", "echo x >> log; wc -l < log; date +%N")
    assert first.stdout.startswith(b"1\n")
    assert await executor.run("s", "c1", "echo x >> log; wc -l < log; date +%N") == first
    same = await asyncio.gather(*(executor.run("s", "c2", "echo x >> log; sleep 0.2; wc -l < log") for _ in range(5)))
    assert {result.stdout for result in same} == {b"2\n"}
    with pytest.raises(JournalError, match="'c1' was used for another command"):
        await executor.run("s", "c1", "echo other")
    assert (await executor.run("s", "c3", "wc -l < log")).stdout == b"2\n"


async def test_a_cancelled_asker_does_not_stop_the_command(executor: Executor) -> None:
    await executor.reset("s", FILES)
    asker = asyncio.create_task(executor.run("s", "c", "sleep 0.3; echo done >> log"))
    await asyncio.sleep(0.1)
    asker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asker
    result = await executor.run("s", "c", "sleep 0.3; echo done >> log")
    assert result.outcome is Outcome.EXITED
    assert (await executor.run("s", "look", "cat log")).stdout == b"done\n"


async def test_commands_of_one_sandbox_run_in_order(executor: Executor) -> None:
    await executor.reset("s", {})
    await asyncio.gather(*(executor.run("s", f"c{number}", f"echo {number} >> log") for number in range(6)))
    assert (await executor.run("s", "look", "cat log")).stdout == b"0\n1\n2\n3\n4\n5\n"


async def test_export_seals(executor: Executor, tmp_path: Path) -> None:
    await executor.reset("s", FILES)
    running = asyncio.create_task(executor.run("s", "c1", "sleep 0.2; echo late > late"))
    await asyncio.sleep(0.05)
    packed = await executor.export("s")
    assert (await running).exit_code == 0 and packed == await executor.export("s")
    with pytest.raises(SandboxSealed):
        await executor.run("s", "c2", "echo too late > a.txt")
    with pytest.raises(SandboxSealed):
        await executor.restore("s", "snap-" + "0" * 40, "r")
    assert (await executor.run("s", "c1", "sleep 0.2; echo late > late")).exit_code == 0  # recorded, so still answered
    assert unpack(packed.tar, str(tmp_path)) == packed.state_hash
    assert (tmp_path / "late").read_bytes() == b"late\n" and (tmp_path / "a.txt").read_bytes() == b"one\n"


async def test_replay_from_a_snapshot_is_identical_and_forks_are_apart(executor: Executor) -> None:
    await executor.reset("s", FILES)
    await executor.run("s", "c0", "chmod +x a.txt; ln -s a.txt link; mkdir empty")
    base = await executor.snapshot("s", environment="suite-1")
    actions = [
        "echo two >> a.txt; cat a.txt",
        "python3 -c 'print(hash(\"x\"))'; ls -l --time-style=+ | tail -n +2",
        "rm -r d; ls",
    ]

    async def replay(sandbox: str, prefix: str) -> list[tuple[bytes, str]]:
        results = [await executor.run(sandbox, f"{prefix}{n}", action) for n, action in enumerate(actions)]
        return [(result.stdout, result.state_hash_after) for result in results]

    first = await replay("s", "a")
    restored = await executor.restore("s", base.snapshot_id, "r1")
    assert restored.state_hash == base.state_hash and restored.snapshot_id == base.snapshot_id
    assert await replay("s", "b") == first
    forks = [await executor.fork(base.snapshot_id, f"fork{number}") for number in range(2)]
    assert {fork.state_hash for fork in forks} == {base.state_hash}
    assert await replay("fork0", "c") == first
    assert (await executor.run("fork1", "d", "cat a.txt; ls -d d link empty")).stdout == b"one\nd\nempty\nlink\n"
    assert (await executor.restore("s", base.snapshot_id, "r1")).state_hash == base.state_hash  # a repeat changes nothing
    assert (await executor.run("s", "look", "ls")).stdout == first[-1][0]
    child = await executor.snapshot("fork1")
    assert (child.parent, child.state_hash) == (base.snapshot_id, base.state_hash)


async def test_unknown_and_damaged_snapshots_activate_nothing(executor: Executor, root: str) -> None:
    await executor.reset("s", FILES)
    base = await executor.snapshot("s")
    await executor.run("s", "c", "echo changed > a.txt")
    with pytest.raises(SnapshotUnknown):
        await executor.restore("s", "snap-" + "0" * 40, "r1")
    stored = Path(root, "snapshots", f"{base.snapshot_id}.tar")
    stored.write_bytes(stored.read_bytes()[:-1] + b"x")
    with pytest.raises(SnapshotUnknown, match="damaged"):
        await executor.restore("s", base.snapshot_id, "r2")
    with pytest.raises(SnapshotUnknown):
        await executor.fork(base.snapshot_id, "f")
    assert (await executor.run("s", "look", "cat a.txt")).stdout == b"changed\n"
    await executor.drop_snapshot(base.snapshot_id)
    await executor.drop_snapshot(base.snapshot_id)


async def test_cleanup_is_confirmed_and_repeatable(executor: Executor, root: str) -> None:
    word = token()
    await executor.reset("s", FILES)
    running = asyncio.create_task(executor.run("s", "c", f"setsid sh -c 'sleep 60; : {word}' & sleep 60", timeout_s=60))
    await asyncio.to_thread(wait_until, lambda: bool(processes_naming(word)), "the command runs")
    first, second = await asyncio.gather(executor.cleanup("s"), executor.cleanup("s"))
    assert first.existed and second.existed
    assert processes_naming(word) == [] and os.listdir(os.path.join(root, "sandboxes")) == []
    with pytest.raises(SandboxLost, match="cleaned up"):
        await running
    assert not (await executor.cleanup("s")).existed and not (await executor.cleanup("never")).existed
    with pytest.raises(SandboxLost, match="cleaned up"):
        await executor.run("s", "c2", "true")
    with pytest.raises(SandboxLost, match="its id is spent"):
        await executor.reset("s", FILES)
    with pytest.raises(UnknownSandbox):
        await executor.run("never", "c", "true")
    with pytest.raises(UnknownSandbox):
        await executor.export("never")


async def test_the_host_is_bounded(executor: Executor) -> None:
    for number in range(6):
        await executor.reset(f"s{number}", FILES)
    with pytest.raises(TooManySandboxes):
        await executor.reset("s6", FILES)
    await executor.cleanup("s3")
    await executor.reset("s6", FILES)
    for bad in ("", "../x", "a/b", ".hidden", "-x", "x" * 129):
        with pytest.raises(BadSandboxId):
            await executor.reset(bad, FILES)


async def test_a_full_lane_hands_the_request_back(root: str) -> None:
    lanes = {lane: LaneSpec(run_permits=1, start_permits=1, queue_bound=1) for lane in Lane}
    async with started(root, lanes=lanes) as executor:
        for name in ("a", "b", "c"):
            await executor.reset(name, {})
        slow = "sleep 1.5; : pip install"
        stuck = [asyncio.create_task(executor.run(name, "slow", slow, lane=Lane.PACKAGE)) for name in ("a", "b")]
        await asyncio.sleep(0.1)
        with pytest.raises(LaneBusy):
            await executor.run("c", "slow", "pip install --help")
        async with asyncio.timeout(1.2):
            assert (await executor.run("c", "quick", "echo quick")).stdout == b"quick\n"
        assert {result.exit_code for result in await asyncio.gather(*stuck)} == {0}
        assert (await executor.run("c", "slow", "pip --help install >&2; echo ran")).stdout == b"ran\n"


async def test_idle_sandboxes_are_removed(root: str) -> None:
    async with started(root, idle_s=0.3) as executor:
        await executor.reset("idle", {})
        await executor.reset("busy", {})
        running = asyncio.create_task(executor.run("busy", "c", "sleep 1"))
        await asyncio.sleep(0.5)
        assert await executor.reap_idle() == ("idle",)
        assert (await running).exit_code == 0
        with pytest.raises(SandboxLost, match="nobody used it"):
            await executor.run("idle", "c", "true")


async def test_stopping_ends_what_runs(root: str) -> None:
    word = token()
    async with started(root) as executor:
        await executor.reset("s", {})
        running = asyncio.create_task(executor.run("s", "c", f"sleep 60; : {word}", timeout_s=60))
        waiting = asyncio.create_task(executor.run("s", "d", "true"))
        await asyncio.to_thread(wait_until, lambda: bool(processes_naming(word)), "the command runs")
    assert processes_naming(word) == []
    for cut_off in (running, waiting):
        with pytest.raises(SandboxLost, match="the executor stopped"):
            await cut_off
    async with started(root) as successor:  # what we cut off is no result of the command
        with pytest.raises(SandboxLost, match="the executor stopped"):
            await successor.run("s", "c", f"sleep 60; : {word}")


async def by_value(packed: PackedState) -> StateRef:
    """A reference that holds the archive itself; every call makes another one, as two uploads would."""
    return StateRef(
        state_hash=packed.state_hash,
        tar_digest=packed.tar_digest,
        size_bytes=len(packed.tar),
        inline=packed.tar + token().encode(),
    )


async def test_a_sealed_state_is_given_again_when_the_sandbox_is_gone(root: str) -> None:
    async with started(root) as executor:
        await executor.reset("s", FILES)
        await executor.run("s", "c", "echo x > new")
        first, second = await asyncio.gather(executor.seal("s", by_value), executor.seal("s", by_value))
        standing = await executor.standing("s")
        assert first == second and (standing.state_hash, standing.last_command) == (first.state_hash, "c")
        with pytest.raises(SandboxSealed):
            await executor.run("s", "d", "true")
        await executor.cleanup("s", "sealed")
        assert await executor.seal("s", by_value) == first and await executor.standing("s") == standing
        assert (await executor.run("s", "c", "echo x > new")).exit_code == 0  # recorded
        await executor.reset("t", FILES)
    async with started(root) as successor:
        assert await successor.seal("s", by_value) == first and await successor.standing("s") == standing
        for gone, error in (("t", SandboxLost), ("never", UnknownSandbox)):
            with pytest.raises(error):
                await successor.seal(gone, by_value)
            with pytest.raises(error):
                await successor.standing(gone)


async def test_standing_waits_for_what_runs_and_sees_what_no_command_did(executor: Executor, root: str) -> None:
    made = await executor.reset("s", FILES)
    fresh = await executor.standing("s")
    assert (fresh.state_hash, fresh.last_command) == (made.state_hash, "")
    running = asyncio.create_task(executor.run("s", "c", "sleep 0.5; echo x > late"))
    await asyncio.sleep(0)
    after = await executor.standing("s")
    assert (after.state_hash, after.last_command) == ((await running).state_hash_after, "c")
    assert after.state_hash != fresh.state_hash
    (workspace,) = Path(executor._host.path("sandboxes", "s")).glob("work-*")
    (workspace / "foreign").write_text("x")
    with pytest.raises(SandboxLost, match="its last command left"):
        await executor.standing("s")
    with pytest.raises(SandboxLost):
        await executor.run("s", "d", "true")


async def test_a_slot_has_one_sandbox_that_of_its_newest_attempt(executor: Executor) -> None:
    await executor.reset("old", FILES, owner="g1/0/1")
    await executor.reset("other-slot", FILES, owner="g1/1/0")
    await executor.reset("unowned", FILES)
    await executor.reset("new", FILES, owner="g1/0/2")
    with pytest.raises(SandboxConflict, match="attempt 2"):
        await executor.reset("late", FILES, owner="g1/0/1")
    await asyncio.to_thread(wait_until, lambda: executor.status().sandboxes == 3, "the orphan's removal")
    with pytest.raises(SandboxLost, match="its slot went on as g1/0/2"):
        await executor.run("old", "c", "true")
    for name in ("new", "other-slot", "unowned"):
        assert (await executor.run(name, "c", "true")).exit_code == 0
    await executor.cleanup("new")
    await executor.reset("late", FILES, owner="g1/0/1")  # nothing newer lives here any more


async def test_a_group_that_has_ended_leaves_no_sandbox_and_gets_none(executor: Executor) -> None:
    for name, owner in (("a", "g1/0/0"), ("b", "g1/3/2"), ("other", "g11/0/0"), ("unowned", "")):
        await executor.reset(name, FILES, owner=owner)
    assert set(await executor.close_group("g1")) == {"a", "b"}
    assert executor.status().sandboxes == 2
    with pytest.raises(SandboxLost, match="all episodes of g1 are sealed"):
        await executor.run("a", "c", "true")
    with pytest.raises(SandboxConflict, match="all episodes of g1 are sealed"):
        await executor.reset("late", FILES, owner="g1/3/3")
    assert await executor.close_group("g1") == ()
    for name in ("other", "unowned"):
        assert (await executor.run(name, "c", "true")).exit_code == 0


async def test_results_survive_an_orderly_restart(root: str) -> None:
    async with started(root) as executor:
        await executor.reset("s", FILES)
        first = await executor.run("s", "c1", "date +%N; echo out; echo err >&2; exit 7")
    with pytest.raises(ExecutorStopped):
        await executor.reset("t", FILES)
    async with started(root) as successor:
        assert successor.status().reaped_at_start.processes == 0
        assert await successor.run("s", "c1", "date +%N; echo out; echo err >&2; exit 7") == first
        with pytest.raises(JournalError):
            await successor.run("s", "c1", "other")
        with pytest.raises(SandboxLost):
            await successor.run("s", "c2", "true")


CRASHING = """
import asyncio, sys
from services.sandbox.executor import Executor, ExecutorConfig
from services.sandbox.host import HostConfig

async def main(root, word):
    executor = await Executor.start(ExecutorConfig(host=HostConfig(root=root)))
    await executor.reset("s", {"a.txt": b"one"})
    done = await executor.run("s", "done", "echo ran >> /work/log; date +%N; cat log")
    print(done.stdout.split()[0].decode(), flush=True)
    await executor.run("s", "cut", f"setsid sh -c 'while :; do sleep 1; done; : {word}' & sleep 600; : {word}", timeout_s=600)

asyncio.run(main(*sys.argv[1:]))
"""


def crash(root: str, word: str) -> tuple[bytes, bool]:
    """Kill an executor's process in the middle of its second command; returns the output of the first."""
    command = [sys.executable, "-c", CRASHING, root, word]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as process:
        assert process.stdout is not None
        stamp = process.stdout.readline().strip()
        wait_until(lambda: len(processes_naming(f": {word}")) >= 2, "the second command runs")
        in_memory = bool(mounts_under(root))
        process.send_signal(signal.SIGKILL)
    return stamp, in_memory


async def test_a_killed_executor_leaves_nothing_and_its_results_stand(root: str) -> None:
    word = token()
    stamp, in_memory = await asyncio.to_thread(crash, root, word)
    async with started(root) as executor:
        assert processes_naming(word) == []
        reaped = executor.status().reaped_at_start
        assert reaped.folders >= 1 and (not in_memory or reaped.mounts >= 2)
        assert os.listdir(os.path.join(root, "sandboxes")) == []
        recorded = await executor.run("s", "done", "echo ran >> /work/log; date +%N; cat log")
        assert recorded.stdout.split() == [stamp, b"ran"]
        with pytest.raises(SandboxLost, match="went down"):
            await executor.run("s", "cut", "anything")
        with pytest.raises(SandboxLost):
            await executor.reset("s", {"a.txt": b"one"})
        assert (await executor.reset("t", {"a.txt": b"one"})).state_hash == hash_files({"a.txt": b"one"})


RECORDS: list[Record] = [
    Opened(request="r", state_hash="h"),
    *(
        Ran(
            request=f"q{n}", result=CommandResult(command_id=f"c{n}", outcome=Outcome.EXITED, exit_code=n, stdout=bytes(n * 50))
        )
        for n in range(4)
    ),
    Sealed(state=StateRef(state_hash="h", tar_digest="d", size_bytes=3, inline=b"tar")),
    Ended(reason="cleaned up"),
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 10_000), flip=st.booleans())
def test_a_torn_journal_keeps_every_whole_record(tmp_path: Path, cut: int, flip: bool) -> None:
    path = tmp_path / "j.log"
    path.unlink(missing_ok=True)
    journal = Journal.load(str(path))
    ends = [0]
    for record in RECORDS:
        journal.append(record)
        ends.append(path.stat().st_size)
    data = path.read_bytes()
    cut %= len(data)
    path.write_bytes(data[:cut] + (bytes([data[cut] ^ 1]) + data[cut + 1 :] if flip else b""))
    loaded = Journal.load(str(path))
    whole = sum(end <= cut for end in ends) - 1
    assert (loaded.opened is not None) == (whole >= 1) and loaded.ended is None
    assert loaded.commands == max(0, min(whole - 1, 4))
    assert (loaded.sealed_state() is not None) == (whole >= 6)
    assert loaded.last_command == (f"c{loaded.commands - 1}" if loaded.commands else "")
    for number in range(loaded.commands):
        result = loaded.result_of(f"c{number}", f"q{number}")
        assert result is not None and result.exit_code == number
    loaded.append(RECORDS[0])  # and it can be written on
    assert Journal.load(str(path)).opened == RECORDS[0]


async def test_old_journals_are_pruned_while_sandboxes_come_and_go(root: str) -> None:
    """Pruning reads the folder in a thread; what the loop opens and closes meanwhile must not disturb it."""
    async with started(root, journals_kept=2, prune_every=1) as executor:

        async def come_and_go(worker: int) -> None:
            for turn in range(6):
                await executor.reset(f"p{worker}-{turn}", FILES)
                await executor.cleanup(f"p{worker}-{turn}", "test")

        await asyncio.gather(*(come_and_go(worker) for worker in range(3)))
        await executor.reset("last", FILES)
        await executor.cleanup("last", "test")
        assert len(os.listdir(os.path.join(root, "journal"))) <= 4


async def test_journals_are_kept_up_to_a_number_of_bytes(root: str) -> None:
    """The newest stay: they are what a takeover may still ask for."""
    async with started(root, journals_kept_bytes=3000, prune_every=1) as executor:
        for number in range(4):
            await executor.reset(f"s{number}", FILES)
            await executor.run(f"s{number}", "c", "head -c 900 /dev/zero")
            await executor.cleanup(f"s{number}", "test")
        assert sorted(os.listdir(os.path.join(root, "journal"))) == ["s2.log", "s3.log"]
