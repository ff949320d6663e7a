"""Lanes: bounds hold at every instant, nobody starves, a full lane refuses."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.sandbox import lane_rules
from services.sandbox.classify import is_package_heavy, lane_of
from services.sandbox.cpus import PACKAGE_CAP, default_lanes, lane_blocks, plan_cpus
from services.sandbox.lane_rules import Lane, LaneSpec, LaneState
from services.sandbox.lanes import LaneBusy, Lanes

pytestmark = pytest.mark.timeout(60)


class LaneMachine(RuleBasedStateMachine):
    """Any order of offers, starts and departures."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = LaneSpec(run_permits=3, start_permits=2, queue_bound=4, cpu_sets=((0,), (1,), (2,)))
        self.state = LaneState()
        self.number = 0
        self.order: list[str] = []  # tickets that wait, in order of arrival
        self.granted: dict[str, int] = {}
        self.starting: set[str] = set()

    def _grant(self) -> None:
        self.state, grants = lane_rules.grant(self.spec, self.state)
        for granted in grants:
            assert granted.ticket == self.order.pop(0), "served in the order of arrival"
            assert granted.slot not in self.granted.values()
            assert granted.cpus == (granted.slot,)
            self.granted[granted.ticket] = granted.slot
            self.starting.add(granted.ticket)

    @rule()
    def offer(self) -> None:
        self.number += 1
        ticket = f"t{self.number}"
        offered = lane_rules.offer(self.spec, self.state, ticket)
        if offered is None:
            assert len(self.state.waiting) == self.spec.queue_bound
            return
        self.order.append(ticket)
        self.state = offered
        self._grant()

    @precondition(lambda self: self.starting)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.starting)))
        self.state = lane_rules.started(lane_rules.started(self.state, ticket), ticket)
        self.starting.discard(ticket)
        self._grant()

    @precondition(lambda self: self.granted or self.order)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted([*self.granted, *self.order])))
        self.state = lane_rules.leave(lane_rules.leave(self.state, ticket), ticket)
        self.granted.pop(ticket, None)
        self.starting.discard(ticket)
        if ticket in self.order:
            self.order.remove(ticket)
        self._grant()

    @invariant()
    def bounds_hold(self) -> None:
        assert self.state.running == len(self.granted) <= self.spec.run_permits
        assert len(self.state.starting) == len(self.starting) <= self.spec.start_permits
        assert list(self.state.waiting) == self.order and len(self.order) <= self.spec.queue_bound
        idle = self.state.running < self.spec.run_permits and len(self.starting) < self.spec.start_permits
        assert not (idle and self.order), "nobody waits while there is room"


LaneMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLaneRules = LaneMachine.TestCase


def test_a_lane_without_a_queue_still_runs_what_has_room() -> None:
    spec = LaneSpec(run_permits=1, start_permits=1, queue_bound=0)
    offered = lane_rules.offer(spec, LaneState(), "a")
    assert offered is not None
    state, grants = lane_rules.grant(spec, offered)
    assert [granted.ticket for granted in grants] == ["a"]
    assert lane_rules.offer(spec, state, "b") is None
    with pytest.raises(ValueError, match="'a'"):
        lane_rules.offer(spec, state, "a")


def specs(**overrides: LaneSpec) -> dict[Lane, LaneSpec]:
    return {lane: overrides.get(lane.value, LaneSpec(run_permits=2, start_permits=2, queue_bound=2)) for lane in Lane}


async def test_a_stuck_package_lane_starves_nobody_and_refuses() -> None:
    lanes = Lanes(specs())
    async with AsyncExitStack() as stuck, asyncio.timeout(10):
        for name in ("a", "b"):
            await stuck.enter_async_context(lanes.permit(Lane.PACKAGE, name))
        waiting = [asyncio.create_task(enter(lanes, Lane.PACKAGE, name)) for name in ("c", "d")]
        await asyncio.sleep(0)
        with pytest.raises(LaneBusy) as busy:
            await enter(lanes, Lane.PACKAGE, "e")
        assert busy.value.retry and busy.value.waiting == 2 and "lane package: 2 wait" in str(busy.value)
        for lane in (Lane.RESET, Lane.COMMAND, Lane.VERIFY, Lane.CLEANUP):
            for _ in range(5):
                await enter(lanes, lane, "x")
        package = next(status for status in lanes.status() if status.lane is Lane.PACKAGE)
        assert (package.running, package.waiting, package.refused, package.holders) == (2, 2, 1, ("a", "b"))
        assert not any(task.done() for task in waiting)
    await asyncio.gather(*waiting)
    assert all(status.running == status.waiting == 0 for status in lanes.status())


async def enter(lanes: Lanes, lane: Lane, label: str) -> int:
    async with lanes.permit(lane, label) as permit:
        permit.started()
        return permit.slot


