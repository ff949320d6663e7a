"""Replay: do READY and the demands give the recorded ledger again, entry by entry and bit by bit?

Two inputs of a decision stand in the entry itself, and are taken from there: the settings, and which demand was in force, which
matters where a trainer came back as a new incarnation and asked for the same step again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from admission.assembly import Assembly, decide
from admission.background import Background
from admission.gates import GateSettings
from admission.losses import Evidence, loss_entry
from schemas.codec import encode
from schemas.group import ReadyGroup
from schemas.ledger import AbandonEntry, BatchEntry, BatchGroup, LedgerEntry, LostItem
from schemas.message import Message
from schemas.table import Stream
from schemas.training import BatchDemand, LostGroup, StepCommit

_AHEAD = 64  # ready groups


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
    background: Background | None = None,
) -> Difference | None:
    """Decide again over recorded `(sequence, message)` pairs; `None` if every recorded entry comes out the same.

    Each entry is decided under the settings whose hash it carries; pass every setting that the run was under, in any order.
    An entry that closes a group for a lost item is looked up in `evidence`: the item must be missing there as well. One that
    takes a group out of a batch is looked up in the commits of that batch's step, which decided it. `background`: the server's
    times, which an age limit goes by, and the manifests that leases carry.
    """
    known = {item.hash(): item for item in settings}
    state = Assembly(background)
    whole = {seq: group for seq, group in ready if group.purpose == "train"}
    entries, trained = list(ledger), list(train)
    demands = [(seq, message) for seq, message in trained if isinstance(message, BatchDemand)]
    commits = [message for _, message in trained if isinstance(message, StepCommit)]
    assumed = ((member.ready_seq, member) for member in _unready(entries, commits, whole))
    every: list[tuple[int, ReadyGroup | BatchGroup]] = sorted([*whole.items(), *assumed], key=lambda held: held[0])
    coming = iter(every)
    members: dict[str, tuple[int, int]] = {}  # of batches: step and READY sequence
    folded = 0
    for seq, recorded in entries:
        under = known.get(recorded.settings_hash)
        if under is None:
            why = f"decided under settings {recorded.settings_hash}, which are not among {sorted(known)}"
            return Difference(seq, recorded, None, why)
        if isinstance(recorded, AbandonEntry) and isinstance(recorded.lost, LostItem):
            found = evidence or Evidence()
            if isinstance(recorded.step, int):
                if why := _not_left_out(recorded, recorded.step, recorded.lost, members, commits, found, whole):
                    return Difference(seq, recorded, None, why)
                del members[recorded.group]
            elif why := found.refutes(recorded, recorded.lost, whole):
                return Difference(seq, recorded, None, why)
            if difference := _other_entry(seq, recorded, recorded.lost, found):
                return difference
            state.entry(seq, recorded)
            continue
        in_force = recorded.demand_seq
        while folded < len(demands) and (isinstance(in_force, msgspec.UnsetType) or demands[folded][0] <= in_force):
            state.demand(*demands[folded])
            folded += 1
        replayed = _decided(state, under, coming)
        if replayed is None:
            return Difference(seq, recorded, None, "the replay has nothing to decide here")
        if isinstance(replayed, AbandonEntry) and isinstance(in_force, msgspec.UnsetType):  # recorded before it was named
            replayed = msgspec.structs.replace(replayed, demand_seq=msgspec.UNSET)
        if encode(replayed) != encode(recorded):
            return Difference(seq, recorded, replayed, _first_field(recorded, replayed))
        state.entry(seq, recorded)
        if isinstance(recorded, BatchEntry):
            members |= {member.group: (recorded.step, member.ready_seq) for member in recorded.groups}
    return None


def _decided(state: Assembly, under: GateSettings, coming: Iterator[tuple[int, ReadyGroup | BatchGroup]]) -> LedgerEntry | None:
    """The next entry. It follows from a prefix of READY, so no more of READY is folded than that needs, some at a time."""
    while True:
        replayed = next(iter(decide(state, under)), None)
        more = list(islice(coming, _AHEAD)) if replayed is None else []
        if not more:
            return replayed
        for seq, group in more:
            if isinstance(group, BatchGroup):
                state.assume(group)
            else:
                state.ready(seq, group)


def _unready(
    ledger: Iterable[tuple[int, LedgerEntry]], commits: Iterable[StepCommit], ready: Mapping[int, ReadyGroup]
) -> list[BatchGroup]:
    """Members of batches that lost their READY entry and were therefore left out of the step: their place in the batch is
    taken from the record, since nothing is left to decide it from."""
    entries = [entry for _, entry in ledger]
    lost = {left.group: left.item for commit in commits for left in commit.left_out()}
    lost |= {e.group: e.lost for e in entries if isinstance(e, AbandonEntry) and e.step != msgspec.UNSET and e.lost}
    gone = {group for group, item in lost.items() if item.stream == Stream.READY and item.seq not in ready}
    return [member for e in entries if isinstance(e, BatchEntry) for member in e.groups if member.group in gone]


def _not_left_out(
    recorded: AbandonEntry,
    step: int,
    item: LostItem,
    members: Mapping[str, tuple[int, int]],
    commits: Sequence[StepCommit],
    evidence: Evidence,
    ready: Mapping[int, ReadyGroup],
) -> str:
    """Why a group was not taken out of its batch by that batch's step; empty when it was."""
    if members.get(recorded.group) != (step, recorded.ready_seq):
        return f"batch {step} does not hold {recorded.group} with READY {recorded.ready_seq}"
    of_step = [commit for commit in commits if commit.step == step]
    if not of_step:  # TRAIN lost it: then the item itself must be missing
        return evidence.refutes(recorded, item, ready)
    left = LostGroup(recorded.group, item)
    return "" if any(left in commit.left_out() for commit in of_step) else f"no commit of step {step} names this loss"


def _other_entry(seq: int, recorded: AbandonEntry, item: LostItem, evidence: Evidence) -> Difference | None:
    group, family = recorded.group, evidence.families.get(recorded.group)
    if family is None:
        return Difference(seq, recorded, None, f"{group} was never leased")
    replayed = loss_entry(recorded.run, group, family, recorded.ready_seq, item, recorded.settings_hash, step=recorded.step)
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
