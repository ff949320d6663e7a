"""Group assembly: which groups make the next batch, and which are turned away, as a pure function of READY and the demands.

For the outstanding demand the ready groups are taken in completion order. Each is eligible, quarantined or abandoned; as soon
as the wanted number is eligible they are the batch, and what lies behind them in READY is not looked at. So an entry depends on
the READY prefix up to the last group that it needed, and not on how much of READY had arrived when the decision was made: a
decision made early, late or again after a crash is the same, bit for bit.

With an age limit, what was leased longer ago than that before the demand, by the server's times, goes before the others, the
oldest first, if it was ready when the demand was stored. So nothing is decided before READY is known up to the demand's time;
what becomes ready later is not looked at unless it is needed, and the same holds as without the limit.

A trainer that came back as a new incarnation asks again for the steps that have no batch, and names the branches that it left.
Which of a step's demands was in force is the one thing that timing decides; every entry names it, and no demand older than one
that the ledger names is used again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec

from admission.background import Background
from admission.gates import Abandon, Eligible, GateSettings, Quarantine, judge, lag_of
from admission.turn import Turn, turn_of
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, BatchGroup, LedgerEntry, LostItem, QuarantineEntry
from schemas.table import Stream
from schemas.training import BatchDemand, StepCommit

READY = str(Stream.READY)


@dataclass(frozen=True, slots=True)
class Loss:
    """A leased group that lost an item. `ready_seq`: 0 for none. `step`: of the batch that it is in; unset while it is open."""

    group: str
    family: str
    ready_seq: int
    item: LostItem
    step: int | msgspec.UnsetType = msgspec.UNSET


class Assembly:
    """The fold over TASKS, READY, TRAIN and LEDGER. They may arrive in any relative order, and items may come again.

    `background`: the server's times, as they are told, or from the start by whoever has the whole logs. `ready_seq`,
    `ledger_seq`, `demand_seq`: last sequences folded. `counters`: closed groups by way and reason, and duplicates.
    """

    def __init__(self, background: Background | None = None) -> None:
        self.background = background or Background()
        self.ready_seq = 0
        self.ledger_seq = 0
        self.demand_seq = 0
        self.step_committed = -1
        self.last_lags: tuple[int, ...] = ()
        self.counters: Counter[str] = Counter()
        self._open: dict[str, tuple[int, ReadyGroup]] = {}
        self._closed: set[str] = set()  # for ever: a READY entry that was lost may be written again
        self._families: dict[str, str] = {}  # of every leased training group
        self._lost: dict[str, tuple[int, LostItem]] = {}  # group -> its READY sequence (0: none) and what it lost
        self._demands: dict[int, tuple[int, BatchDemand]] = {}
        self._committed: dict[int, StepCommit] = {}
        self._assumed: dict[str, BatchGroup] = {}
        self._batched: dict[str, tuple[int, int]] = {}  # group of a batch, not taken out -> its READY sequence, step
        self._left_out: dict[str, tuple[int, LostItem]] = {}  # by a committed step: group -> step, item
        self._answered = -1  # steps up to here have their batch
        self._decided_under = 0  # newest demand that the ledger names

    def ready(self, seq: int, group: ReadyGroup, time_ns: int = 0) -> None:
        """A training group became whole."""
        if seq <= self.ready_seq:
            self.counters["duplicates"] += 1
            return
        self.ready_seq = seq
        if time_ns:
            self.background.ready(seq, time_ns)
        if group.group in self._closed:
            return
        if group.group in self._open:
            self.counters["duplicates"] += 1
        else:
            self._open[group.group] = (seq, group)

    def lease(self, lease: GroupLease, time_ns: int = 0) -> None:
        """A group was leased."""
        if lease.purpose == "train":
            self._families[lease.group] = lease.family
            self.background.lease(lease, time_ns)

    def assume(self, member: BatchGroup) -> None:
        """For a replay: this member of a recorded batch was ready and eligible, though its READY entry is lost since."""
        if member.group not in self._closed:
            self._assumed[member.group] = member

    def unusable(self, seq: int, group: str) -> None:
        """What stands on `ready.<group>` cannot be used, and nothing else can ever stand there."""
        self.ready_seq = max(self.ready_seq, seq)
        self._lost.setdefault(group, (0, LostItem(READY, seq, "")))

    def lose(self, group: str, item: LostItem) -> None:
        """A ready group is found to lack one of its items."""
        if group in self._open:
            self._lost.setdefault(group, (self._open[group][0], item))

    def open_group(self, group: str) -> tuple[int, ReadyGroup]:
        """READY sequence and entry of a ready group that nothing has closed. Raises `KeyError` for any other."""
        return self._open[group]

    def losses(self) -> list[Loss]:
        """Leased groups that lost something and are open, or were left out of the step of their batch; by the item's place."""
        found = [
            Loss(group, self._families[group], seq, item)
            for group, (seq, item) in self._lost.items()
            if group in self._families and group not in self._closed
        ]
        for group, (step, item) in self._left_out.items():
            ready_seq, of = self._batched.get(group, (0, -1))
            if of == step and group in self._families:
                found.append(Loss(group, self._families[group], ready_seq, item, step))
        return sorted(found, key=lambda loss: (loss.item.stream, loss.item.seq))

    def demand(self, seq: int, demand: BatchDemand, time_ns: int = 0) -> None:
        """The trainer asked for a batch. For a step that has its batch, or by an older incarnation, it changes nothing."""
        self.demand_seq = max(self.demand_seq, seq)
        if time_ns:
            self.background.demand(seq, time_ns)
        if demand.step <= self._answered:
            return
        held = self._demands.get(demand.step)
        if held is not None and held[1].incarnation >= demand.incarnation:
            self.counters["duplicates"] += 1
            return
        self._demands[demand.step] = (seq, demand)

    def step(self, commit: StepCommit) -> None:
        """The trainer committed a step. It tells what the ledger must hold, and which groups of its batch were lost."""
        self.step_committed = max(self.step_committed, commit.step)
        self._committed[commit.step] = commit
        for left in commit.left_out():
            self._left_out.setdefault(left.group, (commit.step, left.item))

    def committed(self, step: int) -> StepCommit | None:
        """The commit of a step; `None` if it is not committed."""
        return self._committed.get(step)

    def entry(self, seq: int, entry: LedgerEntry) -> None:
        """The ledger closed something."""
        if seq <= self.ledger_seq:
            return
        self.ledger_seq = seq
        if not isinstance(entry.demand_seq, msgspec.UnsetType):
            self._decided_under = max(self._decided_under, entry.demand_seq)
        if isinstance(entry, BatchEntry):
            for member in entry.groups:
                self._close(member.group)
                self._batched[member.group] = (member.ready_seq, entry.step)
            self._answered = max(self._answered, entry.step)
            self._demands = {step: held for step, held in self._demands.items() if step > self._answered}
            self.last_lags = tuple(member.lag for member in entry.groups)
            self.counters["batches"] += 1
            self.counters["consumed"] += len(entry.groups)
            self.counters["taken_for_age"] += sum(isinstance(member.aged_ns, int) for member in entry.groups)
            self.counters["zero_variance_trained"] += sum(member.zero_variance is True for member in entry.groups)
        else:
            self._close(entry.group)
            if isinstance(entry, AbandonEntry) and isinstance(entry.step, int):
                self.counters["consumed"] -= self._batched.pop(entry.group, None) is not None
            way = "quarantined" if isinstance(entry, QuarantineEntry) else "abandoned"
            self.counters[way] += 1
            self.counters[f"{way}_{entry.reason}"] += 1

    def _close(self, group: str) -> None:
        self._open.pop(group, None)
        self._assumed.pop(group, None)
        self._lost.pop(group, None)
        self._closed.add(group)

    def outstanding(self) -> tuple[int, BatchDemand] | None:
        """TRAIN sequence and demand of the lowest step that has no batch; none before every demand that the ledger names."""
        if self.demand_seq < self._decided_under:
            return None
        return self._demands[min(self._demands)] if self._demands else None

    def depth(self) -> int:
        """Ready groups that no entry has closed."""
        return len(self._open)

    def waiting_groups(self) -> list[tuple[int, ReadyGroup | BatchGroup]]:
        """The open ready groups with their READY sequences, in completion order; those that are assumed as what they became."""
        assumed = [(member.ready_seq, member) for member in self._assumed.values()]
        return sorted([*self._open.values(), *assumed], key=lambda held: held[0])


