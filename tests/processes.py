"""Looking at processes of ours from outside."""

from __future__ import annotations

from pathlib import Path


def alive(pid: int) -> bool:
    """True while the process runs; a zombie that nobody has collected yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")
