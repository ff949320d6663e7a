"""Damaged, cut or lying files: refused with a typed error that names the place, without crash, hang or large allocation."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from param_sync.patch import changes, codec, container
from param_sync.patch.bits import Bits, same_state
from param_sync.patch.errors import Corrupt, DigestMismatch, PatchError, TooLarge, Truncated
from param_sync.patch.snapshot import Snapshot

pytestmark = pytest.mark.timeout(60)


def _pair() -> tuple[Snapshot, Snapshot]:
    rng = np.random.default_rng(11)
    data = rng.integers(0x3C00, 0x3E00, 6000).astype(np.uint16)
    hit = rng.random(6000) < 0.05
    noise = rng.integers(0, 2**32, 50).astype(np.uint32)
    old = {
        "steps": Bits("bf16", (60, 100), data),
        "f32": Bits("f32", (50,), noise),
        "gone": Bits("u8", (3,), np.arange(3, dtype=np.uint8)),
    }
    new = {
        "steps": Bits("bf16", (60, 100), np.where(hit, data + 1, data)),
        "f32": Bits("f32", (50,), np.where(np.arange(50) % 9, noise, noise ^ 77).astype(np.uint32)),
        "new": Bits("bf16", (64,), data[:64].copy()),
    }
    return Snapshot.of(old, version=1, incarnation=2), Snapshot.of(new, version=2, incarnation=2)


OLD, NEW = _pair()
PATCH = codec.encode(OLD, NEW).tobytes()
ANCHOR = codec.encode_anchor(NEW).tobytes()
HEADER, BODY = container.decode_header(PATCH)


def refused(file: bytes, kind: type[PatchError] = PatchError) -> PatchError:
    """The error with which the file is refused; the base must be as it was."""
    with pytest.raises(kind) as caught:
        codec.apply(OLD, file)
    OLD.audit()
    return caught.value


def sealed(header: dict[str, Any] | bytes, body: bytes, level: int = 1, body_bytes: int | None = None) -> bytes:
    """A file with right checksums around any header and body: what a faulty or hostile writer could send."""
    coded = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    head = struct.pack("<8sHHIQ", b"HRWEIGHT", 1, level, len(coded), len(body) if body_bytes is None else body_bytes)
    return head + xxhash.xxh3_128_digest(head + coded) + coded + body


def fields(**changed: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(HEADER, builtin_types=(bytes,)), **changed}


@pytest.mark.parametrize("file", [PATCH, ANCHOR], ids=["patch", "anchor"])
def test_every_truncation_is_refused(file: bytes) -> None:
    for size in [*range(400), *range(400, len(file), 37), len(file) - 1]:
        refused(file[:size], Truncated)
    assert refused(file + b"\0", Corrupt).offset == len(file)


@pytest.mark.parametrize("file", [PATCH, ANCHOR], ids=["patch", "anchor"])
def test_every_flipped_bit_is_refused(file: bytes) -> None:
    for at in range(len(file)):
        damaged = bytearray(file)
        damaged[at] ^= 1 << (at % 8)
        refused(bytes(damaged))


def test_the_error_names_tensor_and_offset() -> None:
    damaged = bytearray(PATCH)
    damaged[-1] ^= 1
    error = refused(bytes(damaged), Corrupt)
    assert error.tensor == "steps"
    assert error.offset == len(PATCH) - HEADER.tensors[-1].body_bytes
    assert str(error) == f"tensor 'steps', byte {error.offset}: a frame's checksum does not match"


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_noise_is_refused(noise: bytes, magic: bool) -> None:
    refused(b"HRWEIGHT\1\0\1\0" + noise if magic else noise)


@settings(max_examples=600, deadline=None)
@given(data=st.data(), compiled=st.booleans())
def test_frames_with_right_checksums_and_wrong_content_are_refused_or_harmless(data: st.DataObject, compiled: bool) -> None:
    """A frame that still passes its checksum either fails further in or decodes to exactly the announced bits."""
    at, frames = BODY, []
    for entry in HEADER.tensors:
        frames.append((at - BODY, entry.body_bytes))
        at += entry.body_bytes
    body = bytearray(PATCH[BODY:])
    start, size = data.draw(st.sampled_from(frames))
    # Two draws in three go to the head and the table of streams, where the lies are.
    places = st.integers(0, min(60, size - 9)) | st.integers(0, min(60, size - 9)) | st.integers(0, size - 9)
    for _ in range(data.draw(st.integers(1, 3))):
        body[start + data.draw(places)] = data.draw(st.integers(0, 255))
    body[start + size - 8 : start + size] = xxhash.xxh3_64_digest(bytes(body[start : start + size - 8]))
    before = changes.COMPILED_FROM
    changes.COMPILED_FROM = 0 if compiled else before
    tracemalloc.start()
    outcome: Snapshot | PatchError
    try:
        outcome = codec.apply(OLD, PATCH[:BODY] + bytes(body))
    except PatchError as error:
        outcome = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        changes.COMPILED_FROM = before
    if isinstance(outcome, PatchError):
        assert outcome.tensor is not None
    else:
        assert same_state(outcome.tensors, NEW.tensors)
    assert peak < 64 * 2**20
    OLD.audit()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_headers_with_right_checksums_and_wrong_content_are_refused(data: st.DataObject) -> None:
    header = fields()
    anything = (
        st.none()
        | st.integers(-5, 2**63)
        | st.text(max_size=5)
        | st.binary(max_size=20)
        | st.lists(st.integers(0, 2**40), max_size=4)
    )
    if data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(header)))
        value = data.draw(anything)
        harmless = key in ("version",) and isinstance(value, int)
        header[key] = value
    else:
        row = data.draw(st.integers(0, len(header["tensors"]) - 1))
        column = data.draw(st.integers(0, 5))
        rows = [list(entry) for entry in header["tensors"]]
        rows[row][column] = data.draw(anything)
        harmless = rows == [list(entry) for entry in fields()["tensors"]]
        header["tensors"] = rows
    if header != fields() and not harmless:
        refused(sealed(header, PATCH[BODY:]))


def _entry(name: str, /, **changed: Any) -> dict[str, Any]:
    rows = msgspec.to_builtins(HEADER, builtin_types=(bytes,))["tensors"]
    order = ("name", "dtype", "shape", "base_digest", "digest", "body_bytes")
    return fields(
        tensors=[[changed.get(k, v) if row[0] == name else v for k, v in zip(order, row, strict=True)] for row in rows]
    )


@pytest.mark.parametrize(
    ("header", "kind", "text"),
    [
        (_entry("new", shape=[2**20, 2**20]), TooLarge, "exceed the limit"),
        (_entry("new", shape=[2**33]), Corrupt, "cannot hold a tensor"),
        (_entry("new", shape=[65]), Corrupt, "needs all its 65 words"),
        (_entry("new", shape=[63]), Corrupt, "does not fit"),
        (_entry("new", shape=[1] * 17 + [64]), Corrupt, "at most 16 dimensions"),
        (_entry("new", dtype="complex"), Corrupt, "unknown"),
        (_entry("new", dtype="f32", shape=[32]), Corrupt, "does not fit"),
        (_entry("new", digest=b"1" * 16), DigestMismatch, "announced 3131"),
        (_entry("new", digest=b"1"), Corrupt, "16 bytes"),
        (_entry("steps", shape=[6000]), PatchError, "the receiver holds"),
        (_entry("steps", base_digest=b""), Corrupt, "needs all its 6000 words"),
        (_entry("steps", base_digest=b"1" * 16), PatchError, "other bits than"),
        (_entry("f32", name="steps"), Corrupt, "twice"),
        (_entry("steps", body_bytes=7), Corrupt, "do not add up"),
        (fields(removed=["absent"]), PatchError, "does not hold it"),
        (fields(removed=[]), DigestMismatch, "the state is announced"),
        (fields(digest="0"), DigestMismatch, "the state is announced"),
        (fields(base_digest=None), Corrupt, "come together"),
        (fields(base_digest=None, base_version=None), Corrupt, "an anchor is everything"),
        (fields(extra=1), Corrupt, "malformed"),
        (b"\xc1", Corrupt, "malformed"),
    ],
)
def test_a_lying_header_is_refused_before_it_costs_memory(header: Any, kind: type[PatchError], text: str) -> None:
    tracemalloc.start()
    error = refused(sealed(header, PATCH[BODY:]), kind)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert text in str(error)
    assert peak < 2**20


def test_limits_are_the_receivers_choice() -> None:
    with pytest.raises(TooLarge, match=r"'steps'.*12000 bytes exceed"):
        codec.apply(OLD, PATCH, limits=codec.Limits(tensor_bytes=11_999))
    with pytest.raises(TooLarge, match="of tensors exceed"):
        codec.apply(OLD, PATCH, limits=codec.Limits(state_bytes=12_100))
    assert codec.apply(OLD, PATCH).digest == NEW.digest


def test_unknown_formats_and_levels_are_named() -> None:
    assert "format 1 at level 3 is unknown" in str(refused(sealed(fields(), PATCH[BODY:], level=3), Corrupt))
    assert "not a weights file" in str(refused(b"safetensors?" * 9, Corrupt))
    assert "do not add up" in str(refused(sealed(fields(), PATCH[BODY:], body_bytes=2**60), Corrupt))
