"""What the journal says of the slots of a group that somebody has worked on before. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import structlog

from rollouter.agent import PastTurn
from rollouter.journal import acted_before
from rollouter.rows import Sampled
from rollouter.sandbox_client import Sandbox
from schemas.attempts import AttemptEnded, AttemptOpened, AttemptPlayed, AttemptTakeover
from schemas.codec import CodecError, decode_any
from schemas.trajectory import TurnEffect, TurnRecord
from services.bus import Item
from services.consume import Event
from services.continuity import Hole
from services.pull import Damaged

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class PastAttempt:
    """An attempt that can be continued: its sandbox, and every turn that it sampled."""

    attempt: int
    box: Sandbox  # `state_hash` is the state in which the last turn's action, or the first turn, finds it
    started_ns: int
    turns: tuple[PastTurn, ...]  # what the last one did is asked for again: whether a turn follows depends on its text
    ran: str  # id of the last command that a later turn tells of; empty: none
    pending: str  # id of the last turn's command; empty: it runs none
    played: bool  # what the last turn did is journalled already

    def stands(self, state_hash: str, last_command: str) -> bool:
        """Whether a sandbox that stands so is the one that the journal speaks of."""
        if self.pending and last_command == self.pending:
            return True  # it ran, and its recorded result says what it did
        return last_command == self.ran and state_hash == self.box.state_hash


@dataclass
class _Attempt:
    opened: AttemptOpened | None = None
    turns: list[TurnRecord] = field(default_factory=list)
    played: bool = False
    ended: AttemptEnded | None = None
    damaged: bool = False


@dataclass
class SlotHistory:
    """One slot's records, folded in their order."""

    last_seq: int = 0
    newest_claim: int = -1
    attempts: dict[int, _Attempt] = field(default_factory=dict)

    def add(self, event: Item | Damaged) -> None:
        """The next record. One that cannot be read still counts its attempt, which then cannot be continued."""
        item = event.item if isinstance(event, Damaged) else event
        self.last_seq = item.seq
        attempt = self.attempts.setdefault(int(item.subject.split(".")[-2]), _Attempt())
        try:
            record = None if isinstance(event, Damaged) else decode_any(item.data)
        except CodecError as error:
            log.error("unreadable record", subject=item.subject, seq=item.seq, error=str(error))
            record = None
        if isinstance(record, AttemptOpened | AttemptTakeover | AttemptEnded):
            self.newest_claim = max(self.newest_claim, record.claim)
        match record:
            case AttemptOpened():
                attempt.opened = record
            case TurnRecord():
                attempt.turns.append(record)
            case AttemptPlayed():
                attempt.played = True
            case AttemptEnded():
                attempt.ended = record
            case AttemptTakeover():
                pass
            case _:
                attempt.damaged = True

    @property
    def current(self) -> int:
        """The attempt that is in work, or the one that comes next."""
        if not self.attempts:
            return 0
        newest = max(self.attempts)
        return newest + 1 if self.attempts[newest].ended else newest

    @property
    def aborts(self) -> int:
        """Retries that are used up."""
        return sum(a.ended is not None and a.ended.reason == "infra_abort" for a in self.attempts.values())

    @property
    def restarts(self) -> int:
        """Attempts that were given up because the weights changed under them."""
        return sum(a.ended is not None and a.ended.reason == "restarted" for a in self.attempts.values())

    def left_sandboxes(self) -> list[Sandbox]:
        """Sandboxes of attempts that nobody continues, as far as they are known; their removal may have been missed."""
        going_on = self.continuable()
        opened = [(n, a.opened) for n, a in self.attempts.items() if going_on is None or n != going_on.attempt]
        return [Sandbox(name=o.sandbox, executor=o.executor, state_hash=o.state_hash) for _, o in opened if o is not None]

    def continuable(self) -> PastAttempt | None:
        """The attempt in work, if the journal holds all that its continuation needs."""
        found = self.attempts.get(self.current)
        if found is None or found.opened is None or found.damaged:
            return None
        try:
            turns = past_turns(found.turns)
        except ValueError as error:
            log.error("a journalled turn does not line up", attempt=self.current, error=str(error))
            return None
        opened, last = found.opened, found.turns[-1] if found.turns else None
        ran = [t.command_id for t, past in zip(found.turns, turns, strict=True) if past.acted and not past.acted.refused]
        return PastAttempt(
            attempt=self.current,
            box=Sandbox(
                name=opened.sandbox,
                executor=opened.executor,
                state_hash=last.state_before if last else opened.state_hash,
            ),
            started_ns=opened.started_ns,
            turns=turns,
            ran=next((command for command in reversed(ran) if command), ""),
            pending=last.command_id if last else "",
            played=found.played,
        )


def histories(events: Iterable[Event], slots: Sequence[int]) -> dict[int, SlotHistory]:
    """The histories of these slots, out of all records of their group in stream order.

    A hole needs no notice here: an attempt that lacks a turn or its opening is not continued, and one that lacks its end finds
    its sandbox gone.
    """
    found = {slot: SlotHistory() for slot in slots}
    for event in events:
        if event is None or isinstance(event, Hole):
            continue
        slot = subject_of(event).split(".")[-3]
        if slot.isdigit() and int(slot) in found:
            found[int(slot)].add(event)
    return found


def subject_of(event: Item | Damaged) -> str:
    return event.item.subject if isinstance(event, Damaged) else event.subject


def past_turns(records: Sequence[TurnRecord]) -> tuple[PastTurn, ...]:
    """Turns as the agent takes them up. Raises `ValueError` unless every one is whole and knows what the one before did."""
    if (numbers := [record.turn for record in records]) != list(range(len(records))):
        raise ValueError(f"turns {numbers} are not one after the other")
    effects: list[TurnEffect | None] = [after.previous for _, after in pairwise(records)]
    if None in effects:
        raise ValueError(f"turn {effects.index(None)}: what it did is not recorded, though a turn follows it")
    return tuple(_past_turn(record, effect) for record, effect in zip(records, [*effects, None], strict=False))


def _past_turn(record: TurnRecord, effect: TurnEffect | None) -> PastTurn:
    raw = record.raw_logprobs
    sampled = Sampled(
        ids=record.sampled_ids.of_kind("sampled_ids", "int32", 1),
        logprobs=record.logprobs.of_kind("logprobs", "float32", 1),
        raw_logprobs=None if raw is None else raw.of_kind("raw_logprobs", "float32", 1),
        versions=record.versions,
        finish_reason=record.finish_reason,
        stop_reason=record.stop_reason,
        engine=record.engine,
        generator=record.generator,
        weight_digest=record.weight_digest,
    )
    return PastTurn(
        fed=record.prompt_ids.of_kind("prompt_ids", "int32", 1),
        sampled=sampled.checked(),
        action=record.action,
        acted=None if effect is None else acted_before(effect),
    )
