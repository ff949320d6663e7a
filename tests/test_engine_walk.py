"""The walk from held weights to ordered ones: one shadow, patched in place, all links of it or none. Invariants 5 and 10."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_sync.patch.bits import Bits, same_state
from param_sync.patch.codec import encode, encode_anchor
from param_sync.patch.container import assemble, decode_header
from param_sync.patch.errors import PatchError, WrongBase
from param_sync.patch.snapshot import Snapshot
from param_sync.patch.tensor import encode_full
from services.bus import IntegrityError
from services.engine.chain_walk import Walk, layout_of, shadow_of
from services.engine.changes import TensorChange

SHAPES = {"embed": (300, 64), "norm": (64,), "scale": (), "empty": (0, 4), "up": (128, 64)}


def first(seed: int = 0) -> Snapshot:
    """bfloat16 bits of N(0, 0.02)."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in SHAPES.items():
        values = (random.standard_normal(shape) * 0.02).astype(np.float32)
        tensors[name] = Bits("bf16", shape, (np.atleast_1d(values).view(np.uint32) >> 16).astype(np.uint16))
    return Snapshot.of(tensors, version=0, incarnation=0)


def moved(old: Snapshot, seed: int, share: float, names: Sequence[str] = tuple(SHAPES)) -> Snapshot:
    """The next version: a share of the elements one representable number up or down."""
    random = np.random.default_rng([seed, old.version])
    tensors = dict(old.tensors)
    for name in names:
        words = old.tensors[name].data.copy()
        words[random.random(words.size) < share] ^= 1
        tensors[name] = Bits("bf16", SHAPES[name], words)
    return Snapshot.of(tensors, version=old.version + 1, incarnation=old.incarnation)


def copy_of(snapshot: Snapshot) -> Snapshot:
    tensors = {name: Bits(bits.dtype, bits.shape, bits.data.copy()) for name, bits in snapshot.tensors.items()}
    return Snapshot(snapshot.version, snapshot.incarnation, tensors, snapshot.entries, snapshot.digest)


def written(base: Snapshot, changes: Sequence[TensorChange]) -> dict[str, Bits]:
    """What an engine holds after the changes, each of which must start from what is there."""
    state = {name: Bits(bits.dtype, bits.shape, bits.data.copy()) for name, bits in base.tensors.items()}
    for change in changes:
        words = state[change.checked().name].data
        np.testing.assert_array_equal(words[change.index], change.old)
        words[change.index] = change.new
    return state


def level_of(file: bytes) -> int:
    """The level that the file itself names."""
    return int.from_bytes(file[10:12], "little")


def changes_of(walk: Walk) -> list[TensorChange]:
    update = walk.update(layout_of(first()))
    assert update.changes is not None
    return list(update.changes())


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**20),
    shares=st.lists(st.sampled_from((0.0, 0.001, 0.02, 0.3, 1.0)), min_size=1, max_size=4),
    level=st.sampled_from((1, 2)),
    keep=st.booleans(),
)
def test_any_chain_leads_there_and_back(seed: int, shares: list[float], level: int, keep: bool) -> None:
    """Each link may touch what the one before has touched, and turn it back."""
    line = [first(seed)]
    for share in shares:
        line.append(moved(line[-1], seed, share))
    shadow = shadow_of(copy_of(line[0]))
    walk = Walk(shadow)
    for old, new in itertools.pairwise(line):
        walk.step(encode(old, new, level=level).tobytes())
    assert walk.at is not None and same_state(walk.at.tensors, line[-1].tensors)
    assert same_state(written(line[0], changes_of(walk)), line[-1].tensors)
    if keep:
        assert same_state(walk.arrived().tensors, line[-1].tensors)
        assert walk.back() is not shadow, "there is no way back any more"
    else:
        assert walk.back() is shadow and same_state(shadow.tensors, line[0].tensors)
        shadow.audit()


def test_a_level_2_patch_is_laid_out_over_one_copy_of_the_weights() -> None:
    old = first()
    new = moved(old, 1, 0.2)
    file = encode(old, new, level=2).tobytes()
    assert level_of(file) == 2
    shadow = shadow_of(copy_of(old))
    places = {name: bits.data.ctypes.data for name, bits in shadow.tensors.items()}
    walk = Walk(shadow)
    walk.step(file)
    for change in changes_of(walk):
        index = np.flatnonzero(old.tensors[change.name].data != new.tensors[change.name].data)
        np.testing.assert_array_equal(change.index, index)
        np.testing.assert_array_equal(change.new, new.tensors[change.name].data[index])
    kept = walk.arrived()
    assert {name: bits.data.ctypes.data for name, bits in kept.tensors.items()} == places
    assert same_state(kept.tensors, new.tensors)