def decide(state: Assembly, settings: GateSettings) -> list[LedgerEntry]:
    """The entries that the ledger lacks for the outstanding demand, in the order in which they must be appended.

    The ineligible groups met on the way come first, in completion order, then the batch, if there are enough eligible ones.
    """
    held = state.outstanding()
    if held is None:
        return []
    demand_seq, demand = held
    turn = turn_of(state.waiting_groups(), state.background, state.ready_seq, demand_seq, settings)
    if turn is None:
        return []
    turned_away: list[LedgerEntry] = []
    chosen: list[BatchGroup] = []
    trained_under = None if isinstance(demand.policy, msgspec.UnsetType) else demand.policy
    for seq, group, aged_ns in turn.groups:
        if isinstance(group, BatchGroup):
            chosen.append(group)
            if len(chosen) >= demand.groups:
                return [*turned_away, _batch(chosen, turn, demand_seq, demand, settings)]
            continue
        known = state.background.manifests
        decision = judge(group, demand.version, demand.left(), settings, trained_under=trained_under, known=known)
        if isinstance(decision, Eligible):
            chosen.append(_member(seq, group, decision, aged_ns, settings))
        elif isinstance(decision, Quarantine):
            turned_away.append(_quarantine(seq, group, decision, demand_seq, demand, settings))
        else:
            turned_away.append(_abandon(seq, group, decision, demand_seq, settings))
        if len(chosen) >= demand.groups:
            return [*turned_away, _batch(chosen, turn, demand_seq, demand, settings)]
    return turned_away


