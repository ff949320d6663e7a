"""One patch over many versions, and one out of many ranks' parts: the same weights, and the same bytes, as the direct way."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_sync.patch import codec, frame, parts, steps
from param_sync.patch.bits import Bits, same_state
from param_sync.patch.errors import DigestMismatch, PatchError, WrongBase
from param_sync.patch.merging import merge
from param_sync.patch.parts import Part, assemble_parts, encode_part
from param_sync.patch.snapshot import Snapshot

pytestmark = pytest.mark.timeout(110)

SHAPES = {"empty": (0, 3), "scalar": (), "short": (7,), "wide": (9, 41), "long": (1500,)}


def state(rng: np.random.Generator) -> dict[str, Bits]:
    made = {}
    for name, shape in SHAPES.items():
        drawn = (rng.standard_normal(shape).astype(np.float32) * np.float32(0.02)).view(np.uint32) >> np.uint32(16)
        made[name] = Bits("bf16", shape, np.asarray(drawn).astype(np.uint16))
    made["counter"] = Bits("i64", (3,), rng.integers(0, 9, 3).astype(np.uint64))
    return made


def moved(rng: np.random.Generator, bits: Bits, density: float) -> Bits:
    if bits.data.itemsize != 2:
        return Bits(bits.dtype, bits.shape, bits.data + np.uint64(1))
    hit = rng.random(bits.data.size) < density
    line = steps.to_line(bits.data) + rng.choice(np.array([1, 65535], np.uint16), bits.data.size)
    return Bits(bits.dtype, bits.shape, np.where(hit, steps.from_line(line), bits.data))


def chain(rng: np.random.Generator, length: int, level: int) -> tuple[list[Snapshot], list[bytes]]:
    """Versions whose tensors move, come and go, and the patches between them."""
    snapshots = [Snapshot.of(state(rng), version=10, incarnation=2)]
    for version in range(11, 11 + length):
        tensors = {n: moved(rng, b, 0.1) if rng.random() < 0.7 else b for n, b in snapshots[-1].tensors.items()}
        if rng.random() < 0.3:
            tensors.pop("short", None)
        elif "short" not in tensors:
            tensors["short"] = state(rng)["short"]
        snapshots.append(Snapshot.of(tensors, version=version, incarnation=2))
    pairs = pairwise(snapshots)
    return snapshots, [codec.encode(a, b, level=level).tobytes() for a, b in pairs]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 6), level=st.sampled_from([1, 2]), workers=st.sampled_from([1, 2]))
def test_a_merged_patch_is_the_direct_one(seed: int, length: int, level: int, workers: int) -> None:
    snapshots, files = chain(np.random.default_rng(seed), length, level)
    base, end = snapshots[0], snapshots[-1]
    before = {name: bits.data.copy() for name, bits in base.tensors.items()}
    file = merge(base, files, level=level, workers=workers).tobytes()
    made = codec.apply(base, file)
    assert same_state(made.tensors, end.tensors)
    assert (made.version, made.incarnation, made.digest) == (end.version, 2, end.digest)
    assert all(np.array_equal(base.tensors[name].data, data) for name, data in before.items())
    direct = codec.apply(base, codec.encode(base, end, level=level).tobytes())
    assert same_state(made.tensors, direct.tensors)


def test_a_merged_patch_of_eight_steps_takes_half_of_their_bytes() -> None:
    rng = np.random.default_rng(2)
    masters = rng.standard_normal(1 << 17).astype(np.float32) * np.float32(0.02)
    lasting = rng.standard_normal(1 << 17).astype(np.float32)
    versions = []
    for version in range(9):
        bits = masters.view(np.uint32)
        words = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        versions.append(Snapshot.of({"w": Bits("bf16", (1 << 17,), words)}, version=version, incarnation=0))
        noise = rng.standard_normal(1 << 17).astype(np.float32)
        masters = masters - np.float32(5e-7) * (lasting + noise)
    files = [codec.encode(a, b).tobytes() for a, b in pairwise(versions)]
    assert len(merge(versions[0], files).tobytes()) < 0.55 * sum(map(len, files))


def test_a_broken_chain_is_not_merged() -> None:
    snapshots, files = chain(np.random.default_rng(5), 3, 1)
    with pytest.raises(WrongBase, match="starts at"):
        merge(snapshots[0], [files[0], files[2]])
    with pytest.raises(WrongBase, match="starts at"):
        merge(snapshots[1], files)
    with pytest.raises(PatchError, match="nothing to merge"):
        merge(snapshots[0], [])
    with pytest.raises(PatchError, match="is an anchor"):
        merge(snapshots[0], [files[0], codec.encode_anchor(snapshots[2]).tobytes()])
    for at in range(0, len(files[1]), 7):
        damaged = bytearray(files[1])
        damaged[at] ^= 1
        with pytest.raises(PatchError):
            merge(snapshots[0], [files[0], bytes(damaged), files[2]])


# -- parts of several ranks ----------------------------------------------------------------------------------------------------


def cut(old: Snapshot, new: Snapshot, rng: np.random.Generator, level: int, most: int = 4) -> list[Part]:
    """Parts of every tensor at random places, in random order, as ranks would send them."""
    made = []
    for name, bits in new.tensors.items():
        held = old.tensors.get(name)
        before = held.data if held is not None and (held.dtype, held.shape) == (bits.dtype, bits.shape) else None
        ends = sorted({0, bits.data.size, *rng.integers(0, bits.data.size + 1, rng.integers(0, most)).tolist()})
        for a, b in pairwise(ends) if bits.data.size else [(0, 0)]:
            piece = None if before is None else before[a:b]
            part = encode_part(name, bits.dtype, bits.shape, piece, bits.data[a:b], start=a, level=level)
            made.append(msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=Part))
    return [made[i] for i in rng.permutation(len(made))]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    level=st.sampled_from([1, 2]),
    segment=st.sampled_from([64, 700, 1 << 22]),
    ranked_from=st.sampled_from([1, 1024]),
    workers=st.sampled_from([1, 2]),
)
def test_parts_make_the_one_ranks_patch_byte_for_byte(
    seed: int, level: int, segment: int, ranked_from: int, workers: int
) -> None:
    rng = np.random.default_rng(seed)
    first = state(rng)
    second = {name: moved(rng, bits, 0.1) if rng.random() < 0.8 else bits for name, bits in first.items()}
    second["fresh"] = moved(rng, first["wide"], 0.5)
    second["counter"] = Bits("i32", (2,), rng.integers(0, 9, 2).astype(np.uint32))
    del second["short"]
    old, new = Snapshot.of(first, version=0, incarnation=1), Snapshot.of(second, version=1, incarnation=1)
    before = frame.SEGMENT_ELEMENTS, frame.RANKED_FROM
    frame.SEGMENT_ELEMENTS, frame.RANKED_FROM = segment, ranked_from
    try:
        pieces = cut(old, new, rng, level)
        made = assemble_parts(old, pieces, version=1, removed=["short"], level=level, workers=workers).tobytes()
        assert made == codec.encode(old, new, level=level).tobytes()
    finally:
        frame.SEGMENT_ELEMENTS, frame.RANKED_FROM = before
    assert same_state(codec.apply(old, made).tensors, second)
    old.audit()


def _two() -> tuple[Snapshot, list[Part]]:
    rng = np.random.default_rng(3)
    first = {"a": state(rng)["wide"], "b": state(rng)["long"]}
    old = Snapshot.of(first, version=0, incarnation=0)
    new = Snapshot.of({name: moved(rng, bits, 0.2) for name, bits in first.items()}, version=1, incarnation=0)
    made = []
    for name, bits in new.tensors.items():
        for a, b in ((0, 100), (100, bits.data.size)):
            piece = old.tensors[name].data[a:b]
            made.append(encode_part(name, bits.dtype, bits.shape, piece, bits.data[a:b], start=a))
    return old, made


def test_a_part_that_is_lost_doubled_or_of_other_weights_is_found() -> None:
    old, good = _two()
    assert assemble_parts(old, good, version=1).header.version == 1
    for at, text in ((0, "between 0 and 100 are missing"), (1, "from 100 to 369 are missing")):
        with pytest.raises(PatchError, match=f"'a'.*{text}"):
            assemble_parts(old, good[:at] + good[at + 1 :], version=1)
    with pytest.raises(PatchError, match="come twice"):
        assemble_parts(old, [*good, good[0]], version=1)
    with pytest.raises(PatchError, match=r"'b'.*either has parts or is removed"):
        assemble_parts(old, good[:2], version=1)
    with pytest.raises(PatchError, match=r"'b'.*either has parts or is removed"):
        assemble_parts(old, good, version=1, removed=["b"])
    with pytest.raises(PatchError, match="disagree"):
        assemble_parts(old, [msgspec.structs.replace(good[0], dtype="f16"), *good[1:]], version=1)
    with pytest.raises(PatchError, match="do not fit"):
        encode_part("a", "bf16", (3,), None, np.zeros(3, np.uint16), start=1)
    other = Snapshot.of({n: moved(np.random.default_rng(9), b, 0.5) for n, b in old.tensors.items()}, version=0, incarnation=0)
    with pytest.raises(DigestMismatch, match="part at 0"):
        assemble_parts(other, good, version=1)
    reshaped = Snapshot.of({**old.tensors, "a": Bits("f16", (369,), old.tensors["a"].data)}, version=0, incarnation=0)
    with pytest.raises(WrongBase, match="'a'"):
        assemble_parts(reshaped, good, version=1)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_parts_are_refused_or_harmless(data: st.DataObject) -> None:
    old, good = _two()
    right = assemble_parts(old, good, version=1).header.digest
    which = data.draw(st.integers(0, len(good) - 1))
    frames = bytearray(good[which].frames)
    change: dict[str, object] = {}
    match data.draw(st.sampled_from(["frames", "start", "elements", "shape", "is_new", "cut"])):
        case "frames":
            frames[data.draw(st.integers(0, len(frames) - 1))] ^= data.draw(st.integers(1, 255))
            change["frames"] = bytes(frames)
        case "cut":
            change["frames"] = bytes(frames[: data.draw(st.integers(0, len(frames) - 1))])
        case "shape":
            change["shape"] = tuple(data.draw(st.lists(st.integers(-1, 2**40), max_size=3)))
        case "is_new":
            change["is_new"] = True
        case name:
            change[name] = data.draw(st.integers(-5, 2**40))
    bad = [msgspec.structs.replace(part, **change) if i == which else part for i, part in enumerate(good)]
    try:
        found = assemble_parts(old, bad, version=1).header.digest
    except PatchError:
        old.audit()
    else:
        assert found == right


def test_a_slice_that_ends_where_frames_end_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is coded twice where ranks' slices fall on the segments' borders."""
    monkeypatch.setattr(frame, "SEGMENT_ELEMENTS", 100)
    old, good = _two()
    expected = assemble_parts(old, good, version=1).tobytes()

    def fail(*_: object) -> bytes:
        raise AssertionError("a frame was made again")

    monkeypatch.setattr(parts.frame, "encode_changes", fail)
    assert assemble_parts(old, good, version=1).tobytes() == expected
