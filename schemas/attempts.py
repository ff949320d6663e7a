"""Who holds a group, and where each attempt at its slots stands: what a takeover must know besides the turns.

Producer and consumer: rollouter. Everything lies on TURNS beside the turns: `turn.<group>.claim.<n>.<taken or released>` says
who holds the group; `turn.<group>.<slot>.<attempt>.<open, takeover-n, played or end>` belongs to one slot. The records of one
slot are a log with one writer: each is appended after the one before, so the first record of a takeover shuts out the holder
before.
"""

from __future__ import annotations

from typing import Literal

from schemas.message import Message
from schemas.trajectory import TurnEffect

AttemptReason = Literal["infra_abort", "broken", "cancelled", "orphaned", "poison", "restarted"]


class GroupClaim(Message, frozen=True, kw_only=True, tag="group_claim"):
    """A rollouter begins to play a group. Once on `turn.<group>.claim.<number>.taken`; the highest number holds the group.

    `delivery` is where the lease's delivery is acknowledged, so that the holder's next life can give the lease back at once.
    """

    run: str
    group: str
    number: int
    rollouter: str
    at_ns: int
    delivery: str = ""


class GroupRelease(Message, frozen=True, kw_only=True, tag="group_release"):
    """The holder hands the group back of its own accord. A claim without one was lost with its holder."""

    run: str
    group: str
    number: int
    rollouter: str
    reason: str
    at_ns: int


class AttemptOpened(Message, frozen=True, kw_only=True, tag="attempt_opened"):
    """An attempt has its sandbox. On `turn.<group>.<slot>.<attempt>.open`, before its first turn."""

    run: str
    group: str
    slot: int
    attempt: int
    claim: int
    rollouter: str
    sandbox: str
    executor: str
    state_hash: str  # as the reset left it
    started_ns: int


class AttemptTakeover(Message, frozen=True, kw_only=True, tag="attempt_takeover"):
    """The holder of a newer claim continues this attempt; nothing that an older holder appends is accepted any more."""

    run: str
    group: str
    slot: int
    attempt: int
    claim: int
    rollouter: str
    at_ns: int


class AttemptPlayed(Message, frozen=True, kw_only=True, tag="attempt_played"):
    """What the last turn's command did; no turn follows that could carry it."""

    run: str
    group: str
    slot: int
    attempt: int
    last: TurnEffect


class AttemptEnded(Message, frozen=True, kw_only=True, tag="attempt_ended"):
    """An attempt that nobody will continue, and why; the next one has the next number. Its sandbox may be removed.

    `infra_abort` uses up one of the slot's retries. `orphaned` does not: its holder was lost before it could be continued.
    Nor does `restarted`: the weights changed under it, and the run's mode is to play it anew.
    """

    run: str
    group: str
    slot: int
    attempt: int
    claim: int
    rollouter: str
    reason: AttemptReason
    detail: str
    at_ns: int


SlotRecord = AttemptOpened | AttemptTakeover | AttemptPlayed | AttemptEnded
