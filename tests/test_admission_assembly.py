"""Assembly: batches in completion order, each group once, the same ledger whenever and however often the inputs arrive."""

from __future__ import annotations

import random

import msgspec
from admission_stage import make_commit, make_lease, make_ready, with_siblings
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from admission.assembly import Assembly, decide
from admission.conservation import account
from admission.gates import Eligible, GateSettings, judge
from admission.replay import replay
from schemas.codec import encode
from schemas.group import ReadyGroup
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, QuarantineEntry
from schemas.termination import Termination
from schemas.training import BatchDemand, Branch

GROUPS = 3
GATES = GateSettings(max_lag=1, min_rewards=1)


def make_demand(step: int, groups: int = GROUPS) -> BatchDemand:
    return BatchDemand(run="t", step=step, version=step, incarnation=0, groups=groups)


def drain(state: Assembly, ledger: list[tuple[int, LedgerEntry]], under: GateSettings = GATES) -> None:
    """Append what the state decides, as the service does."""
    while entries := decide(state, under):
        for entry in entries:
            ledger.append((state.ledger_seq + 1, entry))
            state.entry(state.ledger_seq + 1, entry)


def spoiled(group: ReadyGroup, how: int) -> ReadyGroup:
    """Some groups are not eligible, each in its own way."""
    if how == 1:
        return with_siblings(group, 0, termination=Termination.INFRA_ABORT, status="censored", reward=None)
    if how == 2:
        return with_siblings(group, 1, status="tampered")
    if how == 3:
        return with_siblings(group, 1, finite=False)
    return group


def test_the_first_eligible_in_completion_order_are_the_batch() -> None:
    state, ledger = Assembly(), []
    order = [5, 0, 3, 1, 4, 2]
    for seq, ordinal in enumerate(order, 1):
        state.ready(seq, spoiled(make_ready(ordinal), 2 if ordinal in (0, 4) else 0))
    drain(state, ledger)
    assert not ledger, "nothing is decided before a demand"
    state.demand(9, make_demand(0))
    drain(state, ledger)
    quarantined, batch = (entry for _, entry in ledger)
    assert isinstance(quarantined, QuarantineEntry)
    assert (quarantined.group, quarantined.ready_seq, quarantined.demand_seq) == ("g00000000", 2, 9)
    assert isinstance(batch, BatchEntry)
    assert [member.group for member in batch.groups] == ["g00000005", "g00000003", "g00000001"]
    assert (batch.ready_high_water, batch.demand_seq, batch.step, batch.version) == (4, 9, 0, 0)
    assert [group.group for _, group in state.waiting_groups()] == ["g00000004", "g00000002"], "what lies behind is not judged"


def test_a_group_goes_stale_only_when_a_demand_for_that_version_is_there() -> None:
    state, ledger = Assembly(), []
    for ordinal in range(4):
        state.ready(ordinal + 1, make_ready(ordinal, oldest=0))
    state.demand(1, make_demand(0))
    drain(state, ledger)
    state.demand(2, make_demand(2))
    drain(state, ledger)
    late = ledger[-1][1]
    assert isinstance(late, QuarantineEntry)
    assert (late.group, late.reason, late.at_version, late.lag) == ("g00000003", "stale", 2, 2)


def test_two_demands_are_answered_in_the_order_of_their_steps() -> None:
    state, ledger = Assembly(), []
    state.demand(1, make_demand(0))
    state.demand(2, make_demand(1))
    for ordinal in range(2 * GROUPS):
        state.ready(ordinal + 1, make_ready(ordinal))
        drain(state, ledger)
    assert [(entry.step, entry.demand_seq) for _, entry in ledger] == [(0, 1), (1, 2)]
    assert state.outstanding() is None


