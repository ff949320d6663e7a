"""One machine's place for sandboxes: a root folder with one owner, what is enforced there, and the threads that wait for
commands.

Layout of the root: `lock` (held while the owner lives), `owner.json`, `system/` (what every sandbox sees as /etc), `sandboxes/`
and `scratch/` (emptied at start), `journal/` and `snapshots/` (kept).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from services.sandbox.cgroups import Cgroup, CgroupParents
from services.sandbox.command import CommandResult, CommandSpec, Limits, SandboxError
from services.sandbox.isolation import HostUnusable, Isolation, Probe, probe
from services.sandbox.launcher import INSIDE_UID, Launcher
from services.sandbox.mounts import can_mount, mount_tmpfs, unmount
from services.sandbox.process import run_blocking
from services.sandbox.reaper import Reaped, reap, remove_folder
from services.sandbox.seccomp import filter_program

_EMPTIED = ("sandboxes", "scratch", "system")
_KEPT = ("journal", "snapshots")
_RUN = "/run"
_UID_BASE, _UIDS_PER_ROOT = 2_000_000, 4096  # so that two roots on one machine share no user
_SYSTEM_BYTES = 4 * 2**20
_ETC = {
    "passwd": f"root:x:0:0:root:/:/usr/sbin/nologin\nagent:x:{INSIDE_UID}:{INSIDE_UID}:agent:/tmp:/bin/bash\n",
    "group": f"root:x:0:\nagent:x:{INSIDE_UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "hostname": "sandbox\n",
}


class RootInUse(SandboxError):
    """Another live process owns the root folder; two owners would kill each other's sandboxes."""

    code = "root_in_use"


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where sandboxes live and what is used to hold them in. Example: `HostConfig(root="/var/lib/headrace/sandbox-0")`."""

    root: str
    uid_base: int = 0  # sandbox k runs as host user uid_base + k, which no account may have; 0: derived from the root
    control_groups: bool = True
    memory_workspace: bool = True  # workspaces in size-limited memory file systems, where this process may mount
    threads: int = 64  # commands that run at the same time, at most


class _Owner(msgspec.Struct, frozen=True, kw_only=True):
    """What a successor must know to clean up."""

    pid: int
    marker: str
    live: str
    cgroups: CgroupParents | None


class Host:
    """An opened root folder. `open` and `close` block; everything else may be called from any thread."""

    def __init__(self, config: HostConfig, live: str, lock: int, marker: str, probed: Probe, reaped: Reaped) -> None:
        self.config, self.live, self.marker, self.reaped = config, live, marker, reaped
        self.isolation: Isolation = probed.isolation
        self.launcher: Launcher = probed.launcher
        self._cgroups, self._lock = probed.cgroups, lock
        self.pool = ThreadPoolExecutor(max_workers=config.threads, thread_name_prefix="sandbox")

    @classmethod
    def open(cls, config: HostConfig) -> Host:
        """Take the root folder, remove what a predecessor left there, and find out what can be enforced.

        Raises `RootInUse`, `HostUnusable` or `TeardownUnconfirmed`.
        """
        root = os.path.realpath(config.root)
        os.makedirs(root, mode=0o711, exist_ok=True)
        lock = _take_lock(root)
        try:
            owner = hashlib.sha256(root.encode()).hexdigest()[:12]
            marker = f"headrace-{owner}"
            uid_base = config.uid_base or _UID_BASE + _UIDS_PER_ROOT * int(owner[:4], 16)
            live = _live_folder(root, marker)
            predecessor = _predecessor(root)
            if predecessor is not None and predecessor.live != live:
                reap(predecessor.live, marker, None, _EMPTIED)
            reaped = reap(live, marker, predecessor.cgroups if predecessor else None, _EMPTIED)
            for name in _EMPTIED:
                open_folder(os.path.join(live, name), 0o711)
            for name in _KEPT:
                os.makedirs(os.path.join(root, name), mode=0o700, exist_ok=True)
            etc, seccomp_path = _build_system(os.path.join(live, "system"), config.memory_workspace)
            scratch = os.path.join(live, "scratch", "probe")
            open_folder(scratch)
            probed = probe(
                owner=owner,
                marker=marker,
                etc=etc,
                seccomp_path=seccomp_path,
                scratch=scratch,
                uid=uid_base,
                control_groups=config.control_groups,
                memory_workspace=config.memory_workspace,
            )
            os.rmdir(scratch)
            _write_owner(root, _Owner(pid=os.getpid(), marker=marker, live=live, cgroups=probed.cgroups))
        except BaseException:
            os.close(lock)
            raise
        return cls(msgspec.structs.replace(config, root=root, uid_base=uid_base), live, lock, marker, probed, reaped)

    def close(self) -> None:
        """Remove every sandbox, mount and group; the root is free afterwards. Idempotent. Raises `TeardownUnconfirmed`."""
        if self._lock < 0:
            return
        self.pool.shutdown(wait=True)
        reap(self.live, self.marker, self._cgroups, _EMPTIED)
        if self.live != self.config.root:
            remove_folder(self.live)
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(self.config.root, "owner.json"))
        os.close(self._lock)
        self._lock = -1

    def path(self, *parts: str) -> str:
        """A path among those that are kept, or below `live` for those that end with the owner."""
        return os.path.join(self.live if parts[0] in _EMPTIED else self.config.root, *parts)

    def uid(self, index: int) -> int:
        """The host user of sandbox number `index`; -1 where sandboxes have no users of their own."""
        return self.config.uid_base + index if self.launcher.setpriv else -1

    def make_folder(self, path: str, index: int, limits: Limits) -> None:
        """An empty folder for sandbox `index`, size-limited where that can be done."""
        uid = self.uid(index)
        open_folder(path)
        if self.isolation.memory_workspace:
            owner = uid if uid >= 0 else os.geteuid()
            mount_tmpfs(path, size_bytes=limits.disk_bytes, inodes=limits.max_files, uid=owner, gid=owner)
        elif uid >= 0:
            os.chown(path, uid, uid)

    def drop_folder(self, path: str) -> None:
        """The end of a folder made by `make_folder`; one that is gone already is no error. Raises `TeardownUnconfirmed`."""
        if self.isolation.memory_workspace:
            unmount(path)
        if os.path.lexists(path):
            remove_folder(path)

    def group(self, name: str) -> Cgroup | None:
        """A fresh control group, or None where there are none."""
        if self._cgroups is None:
            return None
        group = Cgroup(self._cgroups, name)
        group.create()
        return group

    async def run(
        self, spec: CommandSpec, *, group: Cgroup | None = None, on_started: Callable[[], None] | None = None
    ) -> CommandResult:
        """Run one command. Cancelling it kills the whole tree first and then raises `CancelledError`.

        `on_started` is called on the event loop. Raises what `run_blocking` raises.
        """
        loop = asyncio.get_running_loop()
        cancel = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        notify = (lambda: _call_soon(loop, on_started)) if on_started else None
        future = loop.run_in_executor(
            self.pool, lambda: run_blocking(self.launcher, spec, cgroup=group, cancel_fd=cancel, on_started=notify)
        )
        cancelled: asyncio.CancelledError | None = None
        try:
            while not future.done():
                try:
                    await asyncio.shield(future)
                except asyncio.CancelledError as error:
                    cancelled = error
                    os.eventfd_write(cancel, 1)
            if cancelled is not None:
                raise cancelled
            return future.result()
        finally:
            os.close(cancel)


def open_folder(path: str, mode: int = 0o755) -> None:
    """A folder with exactly this mode, whatever the process's umask is; one that is there already is no error."""
    os.makedirs(path, exist_ok=True)
    os.chmod(path, mode)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has closed, so nobody waits for the news
        loop.call_soon_threadsafe(callback)


