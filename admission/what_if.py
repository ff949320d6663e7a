"""What would have happened under other settings: the run again in virtual time, from recorded service times. Pure.

Two things are kept apart. Over the recorded groups, what these gates would have said of the very groups that there were
is exact. But nearly every setting changes what is generated next, through the sampler's bound, the trainer's pace or the groups
turned away; what then follows is modelled: lease by lease with the recorded time from lease to readiness, step by step with the
recorded training time, by the same assembly and gates. Assumed: a group takes as long whatever else is in flight, and a lease
gets the next recorded group's times, rewards and tokens.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from admission.assembly import Assembly, decide
from admission.gates import Eligible, GateSettings, judge
from schemas.group import ReadyGroup
from schemas.ledger import AbandonEntry, BatchEntry, QuarantineEntry
from schemas.training import BatchDemand, Branch


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The settings that are tried."""

    gates: GateSettings
    groups_per_batch: int
    window: int
    demand_ahead: int


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """A recorded group, and its seconds from the lease until it was whole."""

    group: ReadyGroup
    ready_s: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A recorded step, in seconds: demand, decision and commit since the run's begin, training, and until engines serve it."""

    step: int
    demand_at_s: float
    decided_at_s: float
    committed_at_s: float
    work_s: float
    publish_s: float


@dataclass
class RunTimes:
    """What a recording says of a run's times. `branches`: those that its last demand names."""

    groups: list[GroupTimes] = field(default_factory=list)
    steps: list[StepTimes] = field(default_factory=list)
    branches: tuple[Branch, ...] = ()
    groups_per_batch: int = 1
    never_ready: int = 0


@dataclass
class Outcome:
    """What a replay gives. Seconds; `wait_s` of each batch from its demand to its decision; `mix`: trained groups by family.

    `idle`: share of the time from the first demand to the last commit in which the trainer had nothing to train on.
    """

    steps: int = 0
    seconds: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)
    turned_away: Counter[tuple[str, str]] = field(default_factory=Counter)  # reason, family
    mix: Counter[str] = field(default_factory=Counter)
    leased: Counter[str] = field(default_factory=Counter)
    idle: float = 0.0

    def mean_wait_s(self) -> float:
        return sum(self.waits_s) / len(self.waits_s) if self.waits_s else 0.0

    def mean_lag(self) -> float:
        total = sum(self.lags.values())
        return sum(lag * n for lag, n in self.lags.items()) / total if total else 0.0


def as_recorded(
    times: RunTimes, batches: list[BatchEntry], dropped: list[tuple[str, str]], families: dict[str, str]
) -> Outcome:
    """What did happen, in the same terms. `dropped`: reason and family."""
    out = Outcome(steps=len(times.steps), turned_away=Counter(dropped), leased=Counter(g.group.family for g in times.groups))
    out.waits_s = [max(0.0, step.decided_at_s - step.demand_at_s) for step in times.steps]
    for batch in batches:
        out.lags.update(member.lag for member in batch.groups)
        out.mix.update(families.get(member.group, "?") for member in batch.groups)
    if times.steps:
        out.seconds = times.steps[-1].committed_at_s - times.steps[0].demand_at_s
        busy = sum(step.work_s for step in times.steps)
        out.idle = max(0.0, 1 - busy / out.seconds) if out.seconds > 0 else 0.0
    return out


def over_recorded_groups(
    times: RunTimes, trained_at: dict[str, int], gates: GateSettings
) -> tuple[Counter[int], Counter[tuple[str, str]]]:
    """Exact: lags of those recorded groups that these gates let pass, and what they turn away, each at the version at which
    the ledger decided about it (`trained_at`)."""
    lags: Counter[int] = Counter()
    turned_away: Counter[tuple[str, str]] = Counter()
    for held in times.groups:
        version = trained_at.get(held.group.group)
        if version is None:
            continue
        found = judge(held.group, version, times.branches, gates)
        if isinstance(found, Eligible):
            lags[found.lag] += 1
        else:
            turned_away[(str(found.reason), held.group.family)] += 1
    return lags, turned_away


def simulate(times: RunTimes, trial: Trial) -> Outcome:
    """Modelled: the closed loop of sampler, groups, admission and trainer over as many steps as were recorded."""
    return _Loop(times, trial).run()


