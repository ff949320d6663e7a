"""Processes of one chaos run, found exactly: by a token in their environment, and held by their start time.

Nothing is ever signalled that does not carry the run's token, so no other process of the machine can be hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass

TOKEN = "HEADRACE_CHAOS_RUN"


@dataclass(frozen=True, slots=True)
class Process:
    """One process for good: its id and when it began, since the kernel gives ids again."""

    pid: int
    began: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """`None` when there is no such process any more."""
        stat = _stat(pid)
        return cls(pid, stat[19]) if stat else None

    def alive(self) -> bool:
        """True while it runs; a zombie that nobody has collected yet does not."""
        stat = _stat(self.pid)
        return bool(stat) and stat[19] == self.began and stat[0] not in ("Z", "X")

    def carries(self, token: str) -> bool:
        """Was it started by the run with this token?"""
        return f"{TOKEN}={token}".encode() in _read(f"/proc/{self.pid}/environ").split(b"\0") and self.alive()

    def signal(self, number: signal.Signals) -> bool:
        """Signal this very process, not its group; false when it is gone."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive():  # after opening: the handle stays with the process that has the id now
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True

    def command(self) -> str:
        return _read(f"/proc/{self.pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def carrying(token: str, *marks: str) -> list[Process]:
    """Every living process of a run: it has the token or, in a sandbox, without our environment, one of the marks in its
    command line.
    """
    wanted, named = f"{TOKEN}={token}".encode(), [os.fsencode(mark) for mark in marks]
    found = []
    for pid in _pids() - _ourselves():
        command = _read(f"/proc/{pid}/cmdline")
        ours = any(mark in command for mark in named) or wanted in _read(f"/proc/{pid}/environ").split(b"\0")
        process = Process.of(pid) if ours else None
        if process is not None and process.alive():
            found.append(process)
    return found


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _ourselves() -> set[int]:
    """This process and its ancestors: their command lines may name the folder as well."""
    pid, found = os.getpid(), set[int]()
    while pid > 1:
        found.add(pid)
        stat = _stat(pid)
        pid = int(stat[1]) if stat else 0
    return found


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when there is no such process."""
    text = _read(f"/proc/{pid}/stat").decode(errors="replace")
    return text.rsplit(")", 1)[1].split() if ")" in text else []


def _read(path: str) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""
