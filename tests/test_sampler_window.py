"""The sampler's core: the window is bounded at every instant, no lease is bound to be too stale, no ordinal repeats."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from admission_stage import make_commit, make_lease, make_ready
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.assembly import Assembly, decide
from admission.conservation import account
from admission.gates import GateSettings
from admission.losses import loss_entry
from rollouter import window
from rollouter.evaluation import EvalSettings
from rollouter.sampler import Plan, SamplerSettings, SamplerState, Wait, next_action
from rollouter.window import Cut, EngineLoad, FlowBook, WindowSettings
from schemas.group import ReadyGroup, Sibling
from schemas.lease import GroupLease
from schemas.ledger import BatchEntry, BatchGroup, LedgerEntry, LostItem, QuarantineEntry
from schemas.policy import FleetVersions
from schemas.training import BatchDemand, EvalResult, StepCommit

TASKS = tuple(f"task-{n}" for n in range(7))


def make_settings(
    *,
    window: int = 6,
    max_lag: int = 1,
    batch: int = 3,
    steps: int = 4,
    at_start: bool = False,
    at_end: bool = False,
    every: int = 0,
    only: bool = False,
) -> SamplerSettings:
    return SamplerSettings(
        run="t",
        seed=1,
        eval_seed=0,
        max_groups=window,
        max_lag=max_lag,
        groups_per_batch=batch,
        max_steps=steps,
        group_size=2,
        pool=TASKS,
        evaluation=EvalSettings(
            at_start=at_start,
            at_end=at_end,
            every_steps=every,
            max_steps=steps,
            evaluate_only=only,
            group_size=2,
            full_attempts={"heldout_instance": 7, "heldout_template": 4},
            interim_attempts=3,
            tasks={"heldout_instance": ("hi-0", "hi-1"), "heldout_template": ("ht-0", "ht-1", "ht-2")},
        ),
    )


class World:
    """Everything around the sampler, in lists: streams, one admission, a trainer that asks as soon as it may, a fleet."""

    def __init__(self, chosen: SamplerSettings, disorder: random.Random, *, loss: float = 0.0) -> None:
        self.chosen, self.disorder, self.loss = chosen, disorder, loss
        self.state = SamplerState()
        self.admission = Assembly()
        self.gates = GateSettings(max_lag=chosen.max_lag, min_rewards=1)
        self.leases: list[GroupLease] = []
        self.ready: list[tuple[int, ReadyGroup]] = []
        self.ledger: list[tuple[int, LedgerEntry]] = []
        self.commits: list[StepCommit] = []
        self.results: list[EvalResult] = []
        self.serving = -1
        self.running: list[GroupLease] = []
        self.most_open = 0

    # -- the sampler

    def act(self) -> Wait:
        """Lease and publish as the service does; every rule is checked at every lease."""
        while True:
            action = next_action(self.state, self.chosen)
            if isinstance(action, Wait):
                return action
            if isinstance(action, EvalResult):
                assert action.point not in {result.point for result in self.results}, "a point has one result"
                self.results.append(action)
                self.state.result(action)
                continue
            self.check(action)
            lease = make_lease(
                action.ordinal,
                purpose=action.purpose,
                group_size=action.group_size,
                split=action.split,
                task_id=action.task_id,
                eval_point=action.eval_point,
                leased_at_version=self.serving,
            )
            self.leases.append(lease)
            self.running.append(lease)
            self.state.lease(lease)

    def check(self, action: Plan) -> None:
        chosen = self.chosen
        assert action.ordinal == len(self.leases), "ordinals are one sequence without gaps"
        assert self.serving >= 0, "nothing is leased before an engine serves"
        if action.purpose == "eval":
            in_flight = sum(lease.purpose == "eval" for lease in self.running)
            assert in_flight < chosen.max_groups
            return
        now = account(self.leases, [entry for _, entry in self.ledger])
        assert len(now.open) < chosen.max_groups, "the window is bounded at every instant"
        assert now.consumed + len(now.open) < (self.serving + 1 + chosen.max_lag) * chosen.groups_per_batch
        assert now.consumed + len(now.open) < chosen.max_steps * chosen.groups_per_batch
        if chosen.evaluation.at_start:
            assert self.results, "the start is evaluated before the first training lease"
        self.most_open = max(self.most_open, len(now.open) + 1)

    def restart(self) -> None:
        """A new process folds the streams again, in any order of the streams."""
        state = SamplerState()
        folds: list[Callable[[], None]] = [
            lambda: [state.lease(lease, 7) for lease in self.leases] and None,
            lambda: [state.entry(*item) for item in self.ledger] and None,
            lambda: [state.whole(*item) for item in self.ready] and None,
            lambda: [state.step(commit) for commit in self.commits] and None,
            lambda: [state.result(result) for result in self.results] and None,
            lambda: self.tell_version(state),
        ]
        self.disorder.shuffle(folds)
        for fold in folds:
            fold()
        assert self.same(next_action(state, self.chosen)) == self.same(next_action(self.state, self.chosen))
        self.state = state

    @staticmethod
    def same(action: Plan | EvalResult | Wait) -> object:
        return action.point if isinstance(action, EvalResult) else action

    # -- the others

    def tell_version(self, state: SamplerState) -> None:
        fleet = FleetVersions(
            run="t", target=self.serving, incarnation=0, engines={"e0": self.serving}, oldest=self.serving, newest=self.serving
        )
        state.active(fleet)

    def finish_a_group(self) -> None:
        lease = self.running.pop(self.disorder.randrange(len(self.running)))
        oldest = self.disorder.randint(lease.leased_at_version, self.serving)
        siblings = (make_ready(lease.ordinal, oldest=oldest, newest=self.serving).siblings * 4)[: lease.group_size]
        siblings = tuple(replace_slot(sibling, slot) for slot, sibling in enumerate(siblings))
        if lease.purpose == "train" and self.disorder.random() < self.loss:
            siblings = (replace_slot(siblings[0], 0, status="tampered"), *siblings[1:])
        group = make_ready(
            lease.ordinal,
            group=lease.group,
            purpose=lease.purpose,
            split=lease.split,
            task_id=lease.task_id,
            eval_point=lease.eval_point,
            group_size=lease.group_size,
            siblings=siblings,
        )
        item = (len(self.ready) + 1, group)
        self.ready.append(item)
        self.state.whole(*item, 9)
        if lease.purpose == "train":
            self.admission.ready(*item)

    def admit(self) -> None:
        step = len(self.commits)
        if step < self.chosen.max_steps:
            demand = BatchDemand(run="t", step=step, version=step, incarnation=0, groups=self.chosen.groups_per_batch)
            self.admission.demand(step + 1, demand)
        while entries := decide(self.admission, self.gates):
            for entry in entries:
                item = (len(self.ledger) + 1, entry)
                self.ledger.append(item)
                self.admission.entry(*item)
                self.state.entry(*item)
                if isinstance(entry, BatchEntry):
                    self.commits.append(make_commit(entry))
                    self.state.step(self.commits[-1])

    def serve_next(self) -> None:
        if self.serving < len(self.commits):
            self.serving += 1
            self.tell_version(self.state)

    def live(self, turns: int = 4000) -> None:
        """Everybody acts in random order until the sampler waits for the end of the run."""
        for _ in range(turns):
            choice = self.disorder.random()
            if choice < 0.5 and self.running:
                self.finish_a_group()
            elif choice < 0.65:
                self.admit()
            elif choice < 0.8:
                self.serve_next()
            elif choice < 0.85:
                self.restart()
            elif self.act().what == "the end of the run":
                return
        raise AssertionError(f"not at its end after {turns} turns: {next_action(self.state, self.chosen)}")


def replace_slot(sibling: Sibling, slot: int, **changes: object) -> Sibling:
    return msgspec.structs.replace(sibling, slot=slot, **changes)


@given(
    seed=st.integers(0, 2**32),
    window=st.integers(3, 9),
    max_lag=st.integers(0, 3),
    batch=st.integers(1, 3),
    steps=st.integers(1, 5),
    every=st.integers(0, 2),
    loss=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=60, deadline=None)
def test_a_run_ends_with_exactly_the_groups_that_it_needed(
    seed: int, window: int, max_lag: int, batch: int, steps: int, every: int, loss: float
) -> None:
    """Invariants 3 and 4 at the sampler: every rule at every lease is checked on the way, restarts included."""
    chosen = make_settings(window=window, max_lag=max_lag, batch=batch, steps=steps, at_start=True, at_end=True, every=every)
    world = World(chosen, random.Random(seed), loss=loss)
    world.live()
    final = account(world.leases, [entry for _, entry in world.ledger])
    assert final.holds, final.line()
    assert final.consumed == steps * batch
    assert not final.open
    assert world.most_open <= window
    if max_lag >= 1 or loss:
        assert set(final.quarantined) <= {"stale", "tampered"}
    points = [result.point for result in world.results]
    assert points[0] == "step-00000"
    assert points[-1] == f"step-{steps:05d}"
    assert len(set(points)) == len(points)
    for result, exact in ((world.results[0], 0), (world.results[-1], steps)):
        for split in result.splits:
            assert (split.oldest_version, split.newest_version) == (exact, exact), "the first and the last point are exact"
        assert sum(split.attempts for split in result.splits) == 11


@pytest.mark.parametrize("seed", range(5))
def test_with_k_zero_the_schedule_is_the_synchronous_trainers(seed: int) -> None:
    """Invariant 12: at version v exactly the groups of batch v are leased, all sampled under v, and none is ever stale."""
    chosen = make_settings(max_lag=0, batch=3, window=8, steps=4)
    world = World(chosen, random.Random(seed))
    world.live()
    assert not any(isinstance(entry, QuarantineEntry) for _, entry in world.ledger)
    by_version = [sum(lease.leased_at_version == version for lease in world.leases) for version in range(4)]
    assert by_version == [3, 3, 3, 3]
    for _, entry in world.ledger:
        assert isinstance(entry, BatchEntry)
        ordinals = sorted(int(member.group[1:]) for member in entry.groups)
        assert ordinals == list(range(3 * entry.step, 3 * entry.step + 3))
        assert {member.lag for member in entry.groups} == {0}


def test_the_k_gate_opens_by_one_batch_per_version() -> None:
    chosen = make_settings(max_lag=2, batch=2, window=50, steps=9)
    world = World(chosen, random.Random(0))
    assert world.act() == Wait("an engine that serves a verified version", "param_sync and the engines")
    for version in range(3):
        world.serving = version
        world.tell_version(world.state)
        wait = world.act()
        assert len(world.leases) == (version + 1 + 2) * 2
        assert wait.culprit == "trainer, param_sync and the engines"


def test_a_full_window_names_its_oldest_group() -> None:
    chosen = make_settings(max_lag=9, batch=3, window=5, steps=20)
    world = World(chosen, random.Random(0))
    world.serving = 0
    world.tell_version(world.state)
    wait = world.act()
    assert len(world.leases) == 5
    assert wait == Wait("room in the window of 5", "the oldest open group g00000000")


def test_fleet_without_engines_leases_nothing_more() -> None:
    world = World(make_settings(), random.Random(0))
    world.serving = 0
    world.tell_version(world.state)
    world.act()
    before = len(world.leases)
    while world.running:
        world.finish_a_group()
    world.admit()
    world.serving = -1
    world.tell_version(world.state)
    assert world.act().culprit == "param_sync and the engines"
    assert len(world.leases) == before


def test_evaluate_only_evaluates_once_and_idles() -> None:
    chosen = make_settings(steps=0, only=True, at_end=True, every=1)
    world = World(chosen, random.Random(2))
    world.serving = 0
    world.tell_version(world.state)
    for _ in range(400):
        wait = world.act()
        if world.running:
            world.finish_a_group()
    assert [result.point for result in world.results] == ["step-00000"]
    assert {lease.purpose for lease in world.leases} == {"eval"}
    assert "the evaluation is published" in wait.culprit


def test_a_lease_told_twice_or_late_changes_nothing() -> None:
    state = SamplerState()
    state.lease(make_lease(0))
    state.lease(make_lease(0))
    assert (state.leased, state.next_ordinal, state.open_groups()) == (1, 1, ("g00000000",))


def test_a_group_that_is_lost_out_of_its_batch_is_not_replaced() -> None:
    """Its batch's step is taken without it, so a group leased in its place would have no step to go to."""
    state = SamplerState()
    for ordinal in range(2):
        state.lease(make_lease(ordinal))
    members = tuple(BatchGroup(group=f"g{n:08d}", ready_seq=n + 1, oldest_version=0, newest_version=0, lag=0) for n in range(2))
    batch = BatchEntry(
        run="t",
        step=0,
        version=0,
        incarnation=0,
        groups=members,
        ready_high_water=2,
        demand_seq=1,
        settings_hash="s",
        max_lag=0,
    )
    state.entry(1, batch)
    lost = LostItem("READY", 1, "")
    state.entry(2, loss_entry("t", "g00000000", "files", 1, lost, "s", step=0))
    assert (state.consumed, state.turned_away, state.promised(), state.open_groups()) == (1, 0, 2, ())
    state.lease(make_lease(2))
    state.entry(3, loss_entry("t", "g00000002", "files", 0, lost, "s"))
    assert (state.turned_away, state.promised()) == (1, 2), "one that was in no batch is"


