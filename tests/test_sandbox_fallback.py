"""What is left where the kernel offers less: still bounded, and it says what is not enforced."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from services.sandbox.box import Box
from services.sandbox.cgroups import CgroupParents
from services.sandbox.command import CommandResult, Limits, Outcome
from services.sandbox.host import Host, HostConfig, RootInUse
from services.sandbox.launcher import Launcher, first_process
from services.sandbox.seccomp import filter_program
from tests.sandbox_ground import needs_bwrap, opened_host, processes_naming, sandbox_root, token

pytestmark = [needs_bwrap, pytest.mark.timeout(60)]
LIMITS = Limits(memory_bytes=256 * 2**20, processes=30, disk_bytes=4 * 2**20, max_files=100)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with opened_host(control_groups=False, memory_workspace=False) as opened:
        yield opened


@pytest.fixture
def box(host: Host) -> Iterator[Box]:
    made = Box(host, token(), 3, LIMITS)
    made.open()
    yield made
    made.close()


def run(box: Box, command: str, timeout_s: float = 10.0) -> CommandResult:
    return box.run("c", command, timeout_s=timeout_s, limits=LIMITS, cpus=())


def test_what_is_missing_is_said(host: Host) -> None:
    assert host.isolation.control_groups == () and not host.isolation.memory_workspace
    for word in ("memory:", "processes:", "cpu:", "disk:"):
        assert any(line.startswith(word) for line in host.isolation.missing)


def test_a_command_runs_and_leaves_its_files(box: Box) -> None:
    box.fill({"d/a": b"1"})
    result = run(box, "cat d/a > b; id -u")
    assert (result.stdout, result.exit_code) == (b"1000\n", 0) and result.cpu_s > 0
    assert run(box, "cat b").stdout == b"1"


def test_cpus_need_no_privilege_over_the_sandboxs_user(monkeypatch: pytest.MonkeyPatch, box: Box) -> None:
    """A container has no CAP_SYS_NICE, without which a process of another user cannot be moved."""
    own, cpu, move = os.sched_getaffinity(0), max(os.sched_getaffinity(0)), os.sched_setaffinity

    def refuse_others(pid: int, cpus: Iterable[int]) -> None:
        if pid:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        move(pid, cpus)

    monkeypatch.setattr(os, "sched_setaffinity", refuse_others)
    result = box.run("c", "grep Cpus_allowed_list /proc/self/status", timeout_s=10.0, limits=LIMITS, cpus=(cpu,))
    assert result.stdout.split() == [b"Cpus_allowed_list:", str(cpu).encode()]
    assert os.sched_getaffinity(0) == own


def test_processes_are_bounded(host: Host, box: Box) -> None:
    if not host.isolation.own_user_per_sandbox:
        pytest.skip("RLIMIT_NPROC does not bind this process's own user when it is root")
    word = token()
    result = run(box, f": {word}; for i in $(seq 100); do sleep 30 & done; jobs -r | wc -l", timeout_s=3)
    assert result.timed_out or b"Resource temporarily unavailable" in result.stderr
    assert processes_naming(word) == []


def test_memory_is_bounded_per_process(box: Box) -> None:
    result = run(box, "python3 -I -S -c 'bytearray(600 * 2**20)' || echo refused")
    assert result.stdout == b"refused\n" and b"MemoryError" in result.stderr


def test_disk_is_bounded_per_file_and_checked_afterwards(box: Box) -> None:
    one = run(box, "head -c 20M /dev/zero > big; stat -c %s big")
    assert int(one.stdout) <= LIMITS.disk_bytes
    many = run(box, "for i in 1 2 3; do head -c 3M /dev/zero > f$i; done")
    assert many.outcome is Outcome.OVER_QUOTA
    assert run(box, "rm f* big").outcome is Outcome.EXITED


def test_a_timeout_ends_the_whole_tree(box: Box) -> None:
    word = token()
    result = run(box, f"setsid sh -c 'sleep 60; : {word}' & sleep 60", timeout_s=0.5)
    assert result.timed_out and processes_naming(word) == []


def test_closed_folders_are_opened_for_the_hash(box: Box) -> None:
    result = run(box, "mkdir shut; echo x > shut/a; chmod 000 shut/a shut")
    assert len(result.state_hash_after) == 64
    assert run(box, "mkdir -p " + "/".join(["deep"] * 40)).outcome is Outcome.OVER_QUOTA


def test_the_first_process_sets_what_no_group_does() -> None:
    bare = Launcher(etc="/e", marker="m", limit_memory_inside=True, limit_processes_inside=True)
    script = first_process(bare, LIMITS)
    assert f"ulimit -v {256 * 1024}" in script and "ulimit -u 31" in script and script.endswith('"$@"; exit $?')
    assert "ulimit -u" not in first_process(Launcher(etc="/e", marker="m"), LIMITS)


def test_unknown_machines_have_no_call_filter() -> None:
    assert filter_program("vax") is None
    for machine in ("x86_64", "aarch64"):
        program = filter_program(machine)
        assert program is not None and len(program) % 8 == 0


def test_a_root_has_one_owner() -> None:
    with sandbox_root() as root:
        host = Host.open(HostConfig(root=root))
        with pytest.raises(RootInUse, match="another process owns it"):
            Host.open(HostConfig(root=root))
        host.close()
        host.close()
        Host.open(HostConfig(root=root)).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives sandboxes users of their own")
def test_a_root_in_a_closed_folder_and_a_strict_umask_work(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    before = os.umask(0o077)
    try:
        host = Host.open(HostConfig(root=str(closed / "root")))
        try:
            assert host.live.startswith("/run/")
            box = Box(host, "b", 0, LIMITS)
            box.open()
            box.fill({"d/a": b"1"})
            assert run(box, "cat d/a; echo x > d/b").exit_code == 0
            box.close()
        finally:
            host.close()
        assert not os.path.exists(host.live)
    finally:
        os.umask(before)


UNPRIVILEGED = """
import sys
from services.sandbox.box import Box
from services.sandbox.command import Limits
from services.sandbox.host import Host, HostConfig

