"""The second line against two trainers: whoever writes checkpoints below a folder holds its lock.

The ownership record says who may train; it cannot stop a process that is cut off and still alive from finishing a write. The
kernel lets go of the lock when its process ends, however it ends. Where the folder is shared between hosts, its file system
must pass `flock` on (NFS 4 and the cluster file systems do).
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from services.health import pause
from services.runtime import ServiceContext
from services.standing_wait import StandingWait

log = structlog.get_logger()
_NAME = ".lock"
_TRY_EVERY_S = 0.2
_NAMED_WAIT_S = 600.0


@asynccontextmanager
async def locked(context: ServiceContext, root: Path) -> AsyncIterator[bool]:
    """Hold `root`'s lock in the body. Waits for the holder by name; the body gets false when the service is stopped first."""
    root.mkdir(parents=True, exist_ok=True)
    waiting = StandingWait(context.health, _NAMED_WAIT_S)
    handle = os.open(root / _NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        held = _try(handle)
        while not held and not context.stop.is_set():
            holder = os.pread(handle, 256, 0).decode("utf-8", "replace") or "a process that did not say its name"
            waiting.on(f"the lock of {root}", holder, "waits on; the lock ends with its process")
            await pause(context.stop, _TRY_EVERY_S)
            held = _try(handle)
        waiting.over()
        if held:
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"trainer {context.instance} on {socket.gethostname()}, process {os.getpid()}".encode(), 0)
        yield held
    finally:
        os.close(handle)


def _try(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
