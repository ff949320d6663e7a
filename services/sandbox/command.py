"""One command as data: what is to be run, under which limits, and how it ended.

Every ending has a typed outcome and bounded data, whatever the command does: hang, fork, flood, fill the disk, print bytes that
are no text, or kill its own shell.
"""

from __future__ import annotations

import os
from enum import StrEnum

import msgspec

MAX_COMMAND_BYTES = 96 * 1024  # the kernel's bound for one argument is 128 KiB
MAX_OUTPUT_BYTES = 4 * 2**20  # of each stream, whatever the limits say: results are recorded whole


class SandboxError(RuntimeError):
    """Anything that the sandbox service refuses or cannot do; the text names the sandbox and the rule.

    `code` is stable and goes over the wire; `retry` says whether the same request may succeed later, unchanged.
    """

    code = "sandbox_error"
    retry = False


class CommandRefused(SandboxError):
    """The command cannot be started as it stands (too long, or a NUL byte in it). Nothing ran."""

    code = "command_refused"


class SetupFailed(SandboxError):
    """The sandbox could not be set up, so the command did not start. It is the host's fault and never the agent's."""

    code = "setup_failed"
    retry = True


class TeardownUnconfirmed(SandboxError):
    """Processes of a sandbox are still there after the deadline for their end."""

    code = "teardown_unconfirmed"
    retry = True


class Outcome(StrEnum):
    """How a command ended."""

    EXITED = "exited"  # by itself; `exit_code` tells how, 128 + n for signal n
    TIMED_OUT = "timed_out"  # the whole tree was killed; the output so far is kept
    OOM_KILLED = "oom_killed"  # the kernel killed something in it for memory
    OVER_QUOTA = "over_quota"  # it ended by itself and left a workspace that breaks the limits, so it has no state hash
    CANCELLED = "cancelled"  # its sandbox was torn down, or the service stopped


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one command may use. Memory includes the pages of the workspace and /tmp when those live in memory."""

    memory_bytes: int = 512 * 2**20
    processes: int = 128
    disk_bytes: int = 64 * 2**20  # of the workspace
    scratch_bytes: int = 32 * 2**20  # of /tmp, empty at the start of every command
    max_files: int = 4096  # inodes of the workspace
    open_files: int = 1024
    output_bytes: int = 64 * 1024  # kept of each stream: the first half and the last half


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """A host folder seen inside at `target`."""

    source: str
    target: str
    writable: bool = False


class CommandSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One command for one bubblewrap. `uid` is the host's user id of the sandbox (-1: this process's own)."""

    command_id: str
    argv: tuple[str, ...]
    binds: tuple[Bind, ...]
    cwd: str = "/work"
    timeout_s: float = 10.0
    limits: Limits = Limits()
    cpus: tuple[int, ...] = ()  # empty: all that this process may use
    uid: int = -1
    symlinks: tuple[tuple[str, str], ...] = ()  # (target, path inside)
    environment: tuple[tuple[str, str], ...] = ()  # added to the fixed one


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended. Output is bytes as they came; where some were dropped, a marker stands in their place."""

    command_id: str
    outcome: Outcome
    exit_code: int | None  # None when it did not end by itself
    stdout: bytes = b""
    stderr: bytes = b""
    dropped_bytes: int = 0
    timed_out: bool = False
    oom_killed: bool = False
    process_limit_hit: bool = False
    cpu_s: float = 0.0
    wall_s: float = 0.0
    state_hash_after: str = ""  # a `refused:` value says why the workspace has no hash


def shell(command: str) -> tuple[str, ...]:
    """The argv that runs one shell line."""
    return ("/bin/bash", "-c", command)


def check_argv(argv: tuple[str, ...]) -> None:
    """Raises `CommandRefused` for what the kernel would not take as arguments."""
    if not argv:
        raise CommandRefused("command: it is empty")
    for word in argv:
        try:
            data = os.fsencode(word)
        except UnicodeEncodeError as error:
            raise CommandRefused(f"command: it holds a character that no file system can carry ({error.reason})") from error
        if b"\0" in data:
            raise CommandRefused("command: it holds a NUL character")
        if len(data) > MAX_COMMAND_BYTES:
            raise CommandRefused(
                f"command: {len(data)} bytes, but {MAX_COMMAND_BYTES} are the most for one argument; use a file"
            )