# -- the window that adapts


@given(
    batch=st.integers(1, 12),
    max_lag=st.integers(0, 5),
    cuts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5), st.floats(0, 1)), max_size=30),
    ready=st.integers(0, 60),
    waiting=st.integers(0, 90),
)
@settings(deadline=None)
def test_the_window_never_leaves_its_bounds(
    batch: int, max_lag: int, cuts: list[tuple[int, int, float]], ready: int, waiting: int
) -> None:
    """At most K batches ahead, whatever flows, and never less than what is generated while a batch is trained on."""
    chosen = WindowSettings(batch=batch, max_lag=max_lag, adapt=True)
    held = window.first(chosen)
    for left, stale, waited in cuts:
        held = window.after(chosen, held, Cut(left=left, stale=stale, waited=waited))
        shown = window.now(chosen, held, ready=ready, load=EngineLoad(running=8, waiting=waiting, places=8))
        for one in (held, shown):
            assert min(batch, max_lag * batch) <= one.ahead <= max_lag * batch
        assert shown.ahead <= held.ahead


def test_each_signal_moves_the_window_and_is_named() -> None:
    chosen = WindowSettings(batch=8, max_lag=4, adapt=True)
    held = window.Window(16, "so far")
    calm, load = Cut(left=0, stale=0, waited=0.0), EngineLoad()
    assert window.after(chosen, held, calm) == held
    assert window.after(chosen, held, Cut(left=0, stale=0, waited=0.2)) == (18, "the trainer waited for 20% of a step's time")
    assert window.after(chosen, held, Cut(left=9, stale=0, waited=0.0)) == (14, "9 ready groups were left over")
    assert window.after(chosen, held, Cut(left=9, stale=3, waited=0.0)) == (14, "3 groups went stale")
    assert window.now(chosen, held, ready=15, load=load) == held
    assert window.now(chosen, held, ready=16, load=load) == (8, "16 groups lie ready")
    busy = EngineLoad(running=64, waiting=17, places=64)
    assert window.now(chosen, held, ready=0, load=busy) == (8, "17 sequences wait for the engines")
    assert window.now(chosen, held, ready=0, load=EngineLoad(running=64, waiting=16, places=64)) == held
    fixed = WindowSettings(batch=8, max_lag=4, adapt=False)
    assert window.first(fixed).ahead == 32
    assert window.after(fixed, window.first(fixed), Cut(left=30, stale=5, waited=0.0)).ahead == 32


