"""A small file system under the store of a run, which can be filled up and emptied again."""

from __future__ import annotations

import os
from pathlib import Path

from services.sandbox.mounts import mount_tmpfs, unmount

_FILES = 1_000_000
_LEFT_BYTES = 64 * 1024


class SmallDisk:
    """A memory file system at `<run folder>/nats`. Mounting needs root. Raises `OSError`."""

    def __init__(self, run_folder: Path, size_bytes: int) -> None:
        self._path = run_folder / "nats"
        self._path.mkdir(parents=True)
        mount_tmpfs(str(self._path), size_bytes=size_bytes, inodes=_FILES, uid=os.geteuid(), gid=os.getegid())

    def fill(self) -> None:
        """Leave next to nothing, as when somebody else's files grow."""
        state = os.statvfs(self._path)
        handle = os.open(self._ballast(), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(handle, 0, max(1, state.f_bavail * state.f_frsize - _LEFT_BYTES))
        finally:
            os.close(handle)

    def empty(self) -> None:
        self._ballast().unlink(missing_ok=True)

    def remove(self) -> None:
        """The store goes with it."""
        unmount(str(self._path))

    def _ballast(self) -> Path:
        return self._path / "ballast"
