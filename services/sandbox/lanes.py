"""The lanes at run time: waits for permits on the event loop, and says who waits for how long."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec

from services.sandbox import lane_rules
from services.sandbox.command import SandboxError
from services.sandbox.lane_rules import Grant, Lane, LaneSpec, LaneState


class LaneBusy(SandboxError):
    """A lane has no room. Nothing was started: the caller keeps its message un-acknowledged and tries again later."""

    code = "lane_busy"
    retry = True

    def __init__(self, lane: Lane, waiting: int, bound: int, oldest_wait_s: float) -> None:
        super().__init__(f"lane {lane}: {waiting} wait (bound {bound}), the oldest for {oldest_wait_s:.1f} s; try again later")
        self.lane, self.waiting, self.oldest_wait_s = lane, waiting, oldest_wait_s


class LaneStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One lane, for metrics and for whoever asks what is being waited for."""

    lane: Lane
    waiting: int
    starting: int
    running: int
    run_permits: int
    oldest_wait_s: float
    refused: int
    holders: tuple[str, ...]  # what runs, by slot


class Permit:
    """A held run slot. `started()` gives the start permit back; leaving the block gives back the slot."""

    def __init__(self, lanes: Lanes, lane: Lane, grant: Grant) -> None:
        self._lanes, self._lane, self._ticket = lanes, lane, grant.ticket
        self.slot, self.cpus = grant.slot, grant.cpus

    def started(self) -> None:
        """Idempotent; to be called on the event loop."""
        self._lanes._advance(self._lane, lane_rules.started(self._lanes._states[self._lane], self._ticket))


class Lanes:
    """All lanes of one host. Belongs to one event loop."""

    def __init__(self, specs: Mapping[Lane, LaneSpec]) -> None:
        self._specs = dict(specs)
        self._states = dict.fromkeys(self._specs, LaneState())
        self._turns: dict[str, asyncio.Future[Grant]] = {}
        self._since_s: dict[str, float] = {}
        self._refused = dict.fromkeys(self._specs, 0)
        self._numbers = itertools.count()

    @asynccontextmanager
    async def permit(self, lane: Lane, label: str) -> AsyncIterator[Permit]:
        """Wait for a run slot and a start permit. Raises `LaneBusy` at once if the lane is full, or after its longest wait."""
        spec = self._specs[lane]
        ticket = f"{label}#{next(self._numbers)}"
        offered = lane_rules.offer(spec, self._states[lane], ticket)
        if offered is None:
            raise self._busy(lane)
        turn: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._turns[ticket], self._since_s[ticket] = turn, time.monotonic()
        try:
            self._advance(lane, offered)
            try:
                async with asyncio.timeout(spec.max_wait_s):
                    grant = await turn
            except TimeoutError as error:
                raise self._busy(lane) from error
            del self._since_s[ticket]
            yield Permit(self, lane, grant)
        finally:
            self._turns.pop(ticket, None)
            self._since_s.pop(ticket, None)
            self._advance(lane, lane_rules.leave(self._states[lane], ticket))

    def status(self) -> tuple[LaneStatus, ...]:
        return tuple(
            LaneStatus(
                lane=lane,
                waiting=len(state.waiting),
                starting=len(state.starting),
                running=state.running,
                run_permits=self._specs[lane].run_permits,
                oldest_wait_s=self._oldest_wait_s(lane),
                refused=self._refused[lane],
                holders=tuple(ticket.rpartition("#")[0] for _, ticket in state.slots),
            )
            for lane, state in self._states.items()
        )

    def _advance(self, lane: Lane, state: LaneState) -> None:
        self._states[lane], grants = lane_rules.grant(self._specs[lane], state)
        for granted in grants:
            turn = self._turns[granted.ticket]
            if not turn.done():  # else its waiter was cancelled just now and leaves by itself
                turn.set_result(granted)

    def _busy(self, lane: Lane) -> LaneBusy:
        self._refused[lane] += 1
        return LaneBusy(lane, len(self._states[lane].waiting), self._specs[lane].queue_bound, self._oldest_wait_s(lane))

    def _oldest_wait_s(self, lane: Lane) -> float:
        waiting = self._states[lane].waiting
        return time.monotonic() - self._since_s[waiting[0]] if waiting else 0.0