@dataclass
class Lived:
    """What a closed loop in virtual time came to."""

    leased: int = 0
    stale: int = 0
    most_ahead: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0

    def mean_lag(self) -> float:
        return sum(lag * n for lag, n in self.lags.items()) / sum(self.lags.values())


def virtual_run(chosen: SamplerSettings, seed: int, *, train_s: float = 1.0, median_s: float, late_s: float) -> Lived:
    """The real sampler's core, assembly and gates; groups that take random times, one in twenty `late_s` longer; a trainer that
    takes `train_s` for each step; a fleet that serves each version 0.1 s after."""
    chance, out = random.Random(seed), Lived()
    state, assembly = SamplerState(), Assembly()
    gates = GateSettings(max_lag=chosen.max_lag, min_rewards=1)
    events: list[tuple[float, int, str, int]] = []
    leased_at: dict[int, int] = {}
    clock, count, ready_seq, ledger_seq, serving = 0.0, 0, 0, 0, 0

    def push(after_s: float, kind: str, number: int) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (clock + after_s, count, kind, number))

    def serve(version: int) -> None:
        fleet = FleetVersions(run="t", target=version, incarnation=0, engines={"e": version}, oldest=version, newest=version)
        state.active(fleet)

    def now_ns() -> int:
        return int(clock * 1e9) + 1

    def demand(step: int) -> None:
        assembly.demand(step + 1, BatchDemand(run="t", step=step, version=step, incarnation=0, groups=chosen.groups_per_batch))
        state.demand(step + 1, now_ns())

    def lease() -> None:
        while isinstance(action := next_action(state, chosen), Plan):
            leased_at[action.ordinal] = serving
            state.lease(make_lease(action.ordinal, leased_at_version=serving), now_ns())
            out.most_ahead = max(out.most_ahead, state.promised() - (serving + 1) * chosen.groups_per_batch)
            push(median_s * chance.lognormvariate(0, 0.6) + late_s * (chance.random() < 0.05), "ready", action.ordinal)

    def admit() -> None:
        nonlocal ledger_seq
        while entries := decide(assembly, gates):
            for entry in entries:
                ledger_seq += 1
                assembly.entry(ledger_seq, entry)
                state.entry(ledger_seq, entry, now_ns())
                if isinstance(entry, BatchEntry):
                    out.lags.update(member.lag for member in entry.groups)
                    push(train_s, "committed", entry.step)
                elif isinstance(entry, QuarantineEntry):
                    out.stale += entry.reason == "stale"

    serve(0)
    demand(0)
    lease()
    while events and state.committed_steps < chosen.max_steps:
        clock, _, kind, number = heapq.heappop(events)
        if kind == "ready":
            ready_seq += 1
            group = make_ready(number, oldest=leased_at[number], newest=serving)
            assembly.ready(ready_seq, group)
            state.whole(ready_seq, group, now_ns())
        elif kind == "committed":
            state.committed_steps = number + 1
            push(0.1, "serves", number + 1)
            if number + 1 < chosen.max_steps:
                demand(number + 1)
        else:
            serving = number
            serve(number)
        admit()
        lease()
    out.leased, out.seconds = state.leased, clock
    return out