async def test_start_permits_are_separate_from_run_permits() -> None:
    lanes = Lanes(specs(command=LaneSpec(run_permits=4, start_permits=1)))
    async with lanes.permit(Lane.COMMAND, "a") as first:
        second = asyncio.create_task(enter(lanes, Lane.COMMAND, "b"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not second.done(), "a run slot is free, but somebody is starting"
        first.started()
        async with asyncio.timeout(5):
            assert await second == 1


async def test_cancelled_waiters_leave_no_trace() -> None:
    lanes = Lanes(specs(command=LaneSpec(run_permits=1, start_permits=1)))
    async with lanes.permit(Lane.COMMAND, "a"):
        waiters = [asyncio.create_task(enter(lanes, Lane.COMMAND, str(number))) for number in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        waiters[2].cancel()
    waiters[1].cancel()  # its turn has just come
    await asyncio.gather(*waiters, return_exceptions=True)
    async with asyncio.timeout(5):
        assert await enter(lanes, Lane.COMMAND, "z") == 0


async def test_no_wait_is_without_an_end() -> None:
    lanes = Lanes(specs(command=LaneSpec(run_permits=1, start_permits=1, max_wait_s=0.05)))
    async with lanes.permit(Lane.COMMAND, "a"), asyncio.timeout(5):
        with pytest.raises(LaneBusy):
            await enter(lanes, Lane.COMMAND, "b")


@given(count=st.integers(1, 300), offset=st.integers(0, 5))
def test_cpu_sets_are_deterministic_and_do_not_overlap(count: int, offset: int) -> None:
    cpus = [offset + 2 * number for number in range(count)]
    lanes = default_lanes(cpus)
    assert lanes == default_lanes(list(reversed(cpus)))
    assert lanes[Lane.PACKAGE].run_permits <= PACKAGE_CAP
    used: list[int] = []
    for lane in (Lane.COMMAND, Lane.PACKAGE, Lane.VERIFY):
        sets = lanes[lane].cpu_sets
        flat = [cpu for slot in sets for cpu in slot]
        assert len(sets) == lanes[lane].run_permits and set(flat) <= set(cpus) and all(sets)
        assert len(flat) == len(set(flat)), "slots of one lane share nothing"
        used += flat
    if count >= 4:
        assert len(used) == len(set(used)), "lanes share nothing"
        assert set(lane_blocks(cpus)[Lane.RESET]).isdisjoint(used)


def test_sharing_is_said() -> None:
    two = plan_cpus([0, 1], {**dict.fromkeys(Lane, 2), Lane.PACKAGE: 16})
    assert "2 CPUs: lanes share them" in two.note and "package" in two.note
    assert two.sets[Lane.COMMAND] == ((0,), (1,)) and set(two.sets[Lane.PACKAGE]) == {(1,)}
    assert plan_cpus(range(16), dict.fromkeys(Lane, 1)).note == "no two slots share a CPU"
    with pytest.raises(ValueError, match="at least one"):
        lane_blocks([])


HEAVY = """
apt-get install -y jq
sudo apt update && true
pip install requests
pip3.11 install -r requirements.txt
python -m pip install .
python3 -m venv v && v/bin/pip install x
cd src && make -j8
make -j
make --jobs=4 all
bash -c "npm ci && npm run build"
sh -lc 'pip install x'
cat list | xargs -n1 pip install
(cd a; cargo build --release)
env CC=gcc FOO=1 nice -n 10 timeout 60s cargo test
if true; then npm install; fi
for p in a b; do pip install $p; done
echo "$(pip install x 2>&1)"
out=`cargo build`
cmake -S . -B b && cmake --build b
./gradlew test
python setup.py install
bash -c "bash -c 'apt install -y x'"
eval "pip install y"
true\\nyarn
uv pip install x
""".strip().splitlines()
ORDINARY = """
ls -la
echo pip install
grep -r "apt-get install" .
cat Makefile
make
make test
python3 script.py
pip --version
git commit -m 'npm install'
sed -i s/pip/pip3/ a.txt
find . -name '*.py' | xargs grep -l install
cargo --version
mv a b && cat b
echo 'unclosed
""".strip().splitlines()


@pytest.mark.parametrize("command", HEAVY)
def test_package_heavy_lines_are_recognised(command: str) -> None:
    assert lane_of(command.replace("\\n", "\n")) is Lane.PACKAGE


@pytest.mark.parametrize("command", ORDINARY)
def test_ordinary_lines_stay_ordinary(command: str) -> None:
    assert lane_of(command) is Lane.COMMAND


@given(st.text(max_size=200))
@settings(deadline=None)
def test_any_text_is_classified(command: str) -> None:
    is_package_heavy(command)
    is_package_heavy(f"bash -c {command!r}")
