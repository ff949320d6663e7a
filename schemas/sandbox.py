"""Sandbox commands and results, keyed by command id so that a repeated delivery never runs a command twice.

Producer of requests: rollouter (`sbx.<lane>.<executor|any>`); consumer: executors. Results return on `sbx.out.<requester>`.
"""

from __future__ import annotations

from typing import Literal

from schemas.message import Message
from schemas.trajectory import StateRef

Lane = Literal["reset", "command", "package", "verify", "cleanup"]
LANES: tuple[Lane, ...] = ("reset", "command", "package", "verify", "cleanup")


class SandboxReset(Message, frozen=True, kw_only=True, tag="sbx_reset"):
    """Create a sandbox with exactly these files. Any executor may take it; the result names the one that did.

    On the executor that takes it, sandboxes of the same slot under an older attempt are removed: their owner is gone.
    """

    command_id: str
    requester: str
    sandbox: str
    owner: str  # `<group>/<slot>/<attempt>`
    files: dict[str, bytes]
    deadline_ns: int


class SandboxRun(Message, frozen=True, kw_only=True, tag="sbx_run"):
    """Run one shell command in an existing sandbox."""

    command_id: str
    requester: str
    sandbox: str
    command: str
    timeout_s: float
    deadline_ns: int


class SandboxSeal(Message, frozen=True, kw_only=True, tag="sbx_seal"):
    """Export the terminal state; no command is accepted afterwards and the sandbox is cleaned up once the result is out.

    A repeated request gets the same result, also when the sandbox is gone.
    """

    command_id: str
    requester: str
    sandbox: str
    deadline_ns: int


class SandboxAttach(Message, frozen=True, kw_only=True, tag="sbx_attach"):
    """Ask where a sandbox stands, after all that was asked of it before: its state hash and the last command that it ran."""

    command_id: str
    requester: str
    sandbox: str
    deadline_ns: int


class SandboxCleanup(Message, frozen=True, kw_only=True, tag="sbx_cleanup"):
    """Remove a sandbox whose episode was given up; or, by `group`, every one that is left of a group whose episodes are sealed.

    The host makes no sandbox for that group any more: whoever still asks has lost it.
    """

    command_id: str
    requester: str
    sandbox: str  # empty with `group`
    group: str = ""


class SandboxResult(Message, frozen=True, kw_only=True, tag="sbx_result"):
    """What one command did. `status` is `ok` whenever the command ran to a bounded, typed outcome, even a time-out."""

    command_id: str
    sandbox: str
    executor: str
    lane: Lane
    status: Literal["ok", "lost", "refused", "error"]
    error: str = ""
    exit_code: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    dropped_bytes: int = 0
    timed_out: bool = False
    outcome: str = ""
    state_hash: str = ""
    last_command: str = ""  # of an attach: id of the last command that ran
    state: StateRef | None = None
    queued_ns: int = 0
    started_ns: int = 0
    finished_ns: int = 0
