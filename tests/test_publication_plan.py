"""Invariants 10 and 11, requirement W2: progressive publication.

It never takes too many engines out, never goes backward, never waits for ever, and ends with all at the target or named.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from param_sync.chain import VersionReused, Weights
from param_sync.rollout_plan import (
    Engine,
    Fleet,
    Order,
    Phase,
    Policy,
    advance,
    applied,
    culprits,
    failed,
    joined,
    left,
    loaded,
    published,
    settled,
    unavailable,
    versions,
    wake_at,
)

pytestmark = pytest.mark.timeout(60)
POLICY = Policy(max_unavailable=1, apply_deadline_s=10, rebuild_deadline_s=30, max_attempts=3, retry_s=2)


def w(version: int, incarnation: int = 0, digest: str | None = None) -> Weights:
    return Weights(incarnation, version, digest or f"d{incarnation}.{version}")


def at(weights: Weights) -> tuple[int, int]:
    return weights.incarnation, weights.version


def fleet_of(loads: dict[str, float], version: int = 0) -> Fleet:
    fleet = Fleet(target=w(version))
    for name, load in loads.items():
        fleet = joined(fleet, name, w(version), 0.0, load)
    return fleet


def go(fleet: Fleet, now_s: float, policy: Policy = POLICY) -> tuple[Fleet, list[str]]:
    fleet, orders = advance(fleet, policy, now_s)
    return fleet, [f"{o.engine}>{o.target.version}{'!' if o.from_anchor else ''}" for o in orders]


def test_one_engine_at_a_time_least_loaded_first() -> None:
    fleet, orders = go(published(fleet_of({"a": 9, "b": 1, "c": 4}), w(1)), 0)
    assert orders == ["b>1"]
    assert versions(fleet) == (w(0), w(0))
    for now, done, expected in ((1, "b", ["c>1"]), (2, "c", ["a>1"]), (3, "a", [])):
        assert go(fleet, now)[1] == []
        fleet, orders = go(applied(fleet, done, w(1), now), now)
        assert orders == expected
    assert settled(fleet)
    assert versions(fleet) == (w(1), w(1))
    assert wake_at(fleet, POLICY) is None


def test_an_overtaken_engine_skips_forward_and_the_oldest_goes_first() -> None:
    fleet, _ = go(published(fleet_of({"a": 0, "b": 5}), w(1)), 0)
    fleet, orders = go(published(published(fleet, w(2)), w(3)), 1)
    assert orders == []  # a is busy with version 1
    fleet, orders = go(applied(fleet, "a", w(1), 2), 2)
    assert orders == ["b>3"]  # b is older, though busier
    fleet, orders = go(applied(fleet, "b", w(3), 3), 3)
    assert orders == ["a>3"]
    assert published(fleet, w(2)) == fleet
    with pytest.raises(VersionReused):
        published(fleet, w(3, digest="other bits"))


def test_a_failed_engine_is_rebuilt_from_the_anchor_then_passed_over() -> None:
    fleet, _ = go(published(fleet_of({"a": 0, "b": 5}), w(1)), 0)
    fleet, orders = go(failed(fleet, "a", w(1), "checksum", 1), 1)
    assert orders == ["a>1!"]  # and b must wait: a is out
    fleet, orders = go(failed(fleet, "a", w(1), "disk full", 2), 2)
    assert (orders, wake_at(fleet, POLICY)) == ([], 4.0)
    fleet, orders = go(fleet, 4)
    assert orders == ["a>1!"]
    fleet, orders = go(failed(fleet, "a", w(1), "disk full", 5), 5)
    assert orders == ["b>1"]
    assert [(c.engine, c.phase, c.reason) for c in culprits(fleet, POLICY)] == [
        ("a", Phase.WEDGED, "failed 3 times, last: disk full"),
        ("b", Phase.APPLYING, ""),
    ]
    fleet, _ = go(applied(fleet, "b", w(1), 6), 6)
    assert settled(fleet)
    fleet, orders = go(joined(fleet, "a", w(0), 7), 7)  # it restarts
    assert orders == ["a>1"]


def test_a_silent_engine_is_named_at_its_deadline_and_may_come_back() -> None:
    fleet, _ = go(published(fleet_of({"a": 0, "b": 5}), w(1)), 0)
    assert culprits(fleet, POLICY)[0].deadline_s == wake_at(fleet, POLICY) == 10.0
    assert go(fleet, 9.9)[1] == []
    fleet, orders = go(fleet, 10)
    assert orders == ["b>1"]
    named = next(c for c in culprits(fleet, POLICY) if c.engine == "a")
    assert named.reason == f"no answer to the order for {w(1)} within 10 s"
    failing = failed(fleet, "a", w(1), "disk full", 11)
    assert unavailable(failing) == 1  # only b: who was passed over is not counted again
    assert go(failing, 11)[1] == ["a>1!"]
    fleet, _ = go(applied(fleet, "a", w(1), 11), 11)
    assert fleet.engines["a"].phase is Phase.SERVING


def test_only_the_ordered_digest_moves_the_version() -> None:
    fleet, _ = go(published(fleet_of({"a": 0}), w(1)), 0)
    assert applied(fleet, "a", w(0), 1) == fleet
    assert failed(fleet, "a", w(0), "late report", 1) == fleet
    assert (
        applied(fleet, "stranger", w(1), 1) == failed(fleet, "stranger", w(1), "", 1) == loaded(fleet, "stranger", 1) == fleet
    )
    wrong = applied(fleet, "a", w(1, digest="other bits"), 1)
    assert wrong.engines["a"].phase is Phase.FAILED
    assert versions(wrong) is None
    fleet = applied(fleet, "a", w(1), 1)
    assert applied(fleet, "a", w(1), 2) == fleet  # delivered twice


def test_newcomers_do_not_hold_up_the_others_and_impostors_do_not_serve() -> None:
    fleet = joined(joined(published(fleet_of({"a": 0}), w(1)), "new", None, 0), "fake", w(1, digest="other bits"), 0)
    fleet, orders = go(fleet, 0)
    assert sorted(orders) == ["a>1", "fake>1!", "new>1!"]
    assert unavailable(fleet) == 1
    assert go(published(fleet, w(0)), 1)[1] == []


def test_a_new_incarnation_is_forward_whatever_its_version() -> None:
    fleet, orders = go(published(fleet_of({"a": 0}, version=9), w(7, incarnation=1)), 0)
    assert orders == ["a>7"]
    assert versions(applied(fleet, "a", w(7, incarnation=1), 1)) == (w(7, 1), w(7, 1))


def test_an_engine_that_left_is_forgotten() -> None:
    fleet, _ = go(published(fleet_of({"a": 0, "b": 1}), w(1)), 0)
    fleet, orders = go(left(fleet, "a"), 1)
    assert orders == ["b>1"]
    assert [c.engine for c in culprits(fleet, POLICY)] == ["b"]


class Publication(RuleBasedStateMachine):
    """Engines that obey, fail, lie, fall silent, restart, join and leave, while versions are published at any pace."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet, self.now, self.newest = Fleet(), 0.0, w(0)
        self.outstanding: dict[str, Order] = {}
        self.policy = POLICY

    @initialize(limit=st.integers(1, 3), count=st.integers(1, 6))
    def start(self, limit: int, count: int) -> None:
        self.policy = Policy(max_unavailable=limit, apply_deadline_s=10, rebuild_deadline_s=30, max_attempts=3, retry_s=2)
        self.fleet = published(self.fleet, self.newest)
        for i in range(count):
            self.fleet = joined(self.fleet, f"e{i}", self.newest, 0.0)

    def advance(self) -> None:
        before = self.fleet
        self.fleet, orders = advance(before, self.policy, self.now)
        waiting = sum(
            e.capacity and (e.phase is Phase.APPLYING or (e.phase is Phase.FAILED and e.failures < self.policy.max_attempts))
            for e in before.engines.values()
            if not (e.phase is Phase.APPLYING and self.now - e.since_s >= (30 if e.from_anchor else 10))
        )
        taken = [o for o in orders if before.engines[o.engine].phase is Phase.SERVING and not o.from_anchor]
        assert not taken or waiting + len(taken) <= self.policy.max_unavailable
        for order in orders:
            engine = before.engines[order.engine]
            assert order.target == self.fleet.target
            assert engine.held is None or at(order.target) >= at(engine.held)  # never backward
            impostor = engine.held is not None and at(engine.held) == at(order.target)
            assert order.from_anchor == (engine.phase is not Phase.SERVING or impostor)
            self.outstanding[order.engine] = order
        assert advance(self.fleet, self.policy, self.now) == (self.fleet, ())

    @rule(skip=st.integers(1, 3), incarnation=st.booleans())
    def publish(self, skip: int, incarnation: bool) -> None:
        self.newest = (
            w(0, self.newest.incarnation + 1) if incarnation else w(self.newest.version + skip, self.newest.incarnation)
        )
        self.fleet = published(self.fleet, self.newest)
        self.advance()

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.advance()

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data(), how=st.sampled_from(["apply", "apply", "apply", "fail", "lie", "twice"]))
    def answer(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.outstanding)))
        target = self.outstanding[name].target
        before = self.fleet.engines.get(name)
        if how != "twice":
            del self.outstanding[name]
        if how == "fail":
            self.fleet = failed(self.fleet, name, target, "told to", self.now)
        else:
            shown = w(target.version, target.incarnation, "lie") if how == "lie" else target
            self.fleet = applied(self.fleet, name, shown, self.now)
        after = self.fleet.engines.get(name)
        if before is not None and after is not None and before.held is not None:
            assert after.held is not None
            assert at(after.held) >= at(before.held)
        self.advance()

    @rule(data=st.data(), name=st.sampled_from([f"e{i}" for i in range(8)]), load=st.integers(0, 9))
    def restart(self, data: st.DataObject, name: str, load: int) -> None:
        held = data.draw(st.sampled_from([None, w(0), self.newest, w(self.newest.version, self.newest.incarnation, "rot")]))
        self.outstanding.pop(name, None)
        self.fleet = joined(self.fleet, name, held, self.now, load)
        self.advance()

    @rule(name=st.sampled_from([f"e{i}" for i in range(8)]))
    def leave(self, name: str) -> None:
        self.outstanding.pop(name, None)
        self.fleet = left(self.fleet, name)
        self.advance()

    @invariant()
    def everyone_out_is_named_and_has_an_end(self) -> None:
        out = {e.name: e for e in self.fleet.engines.values() if e.phase is not Phase.SERVING}
        assert {c.engine for c in culprits(self.fleet, self.policy)} == set(out)
        assert all(e.phase is not Phase.EMPTY for e in out.values())  # ordered as soon as it is seen
        wake = wake_at(self.fleet, self.policy)
        if any(e.phase in (Phase.APPLYING, Phase.FAILED) for e in out.values()):
            assert wake is not None
            assert wake > self.now
        serving = [e.held for e in self.fleet.engines.values() if e.phase is Phase.SERVING]
        assert versions(self.fleet) == ((min(serving), max(serving)) if serving else None)  # type: ignore[type-var]

    def teardown(self) -> None:
        """From here some engines obey and some are silent for ever: all end at the target or are named, in bounded time."""
        silent = {f"e{i}" for i in range(0, 8, 3)}
        for _ in range(200):
            if settled(self.fleet):
                break
            ready = [n for n in self.outstanding if n not in silent and self._applying(n)]
            if ready:
                name = ready[0]
                self.fleet = applied(self.fleet, name, self.outstanding.pop(name).target, self.now)
            else:
                wake = wake_at(self.fleet, self.policy)
                assert wake is not None, "nobody will ever move again"
                self.now = max(self.now, wake)
            self.advance()
        assert settled(self.fleet)
        named = {c.engine for c in culprits(self.fleet, self.policy)}
        assert all(e.held == self.fleet.target for e in self.fleet.engines.values() if e.name not in named)

    def _applying(self, name: str) -> Engine | None:
        engine = self.fleet.engines.get(name)
        return engine if engine is not None and engine.phase is Phase.APPLYING else None


TestPublication = Publication.TestCase
TestPublication.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
