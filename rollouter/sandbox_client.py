"""The client side of sandboxes: reset anywhere, then stay with the executor that answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

import structlog

from rollouter.hosts import Hosts
from rollouter.replies import NoAnswer, Replies, RequestLost
from schemas.message import Message
from schemas.sandbox import Lane, SandboxAttach, SandboxCleanup, SandboxReset, SandboxResult, SandboxRun, SandboxSeal
from services.bus import Bus
from services.health import Health
from services.items import BusError
from services.sandbox.classify import is_package_heavy

log = structlog.get_logger()
_CLEANUP_S = 3.0


class SandboxLost(Exception):
    """The sandbox, its executor or its answer is gone; the slot is an infrastructure abort."""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """A living sandbox and where it lives."""

    name: str
    executor: str
    state_hash: str


class Sandboxes:
    """Sends sandbox commands and waits for their results.

    Consumes: `sbx.out.<requester>`, and the hosts' heartbeats. Produces: `sbx.req.<lane>.<executor|any>`. Waits for: a result,
    until its deadline, or until the host that was asked has been silent for too long. A command's id names it for ever: the
    queue may deliver a request twice, the executor runs it once. On error: `SandboxLost`.
    """

    def __init__(
        self, bus: Bus, requester: str, timeout_s: float, health: Health, *, silent_s: float, heartbeat_s: float
    ) -> None:
        self._bus = bus
        self._requester = requester
        self._timeout_s = timeout_s
        self._health = health
        self._replies = Replies(bus, "sbxout-{x}", requester, SandboxResult, lambda result: result.command_id, health)
        self._hosts = Hosts(bus, health, self._host_gone, silent_s=silent_s, period_s=heartbeat_s)
        self._asked: dict[str, str] = {}  # command id -> the host that it was sent to

    async def run(self, stop: asyncio.Event) -> None:
        """Receive results, and watch the hosts, until `stop`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._replies.run(stop))
            group.create_task(self._hosts.watch(stop))

    async def reset(self, name: str, owner: str, files: Mapping[str, bytes]) -> Sandbox:
        """A new sandbox that holds exactly `files`."""
        request = SandboxReset(
            command_id=f"{name}.reset",
            requester=self._requester,
            sandbox=name,
            owner=owner,
            files=dict(files),
            deadline_ns=self._deadline(self._timeout_s),
        )
        result = await self._ask("reset", "any", request.command_id, request, self._timeout_s)
        if result.status != "ok":
            raise SandboxLost(f"reset on {result.executor}: {result.status} {result.error}")
        return Sandbox(name=name, executor=result.executor, state_hash=result.state_hash)

    async def attach(self, sandbox: Sandbox) -> SandboxResult:
        """Where a sandbox stands after all that anybody asked of it before: its state hash and its last command."""
        request = SandboxAttach(
            command_id=f"{sandbox.name}.attach-{uuid4().hex[:8]}",
            requester=self._requester,
            sandbox=sandbox.name,
            deadline_ns=self._deadline(self._timeout_s),
        )
        result = await self._ask("command", sandbox.executor, request.command_id, request, self._timeout_s)
        if result.status != "ok":
            raise SandboxLost(f"attach to {sandbox.name} on {sandbox.executor}: {result.status} {result.error}")
        return result

    async def command(self, sandbox: Sandbox, command_id: str, command: str, timeout_s: float) -> SandboxResult:
        """Run one command. A result with status `refused` means that this command cannot be run at all and nothing happened."""
        patience_s = self._timeout_s + timeout_s
        request = SandboxRun(
            command_id=command_id,
            requester=self._requester,
            sandbox=sandbox.name,
            command=command,
            timeout_s=timeout_s,
            deadline_ns=self._deadline(patience_s),
        )
        lane: Lane = "package" if is_package_heavy(command) else "command"
        result = await self._ask(lane, sandbox.executor, command_id, request, patience_s)
        if result.status not in ("ok", "refused"):
            raise SandboxLost(f"command {command_id} on {sandbox.executor}: {result.status} {result.error}")
        return result

    async def seal(self, sandbox: Sandbox) -> SandboxResult:
        """Export the terminal state; the executor cleans up by itself afterwards."""
        request = SandboxSeal(
            command_id=f"{sandbox.name}.seal",
            requester=self._requester,
            sandbox=sandbox.name,
            deadline_ns=self._deadline(self._timeout_s),
        )
        result = await self._ask("command", sandbox.executor, request.command_id, request, self._timeout_s)
        if result.status != "ok" or result.state is None:
            raise SandboxLost(f"seal on {sandbox.executor}: {result.status} {result.error}")
        return result

    async def discard(self, name: str, executor: str) -> None:
        """Have a given-up sandbox removed. Nobody waits for it; the executor's reaper is the second line."""
        await self._clean_up(executor, SandboxCleanup(command_id=f"{name}.cleanup", requester="", sandbox=name))

    async def close_group(self, group: str) -> None:
        """All slots of a group are sealed: whatever a lost holder of it left on any host may go, and none is made any more."""
        request = SandboxCleanup(command_id=f"{group}.close", requester="", sandbox="", group=group)
        await asyncio.gather(*(self._clean_up(host, request) for host in self._hosts.names()))

    async def _clean_up(self, executor: str, request: SandboxCleanup) -> None:
        try:
            async with asyncio.timeout(_CLEANUP_S):
                await self._bus.publish(self._bus.subjects.sandbox("cleanup", executor), request)
        except (BusError, TimeoutError) as error:
            log.info("cleanup not delivered", request=request.command_id, executor=executor, error=repr(error))

    def _host_gone(self, host: str, reason: str) -> None:
        for command_id, where in self._asked.items():
            if where == host:
                self._replies.lose(command_id, reason)

    async def _ask(self, lane: Lane, executor: str, command_id: str, request: Message, timeout_s: float) -> SandboxResult:
        subject = self._bus.subjects.sandbox(lane, executor)
        culprit = f"{executor} ({lane} lane)"
        if gone := self._hosts.gone(executor):
            raise SandboxLost(f"{command_id} on {executor}: {gone}")
        self._asked[command_id] = executor
        with self._health.waiting(f"sandbox result {command_id}", culprit, timeout_s, "the slot is an infrastructure abort"):
            try:
                return await self._replies.ask(command_id, lambda: self._bus.publish(subject, request), timeout_s)
            except NoAnswer as error:
                self._health.count("sandbox_timeouts")
                raise SandboxLost(f"{command_id} on {executor}: {error}") from error
            except RequestLost as error:
                self._health.count("sandbox_hosts_given_up")
                raise SandboxLost(f"{command_id} on {executor}: {error}") from error
            finally:
                del self._asked[command_id]

    @staticmethod
    def _deadline(seconds: float) -> int:
        return time.time_ns() + int(seconds * 1e9)
