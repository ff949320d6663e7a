"""What the sandbox and verifier tests share: real roots for real bubblewraps, and proof that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from services.sandbox.host import Host, HostConfig
from services.sandbox.mounts import mounts_under

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@contextlib.contextmanager
def sandbox_root() -> Iterator[str]:
    """A root folder that every user can reach, which pytest's own folders are not; it must be clean in the end."""
    root = tempfile.mkdtemp(prefix="hr-sandbox-", dir="/tmp")
    os.chmod(root, 0o711)
    try:
        yield root
        assert mounts_under(root) == []
    finally:
        for point in mounts_under(root):
            subprocess.run(["umount", "-l", point], check=False)
        subprocess.run(["rm", "-rf", root], check=False)


@contextlib.contextmanager
def opened_host(*, control_groups: bool = True, memory_workspace: bool = True) -> Iterator[Host]:
    with sandbox_root() as root:
        host = Host.open(HostConfig(root=root, control_groups=control_groups, memory_workspace=memory_workspace))
        try:
            yield host
        finally:
            host.close()


def token() -> str:
    """A word that is in no other process's arguments."""
    return f"hrtoken{uuid.uuid4().hex}"


def processes_naming(word: str) -> list[int]:
    """Processes of this machine with `word` in their arguments."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                if word.encode() in file.read():
                    found.append(int(name))
    return found


def wait_until(true: Callable[[], bool], what: str, timeout_s: float = 15.0) -> None:
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.01)