def test_a_link_that_cannot_be_used_leaves_the_walk_before_it() -> None:
    old = first()
    middle = moved(old, 1, 0.02)
    new = moved(middle, 1, 0.02)
    bad = bytearray(encode(middle, new, level=2).tobytes())
    bad[-3] ^= 0x40
    shadow = shadow_of(copy_of(old))
    walk = Walk(shadow)
    with pytest.raises(WrongBase):
        walk.step(encode(middle, new).tobytes())
    walk.step(encode(old, middle, level=2).tobytes())
    with pytest.raises(PatchError):
        walk.step(bytes(bad))
    assert walk.at is not None and walk.at.digest == middle.digest and same_state(walk.at.tensors, middle.tensors)
    assert walk.back() is shadow and same_state(shadow.tensors, old.tensors)


def test_an_anchor_on_the_way_is_compared_with_what_is_served() -> None:
    """A new incarnation begins with one; what had been patched before it is put back first, so that it can be compared."""
    old = first()
    new = moved(old, 1, 0.02)
    other = Snapshot.of(moved(old, 2, 0.05).tensors, version=1, incarnation=1)
    end = moved(other, 3, 0.02)
    shadow = shadow_of(copy_of(old))
    walk = Walk(shadow)
    walk.step(encode(old, new, level=2).tobytes())
    walk.step(encode_anchor(other).tobytes())
    walk.step(encode(other, end, level=2).tobytes())
    assert same_state(shadow.tensors, old.tensors), "the old weights may still be needed"
    assert same_state(written(old, changes_of(walk)), end.tensors)
    assert walk.back() is shadow and same_state(shadow.tensors, old.tensors)


def test_a_tensor_that_comes_whole_after_it_was_patched() -> None:
    old = first()
    middle = moved(old, 1, 0.02)
    new = moved(middle, 1, 0.1, ("up",))
    whole = assemble(
        [encode_full("up", new.tensors["up"], new.entries["up"][2])],
        version=new.version,
        incarnation=0,
        digest=new.digest,
        base_version=middle.version,
        base_digest=middle.digest,
    )
    assert decode_header(whole.tobytes())[0].base_version == 1
    shadow = shadow_of(copy_of(old))
    walk = Walk(shadow)
    walk.step(encode(old, middle, level=2).tobytes())
    walk.step(whole.tobytes())
    assert same_state(written(old, changes_of(walk)), new.tensors)
    assert walk.back() is shadow and same_state(shadow.tensors, old.tensors)


def test_from_nothing_only_an_anchor_leads_anywhere() -> None:
    old = first()
    new = moved(old, 1, 0.02)
    walk = Walk(None)
    with pytest.raises(PatchError):
        walk.step(encode(old, new).tobytes())
    walk.step(encode_anchor(old).tobytes())
    walk.step(encode(old, new, level=2).tobytes())
    update = walk.update(layout_of(old))
    assert update.changes is None and {name for name, _, _ in update.load()} == set(SHAPES)
    assert same_state(walk.arrived().tensors, new.tensors)


def test_weights_of_another_model_are_refused_before_any_of_them_is_loaded() -> None:
    old = first()
    tensors = {name: bits for name, bits in old.tensors.items() if name != "norm"}
    walk = Walk(shadow_of(copy_of(old)))
    walk.step(encode(old, Snapshot.of(tensors, version=1, incarnation=0)).tobytes())
    with pytest.raises(IntegrityError, match="another model"):
        walk.update(layout_of(old))


def test_tensors_that_share_memory_are_changed_once_each() -> None:
    """A checkpoint that stores a tied head twice may be read as two views of one array."""
    words = first().tensors["up"].data.copy()
    pair = {"head": Bits("bf16", (128, 64), words), "tied": Bits("bf16", (128, 64), words)}
    old = Snapshot.of(pair, version=0, incarnation=0)
    turned = words ^ np.where(np.arange(words.size) % 97 == 0, 1, 0).astype(np.uint16)
    new = Snapshot.of({name: Bits("bf16", (128, 64), turned.copy()) for name in pair}, version=1, incarnation=0)
    file = encode(old, new, level=2).tobytes()
    walk = Walk(shadow_of(old))
    walk.step(file)
    assert walk.at is not None and same_state(walk.at.tensors, new.tensors)
