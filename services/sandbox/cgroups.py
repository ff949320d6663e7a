"""Control groups of both generations, by their files: limits of a sandbox, who is in it, and the end of all of them.

A tree belongs to one owner (a sandbox host's root folder) and hangs below the group that this process is in, so the limits that
an operator put on the service hold for everything that it starts. On generation 1 each controller has its own hierarchy; the
memory, pids, cpuset and cpuacct ones are used. On generation 2 one folder does it all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

import msgspec

from services.sandbox.command import Limits, SandboxError, TeardownUnconfirmed

_KILL_DEADLINE_S = 10.0
_OWN_PROCESSES = 4  # the launcher, the first process of the namespace and a little slack do not count as the command's


class CgroupError(SandboxError):
    """A limit could not be set; the text names the file and the value."""

    code = "limit_not_set"


class CgroupParents(msgspec.Struct, frozen=True, kw_only=True):
    """Where the owner's groups lie: one folder per controller (generation 2: the same folder for each)."""

    generation: int
    folders: dict[str, str]  # controller -> the owner's folder


def cpu_list(cpus: Sequence[int]) -> str:
    """Example: (0, 2, 3) -> "0,2,3"."""
    return ",".join(str(cpu) for cpu in cpus)


class Cgroup:
    """The group of one sandbox. Not safe for two threads at once: one command runs in a sandbox at a time."""

    def __init__(self, parents: CgroupParents, name: str) -> None:
        self._generation = parents.generation
        self._folders = {controller: f"{folder}/{name}" for controller, folder in parents.folders.items()}
        self._written: dict[str, str] = {}

    @property
    def controllers(self) -> frozenset[str]:
        return frozenset(self._folders)

    def create(self) -> None:
        for folder in set(self._folders.values()):
            os.makedirs(folder, exist_ok=True)
        if self._generation == 1 and (cpuset := self._folders.get("cpuset")):
            _inherit_cpuset(cpuset)

    def apply(self, limits: Limits, cpus: Sequence[int]) -> None:
        """Set the limits that differ from the last ones. Raises `CgroupError`.

        Pages of the workspace, /tmp and /dev/shm are charged to the sandbox, so their sizes come on top of its memory.
        """
        memory = limits.memory_bytes + limits.disk_bytes + 2 * limits.scratch_bytes
        processes = str(limits.processes + _OWN_PROCESSES)
        if self._generation == 1:
            if self._written.get("memory.limit_in_bytes") != str(memory):  # memory and swap together may not fall below memory
                self._set("memory", "memory.memsw.limit_in_bytes", "-1", optional=True)
            self._set("memory", "memory.limit_in_bytes", str(memory))
            self._set("memory", "memory.memsw.limit_in_bytes", str(memory), optional=True)
        else:
            self._set("memory", "memory.max", str(memory))
            self._set("memory", "memory.swap.max", "0", optional=True)
        self._set("pids", "pids.max", processes)
        if cpus:
            self._set("cpuset", "cpuset.cpus", cpu_list(cpus))

    def enter(self, pid: int) -> None:
        """Move one process, which has no children yet, into the group. Raises `OSError`."""
        for folder in set(self._folders.values()):
            _write(f"{folder}/cgroup.procs", str(pid))

    def oom_kills(self) -> int:
        """How many processes the kernel has killed here for memory, so far."""
        name = "memory.oom_control" if self._generation == 1 else "memory.events"
        return self._counter("memory", name, "oom_kill")

    def process_limit_hits(self) -> int:
        """How often a fork was refused here, so far."""
        return self._counter("pids", "pids.events", "max")

    def cpu_s(self) -> float | None:
        """CPU time of all processes that ever were in the group; None where nobody counts it."""
        if self._generation == 2:
            return self._counter("memory", "cpu.stat", "usage_usec") / 1e6
        folder = self._folders.get("cpuacct")
        return int(_read(f"{folder}/cpuacct.usage")) / 1e9 if folder else None

    def members(self) -> set[int]:
        found: set[int] = set()
        for folder in set(self._folders.values()):
            with contextlib.suppress(FileNotFoundError):
                found.update(int(line) for line in _read(f"{folder}/cgroup.procs").split())
        return found - {0}

    def kill(self, deadline_s: float = _KILL_DEADLINE_S) -> int:
        """Kill every member until none is left; returns how many were seen. Raises `TeardownUnconfirmed` at the deadline."""
        until = time.monotonic() + deadline_s
        seen: set[int] = set()
        while members := self.members():
            seen |= members
            if time.monotonic() > until:
                group = min(self._folders.values())
                raise TeardownUnconfirmed(f"control group {group}: {sorted(members)} outlive SIGKILL by {deadline_s:g} s")
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)  # the kernel has no event for "the last member is gone" on generation 1
        return len(seen)

    def remove(self) -> None:
        """Kill what is left and remove the group; a group that is gone already is no error."""
        self.kill()
        for folder in set(self._folders.values()):
            _remove(folder)

    def _set(self, controller: str, name: str, value: str, *, optional: bool = False) -> None:
        folder = self._folders.get(controller)
        if folder is None or self._written.get(name) == value:
            return
        if optional and not os.path.exists(f"{folder}/{name}"):
            return
        try:
            _write(f"{folder}/{name}", value)
        except OSError as error:
            raise CgroupError(f"{folder}/{name}: the kernel refuses {value!r} ({error.strerror})") from error
        self._written[name] = value

    def _counter(self, controller: str, name: str, key: str) -> int:
        folder = self._folders.get(controller)
        if folder is None:
            return 0
        for line in _read(f"{folder}/{name}").splitlines():
            if line.startswith(key + " "):
                return int(line.split()[1])
        return 0


