"""Routing (R9): bounded load always, affinity while it is cheap, and as little movement as possible."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rollouter.routing import AFFINITY_MARGIN, LOAD_FACTOR, Reason, bound, choose, preference

engines = st.lists(st.integers(0, 30).map(lambda n: f"e{n}"), min_size=1, max_size=8, unique=True)
loads = st.dictionaries(st.integers(0, 30).map(lambda n: f"e{n}"), st.integers(0, 40), min_size=1, max_size=8)
groups = st.integers(0, 10_000).map(lambda n: f"g{n:08d}")


@settings(deadline=None)
@given(engines, st.lists(groups, min_size=1, max_size=120))
def test_new_conversations_never_pass_the_bound(names: list[str], arriving: list[str]) -> None:
    in_flight = dict.fromkeys(names, 0)
    for group in arriving:
        choice = choose(in_flight, group, None)
        assert choice is not None
        in_flight[choice.engine] += 1
        assert max(in_flight.values()) <= math.ceil(LOAD_FACTOR * sum(in_flight.values()) / len(names))


@settings(deadline=None)
@given(loads, groups, st.integers(0, 30).map(lambda n: f"e{n}"))
def test_a_conversation_stays_exactly_while_its_engine_is_not_much_busier(
    in_flight: dict[str, int], group: str, held: str
) -> None:
    choice = choose(in_flight, group, held)
    assert choice is not None
    assert choice.engine in in_flight
    stays = held in in_flight and in_flight[held] - min(in_flight.values()) <= AFFINITY_MARGIN
    assert (choice.reason is Reason.KEPT) == stays
    if stays:
        assert choice.engine == held
    else:
        assert in_flight[choice.engine] < bound(sum(in_flight.values()), len(in_flight))
        assert choice.reason is (Reason.BROKEN_LOAD if held in in_flight else Reason.BROKEN_GONE)


@settings(deadline=None)
@given(engines, groups)
def test_siblings_prefer_one_engine(names: list[str], group: str) -> None:
    idle = dict.fromkeys(names, 0)
    first = choose(idle, group, None)
    assert first is not None
    assert first.reason is Reason.NEW_PREFERRED
    assert first.engine == preference(group, tuple(sorted(names)))[0]
    assert choose(dict(reversed(idle.items())), group, None) == first  # the order of what is known decides nothing


@settings(deadline=None)
@given(engines.filter(lambda names: len(names) > 1), groups)
def test_a_leaving_engine_moves_only_its_own_groups(names: list[str], group: str) -> None:
    before = preference(group, tuple(sorted(names)))
    gone = before[-1]
    after = preference(group, tuple(sorted(set(names) - {gone})))
    assert after == before[:-1]


@settings(deadline=None)
@given(loads, groups, st.sets(st.integers(0, 30).map(lambda n: f"e{n}")))
def test_an_engine_that_just_failed_is_taken_only_without_another(
    in_flight: dict[str, int], group: str, avoid: set[str]
) -> None:
    held = next(iter(in_flight))
    choice = choose(in_flight, group, held, avoid)
    assert choice is not None
    assert choice.engine not in avoid or set(in_flight) <= avoid
    if held in avoid and not set(in_flight) <= avoid:
        assert choice.reason is Reason.BROKEN_AVOIDED


def test_no_engine_no_choice() -> None:
    assert choose({}, "g00000001", "e0") is None


def test_groups_spread_over_the_ring() -> None:
    names = tuple(f"e{n}" for n in range(4))
    owners = Counter(preference(f"g{n:08d}", names)[0] for n in range(4000))
    assert min(owners.values()) > 500  # 64 points per engine: within a factor of two of the mean
