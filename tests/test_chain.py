"""Requirement W4: from any weights, or none, to the target by the cheapest verified chain, or a named gap."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_sync.chain import (
    AnchorPolicy,
    BrokenChain,
    ChainError,
    Manifest,
    Need,
    VersionReused,
    Weights,
    anchor_due,
    plan_chain,
    plan_collection,
)

pytestmark = pytest.mark.timeout(30)


def w(version: int, incarnation: int = 0) -> Weights:
    return Weights(incarnation, version, f"digest-{incarnation}-{version}")


def anchor(version: int, nbytes: int = 1000, incarnation: int = 0) -> Manifest:
    return Manifest(w(version, incarnation), None, f"anchor-{incarnation}-{version}", nbytes)


def patch(base: int, version: int, nbytes: int = 10, incarnation: int = 0) -> Manifest:
    return Manifest(w(version, incarnation), w(base, incarnation), f"patch-{incarnation}-{base}-{version}", nbytes)


def names(chain: tuple[Manifest, ...]) -> list[str]:
    return [link.name for link in chain]


FILES = [anchor(0), *(patch(v, v + 1) for v in range(6)), anchor(4), patch(0, 6, 35)]


@pytest.mark.parametrize(
    ("held", "target", "expected"),
    [
        (w(6), w(6), []),
        (w(5), w(6), ["patch-0-5-6"]),
        (w(0), w(6), ["patch-0-0-6"]),  # one merged patch beats six
        (w(1), w(3), ["patch-0-1-2", "patch-0-2-3"]),
        (None, w(4), ["anchor-0-4"]),
        (None, w(6), ["anchor-0-4", "patch-0-4-5", "patch-0-5-6"]),
        (w(9, 1), w(5), ["anchor-0-4", "patch-0-4-5"]),  # another incarnation's weights are no base
        (Weights(0, 5, "other bits"), w(6), ["anchor-0-4", "patch-0-4-5", "patch-0-5-6"]),
    ],
)
def test_the_cheapest_chain(held: Weights | None, target: Weights, expected: list[str]) -> None:
    assert names(plan_chain(FILES, target, held)) == expected


def test_a_costly_link_makes_few_links_cheaper() -> None:
    files = [*(patch(v, v + 1) for v in range(3)), patch(0, 3, 50)]
    assert len(plan_chain(files, w(3), w(0))) == 3
    assert names(plan_chain(files, w(3), w(0), link_cost_bytes=20)) == ["patch-0-0-3"]


def test_a_cheap_anchor_beats_a_long_chain() -> None:
    assert names(plan_chain([anchor(5, 30), *FILES], w(5), w(0), without=["patch-0-0-6"])) == ["anchor-0-5"]


def test_lost_files_are_gone_around_and_a_gap_is_named() -> None:
    assert names(plan_chain(FILES, w(6), w(5), without=["patch-0-5-6"])) == ["anchor-0-0", "patch-0-0-6"]
    with pytest.raises(BrokenChain, match=r"no chain to version 6 .*produces version 5 .*'patch-0-5-6' starts from") as caught:
        plan_chain(FILES, w(6), None, without=["patch-0-4-5", "anchor-0-0"])
    assert caught.value.missing == w(5)
    assert caught.value.needed_by == "patch-0-5-6"
    with pytest.raises(BrokenChain, match="the target itself") as caught:
        plan_chain(FILES, w(7), w(6))
    assert (caught.value.missing, caught.value.needed_by) == (w(7), None)


def test_a_version_that_stands_for_two_sets_of_weights_is_refused() -> None:
    double = Manifest(Weights(0, 3, "other bits"), None, "double", 5)
    with pytest.raises(VersionReused, match="double: version 3"):
        plan_chain([*FILES, double], w(6))
    for base in (w(4), w(3), w(1, 1)):
        with pytest.raises(ChainError, match="forward within one incarnation"):
            Manifest(w(3), base, "backward", 5)


@st.composite
def files(draw: st.DrawFn) -> list[Manifest]:
    made = [anchor(v, draw(st.integers(1, 60))) for v in draw(st.lists(st.integers(0, 7), max_size=3, unique=True))]
    pairs = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 7)), max_size=14, unique=True))
    return made + [patch(a, b, draw(st.integers(1, 30))) for a, b in pairs if a < b]


def cheapest(manifests: list[Manifest], held: int | None) -> list[float]:
    """Cost to reach each version, by relaxing in order of version: the reference."""
    cost = [float("inf")] * 8
    for v in range(8):
        entering = [cost[m.base.version] + m.nbytes for m in manifests if m.target.version == v and m.base]
        anchors = [m.nbytes for m in manifests if m.target.version == v and not m.base]
        cost[v] = 0.0 if v == held else min([*entering, *anchors, float("inf")])
    return cost


@settings(max_examples=300, deadline=None)
@given(files(), st.integers(0, 7), st.none() | st.integers(0, 7))
def test_plans_are_valid_and_as_cheap_as_the_reference(manifests: list[Manifest], target: int, held: int | None) -> None:
    best = cheapest(manifests, held)[target]
    start = None if held is None else w(held)
    if best == float("inf"):
        with pytest.raises(BrokenChain) as caught:
            plan_chain(manifests, w(target), start)
        missing = caught.value.missing
        assert cheapest(manifests, held)[missing.version] == float("inf")
        assert not any(m.target == missing for m in manifests)
        return
    chain = plan_chain(manifests, w(target), start)
    assert sum(link.nbytes for link in chain) == best
    at = start
    for link in chain:
        assert link.base is None or link.base == at
        at = link.target
    assert at == w(target)
    assert chain == plan_chain(manifests[::-1], w(target), start)


@settings(max_examples=300, deadline=None)
@given(
    files(),
    st.integers(0, 7),
    st.lists(st.tuples(st.none() | st.integers(0, 7), st.none() | st.integers(0, 7)), max_size=4),
    st.data(),
)
def test_collection_never_lengthens_the_way_of_a_known_receiver(
    manifests: list[Manifest], latest: int, known: list[tuple[int | None, int | None]], data: st.DataObject
) -> None:
    needs = [Need(None if h is None else w(h), None if o is None else w(o)) for h, o in known]
    pinned = data.draw(st.lists(st.integers(0, 7), max_size=2))
    kept = plan_collection(manifests, w(latest), needs, pinned=[w(v) for v in pinned], keep_anchors=1)
    assert sorted((*kept.keep, *kept.drop)) == sorted(m.name for m in manifests)
    left = [m for m in manifests if m.name in kept.keep]
    for held, ordered in [*known, (None, latest), *((None, v) for v in pinned)]:
        for goal in (latest, latest if ordered is None else ordered):
            assert cheapest(left, held)[goal] == cheapest(manifests, held)[goal]
            assert cheapest(left, None)[goal] == cheapest(manifests, None)[goal]
    assert all(m.name in kept.keep for m in manifests if m.target.version > latest)


def test_collection_drops_old_files_and_keeps_two_anchors() -> None:
    manifests = [*FILES, anchor(6), patch(6, 7), patch(7, 8)]
    kept = plan_collection(manifests, w(7), [Need(w(6)), Need(w(5), w(6))])
    expected = ["anchor-0-4", "anchor-0-6", "patch-0-4-5", "patch-0-5-6", "patch-0-6-7", "patch-0-7-8"]
    assert list(kept.keep) == expected
    nothing = plan_collection([m for m in manifests if m.base], w(7), [Need(w(6))])
    assert nothing.drop == ()  # no anchor leads to the latest: whatever is there may be all there is


def test_collection_keeps_the_single_patches_beside_a_merged_one() -> None:
    manifests = [anchor(0), *(patch(v, v + 1) for v in range(6)), patch(1, 5, 15), patch(0, 6, 20)]
    kept = plan_collection(manifests, w(6), [Need(w(1), w(5))])
    assert set(kept.keep) == {"anchor-0-0", "patch-0-0-6", "patch-0-1-5", *(f"patch-0-{v}-{v + 1}" for v in range(6))}
    assert plan_collection(manifests, w(6), [Need(w(0), w(6))]).drop == ("patch-0-1-5",)


def test_a_new_incarnation_lets_the_old_one_go_once_nobody_needs_it() -> None:
    manifests = [*FILES, anchor(6, incarnation=1), patch(6, 7, incarnation=1)]
    assert plan_collection(manifests, w(7, 1), []).keep == ("anchor-1-6", "patch-1-6-7")
    assert "patch-0-5-6" in plan_collection(manifests, w(7, 1), [Need(w(5), w(6))]).keep


def test_anchors_are_rare_but_come_in_time() -> None:
    policy = AnchorPolicy(every_versions=4, chain_ratio=0.05)
    first = [anchor(0, 1000)]
    assert anchor_due(policy, [], w(0)) == "incarnation 0 has no anchor"
    assert anchor_due(policy, first, w(0), requested=True) is None
    assert anchor_due(policy, [*first, patch(0, 1)], w(1)) is None
    assert anchor_due(policy, [*first, patch(0, 1)], w(1), requested=True) == "a receiver asked for one"
    assert "4 versions old" in (anchor_due(policy, [*first, patch(0, 4)], w(4)) or "")
    assert "weigh 60 bytes" in (anchor_due(policy, [*first, patch(0, 1, 30), patch(1, 2, 30)], w(2)) or "")
    assert anchor_due(policy, [*first, patch(0, 1)], w(1, 1)) == "incarnation 1 has no anchor"
