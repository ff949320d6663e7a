"""A rollouter or a sandbox executor in a process of its own, which may kill itself at a named point.

usage: python -m tests.takeover_child ROLE INSTANCE CONFIG.toml [POINT]
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from rollouter import service as rollouter_service
from rollouter.claims import Claims
from rollouter.journal import SlotLog
from rollouter.sandbox_client import Sandboxes
from schemas import table
from schemas.table import Role
from services.bus import Bus
from services.config import load
from services.runtime import run_service
from services.sandbox import service as sandbox_service

LEASE_S = float(os.environ.get("HR_TEST_LEASE_S", "4"))  # instead of the table's, so that a lost lease comes back soon
SHORT_DRAIN_S = 2.0
POINTS = ("claimed", "reset", "opened", "sampled", "recorded", "sent", "ran", "finished", "sealed")


def shorten_leases() -> None:
    """A lease that nobody keeps comes back after `LEASE_S`."""
    rows = tuple(replace(row, ack_wait_s=LEASE_S) if row.name == "rollouter" else row for row in table.CONSUMERS)
    table.CONSUMERS = rows


async def die(bus: Bus) -> None:
    """SIGKILL to ourselves, once the sibling in slot 1 is sealed."""
    while await bus.last(bus.subjects.episode("g00000000", 1)) is None:
        await asyncio.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def patch(owner: Any, name: str, make: Callable[[Callable[..., Awaitable[Any]]], Callable[..., Awaitable[Any]]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def die_at(point: str) -> None:
    """Arrange for the end of this process at one point in the life of slot 0's attempt."""

    def claim(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def take(self: Claims, group: str, number: int, delivery: str) -> None:
            await original(self, group, number, delivery)
            os.kill(os.getpid(), signal.SIGKILL)

        return take

    def reset(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def reset_and_die(self: Sandboxes, name: str, *rest: Any) -> Any:
            box = await original(self, name, *rest)
            if name.startswith("g00000000-0-"):
                await die(self._bus)
            return box

        return reset_and_die

    def append(word: str, *, before: bool) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Awaitable[Any]]]:
        def make(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def append_and_die(self: SlotLog, attempt: int, what: str, record: Any) -> None:
                mine = self._slot == 0 and what == word
                if mine and before:
                    await die(self._bus)
                await original(self, attempt, what, record)
                if mine:
                    await die(self._bus)

            return append_and_die

        return make

    def command(original: Callable[..., Awaitable[Any]], *, answered: bool) -> Callable[..., Awaitable[Any]]:
        async def run_and_die(self: Sandboxes, box: Any, command_id: str, *rest: Any) -> Any:
            if not (box.name.startswith("g00000000-0-") and command_id.endswith(".1")):
                return await original(self, box, command_id, *rest)
            running = asyncio.create_task(original(self, box, command_id, *rest))
            if answered:
                await running
            else:
                await asyncio.sleep(0.7)  # it is on its way, or runs
            await die(self._bus)

        return run_and_die

    def seal(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def seal_and_die(self: Sandboxes, box: Any) -> Any:
            sealed = await original(self, box)
            if box.name.startswith("g00000000-0-"):
                await die(self._bus)
            return sealed

        return seal_and_die

    match point:
        case "claimed":
            patch(Claims, "_take", claim)
        case "reset":
            patch(Sandboxes, "reset", reset)
        case "opened":
            patch(SlotLog, "append", append("open", before=False))
        case "sampled":
            patch(SlotLog, "append", append("1", before=True))
        case "recorded":
            patch(SlotLog, "append", append("1", before=False))
        case "sent":
            patch(Sandboxes, "command", lambda original: command(original, answered=False))
        case "ran":
            patch(Sandboxes, "command", lambda original: command(original, answered=True))
        case "finished":
            patch(SlotLog, "append", append("4", before=False))
        case "sealed":
            patch(Sandboxes, "seal", seal)
        case _:
            raise ValueError(f"point: {point!r} is none of {POINTS}")


def main(role: str, instance: str, config: str, point: str = "") -> int:
    shorten_leases()
    if point == "short-drain":
        sandbox_service.DRAIN_S = SHORT_DRAIN_S
    elif point:
        die_at(point)
    serve = {Role.ROLLOUTER: rollouter_service.serve, Role.SANDBOX: sandbox_service.serve}[Role(role)]
    return run_service(Role(role), instance, load(config), serve)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
