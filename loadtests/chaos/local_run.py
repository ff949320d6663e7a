"""One local run in a process of its own, seen and hit from outside."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from uuid import uuid4

from loadtests.chaos.observer_key import new_seed
from loadtests.chaos.processes import TOKEN, Process, carrying
from loadtests.chaos.settings import CONFIG, ROOT
from services.child import LIFELINE
from services.config import Config, load
from services.identity import public_key
from services.run_folder import url_file
from services.sandbox.service import executor_config

_POLL_S = 0.01


class RunFailed(RuntimeError):
    """The run did not do what it was started for; the text ends with what it said."""


def sandbox_marks(config: Config) -> list[str]:
    """What the sandbox hosts of this run call themselves, their processes' arguments and their control groups."""
    roots = [executor_config(config, name).host.root for name in config.sandbox.names]
    return [f"headrace-{hashlib.sha256(os.path.realpath(root).encode()).hexdigest()[:12]}" for root in roots]


class LocalRun:
    """Starts the stack of `loadtests.chaos.stack`, knows which process each service is now, and signals them by label."""

    def __init__(self, settings: Sequence[str], *options: str) -> None:
        self.settings = list(settings)
        self.options = list(options)
        self.config: Config = load(CONFIG, settings)
        self.folder = self.config.run_folder()
        self.token = uuid4().hex
        self.seed = new_seed() if self.config.nats.embedded_keys else None  # of the observer's key
        self.output = self.folder.with_name(f"{self.folder.name}.out")
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1  # the stack ends with whoever holds this
        self._log_offset = 0
        self._children: dict[str, Process] = {}
        self._said_to_start: dict[str, int] = {}

    def start(self, *more: str) -> None:
        """Start, or start again in the same folder; `more` are settings that hold for this start alone."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        url_file(self.folder).unlink(missing_ok=True)
        log = self.folder / "logs" / "supervisor.log"
        self._log_offset = log.stat().st_size if log.exists() else 0
        self._children.clear()
        self._said_to_start.clear()
        command = [sys.executable, "-m", "loadtests.chaos.stack", "--config", str(CONFIG), *self.options]
        if self.seed is not None:
            command += ["--observer", public_key(self.seed)]
        for setting in (*self.settings, *more):
            command += ["--set", setting]
        self._let_go()
        lifeline, self._lifeline = os.pipe()
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, TOKEN: self.token, "PYTHONPATH": str(ROOT), LIFELINE: str(lifeline)},
                pass_fds=(lifeline,),
            )
        os.close(lifeline)

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def url(self, within_s: float = 60.0) -> str:
        """Where the server is. Raises `RunFailed` when the run ends first or does not say it in time."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and self.running():
            if url_file(self.folder).is_file() and (text := url_file(self.folder).read_text(encoding="ascii").strip()):
                return text
            await asyncio.sleep(0.05)
        raise RunFailed(f"the run did not say where its server is within {within_s:g} s:\n{self.said()}")

    def now(self, label: str) -> Process | None:
        """The newest process of a child that the supervisor has started; it may have ended."""
        log = self.folder / "logs" / "supervisor.log"
        if log.exists():
            with log.open("rb") as file:
                file.seek(self._log_offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._log_offset += len(whole)
            for line in whole.splitlines():
                event = json.loads(line)
                if event.get("event") == "child started":
                    self._said_to_start[str(event["child"])] = int(event["pid"])
        for child, pid in list(self._said_to_start.items()):  # one that does not run its program yet has not its environment
            process = Process.of(pid)
            if process is not None and process.carries(self.token):
                self._children[child] = process
            if process is None or self._children.get(child) == process or not process.alive():
                del self._said_to_start[child]
        return self._children.get(label)

    def labels(self) -> list[str]:
        """Children that were started so far."""
        self.now("")
        return sorted(self._children)

    def signal(self, label: str, number: signal.Signals) -> Process | None:
        """Signal a child now; `None` when it does not run, else the process that was hit."""
        process = self.now(label)
        return process if process is not None and process.signal(number) else None

    async def ended(self, within_s: float) -> int:
        """Exit code of the run. Raises `RunFailed` when it does not end in time."""
        assert self._process is not None
        deadline = time.monotonic() + within_s
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                raise RunFailed(f"the run did not end within {within_s:g} s:\n{self.said()}\n{self.logs()}")
            await asyncio.sleep(0.05)
        self._let_go()
        return self._process.returncode

    async def stop(self, within_s: float = 280.0) -> int:
        """Ask the run to drain, and wait for its end."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
        return await self.ended(within_s)

    def kill(self) -> None:
        """End whatever is left of the run, hard. For the end of a failed one."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        deadline = time.monotonic() + 20.0
        while (left := carrying(self.token, str(self.folder), *sandbox_marks(self.config))) and time.monotonic() < deadline:
            for process in left:
                process.signal(signal.SIGCONT)
                process.signal(signal.SIGKILL)
            time.sleep(_POLL_S)
        if self._process is not None:
            self._process.wait(20)
        self._let_go()

    def _let_go(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def said(self, lines: int = 30) -> str:
        """The end of what the run printed."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:]) if self.output.exists() else ""

    def logs(self, lines: int = 8) -> str:
        """The ends of all logs, for a failed assertion."""
        parts = []
        for path in sorted((self.folder / "logs").glob("*.log")):
            parts.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:]))
        return "\n".join(parts)
