"""Replay: do READY and the demands give the recorded ledger again, entry by entry and bit by bit?

Two inputs of a decision stand in the entry itself, and are taken from there: the settings, and which demand was in force, which
matters where a trainer came back as a new incarnation and asked for the same step again. READY is taken in as far as a decision
needs it, since none depends on what lies behind.

What a damaged store no longer has cannot be decided from. Such entries are taken from the record, and each is named.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from admission.assembly import Assembly, decide
from admission.gates import GateSettings
from admission.losses import Evidence, loss_entry
from schemas.codec import encode
from schemas.group import ReadyGroup
from schemas.ledger import AbandonEntry, BatchEntry, BatchGroup, LedgerEntry, LostItem
from schemas.message import Message
from schemas.table import Stream
from schemas.training import BatchDemand, Branch, LostGroup, StepCommit

_AHEAD = 64  # READY sequences
Arrival = tuple[int, ReadyGroup | BatchGroup]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first ledger entry that a replay does not reproduce."""

    seq: int
    recorded: LedgerEntry
    replayed: LedgerEntry | None  # None: the replay decides nothing here
    why: str


@dataclass(frozen=True, slots=True)
class Reach:
    """What the logs at hand no longer have, or never had.

    `ready`, `train`: sequences that were written and are gone. `outside`: whether nothing can be said about an item of a group.
    """

    ready: Container[int] = ()
    train: Container[int] = ()
    outside: Callable[[str, LostItem], bool] = lambda group, item: False


def replay(
    ready: Iterable[tuple[int, ReadyGroup]],
    train: Iterable[tuple[int, Message]],
    ledger: Iterable[tuple[int, LedgerEntry]],
    *settings: GateSettings,
    evidence: Evidence | None = None,
) -> Difference | None:
    """Decide again over recorded `(sequence, message)` pairs; `None` if every recorded entry comes out the same.

    Each entry is decided under the settings whose hash it carries; pass every setting that the run was under, in any order.
    An entry that closes a group for a lost item is looked up in `evidence`: the item must be missing there as well. One that
    takes a group out of a batch is looked up in the commits of that batch's step, which decided it.
    """
    held = dict(sorted(dict(ready).items()))
    return Replay(held.items(), held, train, ledger, settings, evidence or Evidence()).run()