def test_entries_of_another_writer_that_come_before_their_ready_items_close_them() -> None:
    state, ledger = Assembly(), []
    source = Assembly()
    for ordinal in range(GROUPS):
        source.ready(ordinal + 1, make_ready(ordinal))
    source.demand(1, make_demand(0))
    drain(source, ledger)
    for seq, entry in ledger:
        state.entry(seq, entry)
        state.entry(seq, entry)
    for ordinal in range(GROUPS):
        state.ready(ordinal + 1, make_ready(ordinal))
    state.demand(1, make_demand(0))
    assert state.depth() == 0
    assert not decide(state, GATES)
    assert state.counters["batches"] == 1


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[ReadyGroup], list[BatchDemand]]:
    count = draw(st.integers(0, 24))
    groups = []
    for ordinal in draw(st.permutations(range(count))):
        oldest = draw(st.integers(0, 3))
        groups.append(spoiled(make_ready(ordinal, oldest=oldest, newest=oldest), draw(st.sampled_from([0, 0, 0, 1, 2, 3]))))
    return groups, [make_demand(step, draw(st.integers(1, 4))) for step in range(draw(st.integers(0, 5)))]


def ledger_of(
    groups: list[ReadyGroup], demands: list[BatchDemand], disorder: random.Random | None, restarts: bool = False
) -> list[tuple[int, LedgerEntry]]:
    """The ledger, when the two streams arrive interleaved at random, with repeats, and with restarts of the fold."""
    ledger: list[tuple[int, LedgerEntry]] = []
    state = Assembly()
    ready, asked = list(enumerate(groups, 1)), list(enumerate(demands, 1))
    at_ready = at_demand = 0
    while at_ready < len(ready) or at_demand < len(asked):
        take_ready = at_demand == len(asked) or (at_ready < len(ready) and (disorder is None or disorder.random() < 0.5))
        if take_ready:
            state.ready(*ready[at_ready])
            at_ready += 1
        else:
            state.demand(*asked[at_demand])
            at_demand += 1
        if disorder is not None:
            if disorder.random() < 0.3 and at_ready:
                state.ready(*disorder.choice(ready[:at_ready]))
            if disorder.random() < 0.3 and at_demand:
                state.demand(*disorder.choice(asked[:at_demand]))
            if restarts and disorder.random() < 0.3:
                state = Assembly()
                told = [
                    *((state.ready, item) for item in ready[:at_ready]),
                    *((state.demand, item) for item in asked[:at_demand]),
                ]
                for method, item in told if disorder.random() < 0.5 else reversed_streams(told, at_ready):
                    method(*item)
                for item in ledger:
                    state.entry(*item)
            if disorder.random() < 0.5:
                continue
        drain(state, ledger)
    drain(state, ledger)
    return ledger


def reversed_streams(told: list, at_ready: int) -> list:
    return [*told[at_ready:], *told[:at_ready]]