root, word = sys.argv[1:]
host = Host.open(HostConfig(root=root))
box = Box(host, "b", 0, Limits(processes=20))
box.open()
box.fill({"d/a": b"1"})
def run(command, timeout_s):
    return box.run("c", command, timeout_s=timeout_s, limits=Limits(processes=20), cpus=())
print(run("cat d/a; id -u; echo x > d/b; cat d/b; touch /usr/x 2>/dev/null || echo no", 10).stdout.split())
print(run(f"setsid sh -c 'sleep 60; : {word}' & for i in $(seq 40); do sleep 60 & done; sleep 60", 1).outcome.value)
box.close()
host.close()
print(len(host.isolation.missing))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without privileges")
def test_without_any_privilege_it_still_isolates_and_ends() -> None:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("setpriv is not installed")
    nobody = [setpriv, "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/python3"]
    repository = Path(__file__).parents[1]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{repository}:{Path(msgspec.__file__).parents[1]}"}

    def run_as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*nobody, *arguments], env=environment, capture_output=True, text=True, timeout=40, check=False, cwd="/"
        )

    trial = run_as_nobody("-c", "import msgspec, services.sandbox.host")
    if trial.returncode != 0:
        pytest.skip(f"the system's Python cannot import this project as another user: {trial.stderr[-200:]}")
    with sandbox_root() as root:
        os.chown(root, 65534, 65534)
        word = token()
        done = run_as_nobody("-c", UNPRIVILEGED, root, word)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["[b'11000', b'x', b'no']", "timed_out", "5"]
        assert processes_naming(word) == []


def test_a_group_of_an_earlier_life_that_is_gone_is_no_error() -> None:
    from services.sandbox.cgroups import leftovers, remove_parents

    parents = CgroupParents(generation=1, folders={"pids": "/sys/fs/cgroup/pids/no-such-group-of-ours"})
    assert leftovers(parents) == []
    remove_parents(parents)