class Replay:
    """The fold so far, and what of READY and TRAIN is still to come.

    `ready` is read as far as decisions need it; `held` gives an entry of READY by its sequence. `trusted`: LEDGER sequence and
    reason of each entry that was, or a part of which was, taken from the record.
    """

    def __init__(
        self,
        ready: Iterable[tuple[int, ReadyGroup]],
        held: Mapping[int, ReadyGroup],
        train: Iterable[tuple[int, Message]],
        ledger: Iterable[tuple[int, LedgerEntry]],
        settings: Iterable[GateSettings],
        evidence: Evidence,
        reach: Reach | None = None,
    ) -> None:
        self.trusted: list[tuple[int, str]] = []
        self._held, self._evidence, self._reach = held, evidence, reach or Reach()
        self._known = {item.hash(): item for item in settings}
        self._entries = list(ledger)
        self._state = Assembly()
        trained = list(train)
        self._commits = [message for _, message in trained if isinstance(message, StepCommit)]
        self._demands = {seq: message for seq, message in trained if isinstance(message, BatchDemand)}
        self._restored = self._lost_demands()
        self._to_fold = iter(sorted((self._demands | self._restored).items()))
        self._next_demand = next(self._to_fold, None)
        assumed = sorted(((m.ready_seq, m) for m in self._assumed()), key=lambda held: held[0])
        self._assumed_groups = {member.group for _, member in assumed}
        self._coming = heapq.merge(self._trained(ready), assumed, key=lambda arrival: arrival[0])
        self._next_ready: Arrival | None = None
        self._at, self._more = 0, True
        self._members: dict[str, tuple[int, int]] = {}  # of batches: step and READY sequence

    def run(self) -> Difference | None:
        """Entry after entry; the first difference ends it."""
        for seq, recorded in self._entries:
            under = self._known.get(recorded.settings_hash)
            if under is None:
                why = f"decided under settings {recorded.settings_hash}, which are not among {sorted(self._known)}"
                return Difference(seq, recorded, None, why)
            if isinstance(recorded, AbandonEntry) and isinstance(recorded.lost, LostItem):
                difference = self._loss(seq, recorded, recorded.lost)
            else:
                difference = self._decision(seq, recorded, under)
            if difference is not None:
                return difference
            self._state.entry(seq, recorded)
            if isinstance(recorded, BatchEntry):
                self._members |= {member.group: (recorded.step, member.ready_seq) for member in recorded.groups}
        return None

    def _decision(self, seq: int, recorded: LedgerEntry, under: GateSettings) -> Difference | None:
        if why := self._out_of_reach(recorded):
            self.trusted.append((seq, why))
            return None
        in_force = recorded.demand_seq
        self._take_demands(in_force)
        self._take_ready(recorded.ready_high_water if isinstance(recorded, BatchEntry) else recorded.ready_seq)
        replayed = next(iter(decide(self._state, under)), None)
        while replayed is None and self._more and self._state.outstanding() is not None:
            self._take_ready(self._at + _AHEAD)
            replayed = next(iter(decide(self._state, under)), None)
        if replayed is None:
            return Difference(seq, recorded, None, "the replay has nothing to decide here")
        if isinstance(replayed, AbandonEntry) and isinstance(in_force, msgspec.UnsetType):  # recorded before it was named
            replayed = msgspec.structs.replace(replayed, demand_seq=msgspec.UNSET)
        if encode(replayed) != encode(recorded):
            return Difference(seq, recorded, replayed, _first_field(recorded, replayed))
        if isinstance(recorded, BatchEntry):
            self._note_assumed(seq, recorded)
        return None

    # -- losses --------------------------------------------------------------------------------------------------------------

    def _loss(self, seq: int, recorded: AbandonEntry, item: LostItem) -> Difference | None:
        """An entry that closes a group for a lost item, out of a batch or not."""
        if isinstance(recorded.step, int):
            why = self._not_left_out(seq, recorded, recorded.step, item)
        else:
            why = self._not_lost(seq, recorded, item)
        if why:
            return Difference(seq, recorded, None, why)
        if isinstance(recorded.step, int):
            del self._members[recorded.group]
        group, family = recorded.group, self._evidence.families.get(recorded.group)
        if family is None:
            return Difference(seq, recorded, None, f"{group} was never leased")
        replayed = loss_entry(recorded.run, group, family, recorded.ready_seq, item, recorded.settings_hash, step=recorded.step)
        same = encode(replayed) == encode(recorded)
        return None if same else Difference(seq, recorded, replayed, _first_field(recorded, replayed))

    def _not_left_out(self, seq: int, recorded: AbandonEntry, step: int, item: LostItem) -> str:
        """Why a group was not taken out of its batch by that batch's step; empty when it was."""
        if self._members.get(recorded.group) != (step, recorded.ready_seq):
            return f"batch {step} does not hold {recorded.group} with READY {recorded.ready_seq}"
        of_step = [commit for commit in self._commits if commit.step == step]
        if not of_step:  # TRAIN lost it: then the item itself must be missing
            return self._not_lost(seq, recorded, item)
        left = LostGroup(recorded.group, item)
        return "" if any(left in commit.left_out() for commit in of_step) else f"no commit of step {step} names this loss"

    def _not_lost(self, seq: int, recorded: AbandonEntry, item: LostItem) -> str:
        if item.stream != Stream.READY and self._reach.outside(recorded.group, item):
            self.trusted.append((seq, f"EPISODES {item.seq} is outside of the range, so that it was lost cannot be seen"))
            return ""
        if item.stream != Stream.READY and recorded.ready_seq in self._reach.ready and recorded.ready_seq not in self._held:
            self.trusted.append((seq, f"READY {recorded.ready_seq}, which names the lost item, is gone as well"))
            return ""
        return self._evidence.refutes(recorded, item, self._held)

    # -- what is gone --------------------------------------------------------------------------------------------------------

    def _out_of_reach(self, recorded: LedgerEntry) -> str:
        """Why an entry cannot be decided again, since what it came from is gone; empty when it can."""
        asked = recorded.demand_seq
        if isinstance(asked, int) and asked in self._reach.train and asked not in self._demands and asked not in self._restored:
            return f"its demand, TRAIN {asked}, is gone"
        if not isinstance(recorded, BatchEntry) and self._is_gone(recorded.group, recorded.ready_seq):
            return f"its ready entry, READY {recorded.ready_seq}, is gone"
        return ""

    def _is_gone(self, group: str, ready_seq: int) -> bool:
        if ready_seq not in self._reach.ready:
            return False
        stands = self._held.get(ready_seq)
        return stands is None or stands.group != group

    def _assumed(self) -> list[BatchGroup]:
        """Members of batches whose READY entry is gone: their place is taken from the record, since nothing is left to decide
        it from. A group that its step left out for this very loss needs no more proof; others count as trusted."""
        lost = {left.group: left.item for commit in self._commits for left in commit.left_out()}
        abandoned = [entry for _, entry in self._entries if isinstance(entry, AbandonEntry)]
        lost |= {e.group: e.lost for e in abandoned if isinstance(e.step, int) and isinstance(e.lost, LostItem)}
        self._proven = {g for g, item in lost.items() if item.stream == Stream.READY and item.seq not in self._held}
        members = [member for _, entry in self._entries if isinstance(entry, BatchEntry) for member in entry.groups]
        return [m for m in members if m.group in self._proven or self._is_gone(m.group, m.ready_seq)]

    def _note_assumed(self, seq: int, batch: BatchEntry) -> None:
        if asked := self._restored.get(batch.demand_seq):
            self.trusted.append((seq, f"the demand of step {asked.step}, TRAIN {batch.demand_seq}, is gone"))
        for member in batch.groups:
            if member.group in self._assumed_groups and member.group not in self._proven:
                self.trusted.append((seq, f"the ready entry of {member.group}, READY {member.ready_seq}, is gone"))

    def _lost_demands(self) -> dict[int, BatchDemand]:
        """Demands that TRAIN has lost since, as the batches that answered them say."""
        branches: dict[int, tuple[Branch, ...]] = {demand.incarnation: demand.left() for demand in self._demands.values()}
        branches.setdefault(0, ())
        return {
            entry.demand_seq: BatchDemand(
                run=entry.run,
                step=entry.step,
                version=entry.version,
                incarnation=entry.incarnation,
                groups=len(entry.groups),
                branches=branches[entry.incarnation] or msgspec.UNSET,
            )
            for _, entry in self._entries
            if isinstance(entry, BatchEntry)
            and entry.demand_seq in self._reach.train
            and entry.demand_seq not in self._demands
            and entry.incarnation in branches
        }

    # -- taking in -----------------------------------------------------------------------------------------------------------

    def _trained(self, ready: Iterable[tuple[int, ReadyGroup]]) -> Iterator[Arrival]:
        for seq, group in ready:
            if group.purpose == "train" and group.group not in self._assumed_groups:
                yield seq, group

    def _take_demands(self, in_force: int | msgspec.UnsetType) -> None:
        """Every demand up to the one that was in force; all, where the entry does not name it."""
        while (held := self._next_demand) is not None and (isinstance(in_force, msgspec.UnsetType) or held[0] <= in_force):
            self._state.demand(*held)
            self._next_demand = next(self._to_fold, None)

    def _take_ready(self, up_to: int) -> None:
        while self._more:
            self._next_ready = self._next_ready or next(self._coming, None)
            if self._next_ready is None:
                self._more = False
            elif self._next_ready[0] > up_to:
                break
            else:
                seq, group = self._next_ready
                self._next_ready = None
                if isinstance(group, BatchGroup):
                    self._state.assume(group)
                else:
                    self._state.ready(seq, group)
        self._at = max(self._at, up_to)


def _first_field(recorded: LedgerEntry, replayed: LedgerEntry) -> str:
    if type(recorded) is not type(replayed):
        return f"a {type(recorded).__name__} was recorded, the replay gives a {type(replayed).__name__}"
    for field in recorded.__struct_fields__:
        before, after = getattr(recorded, field), getattr(replayed, field)
        if before != after:
            return f"{field}: recorded {before!r}, replayed {after!r}"
    return "equal fields, other bytes"
