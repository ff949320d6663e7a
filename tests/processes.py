"""Looking at processes of ours from outside."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """One process for good: its id and when it began, since the kernel gives ids again."""

    pid: int
    began: str

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, _stat(pid)[19] if _stat(pid) else "")

    def alive(self) -> bool:
        """True while it runs; a zombie that nobody has collected yet does not."""
        stat = _stat(self.pid)
        return bool(stat) and stat[19] == self.began and stat[0] not in ("Z", "X")


def alive(pid: int) -> bool:
    """True while some process of this id runs."""
    stat = _stat(pid)
    return bool(stat) and stat[0] not in ("Z", "X")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
