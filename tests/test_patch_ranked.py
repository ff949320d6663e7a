"""Level 2 of the patch format, and patches applied in place: bit-identical for any bits; what is refused changes nothing."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from param_sync.patch import changes, codec, coder, frame, steps, symbols, vectors
from param_sync.patch.bits import Bits, same_state
from param_sync.patch.container import decode_header
from param_sync.patch.errors import Corrupt, DigestMismatch, PatchError
from param_sync.patch.shadow import Shadow
from param_sync.patch.snapshot import Snapshot

pytestmark = pytest.mark.timeout(110)

ROOT = Path(__file__).parent.parent
# +0, -0, denormals, 1, -1, largest finite, +-inf, quiet and signalling NaNs with payloads
AWKWARD = [0x0000, 0x8000, 0x0001, 0x8001, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF]


@contextmanager
def ranked_from(changed: int, segment: int = frame.SEGMENT_ELEMENTS, compiled: int = 0) -> Iterator[None]:
    """Try form 4 from so many changes on, cut tensors so, and use the compiled forms from that size on."""
    before = frame.RANKED_FROM, frame.SEGMENT_ELEMENTS, changes.COMPILED_FROM
    frame.RANKED_FROM, frame.SEGMENT_ELEMENTS, changes.COMPILED_FROM = changed, segment, compiled
    try:
        yield
    finally:
        frame.RANKED_FROM, frame.SEGMENT_ELEMENTS, changes.COMPILED_FROM = before


def weights(rng: np.random.Generator, count: int, kind: str) -> np.ndarray:
    if kind == "any bits":
        return rng.integers(0, 65536, count).astype(np.uint16)
    if kind == "one exponent":
        return rng.integers(0x3C00, 0x3C80, count).astype(np.uint16)
    drawn = (rng.standard_normal(count).astype(np.float32) * np.float32(0.02)).view(np.uint32) >> 16
    return drawn.astype(np.uint16)


def stepped(rng: np.random.Generator, data: np.ndarray, density: float, far: float) -> np.ndarray:
    """`density` of the elements one step away, a share `far` of those anywhere."""
    hit = rng.random(data.size) < density
    step = np.where(rng.random(data.size) < far, rng.integers(1, 2**15, data.size), 1) * rng.choice([-1, 1], data.size)
    return np.where(hit, steps.from_line((steps.to_line(data).astype(np.int64) + step).astype(np.uint16)), data)


def snapshot(tensors: dict[str, np.ndarray], version: int, dtype: str = "bf16") -> Snapshot:
    return Snapshot.of(
        {n: Bits(dtype, d.shape, d.astype(np.uint16)) for n, d in tensors.items()}, version=version, incarnation=0
    )


def forms(file: bytes) -> set[int]:
    _, at = decode_header(file)
    found = set()
    while at < len(file):
        found.add(file[at])
        at += frame.frame_bytes(memoryview(file)[at:])
    return found


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.sampled_from([1, 2, 63, 64, 65, 255, 256, 257, 1000, 5003]),
    kind=st.sampled_from(["normal", "any bits", "one exponent"]),
    density=st.sampled_from([0.001, 0.009, 0.06, 0.3, 0.9, 1.0]),
    far=st.sampled_from([0.0, 0.02]),
    dtype=st.sampled_from(["bf16", "f16"]),
    segment=st.sampled_from([100, 1 << 22]),
)
def test_level_2_round_trips_in_copies_and_in_place(
    seed: int, count: int, kind: str, density: float, far: float, dtype: str, segment: int
) -> None:
    rng = np.random.default_rng(seed)
    data = weights(rng, count, kind)
    data[: min(count, 14)] = AWKWARD[:count]
    after = stepped(rng, data, density, far)
    after[0] = data[0] ^ 0x8000  # at least one change: a zero's sign
    old, new = snapshot({"w": data}, 0, dtype), snapshot({"w": after}, 1, dtype)
    with ranked_from(1, segment):
        file = codec.encode(old, new, level=2).tobytes()
        assert codec.encode(old, new, level=2, workers=2).tobytes() == file
        made, changed = codec.apply_with_changes(old, file)
        assert same_state(made.tensors, new.tensors)
        index = changed["w"].index
        assert index is not None and np.array_equal(index, np.flatnonzero(data != after))
        assert np.array_equal(changed["w"].words, after[index])
        shadow = Shadow(snapshot({"w": data}, 0, dtype))
        array = shadow.snapshot.tensors["w"].data
        assert shadow.apply(file, workers=2).digest == new.digest
        assert np.shares_memory(shadow.snapshot.tensors["w"].data, array) and np.array_equal(array, after)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.sampled_from([1, 100, 4097]), density=st.sampled_from([0.01, 0.2, 1.0]))
def test_form_4_itself_round_trips(seed: int, count: int, density: float) -> None:
    """Also where the encoder would have taken a smaller form."""
    from param_sync.patch import ranked

    rng = np.random.default_rng(seed)
    old = weights(rng, count, "any bits")
    new = stepped(rng, old, density, 0.3)
    new[-1] = old[-1] ^ 1
    positions, olds, news = changes.find(old, new)
    for shift in (7, 10):
        coded = ranked.encode(old, positions, olds, news, shift)
        found = ranked.in_order(*ranked.decode([memoryview(s) for s in coded.streams], old, len(positions)))
        assert np.array_equal(found[0], positions)
        assert np.array_equal(found[1], news)


def test_level_2_is_taken_where_it_pays_and_named_in_the_file() -> None:
    rng = np.random.default_rng(3)
    data = weights(rng, 1 << 20, "normal")
    masters = rng.standard_normal(1 << 20).astype(np.float32) * np.float32(0.02)
    moved = masters - rng.choice(np.array([-1, 1], np.float32), 1 << 20) * np.float32(1.8e-7)

    def rounded(values: np.ndarray) -> np.ndarray:
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    old, new = snapshot({"w": rounded(masters)}, 0), snapshot({"w": rounded(moved)}, 1)
    one, two = codec.encode(old, new).tobytes(), codec.encode(old, new, level=2).tobytes()
    assert forms(one) == {frame.SPARSE_STEPS} and one[10] == 1
    assert forms(two) == {frame.RANKED_STEPS} and two[10] == 2
    count = np.count_nonzero(rounded(masters) != rounded(moved))
    assert 0.007 < count / (1 << 20) < 0.012
    assert 8 * len(two) / count < 7.6 and len(two) < 0.78 * len(one)
    assert same_state(codec.apply(old, two).tensors, new.tensors)
    few = data.copy()
    few[:5] ^= 1
    assert codec.encode(snapshot({"w": data}, 0), snapshot({"w": few}, 1), level=2).tobytes()[10] == 1
    with pytest.raises(PatchError, match="level 3 is unknown"):
        codec.encode(old, new, level=3)


def test_nth_set_bit_by_both_ways() -> None:
    import numba

    @numba.njit
    def both(mask: np.uint64, n: int) -> tuple[int, int]:
        return vectors.nth(mask, n), vectors._nth_by_halves(mask, n)

    rng = np.random.default_rng(0)
    for mask in [1, 1 << 63, 2**64 - 1, *(int(m) for m in rng.integers(1, 2**63, 30))]:
        bits = [b for b in range(64) if mask >> b & 1]
        for n in {0, len(bits) // 2, len(bits) - 1}:
            assert both(np.uint64(mask), n) == (bits[n], bits[n])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 63), max_size=300), min_size=1, max_size=6))
def test_the_coder_round_trips_any_sections(sections: list[list[int]]) -> None:
    counts = np.array([len(s) for s in sections], np.int64)
    flat = np.array([x for s in sections for x in s], np.uint8)
    tally = np.stack([np.bincount(np.array(s, np.int64), minlength=coder.SYMBOLS) for s in sections])
    frequencies, read = np.empty((len(sections), 64), np.uint16), np.empty((len(sections), 64), np.uint16)
    coder.normalise(tally.astype(np.int64), frequencies)
    tables = np.empty(len(sections) * 129, np.uint8)
    size = coder.write_tables(frequencies, tables)
    assert coder.read_tables(tables[:size], counts, read) == size and np.array_equal(read, frequencies)
    words, out = np.empty(flat.size + 8, np.uint16), np.empty(flat.size, np.uint8)
    coded = words[coder.encode(flat, counts, frequencies, words) :].copy()
    assert coder.decode(coded, counts, frequencies, out) and np.array_equal(out, flat)
    assert not coder.decode(np.append(coded, np.uint16(7)), counts, frequencies, out)


def test_classes_hold_every_exponent_and_stay_within_their_number() -> None:
    chosen = np.empty(2, np.int64)
    changed = np.ones(256, np.int64)
    symbols.choose(np.full(256, 9, np.int64), changed, 256 * 1000, chosen)
    assert 1 <= chosen[1] <= symbols.MAX_CLASSES and 0 <= chosen[0] - chosen[1] + 1 <= chosen[0] <= 255


# -- damage --------------------------------------------------------------------------------------------------------------------


def _ranked_file() -> tuple[Snapshot, Snapshot, bytes]:
    rng = np.random.default_rng(17)
    data = weights(rng, 3001, "normal")
    after = stepped(rng, data, 0.05, 0.03)
    old, new = snapshot({"a": data[:9], "w": data}, 1), snapshot({"a": data[:9], "w": after}, 2)
    before = frame._encode_gaps
    frame._encode_gaps = lambda *_: bytes(1 << 20)  # type: ignore[assignment]
    try:
        with ranked_from(1):
            return old, new, codec.encode(old, new, level=2).tobytes()
    finally:
        frame._encode_gaps = before


OLD, NEW, FILE = _ranked_file()
BODY = decode_header(FILE)[1]
BACK = codec.encode(NEW, Snapshot(3, 0, OLD.tensors, OLD.entries, OLD.digest)).tobytes()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_ranked_frames_with_right_checksums_and_wrong_content_are_refused_or_harmless(data: st.DataObject) -> None:
    assert forms(FILE) == {frame.RANKED_STEPS}
    body = bytearray(FILE[BODY:])
    # the heads, the model and the tables of symbols, where the lies are; then anywhere
    places = st.integers(0, 51) | st.integers(52, 200) | st.integers(0, len(body) - 9)
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(places)] = data.draw(st.integers(0, 255))
    body[-8:] = xxhash.xxh3_64_digest(bytes(body[:-8]))
    shadow = Shadow(OLD)
    tracemalloc.start()
    outcome: Snapshot | PatchError
    try:
        outcome = shadow.apply(FILE[:BODY] + bytes(body))
    except PatchError as error:
        outcome = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**20
    if isinstance(outcome, PatchError):
        assert outcome.tensor is not None
        assert shadow.snapshot.digest == OLD.digest
    else:
        assert same_state(outcome.tensors, NEW.tensors)
        shadow.apply(BACK)
    OLD.audit()  # the shadow's arrays are these


def test_a_symbol_that_costs_nothing_does_not_stand_for_more_than_the_segment() -> None:
    """Tables of one symbol take no bits, so a short frame can announce many changes: the ranks then run past the segment."""
    body = bytearray(FILE[BODY:])
    struct.pack_into("<I", body, 20, 3001)
    body[-8:] = xxhash.xxh3_64_digest(bytes(body[:-8]))
    with pytest.raises(Corrupt, match="cannot be"):
        codec.apply(OLD, FILE[:BODY] + bytes(body))
    model = struct.pack("<BBB", 7, 255, 1) + struct.pack("<I", 3001) + bytes([0]) + bytes([1, 128, 32] * 2)
    states = struct.pack("<4I", *[1 << 16] * 4)
    crafted = frame._build(frame.RANKED_STEPS, 2, False, 0, 0, 3001, 3001, (0, 0), [model, states, b"", b"", b""])
    parsed = frame.parse(memoryview(crafted))
    positions, _ = frame.decode_sparse(parsed, OLD.tensors["w"].data)
    assert np.array_equal(positions, np.arange(3001))
    with pytest.raises(Corrupt, match="101 of 3001 changes lie past the segment's end"):
        frame.decode_sparse(parsed, OLD.tensors["w"].data[:2900])


# -- in place ------------------------------------------------------------------------------------------------------------------


def many(rng: np.random.Generator, version: int, tensors: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    if tensors is None:
        return {f"t{i}": weights(rng, n, "normal") for i, n in enumerate([0, 1, 700, 3000])}
    return {name: stepped(rng, data, 0.05, 0.01) for name, data in tensors.items()}


def test_a_patch_that_is_refused_by_its_receiver_is_taken_back() -> None:
    rng = np.random.default_rng(1)
    first = many(rng, 0)
    second = many(rng, 1, first)
    old, new = snapshot(first, 0), snapshot(second, 1)
    shadow = Shadow(snapshot({name: data.copy() for name, data in first.items()}, 0))
    for level in (1, 2):
        with ranked_from(1):
            file = codec.encode(old, new, level=level).tobytes()
        seen: list[bool] = []

        def refuse(file: bytes, seen: list[bool] = seen) -> None:
            with shadow.staged(file, collect=True, workers=2) as staged:
                seen.append(same_state(staged.snapshot.tensors, new.tensors) and "t3" in staged.changes)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            refuse(file)
        assert seen == [True]
        assert same_state(shadow.snapshot.tensors, old.tensors)
        shadow.snapshot.audit()
    assert shadow.apply(file).version == 1
    assert same_state(shadow.snapshot.tensors, new.tensors)


@pytest.mark.parametrize("workers", [1, 3])
def test_when_the_last_tensor_is_damaged_the_first_ones_are_put_back(workers: int) -> None:
    rng = np.random.default_rng(4)
    first = many(rng, 0)
    old, new = snapshot(first, 0), snapshot(many(rng, 1, first), 1)
    shadow = Shadow(snapshot({name: data.copy() for name, data in first.items()}, 0))
    shadow.snapshot.tensors["t3"].data[2999] ^= 1  # rot in memory: found by the digest of the last tensor alone
    file = codec.encode(old, new).tobytes()
    with pytest.raises(DigestMismatch, match="'t3'"):
        shadow.apply(file, workers=workers)
    for name in ("t1", "t2"):
        assert shadow.snapshot.tensors[name].equals(old.tensors[name])
    shadow.snapshot.tensors["t3"].data[2999] ^= 1
    assert shadow.apply(file, workers=workers).digest == new.digest


def test_tied_and_read_only_weights_get_arrays_of_their_own() -> None:
    rng = np.random.default_rng(6)
    shared = weights(rng, 400, "normal")
    frozen = weights(rng, 50, "normal")
    frozen.flags.writeable = False
    state = {"embed": shared, "head": shared, "tail": shared[100:200], "frozen": frozen}
    moved = stepped(rng, shared, 0.2, 0.0)
    after = {"embed": moved, "head": moved, "tail": moved[100:200], "frozen": stepped(rng, frozen, 0.5, 0.0)}
    shadow = Shadow(snapshot(state, 0))
    file = codec.encode(snapshot({n: d.copy() for n, d in state.items()}, 0), snapshot(after, 1)).tobytes()
    assert same_state(shadow.apply(file).tensors, snapshot(after, 1).tensors)
    assert np.array_equal(frozen, snapshot(state, 0).tensors["frozen"].data)


def test_tensors_come_and_go_and_an_anchor_replaces_everything() -> None:
    rng = np.random.default_rng(8)
    first = many(rng, 0)
    second = {**{n: d for n, d in many(rng, 1, first).items() if n != "t2"}, "fresh": weights(rng, 20, "any bits")}
    shadow = Shadow(snapshot({name: data.copy() for name, data in first.items()}, 0))
    new = snapshot(second, 1)
    assert same_state(shadow.apply(codec.encode(snapshot(first, 0), new).tobytes()).tensors, new.tensors)
    other = snapshot({"t1": weights(rng, 7, "any bits")}, 9)
    assert same_state(shadow.apply(codec.encode_anchor(other).tobytes()).tensors, other.tensors)


@pytest.mark.parametrize("level", [1, 2])
def test_an_apply_in_place_takes_a_small_part_of_the_models_memory(level: int) -> None:
    rng = np.random.default_rng(9)
    data = weights(rng, 1 << 21, "normal")
    old, new = snapshot({"w": data}, 0), snapshot({"w": stepped(rng, data, 0.009, 0.0)}, 1)
    file, shadow = codec.encode(old, new, level=level).tobytes(), Shadow(old)
    tracemalloc.start()
    shadow.apply(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < data.nbytes / 4


# -- the compiler's cache ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cache", ["nowhere", "damaged"])
def test_a_cache_that_cannot_be_used_costs_time_alone(cache: str, tmp_path: Path) -> None:
    """`kernels` stands for all: the same decorator compiles every loop."""
    code = "import numpy as n\nfrom param_sync.patch import kernels as k\n" + (
        "w = n.arange(9).astype('u2'); v = n.ones(1, 'u2')\nk.exchange(n.array([4], 'u4'), v, w)\nprint(v[0], w[4])"
    )
    folder = "/proc/nowhere"
    if cache == "damaged":
        folder = str(tmp_path)
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "NUMBA_CACHE_DIR": folder}, check=True)
        indexes = list(tmp_path.rglob("*.nbi"))
        assert indexes
        for index in indexes:
            index.write_bytes(index.read_bytes()[:20])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "NUMBA_CACHE_DIR": folder}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["4", "1"], done.stderr[-2000:]
