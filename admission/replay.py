"""Replay: do READY and the demands give the recorded ledger again, entry by entry and bit by bit?

Two inputs of a decision stand in the entry itself, and are taken from there: the settings, and which demand was in force, which
matters where a trainer came back as a new incarnation and asked for the same step again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from admission.assembly import Assembly, decide
from admission.gates import GateSettings
from admission.losses import Evidence, loss_entry
from schemas.codec import encode
from schemas.group import ReadyGroup
from schemas.ledger import AbandonEntry, LedgerEntry, LostItem
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
    evidence: Evidence | None = None,
) -> Difference | None:
    """Decide again over recorded `(sequence, message)` pairs; `None` if every recorded entry comes out the same.

    Each entry is decided under the settings whose hash it carries; pass every setting that the run was under, in any order.
    An entry that closes a group for a lost item is looked up in `evidence`: the item must be missing there as well.
    """
    known = {item.hash(): item for item in settings}
    state = Assembly()
    whole = {seq: group for seq, group in ready if group.purpose == "train"}
    for seq, group in whole.items():
        state.ready(seq, group)
    demands = [(seq, message) for seq, message in train if isinstance(message, BatchDemand)]
    folded = 0
    for seq, recorded in ledger:
        under = known.get(recorded.settings_hash)
        if under is None:
            why = f"decided under settings {recorded.settings_hash}, which are not among {sorted(known)}"
            return Difference(seq, recorded, None, why)
        if isinstance(recorded, AbandonEntry) and isinstance(recorded.lost, LostItem):
            if difference := _loss(seq, recorded, recorded.lost, whole, evidence or Evidence()):
                return difference
            state.entry(seq, recorded)
            continue
        in_force = recorded.demand_seq
        while folded < len(demands) and (isinstance(in_force, msgspec.UnsetType) or demands[folded][0] <= in_force):
            state.demand(*demands[folded])
            folded += 1
        replayed = next(iter(decide(state, under)), None)
        if replayed is None:
            return Difference(seq, recorded, None, "the replay has nothing to decide here")
        if isinstance(replayed, AbandonEntry) and isinstance(in_force, msgspec.UnsetType):  # recorded before it was named
            replayed = msgspec.structs.replace(replayed, demand_seq=msgspec.UNSET)
        if encode(replayed) != encode(recorded):
            return Difference(seq, recorded, replayed, _first_field(recorded, replayed))
        state.entry(seq, recorded)
    return None


def _loss(
    seq: int, recorded: AbandonEntry, item: LostItem, ready: Mapping[int, ReadyGroup], evidence: Evidence
) -> Difference | None:
    if why := evidence.refutes(recorded, item, ready):
        return Difference(seq, recorded, None, why)
    group, family = recorded.group, evidence.families.get(recorded.group)
    if family is None:
        return Difference(seq, recorded, None, f"{group} was never leased")
    replayed = loss_entry(recorded.run, group, family, recorded.ready_seq, item, recorded.settings_hash)
    same = encode(replayed) == encode(recorded)
    return None if same else Difference(seq, recorded, replayed, _first_field(recorded, replayed))


def _first_field(recorded: LedgerEntry, replayed: LedgerEntry) -> str:
    if type(recorded) is not type(replayed):
        return f"a {type(recorded).__name__} was recorded, the replay gives a {type(replayed).__name__}"
    for field in recorded.__struct_fields__:
        before, after = getattr(recorded, field), getattr(replayed, field)
        if before != after:
            return f"{field}: recorded {before!r}, replayed {after!r}"
    return "equal fields, other bytes"