def _live_folder(root: str, marker: str) -> str:
    """Where the live parts lie: in the root, or in /run if some folder above the root is closed to the sandboxes' users.

    A sandbox's user has to reach its workspace by path, and a root below a home folder is often closed.
    """
    folders = [root]
    while folders[-1] != "/":
        folders.append(os.path.dirname(folders[-1]))
    if os.geteuid() != 0 or all(os.stat(folder).st_mode & stat.S_IXOTH for folder in folders):
        return root
    live = os.path.join(_RUN, marker)
    try:
        open_folder(live, 0o711)
    except OSError as error:
        closed = next(folder for folder in folders if not os.stat(folder).st_mode & stat.S_IXOTH)
        raise HostUnusable(
            f"root {root}: run `chmod o+x {closed}` or choose another; {live} cannot be used ({error})"
        ) from error
    return live


def _take_lock(root: str) -> int:
    lock = os.open(os.path.join(root, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise RootInUse(f"root {root}: another process owns it; give every sandbox service a root of its own") from error
    return lock


def _predecessor(root: str) -> _Owner | None:
    try:
        with open(os.path.join(root, "owner.json"), "rb") as file:
            return msgspec.json.decode(file.read(), type=_Owner)
    except FileNotFoundError:
        return None


def _write_owner(root: str, owner: _Owner) -> None:
    path = os.path.join(root, "owner.json")
    with open(path + ".new", "wb") as file:
        file.write(msgspec.json.encode(owner))
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def _build_system(system: str, in_memory: bool) -> tuple[str, str]:
    """Build what sandboxes see as /etc, and the call filter; in memory where possible, so that no host path shows inside."""
    if in_memory and can_mount(system):
        mount_tmpfs(system, size_bytes=_SYSTEM_BYTES, inodes=8192, uid=os.geteuid(), gid=os.getegid())
    etc = os.path.join(system, "etc")
    open_folder(etc)
    for name, text in _ETC.items():
        path = os.path.join(etc, name)
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
        os.chmod(path, 0o644)
    if os.path.isdir("/etc/alternatives"):  # `awk` and others are links that lead through it
        shutil.copytree("/etc/alternatives", os.path.join(etc, "alternatives"), symlinks=True)
    for name in ("ld.so.cache", "localtime"):
        with contextlib.suppress(OSError):
            shutil.copy(f"/etc/{name}", os.path.join(etc, name))
    program = filter_program()
    if program is None:
        return etc, ""
    seccomp_path = os.path.join(system, "calls.bpf")
    with open(seccomp_path, "wb") as stream:
        stream.write(program)
    return etc, seccomp_path
