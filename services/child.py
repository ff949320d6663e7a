"""One supervised child process: started in its own process group, dead when its parent dies, its group swept when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LIFELINE = "HEADRACE_LIFELINE"  # number of an inherited pipe end that closes when the supervisor is gone
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl  # resolved here: nothing may be loaded between fork and exec


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """What to run and where its output goes. Children with a smaller `stage` are stopped first."""

    label: str
    argv: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    inherit: tuple[int, ...] = ()  # file descriptors that stay open in the child
    stage: int = 0


async def start(spec: ChildSpec) -> asyncio.subprocess.Process:
    """Start the child with its output appended to its log. Raises `OSError` when it cannot be executed."""
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    with spec.log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **spec.environment},
            pass_fds=spec.inherit,
            start_new_session=True,  # a Ctrl-C on the terminal reaches the supervisor alone
            # not for one with a lifeline: the kernel sends its signal once for each of our threads that ends, and the second
            # would be a hard stop, before the lifeline has swept the child's workers
            preexec_fn=None if LIFELINE in spec.environment else _tied_to(os.getpid()),
        )


def _tied_to(parent: int) -> Callable[[], None]:
    def tie() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)

    return tie


def signal_group(pid: int, number: signal.Signals) -> None:
    """Signal the process group that a child leads, itself and whatever it started; nothing happens when it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def tail(log: Path, lines: int = 12, limit_bytes: int = 64 * 1024) -> str:
    """The last lines of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit_bytes))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(no log)"


def last_words(log: Path) -> str:
    """The reason in a log's last line: its `error` where it is a structured one, else the line; at most 200 characters."""
    line = tail(log, 1).strip()
    try:
        event = json.loads(line)
    except ValueError:
        return line[:200]
    return (
        str(event.get("error") or event.get("reason") or event.get("event") or "")[:200]
        if isinstance(event, dict)
        else line[:200]
    )


def follow_lifeline() -> None:
    """In a child: end the whole process group, workers included, as soon as the supervisor no longer exists.

    The kernel's parent-death signal reaches only the child itself; its own workers would live on.
    """
    number = os.environ.pop(LIFELINE, "")
    if not number:
        return

    def wait_for_end() -> None:
        os.read(int(number), 1)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait_for_end, name="lifeline", daemon=True).start()
