"""A small system-call filter, assembled here because some doors have no namespace.

A network namespace does not hold VSOCK (a virtual machine's way to its host) nor the kernel's keyrings, and the calls refused
below are mostly ways into the kernel that no shell task needs. Everything else stays allowed; the filter is a second fence, not
the first.
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_X32_BIT = 0x40000000

_CALLS = ("socket", "bpf", "perf_event_open", "add_key", "request_key", "keyctl", "userfaultfd", "io_uring_setup")
# AUDIT_ARCH value, then the numbers of the calls above.
_MACHINES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (0xC000003E, dict(zip(_CALLS, (41, 321, 298, 248, 249, 250, 323, 425), strict=True))),
    "aarch64": (0xC00000B7, dict(zip(_CALLS, (198, 280, 241, 217, 218, 219, 282, 425), strict=True))),
}
_SOCKET_FAMILIES = (1, 2, 10, 16)  # UNIX, INET, INET6, NETLINK: all of them live in the network namespace


def filter_program(machine: str = "") -> bytes | None:
    """The classic BPF program for `bwrap --seccomp`, or None on a machine whose call numbers are not listed here."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, calls = known
    refuse = _statement(_RETURN, _ERRNO | errno.ENOSYS)
    program = [
        _statement(_LOAD, _ARCHITECTURE),
        _jump(_JUMP_EQUAL, architecture, 1, 0),
        refuse,
        _statement(_LOAD, _NUMBER),
        _jump(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1),
        refuse,
    ]
    for name, number in calls.items():
        if name != "socket":
            program += [_jump(_JUMP_EQUAL, number, 0, 1), refuse]
    program += [_jump(_JUMP_EQUAL, calls["socket"], 1, 0), _statement(_RETURN, _ALLOW), _statement(_LOAD, _FIRST_ARGUMENT)]
    for family in _SOCKET_FAMILIES:
        program += [_jump(_JUMP_EQUAL, family, 0, 1), _statement(_RETURN, _ALLOW)]
    program.append(_statement(_RETURN, _ERRNO | errno.EAFNOSUPPORT))
    return b"".join(program)


def _statement(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
