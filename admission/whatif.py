"""What would have happened under other settings: the real admission core, in virtual time, fed with modelled groups.

Decided by the very code of the services: which ready groups make a batch, which are turned away and why. Modelled, since other
settings would have changed it: when groups become ready, which versions their tokens have, how long steps take. The model, all
of it from recorded service times:

* groups are leased in the recorded order while the window has room and `K` allows to promise more, as the sampler does;
* a group takes as long as recorded while no more groups are in play than the recording's busy times had; beyond that all slow
  down together, so that more groups never make generation faster than it was seen to be;
* a token's version is the one that the fleet serves at that moment; engines are not told apart;
* a version change acts on a turn in flight as the in-flight mode says; finished turns are kept, except by `restart`;
* a step takes as long as the trainer measured, in proportion to its groups (waits for a trainer that had died are left out);
  its version is served after the recorded median delay.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from statistics import median

import msgspec

from admission.assembly import Assembly, decide
from admission.whatif_settings import Setting
from admission.whatif_trace import GroupTrace, Trace, Turns
from schemas.group import ReadyGroup, Sibling
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry
from schemas.training import BatchDemand


@dataclass
class Outcome:
    """What came out. Times in seconds from the first lease."""

    waits: list[float] = field(default_factory=list)  # of each batch, from the demand
    idle_s: float = 0.0
    seconds: float = 0.0
    lags: Counter[int] = field(default_factory=Counter)
    turned_away: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # (reason, family, stream)
    trained: Counter[tuple[str, str]] = field(default_factory=Counter)  # (family, stream)
    leased: Counter[tuple[str, str]] = field(default_factory=Counter)
    steps: int = 0
    open: int = 0


@dataclass(slots=True)
class _Play:
    """One group in play. Work is seconds of undisturbed generation; `shifts` is what version changes added to each sibling."""

    trace: GroupTrace
    begun: float  # on the work clock
    tail: float  # from the last sampled token until it is ready
    shifts: list[float]
    first: list[float]  # on the work clock: when each sibling's oldest surviving token was sampled
    stamp: int = 0

    def end(self) -> float:
        """When it is ready, on the work clock."""
        ends = [shift + turns[-1][1] for shift, turns in zip(self.shifts, self.trace.turns, strict=True) if turns]
        return self.begun + (max(ends) + self.tail if ends else self.trace.seconds)


def simulate(trace: Trace, setting: Setting) -> Outcome:
    """Replay the recorded groups under a setting, until they are used up."""
    return _Simulation(trace, setting).run()


class _Simulation:
    """The state of the virtual run."""

    def __init__(self, trace: Trace, setting: Setting) -> None:
        self.trace, self.setting, self.gates = trace, setting, setting.gates()
        self.out = Outcome()
        self.state = Assembly()
        self.now = 0.0
        self.work = 0.0  # advances by 1 a second while the fleet is not overloaded
        self.changes: list[float] = [float("-inf")]  # on the work clock: when each version began to be served
        self.in_play: dict[int, _Play] = {}
        self.finishing: list[tuple[float, int, int]] = []  # end, group, stamp
        self.timed: list[tuple[float, int, str, int]] = []  # time, order, what, step or version
        self.order = 0
        self.next_group = self.ready_seq = self.ledger_seq = 0
        self.closed = self.turned_away = 0
        self.asked: dict[int, float] = {}
        self.next_step = 0  # to be trained
        self.last_commit = 0.0
        self.training = False
        self.batches: dict[int, tuple[float, int]] = {}  # step -> when its batch was there, and of how many groups
        seconds = trace.step_seconds()
        per_group = [took / max(1, step.groups) for took, step in zip(seconds, trace.steps, strict=True)]
        self.step_seconds, self.typical = per_group, median(per_group)

    def run(self) -> Outcome:
        """Until nothing can happen any more."""
        first = self.trace.steps[0].demand_s
        self._at(max(0.0, first), "ask", 0)
        self._lease()
        while self.timed or self.in_play:
            finish_s = self._next_finish()
            if self.timed and self.timed[0][0] <= finish_s:
                time_s, _, what, number = heapq.heappop(self.timed)
                self._advance(time_s)
                self._happen(what, number)
            elif self.in_play:
                self._advance(finish_s)
                self._finish()
            self._decide()
            self._lease()
        self.out.seconds = self.last_commit
        self.out.open = self.next_group - self.closed
        return self.out

    # -- time ----------------------------------------------------------------------------------------------------------------

    def _rate(self) -> float:
        return min(1.0, self.trace.busy / len(self.in_play)) if self.in_play else 1.0

    def _advance(self, to: float) -> None:
        self.work += max(0.0, to - self.now) * self._rate()
        self.now = max(self.now, to)

    def _next_finish(self) -> float:
        while self.finishing:
            end, number, stamp = self.finishing[0]
            if number in self.in_play and self.in_play[number].stamp == stamp:
                return self.now + max(0.0, end - self.work) / self._rate()
            heapq.heappop(self.finishing)
        return float("inf")

    def _at(self, time_s: float, what: str, number: int) -> None:
        self.order += 1
        heapq.heappush(self.timed, (time_s, self.order, what, number))

    # -- sampler and rollouter, modelled -------------------------------------------------------------------------------------

    def _lease(self) -> None:
        """As `rollouter/sampler.py` does for training groups."""
        served = len(self.changes) - 1
        while self.next_group < len(self.trace.groups):
            promised = self.next_group - self.turned_away
            if promised >= (served + 1 + self.setting.max_lag) * self.setting.groups_per_batch:
                return
            if self.next_group - self.closed >= self.setting.window:
                return
            group = self.trace.groups[self.next_group]
            begun = [self.work + (turns[0][0] if turns else 0.0) for turns in group.turns]
            tail = max(0.0, group.seconds - group.first_and_last()[1])
            self.in_play[self.next_group] = play = _Play(group, self.work, tail, [0.0] * len(group.turns), begun)
            heapq.heappush(self.finishing, (play.end(), self.next_group, 0))
            self.out.leased[group.family, group.stream] += 1
            self.next_group += 1

    def _serve(self) -> None:
        """The fleet changes to the next version; what is in flight goes on as the mode says."""
        self.changes.append(self.work)
        if self.setting.in_flight not in ("regenerate", "restart"):
            return
        for number, play in self.in_play.items():
            moved = False
            for slot, turns in enumerate(play.trace.turns):
                lost = _lost(turns, self.work - play.begun - play.shifts[slot], whole=self.setting.in_flight == "restart")
                if lost > 0:
                    began = self.work - play.begun - play.shifts[slot] - lost
                    if turns and began <= turns[0][0]:
                        play.first[slot] = self.work
                    play.shifts[slot] += lost
                    moved = True
            if moved:
                play.stamp += 1
                heapq.heappush(self.finishing, (play.end(), number, play.stamp))

    def _version_at(self, work: float) -> int:
        return bisect_right(self.changes, work) - 1

    def _finish(self) -> None:
        """A group is whole: READY gets it with the versions that its tokens would have had."""
        _, number, _ = heapq.heappop(self.finishing)
        play = self.in_play.pop(number)
        self.ready_seq += 1
        self.state.ready(self.ready_seq, self._modelled(play))

    def _modelled(self, play: _Play) -> ReadyGroup:
        siblings = sorted(play.trace.ready.siblings, key=lambda s: s.slot)
        changed = tuple(self._sibling(play, place, s) for place, s in enumerate(siblings))
        return msgspec.structs.replace(play.trace.ready, siblings=changed)

    def _sibling(self, play: _Play, place: int, sibling: Sibling) -> Sibling:
        turns = play.trace.turns[place]
        if not sibling.sampled_tokens:
            return sibling
        begin = play.first[place]
        last = turns[-1][0 if self.setting.in_flight == "finish_old" else 1] if turns else play.trace.seconds
        end = play.begun + play.shifts[place] + last
        oldest = max(0, self._version_at(begin))
        newest = max(oldest, self._version_at(max(begin, end)))
        return msgspec.structs.replace(
            sibling, oldest_version=oldest, newest_version=newest, incarnation=0, incarnations=msgspec.UNSET
        )

    # -- trainer, modelled ---------------------------------------------------------------------------------------------------

    def _happen(self, what: str, number: int) -> None:
        if what == "ask":
            self._ask(number)
        elif what == "commit":
            self.training, self.last_commit = False, self.now
            self.next_step = number + 1
            self._at(self.now + self.trace.sync_s, "serve", number + 1)
            self._ask(number + 1)
            self._train()
        else:
            self._serve()

    def _ask(self, step: int) -> None:
        if step not in self.asked:
            self.asked[step] = self.now
            groups = self.setting.groups_per_batch
            self.state.demand(step + 1, BatchDemand(run="", step=step, version=step, incarnation=0, groups=groups))

    def _train(self) -> None:
        """Begin the next step if its batch is there."""
        if self.training or self.next_step not in self.batches:
            return
        ready_s, groups = self.batches.pop(self.next_step)
        step = self.next_step
        self.training = True
        self.out.idle_s += max(0.0, ready_s - self.last_commit) if step else 0.0
        took = self.step_seconds[step] if step < len(self.step_seconds) else self.typical
        self._at(self.now + took * groups, "commit", step)
        if self.setting.demand_ahead:
            self._ask(step + 1)

    # -- admission, as it is -------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        while entries := decide(self.state, self.gates):
            for entry in entries:
                self.ledger_seq += 1
                self.state.entry(self.ledger_seq, entry)
                self._count(entry)

    def _count(self, entry: LedgerEntry) -> None:
        strata = self.trace.strata
        if not isinstance(entry, BatchEntry):
            kind = "abandoned: " if isinstance(entry, AbandonEntry) else ""
            self.out.turned_away[(kind + str(entry.reason), *strata[entry.group])] += 1
            self.closed += 1
            self.turned_away += 1
            return
        self.out.steps += 1
        self.out.waits.append(self.now - self.asked[entry.step])
        for member in entry.groups:
            self.out.lags[member.lag] += 1
            self.out.trained[strata[member.group]] += 1
        self.closed += len(entry.groups)
        self.batches[entry.step] = (self.now, len(entry.groups))
        self._train()


def _lost(turns: Turns, offset: float, *, whole: bool) -> float:
    """Seconds of a sibling's play that a version change at `offset` throws away: its unfinished turn, or all of it."""
    if not turns or offset >= turns[-1][1] or offset <= turns[0][0]:
        return 0.0
    if whole:
        return offset - turns[0][0]
    begin, end = turns[bisect_right(turns, (offset, float("inf"))) - 1]
    return offset - begin if begin < offset < end else 0.0
