"""Replay: do READY and the demands give the recorded ledger again, entry by entry and bit by bit?

Two inputs of a decision stand in the entry itself, and are taken from there: the settings, and which demand was in force, which
matters where a trainer came back as a new incarnation and asked for the same step again. READY is taken in as far as a decision
needs it, since no decision depends on what lies behind; so a replay takes time in proportion to the run, and memory for the
open groups alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from admission.assembly import Assembly, decide
from admission.gates import GateSettings
from admission.losses import Evidence, loss_entry
from schemas.codec import encode
from schemas.group import ReadyGroup
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, LostItem
from schemas.message import Message
from schemas.table import Stream
from schemas.training import BatchDemand

_SHOWN_GROUPS = 16
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Difference:
    """The first ledger entry that a replay does not reproduce, and what it was decided from."""

    seq: int
    recorded: LedgerEntry
    replayed: LedgerEntry | None  # None: the replay decides nothing here
    why: str
    settings: GateSettings | None = None
    demand: tuple[int, BatchDemand] | None = None
    waiting: tuple[tuple[int, ReadyGroup], ...] = ()  # the first open groups, in completion order


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
    return _Replay(ready, train, settings, evidence or Evidence()).over(ledger)


class _Replay:
    """The fold so far, and what of READY and TRAIN is still to come."""

    def __init__(
        self,
        ready: Iterable[tuple[int, ReadyGroup]],
        train: Iterable[tuple[int, Message]],
        settings: Iterable[GateSettings],
        evidence: Evidence,
    ) -> None:
        self.state = Assembly()
        self.known = {item.hash(): item for item in settings}
        self.evidence = evidence
        self.open: dict[int, ReadyGroup] = {}  # READY sequence -> entry, of those taken in and not closed
        self.closed: set[str] = set()
        self._places: dict[str, int] = {}
        self._ready: Iterator[tuple[int, ReadyGroup]] = iter(ready)
        self._at = 0
        self._exhausted = False
        self._demands = iter([(seq, message) for seq, message in train if isinstance(message, BatchDemand)])
        self._next_demand = next(self._demands, None)

    def over(self, ledger: Iterable[tuple[int, LedgerEntry]]) -> Difference | None:
        """Entry after entry; the first difference ends it."""
        for seq, recorded in ledger:
            under = self.known.get(recorded.settings_hash)
            if under is None:
                why = f"decided under settings {recorded.settings_hash}, which are not among {sorted(self.known)}"
                return Difference(seq, recorded, None, why)
            if isinstance(recorded, AbandonEntry) and isinstance(recorded.lost, LostItem):
                difference = self._loss(seq, recorded, recorded.lost, under)
            else:
                difference = self._decision(seq, recorded, under)
            if difference is not None:
                return difference
            self._close(seq, recorded)
        return None

    def _decision(self, seq: int, recorded: LedgerEntry, under: GateSettings) -> Difference | None:
        in_force = recorded.demand_seq
        self._take_demands(in_force)
        self._take_ready(recorded.ready_high_water if isinstance(recorded, BatchEntry) else recorded.ready_seq)
        replayed, chunk = next(iter(decide(self.state, under)), None), _CHUNK
        while replayed is None and self.state.outstanding() is not None and not self._exhausted:
            self._take_ready(self._at + chunk)
            chunk *= 2
            replayed = next(iter(decide(self.state, under)), None)
        if replayed is None:
            return self._difference(seq, recorded, None, "the replay has nothing to decide here", under)
        if isinstance(replayed, AbandonEntry) and isinstance(in_force, msgspec.UnsetType):  # recorded before it was named
            replayed = msgspec.structs.replace(replayed, demand_seq=msgspec.UNSET)
        if encode(replayed) != encode(recorded):
            return self._difference(seq, recorded, replayed, first_field(recorded, replayed), under)
        return None

    def _loss(self, seq: int, recorded: AbandonEntry, item: LostItem, under: GateSettings) -> Difference | None:
        self._take_ready(max(recorded.ready_seq, item.seq if item.stream == Stream.READY else 0))
        group = recorded.group
        if group in self.closed:
            return self._difference(seq, recorded, None, f"{group} was closed before", under)
        if why := self.evidence.refutes(recorded, item, self.open):
            return self._difference(seq, recorded, None, why, under)
        family = self.evidence.families.get(group)
        if family is None:
            return self._difference(seq, recorded, None, f"{group} was never leased", under)
        replayed = loss_entry(recorded.run, group, family, recorded.ready_seq, item, recorded.settings_hash)
        if encode(replayed) != encode(recorded):
            return self._difference(seq, recorded, replayed, first_field(recorded, replayed), under)
        return None

    def _take_demands(self, in_force: int | msgspec.UnsetType) -> None:
        """Every demand up to the one that was in force; all, where the entry does not name it."""
        while (held := self._next_demand) is not None and (isinstance(in_force, msgspec.UnsetType) or held[0] <= in_force):
            self.state.demand(*held)
            self._next_demand = next(self._demands, None)

    def _take_ready(self, up_to: int) -> None:
        while self._at < up_to:
            found = next(self._ready, None)
            if found is None:
                self._exhausted = True
                return
            self._at, group = found
            if group.purpose == "train":
                self.state.ready(self._at, group)
                self.open[self._at] = group
                self._places[group.group] = self._at

    def _close(self, seq: int, entry: LedgerEntry) -> None:
        self.state.entry(seq, entry)
        for name in [member.group for member in entry.groups] if isinstance(entry, BatchEntry) else [entry.group]:
            self.closed.add(name)
            self.open.pop(self._places.pop(name, 0), None)

    def _difference(
        self, seq: int, recorded: LedgerEntry, replayed: LedgerEntry | None, why: str, under: GateSettings
    ) -> Difference:
        waiting = tuple(self.state.waiting_groups()[:_SHOWN_GROUPS])
        return Difference(seq, recorded, replayed, why, under, self.state.outstanding(), waiting)


def first_field(recorded: Message, replayed: Message) -> str:
    """The first field in which two messages differ, in words."""
    if type(recorded) is not type(replayed):
        return f"a {type(recorded).__name__} was recorded, the replay gives a {type(replayed).__name__}"
    for field in recorded.__struct_fields__:
        before, after = getattr(recorded, field), getattr(replayed, field)
        if before != after:
            return f"{field}: recorded {before!r}, replayed {after!r}"
    return "equal fields, other bytes"
