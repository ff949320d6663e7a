"""Group assembly: which groups make the next batch, and which are turned away, as a pure function of READY and the demands.

For the outstanding demand the ready groups are taken in completion order. Each is eligible, quarantined or abandoned; as soon
as the wanted number is eligible they are the batch, and what lies behind them in READY is not looked at. So an entry depends on
the READY prefix up to the last group that it needed, and not on how much of READY had arrived when the decision was made: a
decision made early, late or again after a crash is the same, bit for bit.
"""

from __future__ import annotations

from collections import Counter

from admission.gates import Abandon, Eligible, GateSettings, Quarantine, judge, lag_of
from schemas.group import ReadyGroup
from schemas.ledger import AbandonEntry, BatchEntry, BatchGroup, LedgerEntry, QuarantineEntry
from schemas.training import BatchDemand, StepCommit


class Assembly:
    """The fold over READY, TRAIN and LEDGER. The three may arrive in any relative order, and items may come again.

    `ready_seq`, `ledger_seq`: last sequences folded. `counters`: closed groups by way and reason, and duplicates.
    """

    def __init__(self) -> None:
        self.ready_seq = 0
        self.ledger_seq = 0
        self.step_committed = -1
        self.last_lags: tuple[int, ...] = ()
        self.counters: Counter[str] = Counter()
        self._open: dict[str, tuple[int, ReadyGroup]] = {}
        self._closed_ahead: set[str] = set()  # closed by the ledger before their READY item was folded
        self._demands: dict[int, tuple[int, BatchDemand]] = {}
        self._answered = -1  # steps up to here have their batch

    def ready(self, seq: int, group: ReadyGroup) -> None:
        """A training group became whole."""
        if seq <= self.ready_seq:
            self.counters["duplicates"] += 1
            return
        self.ready_seq = seq
        if group.group in self._closed_ahead:
            self._closed_ahead.remove(group.group)
        elif group.group in self._open:
            self.counters["duplicates"] += 1
        else:
            self._open[group.group] = (seq, group)

    def demand(self, seq: int, demand: BatchDemand) -> None:
        """The trainer asked for a batch. A demand for a step that has its batch changes nothing."""
        if demand.step in self._demands or demand.step <= self._answered:
            self.counters["duplicates"] += demand.step in self._demands
            return
        self._demands[demand.step] = (seq, demand)

    def step(self, commit: StepCommit) -> None:
        """The trainer committed a step; for the status only."""
        self.step_committed = max(self.step_committed, commit.step)

    def entry(self, seq: int, entry: LedgerEntry) -> None:
        """The ledger closed something."""
        if seq <= self.ledger_seq:
            return
        self.ledger_seq = seq
        if isinstance(entry, BatchEntry):
            for member in entry.groups:
                self._close(member.group, member.ready_seq)
            self._answered = max(self._answered, entry.step)
            self._demands = {step: held for step, held in self._demands.items() if step > self._answered}
            self.last_lags = tuple(member.lag for member in entry.groups)
            self.counters["batches"] += 1
            self.counters["consumed"] += len(entry.groups)
        else:
            self._close(entry.group, entry.ready_seq)
            way = "quarantined" if isinstance(entry, QuarantineEntry) else "abandoned"
            self.counters[way] += 1
            self.counters[f"{way}_{entry.reason}"] += 1

    def _close(self, group: str, ready_seq: int) -> None:
        if self._open.pop(group, None) is None and not 0 < ready_seq <= self.ready_seq:
            self._closed_ahead.add(group)

    def outstanding(self) -> tuple[int, BatchDemand] | None:
        """TRAIN sequence and demand of the lowest step that has no batch."""
        return self._demands[min(self._demands)] if self._demands else None

    def depth(self) -> int:
        """Ready groups that no entry has closed."""
        return len(self._open)

    def waiting_groups(self) -> list[tuple[int, ReadyGroup]]:
        """The open ready groups with their READY sequences, in completion order."""
        return sorted(self._open.values(), key=lambda held: held[0])


def decide(state: Assembly, settings: GateSettings) -> list[LedgerEntry]:
    """The entries that the ledger lacks for the outstanding demand, in the order in which they must be appended.

    The ineligible groups met on the way come first, in completion order, then the batch, if there are enough eligible ones.
    """
    held = state.outstanding()
    if held is None:
        return []
    demand_seq, demand = held
    turned_away: list[LedgerEntry] = []
    chosen: list[BatchGroup] = []
    for seq, group in state.waiting_groups():
        decision = judge(group, demand.version, demand.incarnation, settings)
        if isinstance(decision, Eligible):
            chosen.append(
                BatchGroup(
                    group=group.group,
                    ready_seq=seq,
                    oldest_version=group.oldest_version(),
                    newest_version=group.newest_version(),
                    lag=decision.lag,
                )
            )
        elif isinstance(decision, Quarantine):
            turned_away.append(_quarantine(seq, group, decision, demand_seq, demand, settings))
        else:
            turned_away.append(_abandon(seq, group, decision, settings))
        if len(chosen) >= demand.groups:
            return [*turned_away, _batch(chosen, demand_seq, demand, settings)]
    return turned_away


def _batch(chosen: list[BatchGroup], demand_seq: int, demand: BatchDemand, settings: GateSettings) -> BatchEntry:
    return BatchEntry(
        run=demand.run,
        step=demand.step,
        version=demand.version,
        incarnation=demand.incarnation,
        groups=tuple(chosen),
        ready_high_water=chosen[-1].ready_seq,
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


def _abandon(seq: int, group: ReadyGroup, decision: Abandon, settings: GateSettings) -> AbandonEntry:
    return AbandonEntry(
        run=group.run,
        group=group.group,
        ready_seq=seq,
        reason=decision.reason,
        detail=decision.detail,
        family=group.family,
        settings_hash=settings.hash(),
    )
