"""Keeps a set of child processes running: restarts with backoff, gives up on one that never works, and drains in stages."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from services.child import ChildSpec, last_words, signal_group, start, tail
from services.health import pause
from services.runtime import EXIT_NO_SERVER

log = structlog.get_logger()
Say = Callable[[str], None]


class GaveUp(RuntimeError):
    """A child failed again and again without ever being ready; the text ends with the last lines of its log."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to restart, when to give up, how long to drain."""

    first_backoff_s: float = 0.5
    last_backoff_s: float = 30.0
    settled_s: float = 60.0  # up this long: the backoff begins anew
    failures: int = 8  # in a row, without ever being ready
    drain_s: float = 30.0  # of each stage


class _Child:
    """One child's present process and its history."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        self.started_s = 0.0
        self.ready = False
        self.failures = 0  # ends without having been ready, in a row
        self.quick_ends = 0  # ends before it had settled, in a row
        self.restarts = 0
        self.stop = asyncio.Event()
        self.clean = True

    def signal(self, number: signal.Signals) -> None:
        """Signal the child alone, so that it can drain its own workers; SIGKILL reaches its whole group."""
        if self.process is None or self.process.returncode is not None:
            return
        if number == signal.SIGKILL:
            signal_group(self.process.pid, number)
        else:
            self.process.send_signal(number)


class Supervisor:
    """Runs the children of `specs` until asked to stop.

    Waits for: each child's end. On error: a child that ended is started again after a pause of 0.5 s, doubling to 30 s; one
    that failed eight times in a row without ever being ready stops everything; not finding the server does not count, since
    that says nothing of the child. On stop: SIGTERM by stages, each bounded by
    `drain_s`, then SIGKILL for what is left.
    """

    def __init__(self, specs: Sequence[ChildSpec], say: Say, limits: Limits | None = None) -> None:
        self._children = {spec.label: _Child(spec) for spec in specs}
        self._say = say
        self._limits = limits or Limits()
        self._gave_up = ""
        self._ended = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> bool:
        """Until `stop`, then drain; true when every child ended by itself with code 0. Raises `GaveUp`."""
        async with asyncio.TaskGroup() as group:
            tasks = {label: group.create_task(self._keep(child), name=label) for label, child in self._children.items()}
            ended = group.create_task(self._ended.wait())
            asked = group.create_task(stop.wait())
            await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            asked.cancel()
            await self._drain(tasks)
        if self._gave_up:
            raise GaveUp(self._gave_up)
        return all(child.clean for child in self._children.values())

    def unclean(self) -> str:
        """Children that did not end by themselves with code 0, and how they ended."""
        unclean = {label: child.process for label, child in self._children.items() if not child.clean}
        ends = [(label, process.returncode if process else None) for label, process in unclean.items()]
        return ", ".join(f"{label} ({'never started' if code is None else f'exit code {code}'})" for label, code in ends)

    def ready(self, label: str, pid: int) -> None:
        """Note that a child says of itself that it is ready; a report from an earlier process of it does not count."""
        child = self._children.get(label)
        if child is not None and child.process is not None and child.process.pid == pid and not child.ready:
            child.ready = True

    def pid(self, label: str) -> int | None:
        """Process id of a child that runs now."""
        process = self._children[label].process
        return process.pid if process is not None and process.returncode is None else None

    def restart(self, label: str) -> None:
        """End a child in order; as after any end, it is started again."""
        self._children[label].signal(signal.SIGTERM)

    def restarts(self) -> dict[str, int]:
        """How often each child was started again."""
        return {label: child.restarts for label, child in self._children.items()}

    def kill(self) -> None:
        """SIGKILL every process group at once. All state is on the bus, so nothing acknowledged is lost by it."""
        for child in self._children.values():
            child.stop.set()
            child.signal(signal.SIGKILL)

    async def _keep(self, child: _Child) -> None:
        limits, label = self._limits, child.spec.label
        while not child.stop.is_set():
            code = await self._run_once(child)
            if child.stop.is_set():
                child.clean = code == 0
                return
            settled = time.monotonic() - child.started_s >= limits.settled_s
            child.quick_ends = 1 if settled else child.quick_ends + 1
            if child.ready:
                child.failures = 0
            elif code != EXIT_NO_SERVER:  # an outage is no fault of the child's, and however long it lasts it may end
                child.failures += 1
            if child.failures >= limits.failures:
                self._gave_up = (
                    f"{label} failed {child.failures} times in a row ({ended_how(code)}) without becoming ready; the end of "
                    f"{child.spec.log}:\n{tail(child.spec.log)}"
                )
                self._ended.set()
                return
            backoff_s = min(limits.first_backoff_s * 2.0 ** (child.quick_ends - 1), limits.last_backoff_s)
            log.warning("child ended", child=label, code=code, restart_in_s=backoff_s)
            why = f": {last_words(child.spec.log)}" if code > 0 else ""
            self._say(
                f"{label} ended ({ended_how(code)}{why}); starting it again in {backoff_s:g} s, its log is {child.spec.log}"
            )
            child.restarts += 1
            await pause(child.stop, backoff_s)

    async def _run_once(self, child: _Child) -> int:
        """Start the child, wait for its end, and sweep what it left behind in its process group."""
        child.ready = False
        child.started_s = time.monotonic()
        try:
            process = await start(child.spec)
        except OSError as error:
            log.error("child cannot start", child=child.spec.label, error=str(error))
            return 127
        child.process = process
        log.info("child started", child=child.spec.label, pid=process.pid)
        if child.stop.is_set():
            child.signal(signal.SIGTERM)
        try:
            return await process.wait()
        finally:
            signal_group(process.pid, signal.SIGKILL)

    async def _drain(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        for stage in sorted({child.spec.stage for child in self._children.values()}):
            members = [child for child in self._children.values() if child.spec.stage == stage]
            for child in members:
                child.stop.set()
                child.signal(signal.SIGTERM)
            waiting = [tasks[child.spec.label] for child in members]
            _, late = await asyncio.wait(waiting, timeout=self._limits.drain_s)
            for child in members:
                if tasks[child.spec.label] in late:
                    log.warning("child did not drain in time", child=child.spec.label, after_s=self._limits.drain_s)
                    self._say(f"{child.spec.label} did not drain within {self._limits.drain_s:g} s and is stopped hard")
                    child.signal(signal.SIGKILL)
            if late:
                await asyncio.wait(late, timeout=self._limits.drain_s)


def ended_how(code: int) -> str:
    """A return code in words."""
    if code < 0:
        try:
            return f"by {signal.Signals(-code).name}"
        except ValueError:
            return f"by signal {-code}"
    return f"exit code {code}"