@pytest.mark.parametrize("seed", range(3))
def test_generation_that_outruns_training_slows_down_before_anything_ages_out(seed: int) -> None:
    """With the fixed window the slow trainer's queue takes up all of K, and whatever takes a step longer goes stale."""
    wide = make_settings(window=80, max_lag=4, batch=8, steps=60)
    fixed = virtual_run(wide, seed, median_s=0.15, late_s=1.3)
    adaptive = virtual_run(replace(wide, adapt=True), seed, median_s=0.15, late_s=1.3)
    assert fixed.stale > 0.03 * fixed.leased, "the test wants a run in which the fixed window loses groups"
    assert adaptive.stale <= 0.01 * adaptive.leased
    assert adaptive.mean_lag() < fixed.mean_lag() / 2
    assert adaptive.seconds < 1.06 * fixed.seconds, "the trainer is hardly kept waiting for it"


def test_a_fast_trainer_gets_the_whole_bound() -> None:
    """Where training outruns generation the window opens up to K batches, and no further."""
    wide = make_settings(window=80, max_lag=3, batch=8, steps=60)
    adaptive = virtual_run(replace(wide, adapt=True), 0, train_s=0.05, median_s=0.6, late_s=0.0)
    assert adaptive.most_ahead == 3 * 8


def test_a_sampler_that_starts_again_has_the_same_window() -> None:
    """The window follows from what the logs say, in whatever order they are read, and what comes late changes nothing."""
    logs: list[Callable[[FlowBook], None]] = []
    for step in range(6):
        names = tuple(f"g{n:08d}" for n in range(4 * step, 4 * step + 4))
        for name in names:
            logs.append(lambda book, name=name, at=10 * step: book.ready(name, at))
        logs.append(lambda book, step=step: book.demanded(step + 1, 10 * step + 5))
    batches: list[Callable[[FlowBook], None]] = [
        lambda book, step=step: book.batch(
            step + 1, 10 * step + 12, tuple(f"g{n:08d}" for n in range(3 * step, 3 * step + 3)), step + 1
        )
        for step in range(6)
    ]
    chosen, load, seen = WindowSettings(batch=3, max_lag=4, adapt=True), EngineLoad(), set()
    for order in (logs + batches, batches + logs, [*logs[::-1], *batches]):
        book = FlowBook()
        for tell in order:
            tell(book)
        before = book.window(chosen, load), book.depth()
        for tell in logs:
            tell(book)
        assert (book.window(chosen, load), book.depth()) == before, "what is told again of closed groups is nothing"
        seen.add(before)
    assert len(seen) == 1
