"""Invariant 5 at its root: what a patch produces is bit-identical to what was encoded, for any bits, shape and density."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_sync.patch import changes, codec, frame, gaps, steps
from param_sync.patch.bits import DTYPES, WORDS, Bits, same_state
from param_sync.patch.container import assemble, decode_header
from param_sync.patch.digest import digest_of, tensor_digest
from param_sync.patch.errors import PatchError, WrongBase
from param_sync.patch.snapshot import Snapshot
from param_sync.patch.tensor import encode_slice, encode_tensor, join_slices

pytestmark = pytest.mark.timeout(120)

# +0, -0, smallest denormals, 1, -1, largest finite, +-inf, quiet and signalling NaNs with payloads
AWKWARD = [0x0000, 0x8000, 0x0001, 0x8001, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF]
SHAPES = st.sampled_from([(), (0,), (1,), (3, 0, 2), (7,), (2, 3), (33,), (5, 1, 13), (257,)])


@contextmanager
def compiled_from(elements: int, segment: int = frame.SEGMENT_ELEMENTS) -> Iterator[None]:
    """Use the compiled forms from this size of tensor on, and cut tensors into segments of that size."""
    before = changes.COMPILED_FROM, frame.SEGMENT_ELEMENTS
    changes.COMPILED_FROM, frame.SEGMENT_ELEMENTS = elements, segment
    try:
        yield
    finally:
        changes.COMPILED_FROM, frame.SEGMENT_ELEMENTS = before


def words(dtype: str, shape: tuple[int, ...]) -> st.SearchStrategy[Bits]:
    width = DTYPES[dtype][0]
    any_word = st.integers(0, 2 ** (8 * width) - 1)
    elements = st.sampled_from(AWKWARD) | any_word if width == 2 else any_word
    return hnp.arrays(WORDS[width], shape, elements=elements).map(lambda a: Bits(dtype, shape, a))


@st.composite
def tensor_pair(draw: st.DrawFn) -> tuple[Bits | None, Bits | None]:
    """An old and a new tensor, either absent, of the same or another form, changed a little, much or not at all."""
    dtype, shape = draw(st.sampled_from([*DTYPES, "bf16", "bf16", "bf16"])), draw(SHAPES)
    old = draw(words(dtype, shape))
    match draw(st.sampled_from(["few", "few", "same", "all", "new", "gone", "other"])):
        case "new":
            return None, old
        case "gone":
            return old, None
        case "same":
            return old, Bits(dtype, shape, old.data.copy())
        case "all":
            return old, draw(words(dtype, shape))
        case "other":
            return old, draw(words(draw(st.sampled_from([*DTYPES])), draw(SHAPES)))
    data = old.data.copy()
    for i in draw(st.lists(st.integers(0, max(0, data.size - 1)), max_size=4)) if data.size else []:
        data[i] = draw(st.sampled_from(AWKWARD)) & (2 ** (8 * data.itemsize) - 1)
    return old, Bits(dtype, shape, data)


def snapshot(state: Mapping[str, Bits], version: int, incarnation: int = 0) -> Snapshot:
    return Snapshot.of(state, version=version, incarnation=incarnation)


def bf16(data: np.ndarray) -> dict[str, Bits]:
    return {"w": Bits("bf16", data.shape, data.astype(np.uint16))}


@settings(max_examples=150, deadline=None)
@given(
    pairs=st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), tensor_pair(), max_size=5),
    compiled=st.booleans(),
    segment=st.sampled_from([5, 64, 1 << 22]),
    level=st.sampled_from([1, 2]),
    workers=st.sampled_from([1, 1, 2]),
)
def test_any_two_states_round_trip_and_the_base_is_untouched(
    pairs: dict[str, tuple[Bits | None, Bits | None]], compiled: bool, segment: int, level: int, workers: int
) -> None:
    old = snapshot({name: a for name, (a, _) in pairs.items() if a is not None}, 3)
    new = snapshot({name: b for name, (_, b) in pairs.items() if b is not None}, 4)
    before = {name: bits.data.copy() for name, bits in old.tensors.items()}
    with compiled_from(0 if compiled else 1 << 20, segment):
        file = codec.encode(old, new, level=level, workers=workers).tobytes()
        made, changed = codec.apply_with_changes(old, file, workers=workers)
        assert codec.apply(None, codec.encode_anchor(new).tobytes()).digest == new.digest
    assert same_state(made.tensors, new.tensors)
    assert (made.version, made.incarnation, made.digest) == (4, 0, new.digest) == (4, 0, digest_of(made.tensors))
    assert all(np.array_equal(before[name], old.tensors[name].data) for name in before)
    old.audit()
    made.audit()
    for name, change in changed.items():  # absolute, so that doing it twice does no harm
        expected = new.tensors[name].data
        if change.index is None:
            assert np.array_equal(change.words, expected)
        else:
            target = old.tensors[name].data.copy()
            target[change.index] = change.words
            target[change.index] = change.words
            assert np.array_equal(target, expected)
            assert len(change.index) == np.count_nonzero(old.tensors[name].data != expected)
    unchanged = {name for name in made.tensors if name in old.tensors and name not in changed}
    assert all(made.tensors[name] is old.tensors[name] for name in unchanged)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    density=st.sampled_from([0.0, 0.0003, 0.002, 0.009, 0.06, 0.2, 0.45, 0.8, 1.0]),
    odd=st.integers(0, 70),
    level=st.sampled_from([1, 2]),
    segment=st.sampled_from([1 << 22, 6000, 640]),
)
def test_every_density_round_trips_in_every_form(seed: int, density: float, odd: int, level: int, segment: int) -> None:
    rng = np.random.default_rng(seed)
    data = (rng.standard_normal(20_000 + odd).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    data[:14] = AWKWARD
    hit = rng.random(data.size) < density
    step = np.where(rng.random(data.size) < 0.9, 1, rng.integers(1, 2**15, data.size)) * rng.choice([-1, 1], data.size)
    changed = np.where(hit, steps.from_line((steps.to_line(data).astype(np.int64) + step).astype(np.uint16)), data)
    old, new = snapshot(bf16(data), 0), snapshot(bf16(changed), 1)
    with compiled_from(0, segment):
        compiled = codec.encode(old, new, level=level).tobytes()
        assert codec.encode(old, new, level=level, workers=2).tobytes() == compiled
        assert same_state(codec.apply(old, compiled).tensors, new.tensors)
        made, found = codec.apply_with_changes(old, compiled, workers=2)
        assert same_state(made.tensors, new.tensors)
        if hit.any():
            assert np.array_equal(found["w"].index, np.flatnonzero(data != changed))
            assert np.array_equal(found["w"].words, changed[data != changed])
    plain = codec.encode(old, new, level=level).tobytes()
    assert same_state(codec.apply(old, plain).tensors, new.tensors)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=60, unique=True).map(sorted), st.integers(0, 20))
def test_gaps_round_trip_with_any_shift(where: list[int], shift: int) -> None:
    positions = np.array(where, np.uint32)
    symbols, planes, escapes = gaps.encode(positions, shift)
    assert np.array_equal(gaps.decode(symbols, np.frombuffer(planes, np.uint8), escapes, shift, 2**20), positions)


def test_the_line_is_a_bijection_on_which_neighbouring_floats_differ_by_one() -> None:
    every = np.arange(65536).astype(np.uint16)
    assert np.array_equal(steps.from_line(steps.to_line(every)), every)
    assert len(np.unique(steps.to_line(every))) == 65536
    line = steps.from_line(every).astype(np.uint32) << 16
    with np.errstate(invalid="ignore"):
        values = line.view(np.float32)
        finite = values[np.isfinite(values)].astype(np.float64)
    assert np.all(np.diff(finite) >= 0)
    assert np.count_nonzero(np.diff(finite) == 0) == 1  # -0 and +0


def test_a_sign_flip_of_zero_is_a_change_and_an_unchanged_nan_is_none() -> None:
    old = snapshot(bf16(np.array([0x0000, 0x7FC1, 0x3F80])), 0)
    new = snapshot(bf16(np.array([0x8000, 0x7FC1, 0x3F80])), 1)
    _, changed = codec.apply_with_changes(old, codec.encode(old, new).tobytes())
    assert changed["w"].index is not None
    assert changed["w"].index.tolist() == [0]
    assert codec.encode(old, snapshot(old.tensors, 1)).header.tensors == ()


@pytest.mark.parametrize(("level", "most_bits"), [(1, 10.4), (2, 8.0)])
def test_a_sparse_step_costs_about_ten_bits_for_each_changed_element_or_seven(level: int, most_bits: float) -> None:
    rng = np.random.default_rng(5)
    weights = rng.standard_normal(1 << 20).astype(np.float32) * np.float32(0.02)
    moved = weights - rng.standard_normal(1 << 20).astype(np.float32) * np.float32(2.2e-7)

    def rounded(values: np.ndarray) -> np.ndarray:
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    old, new = snapshot(bf16(rounded(weights)), 0), snapshot(bf16(rounded(moved)), 1)
    count = np.count_nonzero(old.tensors["w"].data != new.tensors["w"].data)
    assert 0.007 < count / (1 << 20) < 0.012
    file = codec.encode(old, new, level=level)
    assert 8 * file.nbytes / count < most_bits
    assert same_state(codec.apply(old, file.tobytes()).tensors, new.tensors)


def test_read_only_bits_at_odd_addresses_will_do() -> None:
    raw = np.random.default_rng(2).integers(0, 256, 4102).astype(np.uint8).tobytes()
    data = np.frombuffer(raw, np.uint16, offset=2)
    old = snapshot({"w": Bits("bf16", data.shape, data)}, 0)
    new = snapshot({"w": Bits("bf16", data.shape, np.frombuffer(raw[:700] + b"!!" + raw[702:], np.uint16, offset=2))}, 1)
    with compiled_from(0):
        file = memoryview(b" " + codec.encode(old, new).tobytes())[1:]
        assert same_state(codec.apply(old, file).tensors, new.tensors)


def test_ranks_that_hold_slices_make_the_same_tensor() -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 65536, 1001).astype(np.uint16)
    changed = data.copy()
    changed[rng.integers(0, 1001, 30)] ^= 1
    old, new = snapshot(bf16(data), 0), snapshot(bf16(changed), 1)
    cuts = [(0, 400), (400, 401), (401, 1001)]
    frames = [encode_slice(data[a:b], changed[a:b], dtype="bf16", start=a) for a, b in cuts]
    part = join_slices("w", "bf16", (1001,), tensor_digest(data), tensor_digest(changed), frames)
    file = assemble([part], version=1, incarnation=0, digest=new.digest, base_version=0, base_digest=old.digest)
    assert codec.apply(old, file.tobytes()).digest == new.digest


def test_parts_may_arrive_in_any_order_and_never_twice() -> None:
    rng = np.random.default_rng(0)
    state = {f"t{i}": Bits("bf16", (9,), rng.integers(0, 65536, 9).astype(np.uint16)) for i in range(4)}
    parts = [part for name, bits in state.items() if (part := encode_tensor(name, None, bits)) is not None]
    one = assemble(parts, version=1, incarnation=0, digest=digest_of(state))
    assert one.tobytes() == assemble(parts[::-1], version=1, incarnation=0, digest=digest_of(state)).tobytes()
    assert decode_header(one.tobytes()[: one.nbytes - 40], partial=True)[0] == one.header
    with pytest.raises(PatchError, match="'t0' comes twice"):
        assemble([*parts, parts[0]], version=1, incarnation=0, digest=digest_of(state))


@pytest.mark.parametrize(
    ("version", "incarnation", "bits"),
    [(4, 0, 1), (3, 1, 1), (3, 0, 2)],
    ids=["other version", "other incarnation", "other bits"],
)
def test_a_wrong_base_is_refused(version: int, incarnation: int, bits: int) -> None:
    file = codec.encode(snapshot(bf16(np.array([1, 5])), 3), snapshot(bf16(np.array([2, 5])), 4)).tobytes()
    assert codec.apply(snapshot(bf16(np.array([1, 5])), 3), file).version == 4
    held = snapshot(bf16(np.array([bits, 5])), version, incarnation)
    with pytest.raises(WrongBase, match="the patch starts at"):
        codec.apply(held, file)
    with pytest.raises(WrongBase, match="holds nothing"):
        codec.apply(None, file)
    held.audit()


def test_bits_that_rotted_in_memory_are_found() -> None:
    held, new = snapshot(bf16(np.array([1, 5, 9])), 3), snapshot(bf16(np.array([2, 5, 9])), 4)
    file = codec.encode(held, new).tobytes()
    held.tensors["w"].data[2] = 8
    with pytest.raises(PatchError, match=r"tensor 'w'.*announced"):
        codec.apply(held, file)
    with pytest.raises(PatchError, match=r"tensor 'w'.*not the ones"):
        held.audit()


def test_a_patch_leads_forward_within_one_incarnation() -> None:
    one, two = snapshot(bf16(np.array([1])), 3), snapshot(bf16(np.array([2])), 3)
    with pytest.raises(PatchError, match="forward within one incarnation"):
        codec.encode(one, two)
    with pytest.raises(PatchError, match="forward within one incarnation"):
        codec.encode(one, snapshot(two.tensors, 4, incarnation=1))
