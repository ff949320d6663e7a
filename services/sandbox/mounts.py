"""The few mount calls that the service makes itself; the one place that talks to libc for them.

A memory-backed workspace is the cheapest disk quota there is: the kernel refuses the byte after the last, no user of it has to
be counted, and destroying it is one call. All of it needs CAP_SYS_ADMIN; `can_mount` says whether it is there.
"""

from __future__ import annotations

import ctypes
import errno
import os

_MS_NOSUID, _MS_NODEV = 2, 4
_MNT_DETACH = 2
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount_tmpfs(path: str, *, size_bytes: int, inodes: int, uid: int, gid: int, mode: int = 0o755) -> None:
    """Mount an empty memory file system. Raises `OSError`."""
    options = f"size={size_bytes},nr_inodes={inodes},uid={uid},gid={gid},mode={mode:o}"
    if _LIBC.mount(b"sandbox", os.fsencode(path), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode()) != 0:
        raise _last_error(path)


def unmount(path: str) -> None:
    """Detach what is mounted at `path`, at once for everybody; nothing mounted there is no error. Raises `OSError`."""
    if _LIBC.umount2(os.fsencode(path), _MNT_DETACH) != 0:
        error = _last_error(path)
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise error


def mounts_under(root: str) -> list[str]:
    """Mount points below `root`, deepest first."""
    prefix = os.path.realpath(root) + "/"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        points = [_unescape(line.split(" ")[4]) for line in lines]
    return sorted((point for point in points if point.startswith(prefix)), key=len, reverse=True)


def can_mount(scratch: str) -> bool:
    """Whether this process may mount a memory file system; tried at `scratch`, an empty folder."""
    try:
        mount_tmpfs(scratch, size_bytes=4096, inodes=16, uid=0, gid=0)
    except OSError:
        return False
    unmount(scratch)
    return True


def _unescape(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def _last_error(path: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), path)
