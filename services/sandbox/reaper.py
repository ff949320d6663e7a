"""Removes what a crashed predecessor with the same root folder left behind: processes, mounts, control groups, folders.

bubblewrap's processes die with their parent, but only some time after it, so the reaper waits and confirms. Journals and
snapshots stay: they are what a successor must know.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time

import msgspec

from services.sandbox import cgroups
from services.sandbox.cgroups import Cgroup, CgroupParents
from services.sandbox.command import TeardownUnconfirmed
from services.sandbox.mounts import mounts_under, unmount

_DEADLINE_S = 20.0


class Reaped(msgspec.Struct, frozen=True, kw_only=True):
    """What was found and removed; all zero after a clean stop."""

    processes: int = 0
    mounts: int = 0
    control_groups: int = 0
    folders: int = 0


def reap(root: str, marker: str, parents: CgroupParents | None, folders: tuple[str, ...]) -> Reaped:
    """Remove leftovers below `root`; `folders` are the sub-folders to empty. Raises `TeardownUnconfirmed` if something
    stays.
    """
    groups = cgroups.leftovers(parents) if parents else []
    processes = 0
    for name in groups:
        processes += Cgroup(parents, name).kill() if parents else 0
    processes += kill_marked(marker)
    if parents:
        for name in groups:
            Cgroup(parents, name).remove()
        cgroups.remove_parents(parents)
    points = mounts_under(root)
    for point in points:
        unmount(point)
    removed = 0
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            for item in list(os.scandir(os.path.join(root, folder))):
                remove_folder(item.path)
                removed += 1
    return Reaped(processes=processes, mounts=len(points), control_groups=len(groups), folders=removed)


def kill_marked(marker: str, deadline_s: float = _DEADLINE_S) -> int:
    """Kill every process that carries `marker` as one of its arguments, and wait until all are gone."""
    until = time.monotonic() + deadline_s
    seen: set[int] = set()
    while found := _marked(marker):
        seen |= found
        if time.monotonic() > until:
            raise TeardownUnconfirmed(f"processes {sorted(found)} of {marker} outlive SIGKILL by {deadline_s:g} s")
        for pid in found:
            _kill_and_wait(pid, min(1.0, deadline_s))
    return len(seen)


def remove_folder(path: str) -> None:
    """Remove a folder of any depth; an agent's tree may be deeper than the interpreter's recursion allows."""
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        done = subprocess.run(["rm", "-rf", "--one-file-system", "--", path], capture_output=True, check=False)
        if os.path.lexists(path):
            raise TeardownUnconfirmed(f"{path}: cannot be removed ({done.stderr.decode(errors='replace').strip()})")


def _marked(marker: str) -> set[int]:
    wanted, found = os.fsencode(marker), set[int]()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                if wanted in file.read().split(b"\0") and int(name) != os.getpid():
                    found.add(int(name))
    return found


def _kill_and_wait(pid: int, wait_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            waiter = select.poll()
            waiter.register(handle, select.POLLIN)
            waiter.poll(wait_s * 1000)
        finally:
            os.close(handle)