class _Loop:
    """Events by virtual time. `serving`: the version that engines serve."""

    def __init__(self, times: RunTimes, trial: Trial) -> None:
        self.times, self.trial = times, trial
        self.state, self.out = Assembly(), Outcome()
        self.now, self.serving, self.ready_seq, self.ledger_seq = 0.0, 0, 0, 0
        self.events: list[tuple[float, int, str, int]] = []
        self.count = 0
        self.open: dict[str, int] = {}  # group -> version at its lease
        self.leased = self.turned_away = 0
        self.demanded_at: dict[int, float] = {}
        self.next_demand = 0
        self.training = False
        self.batches: dict[int, BatchEntry] = {}
        self.next_step = 0
        self.idle_since: float | None = 0.0
        self.idle_s = 0.0

    def run(self) -> Outcome:
        steps, groups = len(self.times.steps), len(self.times.groups)
        if not steps or not groups:
            return self.out
        self._demand()
        self._lease()
        while self.events and self.out.steps < steps:
            self.now, _, kind, number = heapq.heappop(self.events)
            if kind == "ready":
                self._ready(number)
            elif kind == "committed":
                self._committed(number)
            else:
                self.serving = max(self.serving, number)
            self._decide()
            self._train()
            self._lease()
        self.out.seconds = self.now
        self.out.idle = self.idle_s / self.now if self.now else 0.0
        return self.out

    def _push(self, after_s: float, kind: str, number: int) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + after_s, self.count, kind, number))

    def _lease(self) -> None:
        """The sampler's rule: window, and no group that could only be used staler than the bound."""
        per_batch = self.trial.groups_per_batch
        while (
            len(self.open) < self.trial.window
            and self.leased - self.turned_away < (self.serving + 1 + self.trial.gates.max_lag) * per_batch
            and self.leased - self.turned_away < len(self.times.steps) * per_batch
        ):
            held = self.times.groups[self.leased % len(self.times.groups)]
            name = f"g{self.leased:08d}"
            self.open[name] = self.serving
            self.out.leased[held.group.family] += 1
            self._push(held.ready_s, "ready", self.leased)
            self.leased += 1

    def _ready(self, ordinal: int) -> None:
        """The recorded group, but its tokens are of the versions that were served meanwhile."""
        group = self.times.groups[ordinal % len(self.times.groups)].group
        name = f"g{ordinal:08d}"
        oldest, newest = self.open[name], self.serving
        siblings = tuple(
            msgspec.structs.replace(s, oldest_version=oldest, newest_version=newest, incarnation=0, incarnations=msgspec.UNSET)
            for s in group.siblings
        )
        self.ready_seq += 1
        self.state.ready(self.ready_seq, msgspec.structs.replace(group, group=name, ordinal=ordinal, siblings=siblings))

    def _demand(self) -> None:
        step = self.next_demand
        if step >= len(self.times.steps):
            return
        self.next_demand += 1
        self.demanded_at[step] = self.now
        demand = BatchDemand(run="replay", step=step, version=step, incarnation=0, groups=self.trial.groups_per_batch)
        self.state.demand(step + 1, demand)

    def _decide(self) -> None:
        while entries := decide(self.state, self.trial.gates):
            for entry in entries:
                self.ledger_seq += 1
                self.state.entry(self.ledger_seq, entry)
                self._note(entry)

    def _note(self, entry: BatchEntry | QuarantineEntry | AbandonEntry) -> None:
        if isinstance(entry, BatchEntry):
            self.batches[entry.step] = entry
            self.out.waits_s.append(self.now - self.demanded_at[entry.step])
            for member in entry.groups:
                self.out.lags[member.lag] += 1
                self.out.mix[self._family(member.group)] += 1
                self.open.pop(member.group, None)
        else:
            self.turned_away += 1
            self.out.turned_away[(str(entry.reason), self._family(entry.group))] += 1
            self.open.pop(entry.group, None)

    def _family(self, group: str) -> str:
        return self.times.groups[int(group[1:]) % len(self.times.groups)].group.family

    def _train(self) -> None:
        if self.training or self.next_step not in self.batches:
            return
        if self.idle_since is not None:
            self.idle_s += self.now - self.idle_since
            self.idle_since = None
        self.training = True
        self._push(self._work_s(self.next_step), "committed", self.next_step)
        if self.trial.demand_ahead and self.next_demand == self.next_step + 1:
            self._demand()

    def _work_s(self, step: int) -> float:
        """A step's recorded time, by the number of its groups."""
        return self.times.steps[step].work_s * self.trial.groups_per_batch / max(1, self.times.groups_per_batch)

    def _committed(self, step: int) -> None:
        self.training, self.next_step = False, step + 1
        self.out.steps += 1
        self.idle_since = self.now
        self._push(self.times.steps[step].publish_s, "served", step + 1)
        if self.next_demand == self.next_step:
            self._demand()
