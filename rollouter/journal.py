"""The journal: every turn of an attempt on TURNS, written before its action is carried out.

So whoever takes an attempt over finds in it every command that may have reached the sandbox, and asks for the last one again
under the same id. The records of one slot are a log with one writer: each says after which it comes, and the first record of a
takeover shuts out the holder before.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from rollouter.agent import Acted, Turn
from rollouter.sandbox_client import Sandbox
from schemas.arrays import Array
from schemas.attempts import AttemptEnded, AttemptOpened, AttemptPlayed, AttemptReason, AttemptTakeover
from schemas.lease import GroupLease
from schemas.message import Message
from schemas.trajectory import SamplingConfig, TurnEffect, TurnRecord
from services.bus import Bus
from services.items import BusError, Fenced

_SETTLE_S = 2.0
_DETAIL_CHARS = 1000
OPEN, PLAYED, END = "open", "played", "end"


class AttemptTaken(Exception):
    """Another process holds this slot now: nothing that this one does for it counts, and its sandbox is the other's."""


@dataclass(frozen=True, kw_only=True)
class AttemptName:
    """One attempt at one slot of a group."""

    lease: GroupLease
    slot: int
    attempt: int

    def session(self) -> str:
        """The conversation's key: engines keep its prefix under it."""
        return f"{self.lease.group}-{self.slot}-{self.attempt}"

    def __str__(self) -> str:
        return f"{self.lease.group} slot {self.slot} attempt {self.attempt}"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who appends: a process, under its claim on the group."""

    rollouter: str
    claim: int


class SlotLog:
    """The records of one slot, from where they were read on. Belongs to one task at a time."""

    def __init__(self, bus: Bus, group: str, slot: int, holder: Holder, last_seq: int = 0) -> None:
        self.holder = holder
        self._bus = bus
        self._group = group
        self._slot = slot
        self._last_seq = last_seq  # on TURNS, of this slot's newest record
        self._own = bus.subjects.turn(group, slot, "*", "*")

    async def append(self, attempt: int, word: str, record: Message) -> None:
        """Store one record after the last. Raises `AttemptTaken` if another process has appended."""
        subject = self._bus.subjects.turn(self._group, self._slot, attempt, word)
        try:
            self._last_seq = (await self._bus.append(subject, record, after=self._last_seq, within=self._own)).seq
        except Fenced as error:
            raise AttemptTaken(str(error)) from error

    async def take_over(self, attempt: int) -> None:
        """Continue an attempt that another holder began. Raises `AttemptTaken`."""
        record = AttemptTakeover(
            run=self._bus.run,
            group=self._group,
            slot=self._slot,
            attempt=attempt,
            claim=self.holder.claim,
            rollouter=self.holder.rollouter,
            at_ns=time.time_ns(),
        )
        await self.append(attempt, f"takeover-{self.holder.claim}", record)

    async def end(self, attempt: int, reason: AttemptReason, detail: str) -> None:
        """Give an attempt up for good. Raises `AttemptTaken`: then it is not ours to give up."""
        record = AttemptEnded(
            run=self._bus.run,
            group=self._group,
            slot=self._slot,
            attempt=attempt,
            claim=self.holder.claim,
            rollouter=self.holder.rollouter,
            reason=reason,
            detail=detail[:_DETAIL_CHARS],
            at_ns=time.time_ns(),
        )
        await self.append(attempt, END, record)


class Journal:
    """Writes one attempt. At most one record is unconfirmed, and none when something is done in the sandbox.

    Produces: `turn.<group>.<slot>.<attempt>.<k>` and the attempt's `open`, `played` and `end`. Every call waits for the record
    before and raises `AttemptTaken` if that was refused.
    """

    def __init__(self, log: SlotLog, name: AttemptName) -> None:
        self.box: Sandbox | None = None
        self.named = False  # the journal may name the sandbox, so a successor may be using it
        self._log = log
        self._name = name
        self._state_hash = ""
        self._unconfirmed: asyncio.Task[None] | None = None

    async def open(self, box: Sandbox, started_ns: int) -> None:
        """The attempt begins in a fresh sandbox."""
        self.box, self.named, self._state_hash = box, True, box.state_hash
        lease = self._name.lease
        record = AttemptOpened(
            run=lease.run,
            group=lease.group,
            slot=self._name.slot,
            attempt=self._name.attempt,
            claim=self._log.holder.claim,
            rollouter=self._log.holder.rollouter,
            sandbox=box.name,
            executor=box.executor,
            state_hash=box.state_hash,
            started_ns=started_ns,
        )
        await self._start(OPEN, record)

    def rejoin(self, box: Sandbox) -> None:
        """The attempt goes on in the sandbox that the journal names; its state is that before the last turn's action."""
        self.box, self.named, self._state_hash = box, True, box.state_hash

    async def record(self, turn: Turn, command_id: str, sampling: SamplingConfig) -> None:
        """Start to store one turn; `command_id` names the command that it runs, if any."""
        if turn.previous is not None and turn.previous.state_after:
            self._state_hash = turn.previous.state_after
        await self._start(str(turn.number), self._record(turn, command_id, sampling))

    async def played(self, last: Acted) -> None:
        """Start to store what the last turn's action did."""
        lease, name = self._name.lease, self._name
        record = AttemptPlayed(run=lease.run, group=lease.group, slot=name.slot, attempt=name.attempt, last=effect_of(last))
        await self._start(PLAYED, record)

    async def confirm(self) -> None:
        """Wait until everything recorded is stored. Raises `AttemptTaken`."""
        if self._unconfirmed is None:
            return
        await asyncio.shield(self._unconfirmed)
        self._unconfirmed = None

    async def end(self, reason: AttemptReason, detail: str) -> None:
        """Give the attempt up, also one that ends because a record of its cannot be written. Raises `AttemptTaken`."""
        pending, self._unconfirmed = self._unconfirmed, None
        if pending is not None:
            await asyncio.wait({pending})
            if isinstance(error := pending.exception(), AttemptTaken | BusError):
                raise error
        await self._log.end(self._name.attempt, reason, detail)

    async def settle(self) -> None:
        """On the way out: let the record that is under way be stored, boundedly. Never raises."""
        pending = self._unconfirmed
        if pending is None:
            return
        await asyncio.wait({pending}, timeout=_SETTLE_S)
        if not pending.done():
            pending.cancel()
            await asyncio.wait({pending}, timeout=_SETTLE_S)
        if pending.done() and not pending.cancelled():
            pending.exception()  # the play's own error is the one that counts

    async def _start(self, word: str, record: Message) -> None:
        await self.confirm()
        self._unconfirmed = asyncio.create_task(self._append(word, record))

    async def _append(self, word: str, record: Message) -> None:
        try:
            await self._log.append(self._name.attempt, word, record)
        except AttemptTaken:
            self.named = self.named and word != OPEN  # no record names the sandbox, so nobody else knows of it
            raise

    def _record(self, turn: Turn, command_id: str, sampling: SamplingConfig) -> TurnRecord:
        lease, sampled = self._name.lease, turn.sampled
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
            previous=None if turn.previous is None else effect_of(turn.previous),
            action=turn.action,
            command_id=command_id,
            executor="" if self.box is None else self.box.executor,
            state_before=self._state_hash,
            started_ns=turn.started_ns,
            generated_ns=turn.generated_ns,
        )


def effect_of(acted: Acted) -> TurnEffect:
    """What stands on the wire of what one action did."""
    return TurnEffect(
        observation=acted.raw,
        observation_dropped_bytes=acted.dropped_bytes,
        lane=acted.lane,
        exit_code=acted.exit_code,
        timed_out=acted.timed_out,
        refused=acted.refused,
        state_after=acted.state_after,
    )


def acted_before(effect: TurnEffect) -> Acted:
    """What an action did before a takeover; the text that the agent read of it stands in the next turn's prompt."""
    return Acted(
        raw=effect.observation,
        text="",
        refused=effect.refused,
        timed_out=effect.timed_out,
        dropped_bytes=effect.observation_dropped_bytes,
        exit_code=effect.exit_code,
        lane=effect.lane,
        state_after=effect.state_after,
    )


def command_id(sandbox: str, turn: int) -> str:
    """The id of the command of one turn: the same for whoever asks for it."""
    return f"{sandbox}.{turn}"
