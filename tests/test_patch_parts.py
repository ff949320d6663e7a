"""Parts from several ranks make the patch that one rank makes; merged patches make the weights that the chain makes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_sync.patch import classed, codec, frame
from param_sync.patch.bits import Bits, same_state
from param_sync.patch.container import decode_header
from param_sync.patch.errors import PatchError, WrongBase
from param_sync.patch.parts import Part, assemble_parts, cut_points, encode_part
from param_sync.patch.snapshot import Snapshot
from tests.test_patch_codec import bf16, compiled_from, snapshot

pytestmark = pytest.mark.timeout(120)
assert classed  # compiled before any test's time begins


def walk(rng: np.random.Generator, data: np.ndarray, density: float) -> np.ndarray:
    """The next step: a few elements one up or down, now and then a far jump."""
    moved = data.copy()
    hit = np.flatnonzero(rng.random(data.size) < density)
    moved[hit] += rng.choice([1, 1, 1, 65535, 65535, 300], hit.size).astype(np.uint16)
    return moved


def states(seed: int) -> tuple[Snapshot, Snapshot]:
    rng = np.random.default_rng(seed)
    flat = rng.integers(0x3A00, 0x3E00, 5000).astype(np.uint16)
    wide = rng.integers(0, 2**32, 300).astype(np.uint32)
    old = {
        "flat": Bits("bf16", (50, 100), flat),
        "wide": Bits("f32", (300,), wide),
        "same": Bits("bf16", (7,), flat[:7]),
        "form": Bits("bf16", (40,), flat[:40]),
        "gone": Bits("bf16", (2,), flat[:2]),
    }
    new = {
        "flat": Bits("bf16", (50, 100), walk(rng, flat, 0.03)),
        "wide": Bits("f32", (300,), np.where(rng.random(300) < 0.1, wide ^ 5, wide).astype(np.uint32)),
        "same": Bits("bf16", (7,), flat[:7].copy()),
        "form": Bits("bf16", (4, 10), flat[:40]),
        "fresh": Bits("bf16", (1100,), flat[:1100]),
        "none": Bits("bf16", (0,), flat[:0]),
        "one": Bits("f32", (), wide[:1]),
    }
    return snapshot(old, 4, 1), snapshot(new, 6, 1)


def parts_of(old: Snapshot, new: Snapshot, cuts: dict[str, list[int]], level: int) -> list[Part]:
    made = []
    for name, after in new.tensors.items():
        before = old.tensors.get(name)
        base = before if before is not None and (before.dtype, before.shape) == (after.dtype, after.shape) else None
        edges = [0, *cuts[name], after.data.size]
        for a, b in pairwise(edges):
            held = None if base is None else base.data[a:b]
            made.append(
                encode_part(name, held, after.data[a:b], dtype=after.dtype, start=a, total=after.data.size, level=level)
            )
    return made


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 2**32),
    level=st.sampled_from([1, 2]),
    compiled=st.booleans(),
    aligned=st.booleans(),
)
def test_parts_make_the_patch_that_one_rank_makes(
    data: st.DataObject, seed: int, level: int, compiled: bool, aligned: bool
) -> None:
    old, new = states(seed)
    with compiled_from(0 if compiled else 1 << 20, 500):
        cuts = {}
        for name, bits in new.tensors.items():
            if aligned:
                cuts[name] = cut_points(bits.data.size, data.draw(st.integers(1, 5)))[1:-1]
            else:
                cuts[name] = sorted(data.draw(st.lists(st.integers(0, bits.data.size), max_size=4)))
        parts = data.draw(st.permutations(parts_of(old, new, cuts, level)))
        file = assemble_parts(parts, old.entries, new.entries, version=6, incarnation=1, base_version=4, level=level).tobytes()
        alone = codec.encode(old, new, level=level).tobytes()
    if aligned:
        assert file == alone
    made, changed = codec.apply_with_changes(old, file)
    expected, expected_changes = codec.apply_with_changes(old, alone)
    assert same_state(made.tensors, new.tensors)
    assert (made.version, made.incarnation, made.digest) == (expected.version, expected.incarnation, expected.digest)
    assert changed.keys() == expected_changes.keys()
    for name, change in changed.items():
        other = expected_changes[name]
        assert (change.index is None) == (other.index is None)
        assert change.index is None or np.array_equal(change.index, other.index)
        assert np.array_equal(change.words, other.words)


@given(st.integers(0, 10**9), st.integers(1, 64))
def test_cuts_ascend_from_nothing_to_all_along_the_segments(total: int, ranks: int) -> None:
    cuts = cut_points(total, ranks)
    assert cuts[0] == 0 and cuts[-1] == total and len(cuts) == ranks + 1
    assert cuts == sorted(cuts)
    assert all(cut == total or cut % frame.SEGMENT_ELEMENTS == 0 for cut in cuts)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda p: p[1:], "leave a hole at element 0"),
        (lambda p: p[:-1], "end at element 600 of 1000"),
        (lambda p: [*p, p[0]], "overlap at element"),
        (lambda p: [*p, Part("other", 0, 0, False, b"")], "no tensor of the result"),
        (lambda p: [Part("w", 0, 600, True, b""), p[1]], "made against the old"),
    ],
)
def test_parts_that_do_not_fit_are_refused(edit, text: str) -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 2**16, 1000).astype(np.uint16)
    old, new = snapshot(bf16(data), 0), snapshot(bf16(walk(rng, data, 0.1)), 1)
    parts = parts_of(old, new, {"w": [600]}, 1)
    with pytest.raises(PatchError, match=text):
        assemble_parts(edit(parts), old.entries, new.entries, version=1, incarnation=0, base_version=0)
    with pytest.raises(PatchError, match="whose digest stays"):
        assemble_parts(parts, old.entries, old.entries, version=1, incarnation=0, base_version=0)
    with pytest.raises(PatchError, match="do not lie in 500"):
        encode_part("w", data, data, dtype="bf16", start=0, total=500)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), level=st.sampled_from([1, 2]), links=st.integers(1, 6), workers=st.sampled_from([1, 2]))
def test_a_merged_patch_is_the_patch_between_its_ends(seed: int, level: int, links: int, workers: int) -> None:
    rng = np.random.default_rng(seed)
    data = rng.integers(0x3A00, 0x3E00, 3000).astype(np.uint16)
    still = Bits("u8", (3,), np.arange(3).astype(np.uint8))
    chain, files = [snapshot({**bf16(data), "still": still, "gone": still}, 0)], []
    with compiled_from(0):
        for version in range(1, links + 1):
            data = walk(rng, data, 0.02)
            chain.append(snapshot({**bf16(data), "still": still}, version))
            files.append(codec.encode(chain[-2], chain[-1], level=level).tobytes())
        merged = codec.compose(chain[0], files, workers=workers, level=level).tobytes()
        assert merged == codec.encode(chain[0], chain[-1], level=level).tobytes()
    for held in chain:  # no link's memory was overwritten
        held.audit()
    made = codec.apply(chain[0], merged)
    assert same_state(made.tensors, chain[-1].tensors)
    assert made.version == links
    if links > 1:
        with pytest.raises(WrongBase):
            codec.compose(chain[0], files[1:])


def test_eight_steps_in_one_patch_are_about_half_of_eight_patches() -> None:
    """As an optimizer does it: the same elements lie near a rounding edge, cross it, and come back."""
    rng = np.random.default_rng(3)
    masters = rng.standard_normal(1 << 18).astype(np.float32) * np.float32(0.02)

    def rounded() -> dict[str, Bits]:
        bits = masters.view(np.uint32)
        return bf16(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))

    chain, files = [snapshot(rounded(), 0)], []
    for version in range(1, 9):
        masters = masters - rng.standard_normal(masters.size).astype(np.float32) * np.float32(2.2e-7)
        chain.append(snapshot(rounded(), version))
        files.append(codec.encode(chain[-2], chain[-1]).tobytes())
    merged = codec.compose(chain[0], files)
    assert merged.nbytes < 0.55 * sum(map(len, files))
    assert decode_header(merged.tobytes())[0].base_version == 0


def test_memory_that_is_offered_is_used_unless_it_is_the_bases_own() -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 2**16, 1000).astype(np.uint16)
    old, new = snapshot(bf16(data), 0), snapshot(bf16(walk(rng, data, 0.1)), 1)
    file = codec.encode(old, new).tobytes()
    spare = np.empty(1000, np.uint16)
    made = codec.apply(old, file, into={"w": spare})
    assert np.shares_memory(made.tensors["w"].data, spare)
    assert same_state(made.tensors, new.tensors)
    for offered in (old.tensors["w"].data, old.tensors["w"].data[:], np.empty(999, np.uint16), np.empty(1000, np.uint32)):
        again = codec.apply(old, file, into={"w": offered})
        assert not np.may_share_memory(again.tensors["w"].data, offered)
        assert same_state(again.tensors, new.tensors)
        old.audit()
