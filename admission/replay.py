"""Replay: do READY and the demands give the recorded ledger again, entry by entry and bit by bit?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from admission.assembly import Assembly, decide
from admission.gates import GateSettings
from schemas.codec import encode
from schemas.group import ReadyGroup
from schemas.ledger import LedgerEntry
from schemas.message import Message
from schemas.training import BatchDemand


@dataclass(frozen=True, slots=True)
class Difference:
    """The first ledger entry that a replay does not reproduce."""

    seq: int
    recorded: LedgerEntry
    replayed: LedgerEntry | None  # None: the replay decides nothing here
    why: str


def replay(
    ready: Iterable[tuple[int, ReadyGroup]],
    train: Iterable[tuple[int, Message]],
    ledger: Iterable[tuple[int, LedgerEntry]],
    *settings: GateSettings,
) -> Difference | None:
    """Decide again over recorded `(sequence, message)` pairs; `None` if every recorded entry comes out the same.

    Each entry is decided under the settings whose hash it carries; pass every setting that the run was under, in any order.
    """
    known = {item.hash(): item for item in settings}
    state = Assembly()
    for seq, group in ready:
        if group.purpose == "train":
            state.ready(seq, group)
    for seq, message in train:
        if isinstance(message, BatchDemand):
            state.demand(seq, message)
    for seq, recorded in ledger:
        under = known.get(recorded.settings_hash)
        if under is None:
            why = f"decided under settings {recorded.settings_hash}, which are not among {sorted(known)}"
            return Difference(seq, recorded, None, why)
        replayed = next(iter(decide(state, under)), None)
        if replayed is None:
            return Difference(seq, recorded, None, "the replay has nothing to decide here")
        if encode(replayed) != encode(recorded):
            return Difference(seq, recorded, replayed, _first_field(recorded, replayed))
        state.entry(seq, recorded)
    return None


def _first_field(recorded: LedgerEntry, replayed: LedgerEntry) -> str:
    if type(recorded) is not type(replayed):
        return f"a {type(recorded).__name__} was recorded, the replay gives a {type(replayed).__name__}"
    for field in recorded.__struct_fields__:
        before, after = getattr(recorded, field), getattr(replayed, field)
        if before != after:
            return f"{field}: recorded {before!r}, replayed {after!r}"
    return "equal fields, other bytes"