def find_parents(owner: str) -> CgroupParents | None:
    """Create the owner's folders below this process's own groups; None where the kernel or the container does not let us."""
    own, mounted = _own_groups(), _mounted()
    folders: dict[str, str] = {}
    for controller in ("memory", "pids", "cpuset", "cpuacct"):
        if controller in mounted and controller in own:
            folder = f"{_inside(mounted[controller], own[controller])}/headrace-{owner}"
            if _create(folder) and (controller != "cpuset" or _inherit_cpuset(folder)):
                folders[controller] = folder
    if folders:
        return CgroupParents(generation=1, folders=folders)
    if "" in mounted and "" in own:
        return _find_unified(_inside(mounted[""], own[""]), owner)
    return None


def leftovers(parents: CgroupParents) -> list[str]:
    """Names of the groups below the owner's folders."""
    names: set[str] = set()
    for folder in set(parents.folders.values()):
        with contextlib.suppress(FileNotFoundError):
            names.update(item.name for item in os.scandir(folder) if item.is_dir(follow_symlinks=False))
    return sorted(names)


def remove_parents(parents: CgroupParents) -> None:
    for folder in set(parents.folders.values()):
        _remove(folder)


def _find_unified(own: str, owner: str) -> CgroupParents | None:
    """Generation 2 allows limits only below a group without processes of its own, so this process moves one level down."""
    wanted = [name for name in ("memory", "pids", "cpuset") if name in _read(f"{own}/cgroup.controllers").split()]
    folder = f"{own}/headrace-{owner}"
    if not {"memory", "pids"} <= set(wanted) or not _create(folder):
        return None
    enable = " ".join(f"+{name}" for name in wanted)
    try:
        try:
            _write(f"{own}/cgroup.subtree_control", enable)
        except OSError:
            os.makedirs(f"{own}/headrace-service", exist_ok=True)
            _write(f"{own}/headrace-service/cgroup.procs", str(os.getpid()))
            _write(f"{own}/cgroup.subtree_control", enable)
        _write(f"{folder}/cgroup.subtree_control", enable)
    except OSError:
        return None  # other processes share our group, or it is not delegated to us
    return CgroupParents(generation=2, folders=dict.fromkeys(wanted, folder))


def _own_groups() -> dict[str, str]:
    """Controller -> this process's path in its hierarchy; the key of generation 2 is empty."""
    groups: dict[str, str] = {}
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _mounted() -> dict[str, tuple[str, str]]:
    """Controller -> (root of the mount within its hierarchy, mount point)."""
    found: dict[str, tuple[str, str]] = {}
    for line in _read("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if kind[0] == "cgroup2":
            found.setdefault("", (fields[3], fields[4]))
        elif kind[0] == "cgroup":
            for controller in kind[2].split(","):
                found.setdefault(controller, (fields[3], fields[4]))
    return found


def _inside(mount: tuple[str, str], path: str) -> str:
    root, point = mount
    inner = path[len(root) :] if root != "/" and path.startswith(root) else path if root == "/" else ""
    return (point + "/" + inner.strip("/")).rstrip("/")


def _inherit_cpuset(folder: str) -> bool:
    """Generation 1 starts a group with no CPU at all; give it its parent's. Load balancing stays the parent's business."""
    parent = os.path.dirname(folder)
    try:
        for name in ("cpuset.mems", "cpuset.cpus"):
            _write(f"{folder}/{name}", _read(f"{parent}/{name}").strip())
        _write(f"{folder}/cpuset.sched_load_balance", "0")
    except OSError:
        return False
    return True


def _create(folder: str) -> bool:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(f"{folder}/cgroup.procs", os.W_OK)


def _remove(folder: str) -> None:
    until = time.monotonic() + _KILL_DEADLINE_S
    while True:
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > until:
                raise TeardownUnconfirmed(f"{folder}: cannot be removed ({error.strerror})") from error
            time.sleep(0.005)
        else:
            return


def _read(path: str) -> str:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # read for every command; `open` costs three times as much
    try:
        parts = []
        while part := os.read(handle, 1 << 16):
            parts.append(part)
        return b"".join(parts).decode("utf-8", "surrogateescape")
    finally:
        os.close(handle)


def _write(path: str, value: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, value.encode())
    finally:
        os.close(handle)
