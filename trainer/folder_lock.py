"""The second line against two trainers: whoever writes checkpoints below a folder holds its lock.

The ownership record says who may train; it cannot stop a process that is cut off and still alive from finishing a write. The
kernel lets go of the lock when its process ends, however it ends, and one that is cut off ends itself within
`fencing.cut_off_s`. A holder that keeps the lock for longer is stopped in its tracks, or the file system has no locks: then
`trainer/folder_owner.py` alone keeps the two apart.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
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
_GRACE_S = 5.0  # beyond the time after which a holder that is cut off ends itself
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@asynccontextmanager
async def locked(context: ServiceContext, root: Path) -> AsyncIterator[bool]:
    """Hold `root`'s lock in the body; waits for the holder by name, until it would have ended if it could.

    The body gets false when the service is stopped first. Without the lock it goes on, with an error in the log.
    """
    root.mkdir(parents=True, exist_ok=True)
    patience_s = context.config.fencing.cut_off_s + _GRACE_S
    waiting = StandingWait(context.health, patience_s)
    until = time.monotonic() + patience_s
    handle = os.open(root / _NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not (held := _try(handle)) and not context.stop.is_set() and time.monotonic() < until:
            holder = _holder(handle)
            waiting.on(f"the lock of {root}", holder, "goes on without it, as the folder's next owner")
            await pause(context.stop, _TRY_EVERY_S)
        waiting.over()
        if held:
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"trainer {context.instance} on {socket.gethostname()}, process {os.getpid()}".encode(), 0)
        elif not context.stop.is_set():
            log.error("the folder's lock is not let go of", root=str(root), holder=_holder(handle), waited_s=patience_s)
            context.health.count("folder_locks_passed_over")
        yield held or not context.stop.is_set()
    finally:
        os.close(handle)


def _holder(handle: int) -> str:
    return os.pread(handle, 256, 0).decode("utf-8", "replace") or "a process that did not say its name"


def _try(handle: int) -> bool:
    """Whether the lock is ours; also where there are no locks, since then nobody can hold it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        log.warning("the file system of the checkpoints has no locks", reason=str(error))
    return True
