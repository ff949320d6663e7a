"""The journal: every turn of an attempt, once, on TURNS; at most one record behind the play."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType

import structlog

from rollouter.agent import Turn
from schemas.arrays import Array
from schemas.codec import CodecError
from schemas.lease import GroupLease
from schemas.table import Stream
from schemas.trajectory import SamplingConfig, TurnRecord
from services.bus import Bus, OnceConflict, Published
from services.consume import read_latest

log = structlog.get_logger()


class AttemptTaken(Exception):
    """Another process has journalled under this attempt's name, so the lease was taken over."""


@dataclass(frozen=True, kw_only=True)
class AttemptName:
    """One attempt at one slot of a group."""

    lease: GroupLease
    slot: int
    attempt: int

    def session(self) -> str:
        """The conversation's key: engines keep its prefix under it."""
        return f"{self.lease.group}-{self.slot}-{self.attempt}"


class Journal:
    """Writes one attempt's turns while the next one is generated.

    Produces: `turn.<group>.<slot>.<attempt>.<k>`. Waits for: the record before, so that never more than one is unconfirmed.
    Leaving the block waits for the last one; `AttemptTaken` shows at the next call after it happened.
    """

    def __init__(self, bus: Bus, name: AttemptName, executor: str, state_hash: str) -> None:
        self._bus = bus
        self._name = name
        self._executor = executor
        self._state_hash = state_hash
        self._unconfirmed: asyncio.Task[Published] | None = None

    async def __aenter__(self) -> Journal:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unconfirmed is not None:
            self._unconfirmed.cancel()
            await asyncio.wait({self._unconfirmed}, timeout=5)
            if self._unconfirmed.done() and not self._unconfirmed.cancelled():
                self._unconfirmed.exception()  # the play's own error is the one that counts

    async def record(self, turn: Turn, sampling: SamplingConfig) -> None:
        """Start to store one turn, after the one before is confirmed. Raises `AttemptTaken`."""
        await self.confirm()
        record = self._record(turn, sampling)
        if turn.acted.state_after:
            self._state_hash = turn.acted.state_after
        subject = self._bus.subjects.turn(record.group, record.slot, record.attempt, record.turn)
        self._unconfirmed = asyncio.create_task(self._bus.publish_once(subject, record))

    async def confirm(self) -> None:
        """Wait until everything recorded is stored. Raises `AttemptTaken`."""
        if self._unconfirmed is None:
            return
        try:
            await self._unconfirmed
        except OnceConflict as error:
            raise AttemptTaken(str(error)) from error
        finally:
            if self._unconfirmed.done():
                self._unconfirmed = None

    def _record(self, turn: Turn, sampling: SamplingConfig) -> TurnRecord:
        lease, sampled, acted = self._name.lease, turn.sampled, turn.acted
        return TurnRecord(
            run=lease.run,
            group=lease.group,
            slot=self._name.slot,
            attempt=self._name.attempt,
            turn=turn.number,
            task_id=lease.task_id,
            manifest=lease.manifest,
            prompt_ids=Array.of(turn.fed),
            sampled_ids=Array.of(sampled.ids),
            logprobs=Array.of(sampled.logprobs),
            raw_logprobs=None if sampled.raw_logprobs is None else Array.of(sampled.raw_logprobs),
            versions=sampled.versions,
            engine=sampled.engine,
            weight_digest=sampled.weight_digest,
            generator=sampled.generator,
            finish_reason=sampled.finish_reason,
            stop_reason=sampled.stop_reason,
            sampling=sampling,
            action=turn.action,
            command_id=acted.command_id,
            executor=self._executor,
            lane=acted.lane,
            observation=acted.raw,
            observation_dropped_bytes=acted.dropped_bytes,
            exit_code=acted.exit_code,
            state_before=self._state_hash,
            state_after=acted.state_after or self._state_hash,
            started_ns=turn.started_ns,
            generated_ns=turn.generated_ns,
            finished_ns=time.time_ns(),
        )


@dataclass(frozen=True, kw_only=True)
class PastAttempts:
    """What the journal says of a group that somebody has worked on before."""

    next_attempt: dict[int, int]  # slot -> 1 + the highest journalled attempt
    sandboxes: frozenset[tuple[str, str]]  # (executor, sandbox) that earlier attempts used


async def past_attempts(bus: Bus, group: str) -> PastAttempts:
    """Earlier attempts of a group. A group that nobody touched costs one request."""
    if await bus.last(bus.subjects.turn(group, "*", "*", "*"), Stream.TURNS) is None:
        return PastAttempts(next_attempt={}, sandboxes=frozenset())
    highest: dict[int, int] = {}
    sandboxes: set[tuple[str, str]] = set()
    for item in await read_latest(bus, Stream.TURNS, f"turn.{group}.*.*.*"):
        try:
            turn = item.decode(TurnRecord)
        except CodecError as error:  # its subject still says which attempt it was of
            slot, attempt = item.subject.split(".")[-3:-1]
            log.error("unreadable turn", subject=item.subject, seq=item.seq, error=str(error))
            highest[int(slot)] = max(highest.get(int(slot), 0), int(attempt) + 1)
            continue
        highest[turn.slot] = max(highest.get(turn.slot, 0), turn.attempt + 1)
        if turn.command_id:
            sandboxes.add((turn.executor, sandbox_of(turn.command_id)))
    return PastAttempts(next_attempt=highest, sandboxes=frozenset(sandboxes))


def command_id(sandbox: str, turn: int) -> str:
    """The id of the command of one turn; it names its sandbox, so that a takeover can have it removed."""
    return f"{sandbox}.{turn}"


def sandbox_of(command: str) -> str:
    return command.rpartition(".")[0]