@given(streams(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_ledger_does_not_depend_on_when_its_inputs_arrive(
    history: tuple[list[ReadyGroup], list[BatchDemand]], disorder: random.Random
) -> None:
    """Invariant 9: any interleaving, repeats and restarts give the same bytes in the same order."""
    groups, demands = history
    plain = ledger_of(groups, demands, None)
    other = ledger_of(groups, demands, disorder, restarts=True)
    assert [encode(entry) for _, entry in other] == [encode(entry) for _, entry in plain]
    assert replay(enumerate(groups, 1), enumerate(demands, 1), other, GATES) is None


@given(streams(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_conservation_and_once_only(history: tuple[list[ReadyGroup], list[BatchDemand]], disorder: random.Random) -> None:
    """Invariants 3, 4 and 7."""
    groups, demands = history
    ledger = ledger_of(groups, demands, disorder, restarts=True)
    leases = [make_lease(group.ordinal) for group in groups]
    for cut in range(len(ledger) + 1):
        result = account(leases, [entry for _, entry in ledger[:cut]])
        assert result.holds, result.line()
    for _, entry in ledger:
        if isinstance(entry, BatchEntry):
            assert len(entry.groups) == demands[entry.step].groups
            assert all(0 <= member.lag <= GATES.max_lag for member in entry.groups)
            positions = [member.ready_seq for member in entry.groups]
            assert positions == sorted(positions)


def recorded() -> tuple[list[ReadyGroup], list[BatchDemand], list[tuple[int, LedgerEntry]]]:
    groups = [spoiled(make_ready(n, oldest=n // 4), [0, 0, 1, 0, 2, 0, 0, 3][n % 8]) for n in range(16)]
    demands = [make_demand(step) for step in range(4)]
    return groups, demands, ledger_of(groups, demands, None)


def test_replay_finds_the_first_changed_field() -> None:
    groups, demands, ledger = recorded()
    assert any(isinstance(entry, AbandonEntry) for _, entry in ledger)
    for index, (seq, entry) in enumerate(ledger):
        changed = list(ledger)
        if isinstance(entry, BatchEntry):
            changed[index] = (seq, msgspec.structs.replace(entry, ready_high_water=entry.ready_high_water + 1))
        else:
            changed[index] = (seq, msgspec.structs.replace(entry, detail=entry.detail + "?"))
        difference = replay(enumerate(groups, 1), enumerate(demands, 1), changed, GATES)
        assert difference is not None
        assert (difference.seq, difference.recorded) == changed[index]
        assert difference.replayed == entry
        assert ("ready_high_water" if isinstance(entry, BatchEntry) else "detail") in difference.why


def test_replay_finds_a_lost_an_invented_and_a_reordered_entry() -> None:
    groups, demands, ledger = recorded()
    ready, train = list(enumerate(groups, 1)), list(enumerate(demands, 1))
    assert replay(ready, train, ledger[1:], GATES) is not None
    assert replay(ready, train, [ledger[1], ledger[0], *ledger[2:]], GATES) is not None
    extra = (len(ledger) + 1, ledger[0][1])
    found = replay(ready, train, [*ledger, extra], GATES)
    assert found is not None
    assert found.recorded == ledger[0][1]


def test_replay_under_other_settings_names_them() -> None:
    groups, demands, ledger = recorded()
    ready, train = list(enumerate(groups, 1)), list(enumerate(demands, 1))
    other = GateSettings(max_lag=0, min_rewards=1)
    difference = replay(ready, train, ledger, other)
    assert difference is not None
    assert GATES.hash() in difference.why
    assert replay(ready, train, ledger, other, GATES) is None


def test_a_run_whose_settings_changed_in_the_middle_replays() -> None:
    groups = [make_ready(n, oldest=0) for n in range(9)]
    strict = GateSettings(max_lag=0, min_rewards=1)
    state, ledger = Assembly(), []
    for seq, group in enumerate(groups, 1):
        state.ready(seq, group)
    demands = [make_demand(0), make_demand(1)]
    state.demand(1, demands[0])
    drain(state, ledger, GATES)
    state.demand(2, demands[1])
    drain(state, ledger, strict)
    assert [type(entry) for _, entry in ledger] == [BatchEntry, *[QuarantineEntry] * 6]
    assert replay(enumerate(groups, 1), enumerate(demands, 1), ledger, strict, GATES) is None


def asked_again(step: int, incarnation: int, left_at: int) -> BatchDemand:
    """The demand of a trainer that came back as a new incarnation."""
    branches = tuple(Branch(number, left_at) for number in range(1, incarnation + 1))
    return BatchDemand(run="t", step=step, version=step, incarnation=incarnation, groups=GROUPS, branches=branches)


def test_the_newest_incarnations_demand_counts_and_the_old_one_does_not_come_back() -> None:
    state, ledger = Assembly(), []
    for ordinal in range(8):
        state.ready(ordinal + 1, make_ready(ordinal, oldest=4 + ordinal % 2))  # every other one under the version that is left
    state.demand(20, make_demand(5))
    state.demand(30, asked_again(5, 1, 4))
    state.demand(20, make_demand(5))
    drain(state, ledger)
    turned_away = [entry for _, entry in ledger if isinstance(entry, QuarantineEntry)]
    assert {(entry.reason, entry.demand_seq) for entry in turned_away} == {("dead_branch", 30)}
    batch = ledger[-1][1]
    assert isinstance(batch, BatchEntry)
    assert (batch.demand_seq, batch.incarnation) == (30, 1)
    assert [member.group for member in batch.groups] == ["g00000000", "g00000002", "g00000004"]


def test_a_batch_that_the_dead_branch_was_given_stays_the_batch_of_its_step() -> None:
    state, ledger = Assembly(), []
    for ordinal in range(6):
        state.ready(ordinal + 1, make_ready(ordinal, oldest=5))
    state.demand(20, make_demand(5))
    drain(state, ledger)
    state.demand(30, asked_again(5, 1, 4))
    drain(state, ledger)
    assert [type(entry) for _, entry in ledger] == [BatchEntry]
    state.demand(31, asked_again(6, 1, 4))
    drain(state, ledger)
    assert [entry.reason for _, entry in ledger[1:] if isinstance(entry, QuarantineEntry)] == ["dead_branch"] * 3


def test_a_writer_that_is_behind_the_demands_of_the_ledger_decides_nothing() -> None:
    """Else it would answer a demand that the writer before it had seen superseded."""
    groups = [make_ready(ordinal, oldest=5) for ordinal in range(4)]
    demands = [(20, make_demand(5)), (30, asked_again(5, 1, 4))]
    first, behind, ledger = Assembly(), Assembly(), []
    for seq, group in enumerate(groups, 1):
        first.ready(seq, group)
        behind.ready(seq, group)
    for demand in demands:
        first.demand(*demand)
    behind.demand(*demands[0])
    entry = decide(first, GATES)[0]
    behind.entry(1, entry)
    assert decide(behind, GATES) == []
    behind.demand(*demands[1])
    ledger.append((1, entry))
    drain(behind, ledger)
    assert {entry.reason for _, entry in ledger} == {"dead_branch"}
    assert replay(enumerate(groups, 1), demands, ledger, GATES) is None


@st.composite
def streams_of_incarnations(draw: st.DrawFn) -> tuple[list[ReadyGroup], list[BatchDemand]]:
    """Groups sampled by up to three incarnations, and a trainer that asks for steps again each time it comes back."""
    groups = []
    for ordinal in range(draw(st.integers(0, 20))):
        version = draw(st.integers(0, 4))
        group = make_ready(ordinal, oldest=version)
        group = with_siblings(group, 1, incarnation=draw(st.integers(0, 2)))
        groups.append(spoiled(group, draw(st.sampled_from([0, 0, 0, 1, 2]))))
    incarnation, demands = 0, []
    for step in range(draw(st.integers(0, 5))):
        demands.append(asked_again(step, incarnation, draw(st.integers(0, 4))))
        while incarnation < 2 and draw(st.booleans()):
            incarnation += 1
            demands.append(asked_again(step, incarnation, draw(st.integers(0, 4))))
    return groups, demands


@given(streams_of_incarnations(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=200)
def test_a_recording_of_several_incarnations_replays(
    history: tuple[list[ReadyGroup], list[BatchDemand]], disorder: random.Random
) -> None:
    """Invariants 3, 4, 5 and 9: whenever the new demand came, the recorded decisions come out again, and each group once."""
    groups, demands = history
    ledger = ledger_of(groups, demands, disorder, restarts=True)
    assert replay(enumerate(groups, 1), enumerate(demands, 1), ledger, GATES) is None
    result = account([make_lease(group.ordinal) for group in groups], [entry for _, entry in ledger])
    assert result.holds, result.line()


class Ledger(RuleBasedStateMachine):
    """Groups come, the trainer asks, the service crashes: the model is the plain rule on lists."""

    @initialize()
    def begin(self) -> None:
        self.state = Assembly()
        self.ready: list[tuple[int, ReadyGroup]] = []
        self.demands: list[tuple[int, BatchDemand]] = []
        self.ledger: list[tuple[int, LedgerEntry]] = []
        self.committed = 0

    @rule(age=st.integers(0, 2), how=st.sampled_from([0, 0, 0, 1, 2, 3]))
    def a_group_is_whole(self, age: int, how: int) -> None:
        oldest = max(0, len(self.demands) - age)
        item = (len(self.ready) + 1, spoiled(make_ready(len(self.ready), oldest=oldest), how))
        self.ready.append(item)
        self.state.ready(*item)

    @rule()
    def the_trainer_asks(self) -> None:
        batches = sum(isinstance(entry, BatchEntry) for _, entry in self.ledger)
        if len(self.demands) <= batches:
            item = (len(self.demands) + 1, make_demand(len(self.demands)))
            self.demands.append(item)
            self.state.demand(*item)

    @rule()
    def decisions_are_appended(self) -> None:
        before = len(self.ledger)
        drain(self.state, self.ledger)
        for _, entry in self.ledger[before:]:
            if isinstance(entry, BatchEntry):
                assert [m.group for m in entry.groups] == self.expected(entry)
                self.state.step(make_commit(entry))

    @rule()
    def only_the_first_decision_is_appended_before_a_crash(self) -> None:
        if entries := decide(self.state, GATES):
            self.ledger.append((len(self.ledger) + 1, entries[0]))
            self.restart()

    @rule()
    def restart(self) -> None:
        self.state = Assembly()
        for item in self.ledger:
            self.state.entry(*item)
        for demand in self.demands:
            self.state.demand(*demand)
        for group in self.ready:
            self.state.ready(*group)

    @rule(data=st.data())
    def something_comes_again(self, data: st.DataObject) -> None:
        if self.ready:
            self.state.ready(*data.draw(st.sampled_from(self.ready)))
        if self.ledger:
            self.state.entry(*data.draw(st.sampled_from(self.ledger)))

    def expected(self, batch: BatchEntry) -> list[str]:
        """The first eligible groups in completion order that no earlier batch took."""
        taken = {
            m.group
            for _, entry in self.ledger
            if isinstance(entry, BatchEntry) and entry.step < batch.step
            for m in entry.groups
        }
        eligible = [
            group.group
            for _, group in self.ready
            if group.group not in taken and isinstance(judge(group, batch.version, (), GATES), Eligible)
        ]
        return eligible[:GROUPS]

    @invariant()
    def everything_is_accounted_for(self) -> None:
        leases = [make_lease(group.ordinal) for _, group in self.ready]
        result = account(leases, [entry for _, entry in self.ledger])
        assert result.holds, result.line()
        assert len(result.open) == self.state.depth()

    @invariant()
    def the_recording_replays(self) -> None:
        assert replay(self.ready, self.demands, self.ledger, GATES) is None


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_conservation_names_what_is_violated() -> None:
    groups, _, ledger = recorded()
    entries = [entry for _, entry in ledger]
    leases = [make_lease(group.ordinal) for group in groups]
    assert account(leases, entries).holds
    batch = next(entry for entry in entries if isinstance(entry, BatchEntry))
    twice = account(leases, [*entries, msgspec.structs.replace(batch, step=99)])
    assert not twice.holds
    assert "closed twice" in twice.line()
    assert "never leased" in account(leases[8:], entries).line()
    stale = msgspec.structs.replace(batch, groups=(msgspec.structs.replace(batch.groups[0], lag=9),))
    assert "lag 9 > 1" in account(leases, [stale]).line()
    assert "two batches" in account(leases, [batch, batch]).line()
    assert "leased twice" in account([*leases, make_lease(0, seed=77)], []).line()
    evaluation = account([make_lease(3, purpose="eval")], [])
    assert (evaluation.leased, evaluation.holds) == (0, True)


def test_deciding_has_no_effect_until_the_entry_is_appended() -> None:
    groups, demands, _ = recorded()
    state = Assembly()
    for seq, group in enumerate(groups, 1):
        state.ready(seq, group)
    state.demand(1, demands[0])
    first, second = decide(state, GATES), decide(state, GATES)
    assert [encode(e) for e in first] == [encode(e) for e in second]
    assert state.ledger_seq == 0
