"""How bubblewrap is called: what the inside sees, as a pure function of the command and of what the host offers.

The options travel over a pipe (`--args`), because arguments can be read in /proc and some name host folders. bubblewrap reads
that pipe to its end before it does anything, which is also the moment when the caller puts the process into its control group.
The first process of the namespace is a shell that starts the command and waits for it: a real first process keeps signals
working as usual for the command, and with `--as-pid-1` bubblewrap ends only after the kernel has ended everything inside.
"""

from __future__ import annotations

import os
from functools import cache

import msgspec

from services.sandbox.command import CommandSpec, Limits

INSIDE_UID = 1000
ENVIRONMENT: tuple[tuple[str, str], ...] = (
    ("PATH", "/usr/local/bin:/usr/bin:/bin"),
    ("HOME", "/tmp"),  # so that history files and caches never become part of the workspace
    ("USER", "agent"),
    ("SHELL", "/bin/bash"),
    ("LANG", "C.UTF-8"),
    ("LC_ALL", "C.UTF-8"),
    ("TZ", "UTC"),
    ("PYTHONDONTWRITEBYTECODE", "1"),  # compiled files hold times, which would change the state hash
    ("PYTHONHASHSEED", "0"),
)
_PARALLELISM = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "CARGO_BUILD_JOBS")
_SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEV_SHM_BYTES = 16 * 2**20


class Launcher(msgspec.Struct, frozen=True, kw_only=True):
    """What all sandboxes of one host have in common."""

    bwrap: str = "/usr/bin/bwrap"
    setpriv: str = ""  # empty: the sandbox keeps this process's user id
    disable_userns: bool = True
    seccomp_path: str = ""
    etc: str  # host folder shown as /etc
    marker: str  # last resort to find our processes again: the first process's own name
    limit_memory_inside: bool = False  # without a memory control group
    limit_processes_inside: bool = False  # without a pids control group


def command_line(launcher: Launcher, spec: CommandSpec, args_fd: int) -> list[str]:
    """The argv of the launching process; it holds nothing but the command and the user id."""
    line: list[str] = []
    if launcher.setpriv and spec.uid >= 0:
        user = str(spec.uid)
        line += [launcher.setpriv, "--reuid", user, "--regid", user, "--clear-groups", "--"]
    line += [launcher.bwrap, "--args", str(args_fd), "--"]
    shell = ["/bin/bash", "--posix"] if launcher.limit_processes_inside else ["/bin/sh"]
    return [*line, *shell, "-c", first_process(launcher, spec.limits), launcher.marker, *spec.argv]


def first_process(launcher: Launcher, limits: Limits) -> str:
    """The script of the namespace's first process: resource limits, then the command as its child.

    Limits are set here because this is after the user changed, when no privilege is needed to lower them, and inside the user
    namespace, where processes are counted for this sandbox alone. POSIX counts `-f` in units of 512 bytes and `-v` in KiB.
    """
    words = ["ulimit -c 0", f"ulimit -f {limits.disk_bytes // 512}", f"ulimit -n {limits.open_files}"]
    if launcher.limit_memory_inside:
        words.append(f"ulimit -v {limits.memory_bytes // 1024}")
    if launcher.limit_processes_inside:
        words.append(f"ulimit -u {limits.processes + 1}")
    return "; ".join([*words, '"$@"', "exit $?"])


def options(launcher: Launcher, spec: CommandSpec, *, status_fd: int, seccomp_fd: int | None) -> bytes:
    """bubblewrap's options, each ended by a NUL."""
    words = ["--unshare-all", "--unshare-user", "--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID), "--hostname", "sandbox"]
    if launcher.disable_userns:
        words.append("--disable-userns")
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--json-status-fd", str(status_fd)]
    if seccomp_fd is not None:
        words += ["--seccomp", str(seccomp_fd)]
    words += ["--ro-bind", "/usr", "/usr", *system_layout(), "--ro-bind", launcher.etc, "/etc", "--proc", "/proc"]
    words += ["--dev", "/dev", "--size", str(_DEV_SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    words += ["--size", str(spec.limits.scratch_bytes), "--tmpfs", "/tmp"]
    for bind in spec.binds:
        words += ["--bind" if bind.writable else "--ro-bind", bind.source, bind.target]
    for target, path in spec.symlinks:
        words += ["--symlink", target, path]
    words += ["--remount-ro", "/", "--chdir", spec.cwd]
    return os.fsencode("\0".join(words) + "\0")


def environment(spec: CommandSpec) -> dict[str, str]:
    """The whole environment of the command; tools that count CPUs by themselves are told how many they have."""
    count = str(len(spec.cpus) or 1)
    return {**dict(ENVIRONMENT), **dict.fromkeys(_PARALLELISM, count), **dict(spec.environment)}


@cache
def system_layout(root: str = "/") -> tuple[str, ...]:
    """Options that give the inside the host's own /bin, /lib and so on: links where the host has links, else binds."""
    words: list[str] = []
    for name in _SYSTEM_FOLDERS:
        path = os.path.join(root, name)
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), f"/{name}"]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, f"/{name}"]
    return tuple(words)
