"""What this machine lets a sandbox enforce, found by trying, and said in plain sentences where something is missing."""

from __future__ import annotations

import os
import shutil

import msgspec

from services.sandbox.cgroups import CgroupParents, find_parents
from services.sandbox.command import Bind, CommandSpec, SandboxError, SetupFailed
from services.sandbox.launcher import Launcher
from services.sandbox.mounts import can_mount
from services.sandbox.process import run_blocking

_PROBE_TIMEOUT_S = 10.0


class HostUnusable(SandboxError):
    """No sandbox can run on this machine; the text says what bubblewrap answered and what to change."""

    code = "host_unusable"


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """What is enforced. `missing` has one line for everything that is not."""

    own_user_per_sandbox: bool
    memory_workspace: bool  # size-limited by the kernel, and its host path is not visible inside
    control_groups: tuple[str, ...]  # of memory, pids, cpuset
    nested_namespaces_refused: bool
    call_filter: bool
    missing: tuple[str, ...] = ()


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: the report, how to launch, and where control groups go."""

    isolation: Isolation
    launcher: Launcher
    cgroups: CgroupParents | None


def probe(
    *,
    owner: str,
    marker: str,
    etc: str,
    seccomp_path: str,
    scratch: str,
    uid: int,
    control_groups: bool = True,
    memory_workspace: bool = True,
) -> Probe:
    """Try everything once. `scratch` is an empty folder of ours. Raises `HostUnusable` if not even a bare sandbox starts."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise HostUnusable("bwrap is not installed; install the package `bubblewrap`")
    cgroups = find_parents(owner) if control_groups else None
    setpriv = (shutil.which("setpriv") or "") if os.geteuid() == 0 else ""
    best = Launcher(
        bwrap=bwrap,
        setpriv=setpriv,
        seccomp_path=seccomp_path,
        etc=etc,
        marker=marker,
        limit_memory_inside=cgroups is None or "memory" not in cgroups.folders,
        limit_processes_inside=cgroups is None or "pids" not in cgroups.folders,
    )
    launcher = _first_working(best, scratch, uid)
    has_tmpfs = memory_workspace and can_mount(scratch)
    isolation = _report(launcher, cgroups, has_tmpfs)
    return Probe(isolation=isolation, launcher=launcher, cgroups=cgroups)


def _first_working(best: Launcher, scratch: str, uid: int) -> Launcher:
    """Give up one thing after the other until a sandbox starts."""
    candidates = [
        best,
        msgspec.structs.replace(best, disable_userns=False),
        msgspec.structs.replace(best, setpriv=""),
        msgspec.structs.replace(best, setpriv="", disable_userns=False),
        msgspec.structs.replace(best, setpriv="", disable_userns=False, seccomp_path=""),
    ]
    failure = ""
    for launcher in candidates:
        spec = CommandSpec(
            command_id="probe",
            argv=("/bin/true",),
            binds=(Bind(source=scratch, target="/work"),),
            timeout_s=_PROBE_TIMEOUT_S,
            uid=uid if launcher.setpriv else -1,
        )
        try:
            if run_blocking(launcher, spec).exit_code == 0:
                return launcher
        except SetupFailed as error:
            failure = failure or str(error)
    raise HostUnusable(
        f"{best.bwrap}: {failure or 'the probe did not exit with 0'}. Permit unprivileged user namespaces, or give a container "
        "SYS_ADMIN and an unmasked /proc (Docker: cap_add SYS_ADMIN, security_opt seccomp=unconfined,systempaths=unconfined)"
    )


def _report(launcher: Launcher, cgroups: CgroupParents | None, has_tmpfs: bool) -> Isolation:
    controllers = tuple(sorted(cgroups.folders)) if cgroups else ()
    missing: list[str] = []
    if not launcher.setpriv:
        missing.append("users: all sandboxes share this process's user id; they are kept apart by namespaces alone")
    if "memory" not in controllers:
        missing.append("memory: limited per process (RLIMIT_AS), not for the whole sandbox; memory kills are not recognised")
    if "pids" not in controllers:
        missing.append("processes: limited by RLIMIT_NPROC inside the user namespace; hits of the limit are not recognised")
    if "cpuset" not in controllers:
        missing.append("cpu: set by affinity, which a command can change for itself")
    if not has_tmpfs:
        missing.append("disk: limited per file, in total only after each command; the workspace's host path is visible inside")
    if not launcher.disable_userns:
        missing.append("kernel surface: a command may create user namespaces of its own")
    if not launcher.seccomp_path:
        missing.append("kernel surface: no system-call filter; VSOCK and keyrings are reachable")
    return Isolation(
        own_user_per_sandbox=bool(launcher.setpriv),
        memory_workspace=has_tmpfs,
        control_groups=controllers,
        nested_namespaces_refused=launcher.disable_userns,
        call_filter=bool(launcher.seccomp_path),
        missing=tuple(missing),
    )
