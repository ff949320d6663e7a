"""A process under a name that no other process ever has, and the proof that it has ended."""

from __future__ import annotations

import os
from pathlib import Path


def process_name(pid: int) -> str:
    """`<boot>/<pid namespace>/<pid>/<start>`: this process and no other, ever. Empty when the kernel does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
        started = _status(pid)[19]
    except (OSError, IndexError):
        return ""
    return f"{boot}/{namespace}/{pid}/{started}"


def has_ended(pid: int, name: str) -> bool:
    """True only where it can be proved: `name` is of our boot and process namespace, and no living process has it."""
    ours, theirs = process_name(os.getpid()).split("/"), name.split("/")
    if len(ours) != 4 or len(theirs) != 4 or ours[:2] != theirs[:2]:
        return False
    try:
        state = _status(pid)[0]
    except FileNotFoundError:
        return True
    except (OSError, IndexError):
        return False
    return state in ("Z", "X") or process_name(pid) != name


def _status(pid: int) -> list[str]:
    """Fields of `/proc/<pid>/stat` from the state on."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
