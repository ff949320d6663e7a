"""Engines several versions behind: one merged patch out of what the last patches overwrote, where it is smaller."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_sync.behind import History, is_smaller, merge_from, merged
from param_sync.chain import Manifest, Weights
from param_sync.patch import codec
from param_sync.patch.bits import Bits
from param_sync.patch.errors import DigestMismatch
from param_sync.patch.snapshot import Snapshot

pytestmark = pytest.mark.timeout(60)


def w(version: int) -> Weights:
    return Weights(0, version, f"digest-{version}")


def patch(base: int, version: int, nbytes: int = 10) -> Manifest:
    return Manifest(w(version), w(base), f"patch-{base}-{version}", nbytes)


ANCHOR = Manifest(w(2), None, "anchor-2", 1000)
SINGLES = [patch(v, v + 1) for v in range(2, 6)]


@pytest.mark.parametrize(
    ("chain", "remembered", "start"),
    [
        (SINGLES, {2, 3, 4, 5}, 2),
        (SINGLES, {4, 5}, 4),  # as many as can be
        (SINGLES, {5}, None),  # one link is no chain
        (SINGLES, set(), None),
        (SINGLES[-1:], {5}, None),
        ([], {5}, None),
        ([ANCHOR, *SINGLES], {2, 3}, 2),  # what follows an anchor
        ([ANCHOR], {2}, None),
        ([patch(2, 5), patch(5, 6)], {2, 5}, 2),  # an older merged patch gives way to a newer one
    ],
)
def test_a_merged_patch_begins_as_far_back_as_is_remembered(
    chain: list[Manifest], remembered: set[int], start: int | None
) -> None:
    assert merge_from(chain, {w(v) for v in remembered}) == (None if start is None else w(start))


def test_only_a_smaller_one_is_kept() -> None:
    assert is_smaller(39, SINGLES)
    assert not is_smaller(40, SINGLES)


def name(snapshot: Snapshot) -> Weights:
    return Weights(snapshot.incarnation, snapshot.version, snapshot.digest)


def states(seed: int, count: int, changed: float) -> list[Snapshot]:
    """Weights that change a little in every step; tensors come, go and change their form on the way."""
    rng = np.random.default_rng(seed)
    tensors = {n: rng.integers(0, 65536, size).astype(np.uint16) for n, size in (("a", 3000), ("b", 64), ("c", 1), ("d", 10))}
    made = []
    for version in range(count):
        if version:
            tensors = {n: np.where(rng.random(t.size) < changed, t ^ 1, t).astype(np.uint16) for n, t in tensors.items()}
        if version == 2:
            tensors["new"] = rng.integers(0, 65536, 20).astype(np.uint16)
            del tensors["d"]
        if version == 3:
            tensors["b"] = rng.integers(0, 65536, 32).astype(np.uint16)
        bits = {n: Bits("bf16", t.shape, t) for n, t in tensors.items()}
        made.append(Snapshot.of(bits, version=version, incarnation=0))
    return made


def followed(made: list[Snapshot], depth: int, level: int = 1, share: float = 10.0) -> tuple[History, Snapshot]:
    """The history of a synchronizer that applied each patch, and its newest weights."""
    history, held = History(depth, share=share), made[0]
    for old, new in itertools.pairwise(made):
        before = held
        held, changes = codec.apply_with_changes(held, codec.encode(old, new, level=level).tobytes())
        history.add(before, held, changes)
    return history, held


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), changed=st.sampled_from([0.0, 0.01, 0.5]), level=st.sampled_from([1, 2]))
def test_a_merged_patch_is_the_one_between_its_two_ends(seed: int, changed: float, level: int) -> None:
    made = states(seed, 6, changed)
    history, newest = followed(made, 8, level)
    assert history.starts() == {name(state) for state in made[:-1]}
    for start in made[:-1]:
        file = merged(history.since(name(start)), newest, level=level).tobytes()
        assert file == codec.encode(start, made[-1], level=level).tobytes()
        assert codec.apply(start, file).digest == made[-1].digest


def test_the_last_steps_are_remembered_in_bounded_memory() -> None:
    made = states(1, 8, 0.5)
    history, _ = followed(made, 3)
    assert history.starts() == {name(state) for state in made[4:7]}
    total = sum(bits.data.nbytes for bits in made[-1].tensors.values())
    history, _ = followed(made, 8, share=3.2)  # half of the elements at 6 bytes each: one and a half times the model
    kept = [step for start in history.starts() for step in history.since(start)[:1]]
    assert 0 < sum(step.nbytes for step in kept) <= 3.2 * total and len(kept) < 7
    history, _ = followed(made, 0)
    assert history.starts() == frozenset()


def test_a_gap_or_another_incarnation_forgets_what_was_before() -> None:
    made = states(2, 5, 0.1)
    history, _ = followed(made[:3], 8)
    elsewhere = Snapshot(4, 0, made[4].tensors, made[4].entries, made[4].digest)
    after = Snapshot.of(made[3].tensors, version=5, incarnation=0)
    _, changes = codec.apply_with_changes(elsewhere, codec.encode(elsewhere, after).tobytes())
    history.add(elsewhere, after, changes)
    assert history.starts() == {name(elsewhere)}
    other = Snapshot.of(made[0].tensors, version=6, incarnation=1)
    _, changes = codec.apply_with_changes(None, codec.encode_anchor(other).tobytes())
    history.add(after, other, changes)
    assert history.starts() == frozenset()


def test_old_words_that_do_not_come_back_are_not_published() -> None:
    made = states(3, 4, 0.2)
    history, newest = followed(made, 8)
    steps = history.since(name(made[0]))
    steps[1].words["a"][1][0] ^= 2
    with pytest.raises(DigestMismatch, match="the old words do not come back"):
        merged(steps, newest, level=1)
