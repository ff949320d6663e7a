"""The run folder that anyone can read: resolved configuration, logs, metrics, trajectories, quarantine, checkpoints, the store.

One process owns it at a time, by a lock that the embedded server inherits: a folder whose store is still in use stays locked
even when the supervisor was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import structlog

from services.config import Config, to_toml
from services.sandbox.mounts import mounts_under

log = structlog.get_logger()
_SUBFOLDERS = ("logs", "trajectories", "quarantine", "checkpoints", "nats")
_WAIT_FOR_DYING_S = 10.0


class RunFolderError(RuntimeError):
    """The run folder cannot be used; the text says who holds it and what to do."""


class RunFolder:
    """`<run.folder>/<run.name>`; a context manager that holds the lock."""

    def __init__(self, config: Config, *, fresh: bool = False) -> None:
        self.path = config.run_folder()
        self._config = config
        self._fresh = fresh
        self._lock = -1
        self.moved_to: Path | None = None

    def __enter__(self) -> RunFolder:
        """Lock, then make or take over the folder. Raises `RunFolderError` when another process uses it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._acquire()
        except OSError as error:
            raise RunFolderError(
                f"run.folder: cannot make {self.path} ({error.strerror}); give a folder that this user may write to"
            ) from error
        if self._fresh:
            self.moved_to = self._move_aside()
        for name in _SUBFOLDERS:
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self._write_config()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._lock)  # the lock goes when the last process that inherited it ends

    @property
    def lock(self) -> int:
        """The lock's file descriptor, for a child that must keep the folder locked while it lives."""
        return self._lock

    def log(self, label: str) -> Path:
        return self.path / "logs" / f"{label}.log"

    def note_url(self, url: str) -> None:
        """Remember where the server is, for `headrace status --run-folder`."""
        url_file(self.path).write_text(url + "\n", encoding="ascii")

    def _acquire(self) -> int:
        # beside the folder, not in it: moving the folder aside must not take the lock along
        number = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + _WAIT_FOR_DYING_S
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                owner = os.pread(number, 32, 0).decode("ascii", "replace").strip()
                if owner.isdigit() and not Path(f"/proc/{owner}").exists() and time.monotonic() < deadline:
                    time.sleep(0.1)  # its server is still ending
                    continue
                os.close(number)
                raise RunFolderError(
                    f"{self.path} is in use by process {owner or 'unknown'}; stop that run, or choose another run.name"
                ) from None
        os.ftruncate(number, 0)
        os.pwrite(number, f"{os.getpid()}\n".encode("ascii"), 0)
        return number

    def _move_aside(self) -> Path | None:
        if not self.path.exists():
            return None
        stamp = time.strftime("%Y%m%d-%H%M%S")
        taken = [self.path.with_name(f"{self.path.name}.{stamp}{suffix}") for suffix in ("", *(f"-{n}" for n in range(2, 100)))]
        target = next(path for path in taken if not path.exists())
        for point in mounts_under(str(self.path)):  # of sandboxes whose host was killed
            subprocess.run(["umount", "-l", point], check=False, capture_output=True)
        self.path.rename(target)
        return target

    def _write_config(self) -> None:
        text, file = to_toml(self._config), self.path / "config.toml"
        if file.exists() and file.read_text(encoding="utf-8") != text:
            file.rename(self.path / f"config.until-{time.strftime('%Y%m%d-%H%M%S')}.toml")
        file.write_text(text, encoding="utf-8")


def is_in_use(folder: Path) -> bool:
    """Does a `headrace up` hold this folder's lock now?"""
    try:
        number = os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(number)
    return False


def url_file(folder: Path) -> Path:
    return folder / "nats" / "url"


class MetricsFile:
    """`metrics.jsonl`: one JSON object per step and per evaluation point, each exactly once across restarts.

    A step that a new incarnation of the trainer took again has a row of each; the last one is on the line. Rows that the disk
    has no room for are kept until it has; they come from the streams, so a run that ends before writes them the next time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[tuple[str, int | str, int]] = set()
        self._unwritten = ""
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._whole_lines()
        for line in whole.splitlines():
            row = json.loads(line)
            self._seen.add(_identity(row))
        if path.exists() and path.stat().st_size != len(whole):  # a line that a crash cut short
            os.truncate(path, len(whole))

    def append(self, row: dict[str, Any]) -> bool:
        """Append a row unless its step or point is there already; says whether it was new."""
        if _identity(row) in self._seen:
            return False
        self._seen.add(_identity(row))
        self._unwritten += json.dumps(row) + "\n"
        size = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._unwritten)
            self._unwritten = ""
        except OSError as error:
            if self._path.exists():
                os.truncate(self._path, size)  # no half of a row
            log.warning("metrics not written yet", error=str(error), rows=self._unwritten.count("\n"))
        return True

    def _whole_lines(self) -> bytes:
        data = self._path.read_bytes() if self._path.exists() else b""
        return data[: data.rfind(b"\n") + 1]


def _identity(row: dict[str, Any]) -> tuple[str, int | str, int]:
    return (row["kind"], row["point"] if row["kind"] == "eval" else row["step"], row.get("incarnation", 0))