def _member(
    seq: int, group: ReadyGroup, decision: Eligible, aged_ns: int | msgspec.UnsetType, settings: GateSettings
) -> BatchGroup:
    return BatchGroup(
        group=group.group,
        ready_seq=seq,
        oldest_version=group.oldest_version(),
        newest_version=group.newest_version(),
        lag=decision.lag,
        aged_ns=aged_ns,
        zero_variance=True if decision.flat and settings.zero_variance == "count" else msgspec.UNSET,
    )


def _batch(chosen: list[BatchGroup], turn: Turn, demand_seq: int, demand: BatchDemand, settings: GateSettings) -> BatchEntry:
    return BatchEntry(
        run=demand.run,
        step=demand.step,
        version=demand.version,
        incarnation=demand.incarnation,
        groups=tuple(chosen),
        ready_high_water=max(turn.looked_at, *(member.ready_seq for member in chosen)),
        demand_seq=demand_seq,
        settings_hash=settings.hash(),
        max_lag=settings.max_lag,
    )


def _quarantine(
    seq: int, group: ReadyGroup, decision: Quarantine, demand_seq: int, demand: BatchDemand, settings: GateSettings
) -> QuarantineEntry:
    rewards = [reward for reward in group.rewards() if reward is not None]
    return QuarantineEntry(
        run=group.run,
        group=group.group,
        ready_seq=seq,
        reason=decision.reason,
        detail=decision.detail,
        at_version=demand.version,
        oldest_version=group.oldest_version(),
        lag=lag_of(group, demand.version),
        family=group.family,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        sampled_tokens=sum(s.sampled_tokens for s in group.siblings),
        demand_seq=demand_seq,
        settings_hash=settings.hash(),
    )


def _abandon(seq: int, group: ReadyGroup, decision: Abandon, demand_seq: int, settings: GateSettings) -> AbandonEntry:
    return AbandonEntry(
        run=group.run,
        group=group.group,
        ready_seq=seq,
        reason=decision.reason,
        detail=decision.detail,
        family=group.family,
        settings_hash=settings.hash(),
        demand_seq=demand_seq,
    )
