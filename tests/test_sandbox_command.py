"""Invariant 8's fence: what a command can see and touch, and how each way of misbehaving ends. Real bubblewrap throughout."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.sandbox.box import Box
from services.sandbox.command import Bind, CommandRefused, CommandResult, CommandSpec, Limits, Outcome, SetupFailed, shell
from services.sandbox.host import Host
from services.sandbox.state import REFUSED
from tests.sandbox_ground import needs_bwrap, opened_host, processes_naming, token, wait_until

pytestmark = [needs_bwrap, pytest.mark.timeout(60)]
NUMBERS = itertools.count()
TRY_SOCKETS = b"""
import socket
for family in (40, 17, 38, 21):  # VSOCK, PACKET, ALG, RDS
    try:
        socket.socket(family, 1)
        print("OPEN", family)
    except OSError as error:
        print(error.errno)
"""
LIMITS = Limits(
    memory_bytes=128 * 2**20, processes=40, disk_bytes=8 * 2**20, scratch_bytes=4 * 2**20, max_files=200, output_bytes=4096
)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with opened_host() as opened:
        yield opened


@pytest.fixture
def box(host: Host) -> Iterator[Box]:
    number = next(NUMBERS)
    made = Box(host, f"box-{number}", number % 50, LIMITS)
    made.open()
    yield made
    made.close()


def run(box: Box, command: str, timeout_s: float = 10.0, limits: Limits = LIMITS, cpus: tuple[int, ...] = ()) -> CommandResult:
    return box.run(f"c{next(NUMBERS)}", command, timeout_s=timeout_s, limits=limits, cpus=cpus)


def needs(host: Host, controller: str) -> None:
    if controller not in host.isolation.control_groups:
        pytest.skip(f"no {controller} control group here: {'; '.join(host.isolation.missing)}")


def test_a_command_returns_what_it_did(box: Box) -> None:
    box.fill({"a.txt": b"hello"})
    result = run(box, "cat a.txt; echo problem >&2; echo more > b.txt; exit 3")
    assert (result.outcome, result.exit_code) == (Outcome.EXITED, 3)
    assert (result.stdout, result.stderr, result.dropped_bytes) == (b"hello", b"problem\n", 0)
    assert result.wall_s > 0 and result.cpu_s > 0 and len(result.state_hash_after) == 64
    assert run(box, "true").state_hash_after == result.state_hash_after
    assert run(box, "rm b.txt").state_hash_after != result.state_hash_after


def test_signals_and_missing_programs_have_the_usual_codes(box: Box) -> None:
    assert run(box, "kill -TERM $$").exit_code == 128 + 15
    assert run(box, "kill -KILL $$").exit_code == 128 + 9
    assert run(box, "no-such-program").exit_code == 127
    assert run(box, "sh -c 'kill -SEGV $$'").exit_code == 128 + 11


def test_there_is_no_network(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        seen = run(box, f"(exec 3<>/dev/tcp/127.0.0.1/{port}) && echo REACHED; cat /proc/net/dev; cat /proc/net/route")
    assert b"REACHED" not in seen.stdout and b"refused" in seen.stderr
    assert [line.split(b":")[0].strip() for line in seen.stdout.splitlines() if b":" in line] == [b"lo"]


def test_doors_without_a_namespace_are_shut(host: Host, box: Box) -> None:
    if not host.isolation.call_filter:
        pytest.skip("no system-call filter on this machine")
    box.fill({"try.py": TRY_SOCKETS})
    assert run(box, "python3 -I -S try.py").stdout.split() == [b"97"] * 4  # EAFNOSUPPORT


def test_the_host_is_not_visible(host: Host, box: Box, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = token()
    monkeypatch.setenv("HR_SECRET", secret)
    (tmp_path / secret).write_text(secret)
    look = (
        "env; cat /proc/*/environ /proc/*/cmdline /proc/self/mountinfo /proc/self/cgroup | tr '\\0' '\\n'; ls -d /proc/[0-9]*; "
        f"ls / /root /home {tmp_path} {host.config.root}; readlink /proc/1/fd/*; hostname"
    )
    result = run(box, look.replace(secret, ""), limits=Limits(output_bytes=1 << 20))
    seen = result.stdout + result.stderr
    assert secret.encode() not in result.stdout
    assert 0 < len(re.findall(rb"^/proc/\d+$", result.stdout, re.MULTILINE)) <= 5
    if host.isolation.memory_workspace:
        assert b"sandboxes" not in result.stdout and box.sandbox_id.encode() not in result.stdout
    assert seen.count(b"No such file") >= 4
    assert result.stdout.splitlines()[-1] == b"sandbox"


def test_siblings_do_not_see_each_other(host: Host, box: Box) -> None:
    sibling = Box(host, f"sibling-{next(NUMBERS)}", 60, LIMITS)
    sibling.open()
    try:
        name = token()
        sibling.fill({name: b"x"})
        found = run(box, f"find / -name {name} -not -path '/proc/*' 2>/dev/null; ls /work")
        assert found.stdout == b""
        assert host.uid(60) != host.uid(box.index) or not host.isolation.own_user_per_sandbox
    finally:
        sibling.close()


def test_the_system_is_read_only_and_the_user_has_no_power(box: Box) -> None:
    places = "/usr/x /etc/x /x /dev/x /bin/x /proc/sys/kernel/core_pattern /etc/passwd"
    result = run(box, f"for p in {places}; do (echo > $p) 2>/dev/null && echo WROTE $p; done; id -u; cat /proc/self/status")
    assert b"WROTE" not in result.stdout and result.stdout.startswith(b"1000\n")
    assert b"CapEff:\t0000000000000000" in result.stdout and b"CapBnd:\t0000000000000000" in result.stdout
    assert b"NoNewPrivs:\t1" in result.stdout
    attempts = run(box, "date -s 2001-01-01; mount -t tmpfs x /work; unshare -U true && echo NESTED; chroot / true")
    assert attempts.exit_code is not None and b"NESTED" not in attempts.stdout
    assert time.localtime().tm_year > 2001


def test_a_fork_bomb_is_contained(host: Host, box: Box) -> None:
    word = token()
    result = run(box, f": {word}; bomb() {{ bomb | bomb & }}; bomb; sleep 20", timeout_s=1.5)
    assert result.outcome in (Outcome.TIMED_OUT, Outcome.EXITED)
    assert processes_naming(word) == []
    assert run(box, "echo fine").stdout == b"fine\n"
    if "pids" in host.isolation.control_groups:
        assert result.process_limit_hit


def test_a_memory_bomb_is_killed(host: Host, box: Box) -> None:
    needs(host, "memory")
    result = run(box, "python3 -I -S -c 'x = bytearray(400 * 2**20)'; echo code $?")
    assert (result.outcome, result.oom_killed, result.stdout) == (Outcome.OOM_KILLED, True, b"code 137\n")
    assert not run(box, "echo fine").oom_killed


def test_memory_file_systems_are_bounded(box: Box) -> None:
    fill = "head -c 64M /dev/zero > $d/fill; stat -c %s $d/fill"
    result = run(box, f"for d in /tmp /dev/shm /work; do {fill}; done; rm /work/fill")
    sizes = [int(line) for line in result.stdout.split()]
    assert len(sizes) == 3 and all(size <= 16 * 2**20 for size in sizes)
    assert run(box, "ls /tmp").stdout == b""  # scratch is new for every command


def test_a_full_disk_is_the_commands_problem_and_can_be_freed(box: Box) -> None:
    result = run(box, "head -c 64M /dev/zero > big && echo ROOM; for i in $(seq 500); do : > f$i || exit 9; done")
    assert b"ROOM" not in result.stdout and result.outcome in (Outcome.EXITED, Outcome.OVER_QUOTA)
    freed = run(box, "rm -f big f*; echo ok > a; cat a")
    assert (freed.stdout, freed.outcome) == (b"ok\n", Outcome.EXITED)


def test_a_state_too_large_to_carry_is_said_to_be(box: Box) -> None:
    result = run(box, "for i in 1 2 3; do truncate -s 7M hole$i; done")
    assert result.outcome is Outcome.OVER_QUOTA and result.state_hash_after.startswith(REFUSED)
    assert box.pack().refused
    assert run(box, "rm hole*").outcome is Outcome.EXITED


def test_a_flood_keeps_head_and_tail_and_costs_little(box: Box) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    result = run(box, "echo first; yes | head -c 200M; yes >&2 | head -c 1; echo last", timeout_s=3.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert result.stdout.startswith(b"first\n") and len(result.stdout) < 5000
    assert b"bytes dropped ...]" in result.stdout and result.dropped_bytes > 100_000_000
    assert after.ru_maxrss - before.ru_maxrss < 64 * 1024  # KiB
    assert len(result.stderr) < 5000


def test_an_endless_flood_is_cut_off_in_time(box: Box) -> None:
    started = time.monotonic()
    result = run(box, "yes", timeout_s=0.5)
    assert result.timed_out and result.exit_code is None and time.monotonic() - started < 8
    assert result.stdout.startswith(b"y\ny\n") and result.dropped_bytes > 0


def test_bytes_that_are_no_text_are_kept(box: Box) -> None:
    result = run(box, r"printf '\377\000\376a'; printf '\200' >&2")
    assert (result.stdout, result.stderr) == (b"\xff\x00\xfea", b"\x80")


def test_a_timeout_ends_the_whole_tree_and_keeps_the_output(box: Box) -> None:
    word = token()
    daemon = f"setsid sh -c 'trap \"\" TERM HUP INT; while :; do sleep 1; done' {word}"
    result = run(box, f"echo partial; ({daemon} &) ; {daemon} & nohup {daemon} & echo error >&2; sleep 60", timeout_s=0.7)
    assert (result.outcome, result.exit_code, result.timed_out) == (Outcome.TIMED_OUT, None, True)
    assert (result.stdout, result.stderr) == (b"partial\n", b"error\n")
    assert processes_naming(word) == []  # at once: the result says that they are gone


def test_background_children_end_with_their_command(box: Box) -> None:
    word = token()
    started = time.monotonic()
    result = run(box, f"setsid sh -c 'sleep 60' {word} & disown; echo started")
    assert result.stdout == b"started\n" and time.monotonic() - started < 8
    assert processes_naming(word) == []


def test_killing_everything_in_sight_kills_nothing_outside(box: Box) -> None:
    word = token()
    result = run(box, f"sleep 60 & sh -c 'sleep 60; : {word}' & kill -9 1; kill -9 -1; echo unreachable", timeout_s=5)
    assert result.outcome is Outcome.EXITED
    assert processes_naming(word) == []
    assert run(box, "kill -STOP 1; kill -TERM 1; kill -9 1; echo still here").stdout == b"still here\n"


def test_a_stopped_tree_still_ends(box: Box) -> None:
    result = run(box, "kill -STOP $$", timeout_s=0.4)
    assert result.timed_out


def test_it_may_close_its_own_streams(box: Box) -> None:
    result = run(box, "echo a; exec 1>&- 2>&-; sleep 0.1; exit 4")
    assert (result.stdout, result.exit_code) == (b"a\n", 4)


@pytest.mark.parametrize("command", ["echo \0", "echo \ud800", "x" * 200_000])
def test_what_the_kernel_would_not_take_is_refused(box: Box, command: str) -> None:
    with pytest.raises(CommandRefused):
        run(box, command)


def test_a_line_as_long_as_allowed_runs(box: Box) -> None:
    assert run(box, "echo " + "x" * 90_000 + " | wc -c").stdout.strip() == b"90001"


def test_a_broken_set_up_is_not_the_commands_fault(host: Host) -> None:
    binds = (Bind(source="/no/such/folder", target="/work"),)
    spec = CommandSpec(command_id="c", argv=shell("true"), binds=binds, uid=host.uid(0))
    with pytest.raises(SetupFailed, match="no/such/folder"):
        asyncio.run(host.run(spec))


def test_cpus_are_those_that_were_given(host: Host, box: Box) -> None:
    cpu = max(os.sched_getaffinity(0))
    result = run(box, "nproc; echo $OMP_NUM_THREADS; grep Cpus_allowed_list /proc/self/status", cpus=(cpu,))
    assert result.stdout.split() == [b"1", b"1", b"Cpus_allowed_list:", str(cpu).encode()]
    needs(host, "cpuset")
    if len(os.sched_getaffinity(0)) > 1:
        assert run(box, "taskset -c 0-63 nproc", cpus=(cpu,)).stdout in (b"1\n", b"")


def test_open_files_are_bounded_and_there_is_no_core(box: Box) -> None:
    result = run(box, "ulimit -n; ulimit -c; ulimit -n 100000 || echo no")
    assert result.stdout == b"1024\n0\nno\n"


async def test_cancelling_kills_the_tree_first(host: Host, tmp_path: Path) -> None:
    word, started = token(), asyncio.Event()
    folder = host.path("scratch", word)
    host.make_folder(folder, 1, LIMITS)
    spec = CommandSpec(
        command_id="c",
        argv=shell(f"setsid sleep 60 & sleep 60; : {word}"),
        binds=(Bind(source=folder, target="/work", writable=True),),
        uid=host.uid(1),
    )
    task = asyncio.create_task(host.run(spec, on_started=started.set))
    async with asyncio.timeout(10):
        await started.wait()
    await asyncio.to_thread(wait_until, lambda: bool(processes_naming(word)), "the command runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes_naming(word) == []
    host.drop_folder(folder)


def test_a_group_is_gone_with_its_box(host: Host) -> None:
    needs(host, "pids")
    box = Box(host, f"gone-{next(NUMBERS)}", 70, LIMITS)
    box.open()
    run(box, "true")
    box.close()
    box.close()
    group = host.group("sandbox-70")
    assert group is not None and group.members() == set()
    group.remove()
    group.remove()
