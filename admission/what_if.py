"""What would have happened under other settings: the run again in virtual time, from recorded service times. Pure.

Two things are kept apart. Over the recorded groups, what these gates would have said of the very groups that there were
is exact. But nearly every setting changes what is generated next, through the sampler's bound, the trainer's pace or the groups
turned away; what then follows is modelled: lease by lease with the recorded time from lease to readiness, step by step with the
recorded training time, by the same assembly and gates; a change of weights acts on turns in flight as the mode says. Assumed: a
group takes as long whatever else is in flight, and a lease gets the next recorded group's times, rewards and tokens.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from admission.assembly import Assembly, decide
from admission.gates import Eligible, GateSettings, judge
from admission.what_if_strata import Stratum, stratum_of
from admission.what_if_turns import InFlight, Play, Turns
from schemas.group import ReadyGroup, Sibling
from schemas.ledger import AbandonEntry, BatchEntry, QuarantineEntry
from schemas.training import BatchDemand, Branch


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The settings that are tried."""

    gates: GateSettings
    groups_per_batch: int
    window: int
    demand_ahead: int
    in_flight: InFlight = "continue"


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """A recorded group, its seconds from the lease until it was whole, and the turns of each sibling, as far as recorded."""

    group: ReadyGroup
    ready_s: float
    turns: tuple[Turns, ...] = ()


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
    """What a recording says of a run's times. `thirds`: bounds of the groups' lengths."""

    groups: list[GroupTimes] = field(default_factory=list)
    steps: list[StepTimes] = field(default_factory=list)
    thirds: tuple[float, float] = (0.0, 0.0)
    groups_per_batch: int = 1
    never_ready: int = 0


@dataclass
class Outcome:
    """What a replay gives. Seconds; `wait_s` of each batch from its demand to its decision; `mix`: trained groups by stratum.

    `idle`: share of the time from the first demand to the last commit in which the trainer had nothing to train on.
    """

    steps: int = 0
    seconds: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)
    turned_away: Counter[tuple[str, Stratum]] = field(default_factory=Counter)  # by reason and stratum
    mix: Counter[Stratum] = field(default_factory=Counter)
    leased: Counter[str] = field(default_factory=Counter)
    idle: float = 0.0

    def mean_wait_s(self) -> float:
        return sum(self.waits_s) / len(self.waits_s) if self.waits_s else 0.0

    def mean_lag(self) -> float:
        total = sum(self.lags.values())
        return sum(lag * n for lag, n in self.lags.items()) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Decided:
    """What a recorded decision about a group was made from: the version to be updated, and the branches that were left."""

    version: int
    branches: tuple[Branch, ...] = ()


def as_recorded(
    times: RunTimes,
    batches: Iterable[BatchEntry],
    dropped: Iterable[tuple[str, Stratum]],
    strata: Mapping[str, Stratum],
    lost: frozenset[str] = frozenset(),
) -> Outcome:
    """What did happen, in the same terms. `dropped`: reason and stratum; `lost`: groups that were taken out of their batch."""
    out = Outcome(steps=len(times.steps), turned_away=Counter(dropped), leased=Counter(g.group.family for g in times.groups))
    out.waits_s = [max(0.0, step.decided_at_s - step.demand_at_s) for step in times.steps]
    for batch in batches:
        trained = [member for member in batch.groups if member.group not in lost]
        out.lags.update(member.lag for member in trained)
        out.mix.update(strata.get(member.group, Stratum("?")) for member in trained)
    if times.steps:
        out.seconds = times.steps[-1].committed_at_s - times.steps[0].demand_at_s
        busy = sum(step.work_s for step in times.steps)
        out.idle = max(0.0, 1 - busy / out.seconds) if out.seconds > 0 else 0.0
    return out


def over_recorded_groups(
    times: RunTimes, decided: Mapping[str, Decided], gates: GateSettings, lost: frozenset[str] = frozenset()
) -> tuple[Counter[int], Counter[tuple[str, Stratum]]]:
    """Exact: lags of those recorded groups that these gates let pass, and what they turn away, each at the version at which the
    ledger decided about it. What was lost in the store is lost under any setting."""
    lags: Counter[int] = Counter()
    turned_away: Counter[tuple[str, Stratum]] = Counter()
    for held in times.groups:
        name, stratum = held.group.group, stratum_of(held.group, times.thirds)
        if name in lost:
            turned_away[("lost_item", stratum)] += 1
        elif name in decided:
            found = judge(held.group, decided[name].version, decided[name].branches, gates)
            if isinstance(found, Eligible):
                lags[found.lag] += 1
            else:
                turned_away[(str(found.reason), stratum)] += 1
    return lags, turned_away


