"""Runs single commands in a scratch folder, for demonstrations and tests.

Only commands that this package itself composed are run here; an agent's commands run in a real sandbox.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}


@dataclass(frozen=True, kw_only=True)
class Result:
    stdout: bytes
    stderr: bytes
    exit_code: int


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def run(folder: Path, command: str, timeout_s: float = 5.0) -> Result:
    """Raises `subprocess.TimeoutExpired`; no composed command should."""
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=timeout_s,
    )
    return Result(stdout=done.stdout, stderr=done.stderr, exit_code=done.returncode)
