"""Why an executor does not do what it was asked to. Each has a stable code for the wire."""

from __future__ import annotations

from services.sandbox.command import SandboxError


class BadSandboxId(SandboxError):
    """Ids become folder names: letters, digits, dot, dash and underscore, at most 128, starting with a letter or digit."""

    code = "bad_sandbox_id"


class UnknownSandbox(SandboxError):
    """This executor has never had such a sandbox."""

    code = "unknown_sandbox"


class SandboxLost(SandboxError):
    """The sandbox is no more (cleaned up, or its executor went down) and the command was not recorded. Its id is spent."""

    code = "sandbox_lost"


class SandboxSealed(SandboxError):
    """The terminal state was exported; nothing changes it any more."""

    code = "sandbox_sealed"


class SandboxBusy(SandboxError):
    """More requests wait for one sandbox than an agent can have in flight."""

    code = "sandbox_busy"
    retry = True


class SandboxConflict(SandboxError):
    """The same sandbox id was asked for with other contents."""

    code = "sandbox_conflict"


class TooManySandboxes(SandboxError):
    """The host is at its bound; clean up, or try another executor."""

    code = "too_many_sandboxes"
    retry = True


class SnapshotMismatch(SandboxError):
    """The reset did not give the state that was asked for."""

    code = "snapshot_mismatch"


class ExecutorStopped(SandboxError):
    """The executor drains or has stopped; nothing was started."""

    code = "executor_stopped"
    retry = True