def simulate(times: RunTimes, trial: Trial) -> Outcome:
    """Modelled: the closed loop of sampler, groups, admission and trainer over as many steps as were recorded."""
    return _Loop(times, trial).run()


class _Loop:
    """Events by virtual time."""

    def __init__(self, times: RunTimes, trial: Trial) -> None:
        self.times, self.trial = times, trial
        self.state, self.out = Assembly(), Outcome()
        self.now, self.ready_seq, self.ledger_seq = 0.0, 0, 0
        self.served_at = [float("-inf")]  # of each version
        self.events: list[tuple[float, int, str, int, int]] = []  # time, order, what, of which, stamp
        self.count = 0
        self.playing: dict[int, Play] = {}  # by ordinal
        self.open: set[str] = set()
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
            at, _, kind, number, stamp = heapq.heappop(self.events)
            if kind == "ready" and self.playing[number].stamp != stamp:
                continue  # a change of weights has moved its end
            self.now = at
            if kind == "ready":
                self._ready(number)
            elif kind == "committed":
                self._committed(number)
            else:
                self._serve()
            self._decide()
            self._train()
            self._lease()
        self.out.seconds = self.now
        self.out.idle = self.idle_s / self.now if self.now else 0.0
        return self.out

    def _push(self, at_s: float, kind: str, number: int, stamp: int = 0) -> None:
        self.count += 1
        heapq.heappush(self.events, (at_s, self.count, kind, number, stamp))

    def _version_at(self, at_s: float) -> int:
        return bisect_right(self.served_at, at_s) - 1

    def _serve(self) -> None:
        """The fleet changes to the next version, and turns in flight go on as the mode says."""
        self.served_at.append(self.now)
        for ordinal, play in self.playing.items():
            if play.change(self.now, self.trial.in_flight):
                self._push(max(self.now, play.end_s()), "ready", ordinal, play.stamp)

    def _lease(self) -> None:
        """The sampler's rule: window, and no group that could only be used staler than the bound."""
        per_batch = self.trial.groups_per_batch
        while (
            len(self.open) < self.trial.window
            and self.leased - self.turned_away < (len(self.served_at) + self.trial.gates.max_lag) * per_batch
            and self.leased - self.turned_away < len(self.times.steps) * per_batch
        ):
            held = self.times.groups[self.leased % len(self.times.groups)]
            name = f"g{self.leased:08d}"
            self.open.add(name)
            self.out.leased[held.group.family] += 1
            play = self.playing[self.leased] = Play(self.now, held.ready_s, held.turns)
            self._push(play.end_s(), "ready", self.leased)
            self.leased += 1

    def _ready(self, ordinal: int) -> None:
        """The recorded group, but its tokens are of the versions that were served meanwhile."""
        group = self.times.groups[ordinal % len(self.times.groups)].group
        name, play = f"g{ordinal:08d}", self.playing.pop(ordinal)
        siblings = tuple(self._sibling(play, place, s) for place, s in enumerate(group.siblings_by_slot()))
        self.ready_seq += 1
        self.state.ready(self.ready_seq, msgspec.structs.replace(group, group=name, ordinal=ordinal, siblings=siblings))

    def _sibling(self, play: Play, place: int, sibling: Sibling) -> Sibling:
        begin, end = play.sampled_s(place, self.trial.in_flight)
        oldest, newest = self._version_at(begin), self._version_at(end)
        return msgspec.structs.replace(
            sibling, oldest_version=oldest, newest_version=newest, incarnation=0, incarnations=msgspec.UNSET
        )

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
                self.out.mix[self._stratum(member.group)] += 1
                self.open.discard(member.group)
        else:
            self.turned_away += 1
            self.out.turned_away[(str(entry.reason), self._stratum(entry.group))] += 1
            self.open.discard(entry.group)

    def _stratum(self, group: str) -> Stratum:
        return stratum_of(self.times.groups[int(group[1:]) % len(self.times.groups)].group, self.times.thirds)

    def _train(self) -> None:
        if self.training or self.next_step not in self.batches:
            return
        if self.idle_since is not None:
            self.idle_s += self.now - self.idle_since
            self.idle_since = None
        self.training = True
        self._push(self.now + self._work_s(self.next_step), "committed", self.next_step)
        if self.trial.demand_ahead and self.next_demand == self.next_step + 1:
            self._demand()

    def _work_s(self, step: int) -> float:
        """A step's recorded time, by the number of its groups."""
        return self.times.steps[step].work_s * self.trial.groups_per_batch / max(1, self.times.groups_per_batch)

    def _committed(self, step: int) -> None:
        self.training, self.next_step = False, step + 1
        self.out.steps += 1
        self.idle_since = self.now
        self._push(self.now + self.times.steps[step].publish_s, "served", step + 1)
        if self.next_demand == self.next_step:
            self._demand()
