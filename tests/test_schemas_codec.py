"""The wire codec: golden bytes, an independent reader, every refusal, and no allocation on a lie."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any, get_type_hints

import msgpack
import msgspec
import numpy as np
import pytest
import zstandard
from admission_stage import make_commit, make_episode, make_lease, make_ready, make_verdict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from schemas import codec
from schemas.actions import Abstain, Finish, InvalidAction, ToolCall
from schemas.array_fields import ARRAYS
from schemas.arrays import MAX_ARRAY_BYTES, Array, ArrayError
from schemas.attempts import AttemptEnded, AttemptOpened, AttemptPlayed, AttemptTakeover, GroupClaim, GroupRelease
from schemas.codec import CodecError, decode, decode_any, digest, encode
from schemas.dead_letter import DeadLetter, DeadReason, LostRange
from schemas.generation import AbortRequest, GenerateRequest, GenerateResult
from schemas.group import ReadyGroup
from schemas.health import Heartbeat, Wait
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, AbandonReason, BatchEntry, BatchGroup, QuarantineEntry, QuarantineReason
from schemas.manifest import PolicyManifest
from schemas.message import Message
from schemas.ownership import Owner
from schemas.policy import ApplyOrder, EngineState, FleetVersions, WeightsManifest
from schemas.sandbox import SandboxAttach, SandboxCleanup, SandboxReset, SandboxResult, SandboxRun, SandboxSeal
from schemas.training import BatchDemand, EvalResult, ObjectRef, SplitScore
from schemas.trajectory import Episode, SamplingConfig, StateRef, TurnEffect, TurnRecord, VersionSpan

LEASE = make_lease(3)
EPISODE = make_episode(LEASE, 1, version=7)
IDS = Array.of(np.array([5, -1, 2**31 - 1], dtype=np.int32))
LOGPROBS = Array.of(np.array([-0.5, -1.25, 0.0], dtype=np.float32))
BATCH = BatchEntry(
    run="t",
    step=4,
    version=4,
    incarnation=1,
    groups=(BatchGroup(group="g00000003", ready_seq=9, oldest_version=2, newest_version=4, lag=2),),
    ready_high_water=9,
    demand_seq=5,
    settings_hash="0123456789abcdef",
    max_lag=2,
)
WEIGHTS = WeightsManifest(
    run="t",
    version=1,
    incarnation=0,
    digest="d1",
    form="patch",
    base_version=0,
    objects=(ObjectRef(name="o", digest="x", size_bytes=3),),
)
TURN = TurnRecord(
    run="t",
    group="g00000003",
    slot=1,
    attempt=0,
    turn=2,
    task_id="task-3",
    manifest="m0",
    prompt_ids=IDS,
    sampled_ids=IDS,
    logprobs=LOGPROBS,
    raw_logprobs=LOGPROBS,
    versions=(VersionSpan(0, 2, 6), VersionSpan(2, 3, 7, 1)),
    sampling=SamplingConfig(temperature=0.7, stop_token_ids=(1, 2), seed=11),
    action=ToolCall(name="shell", arguments={"command": "ls", "n": 1, "x": 0.5, "ok": True, "none": None}),
    previous=TurnEffect(observation=b"\xff\x00not utf-8", exit_code=-9, lane="command"),
)
EXAMPLES: tuple[Message, ...] = (
    LEASE,
    EPISODE,
    TURN,
    GroupClaim(run="t", group="g1", number=1, rollouter="r0", at_ns=1),
    GroupRelease(run="t", group="g1", number=1, rollouter="r0", reason="stop", at_ns=1),
    AttemptOpened(
        run="t",
        group="g1",
        slot=0,
        attempt=0,
        claim=0,
        rollouter="r0",
        sandbox="s",
        executor="x0",
        state_hash="h",
        started_ns=1,
    ),
    AttemptTakeover(run="t", group="g1", slot=0, attempt=0, claim=1, rollouter="r1", at_ns=1),
    AttemptPlayed(run="t", group="g1", slot=0, attempt=0, last=TurnEffect(observation=b"o", lane="command", exit_code=0)),
    AttemptEnded(run="t", group="g1", slot=0, attempt=0, claim=1, rollouter="r1", reason="infra_abort", detail="lost", at_ns=1),
    msgspec.structs.replace(TURN, action=Finish(answer="42")),
    msgspec.structs.replace(TURN, action=Abstain()),
    msgspec.structs.replace(TURN, action=InvalidAction(code="empty", message="no action")),
    msgspec.structs.replace(
        EPISODE, terminal_state=StateRef(state_hash="h", tar_digest="d", size_bytes=2, inline=b"\x1f\x8b"), engines=("e0", "e1")
    ),
    make_verdict(EPISODE, "d", reward=0.25, components={"tests": 0.5}, violations=("deleted a file",)),
    make_ready(8, oldest=1, newest=3),
    BATCH,
    QuarantineEntry(
        run="t",
        group="g1",
        ready_seq=2,
        reason=QuarantineReason.STALE,
        detail="lag 3 exceeds 2",
        at_version=3,
        oldest_version=0,
        lag=3,
        family="files",
        mean_reward=None,
        sampled_tokens=6,
        demand_seq=4,
        settings_hash="h",
    ),
    AbandonEntry(
        run="t", group="g1", ready_seq=0, reason=AbandonReason.INFRA_ABORT, detail="", family="files", settings_hash="h"
    ),
    BatchDemand(run="t", step=0, version=0, incarnation=0, groups=8),
    make_commit(BATCH),
    EvalResult(
        run="t",
        point="step-00000",
        step=0,
        splits=(
            SplitScore(
                split="heldout_instance",
                successes=1,
                attempts=2,
                censored=1,
                tasks=1,
                oldest_version=0,
                newest_version=0,
                by_family={"files": (1, 2)},
            ),
        ),
    ),
    GenerateRequest(request_id="r", requester="q", session="s", prompt_ids=IDS, sampling=SamplingConfig(top_p=0.9, top_k=4)),
    AbortRequest(request_id="r", requester="q", reason="deadline"),
    GenerateResult(request_id="r", engine="e0", generator="x", status="ok", sampled_ids=IDS, logprobs=LOGPROBS),
    SandboxReset(command_id="c", requester="q", sandbox="s", owner="g/0/0", files={"a/b": b"\0\xff"}, deadline_ns=1),
    SandboxRun(command_id="c", requester="q", sandbox="s", command="true", timeout_s=1.5, deadline_ns=2**62),
    SandboxSeal(command_id="c", requester="q", sandbox="s", deadline_ns=1),
    SandboxAttach(command_id="c", requester="q", sandbox="s", deadline_ns=1),
    SandboxCleanup(command_id="c", requester="q", sandbox="s"),
    SandboxResult(command_id="c", sandbox="s", executor="x0", lane="command", status="ok", exit_code=0, stdout=b"\xff"),
    WEIGHTS,
    ApplyOrder(
        run="t",
        order_id="o",
        engine="e0",
        version=1,
        incarnation=0,
        digest="d1",
        links=(WEIGHTS,),
        mode="continue_keep",
        deadline_ns=1,
    ),
    EngineState(run="t", engine="e0", generator="x", phase="serving", version=1, incarnation=0, digest="d1"),
    FleetVersions(run="t", target=1, incarnation=0, engines={"e0": 1, "e1": -1}, oldest=1, newest=1),
    PolicyManifest(
        model="m",
        base_digest="b",
        tokenizer_sha256="t",
        template_sha256="c",
        system_prompt_sha256="s",
        tool_schemas_sha256="o",
        parser="tokens",
        max_turns=8,
        max_action_tokens=48,
        max_context_tokens=512,
        sampling="",
    ),
    Heartbeat(
        run="t",
        service="bank",
        instance="0",
        host="h",
        pid=1,
        phase="ready",
        waits=(Wait(what="w", culprit="c", since_ns=1, deadline_ns=2, at_deadline="a"),),
        counters={"n": 1.0},
    ),
    Owner(
        run="t", role="trainer", instance="0", host="h", pid=1, process="b/n/1/2", token="x", epoch=3, renewals=7, since_ns=1
    ),
    DeadLetter(
        run="t",
        stream="GEN",
        seq=4,
        subject="s",
        reason=DeadReason.UNREADABLE,
        detail="not a message",
        digest="d",
        declared_digest="d",
        size_bytes=3,
        body=b"\xff\x00a",
        headers={"Hr-Digest": "d"},
        stored_ns=1,
        refused_by="engine-e0",
    ),
    LostRange(run="t", stream="EPISODES", first_seq=3, last_seq=5, how="deleted", noticed_by="bank-0"),
)
# Magic "HR", codec 1, flags 0, 65 bytes of payload; then a map of seven strings to values, the tag first.
GOLDEN_DEMAND = bytes.fromhex(
    "4852010041000000"
    "87a46b696e64a664656d616e64a17601a372756ea4646d2d31a473746570cd012c"
    "a776657273696f6ecd012cab696e6361726e6174696f6e02a667726f75707308"
)


def body_of(data: bytes) -> Any:
    """The payload as an independent msgpack implementation reads it."""
    payload = data[8:]
    if data[3] & 1:
        payload = zstandard.ZstdDecompressor().decompress(payload)
    return msgpack.unpackb(payload, raw=False)


def wire(body: Any, *, magic: bytes = b"HR", version: int = 1, flags: int = 0, size: int | None = None) -> bytes:
    """Wire bytes that an independent writer makes."""
    payload = body if isinstance(body, bytes) else msgpack.packb(body, use_bin_type=True)
    return struct.pack("<2sBBI", magic, version, flags, len(payload) if size is None else size) + payload


def plain(value: Any) -> Any:
    """Structs as the maps and arrays that stand on the wire."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def test_every_kind_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(codec.KINDS.values())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip_and_an_independent_reader(message: Message) -> None:
    data = encode(message)
    assert decode_any(data) == message
    assert decode(data, type(message)) == message
    assert encode(decode_any(data)) == data, "one message has one encoding, so digests are names"
    body = body_of(data)
    assert (body["kind"], body["v"]) == (type(message).__struct_config__.tag, 1)
    assert body == plain(message)
    assert decode_any(wire(body)) == message, "and an independent writer is understood"


def test_golden_bytes() -> None:
    """The layout is a contract with recordings; a change of these bytes needs a new codec or schema version."""
    demand = BatchDemand(run="dm-1", step=300, version=300, incarnation=2, groups=8)
    assert encode(demand) == GOLDEN_DEMAND
    assert decode(GOLDEN_DEMAND, BatchDemand) == demand
    independent = {"kind": "demand", "v": 1, "run": "dm-1", "step": 300, "version": 300, "incarnation": 2, "groups": 8}
    assert wire(independent) == GOLDEN_DEMAND
    assert digest(GOLDEN_DEMAND) == "2b6a1ccced515a2128390f56df492eb011beedf97c0c5a0b7bb2fbf3ab399558"


def test_arrays_are_dtype_shape_and_little_endian_bytes() -> None:
    body = body_of(encode(TURN))
    assert body["sampled_ids"] == ["int32", [3], bytes.fromhex("05000000ffffffffffffff7f")]
    assert body["versions"] == [[0, 2, 6, 0], [2, 3, 7, 1]]


def test_large_messages_are_compressed_and_small_ones_are_not() -> None:
    large = msgspec.structs.replace(TURN, previous=TurnEffect(observation=b"a" * 5000))
    data = encode(large)
    assert data[3] == 1
    assert len(data) < 2000
    assert decode_any(data) == large
    assert encode(BATCH)[3] == 0


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "truncated"),
        (b"HR\x01", "truncated"),
        (wire({}, magic=b"XX"), "not a headrace message"),
        (wire({}, version=2), "codec version 2"),
        (wire({}, flags=2), "unknown flags"),
        (wire({}, flags=3), "unknown flags"),
        (GOLDEN_DEMAND[:-1], "truncated"),
        (GOLDEN_DEMAND + b"\0", "trailing bytes"),
        (wire(b"", size=2**26 + 1), "more than the limit"),
        (wire(b"\xc1"), "not a message"),
        (wire([1, 2]), "not a message"),
        (wire({"v": 1}), "not a message"),
        (wire({"kind": "nonsense", "v": 1}), "unknown kind 'nonsense'"),
        (wire({"kind": "demand", "v": 2}), "schema version 2 is unknown"),
        (wire({"kind": "demand", "v": "1"}), "not a message"),
        (wire({"kind": "demand", "v": 1, "run": "t"}), "demand: "),
        (wire({"kind": "demand", "v": 1, "run": "t", "step": "0", "version": 0, "incarnation": 0, "groups": 1}), "step"),
        (wire(b"\x81" * 5000), "message"),
        (wire(b"not zstd", flags=1), "zstd"),
    ],
)
def test_every_refusal_says_which_rule_was_broken(data: bytes, text: str) -> None:
    with pytest.raises(CodecError, match=text):
        decode_any(data)


def test_another_kind_than_expected_is_refused() -> None:
    with pytest.raises(CodecError, match="expected a StepCommit, got a BatchDemand"):
        decode(GOLDEN_DEMAND, type(make_commit(BATCH)))


def test_a_compressed_frame_that_lies_about_its_size_is_refused() -> None:
    body = msgspec.msgpack.encode(BATCH)
    frame = zstandard.ZstdCompressor().compress(body)
    with pytest.raises(CodecError, match="declares"):
        decode_any(wire(frame, flags=1, size=len(body) + 1))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(body)
    with pytest.raises(CodecError, match=r"declares|zstd"):
        decode_any(wire(unsized, flags=1, size=len(body)))


def test_a_bomb_allocates_nothing() -> None:
    frame = zstandard.ZstdCompressor().compress(b"\0" * (512 * 2**20))
    tracemalloc.start()
    try:
        for size in (len(frame), 64 * 2**20, 512 * 2**20):
            with pytest.raises(CodecError):
                decode_any(wire(frame, flags=1, size=size))
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()


def test_a_message_above_the_limit_is_refused_by_both_ends() -> None:
    noise = np.random.default_rng(0).integers(0, 256, codec.MAX_WIRE_BYTES, dtype=np.uint8).tobytes()
    with pytest.raises(CodecError, match="send its body by reference"):
        encode(msgspec.structs.replace(TURN, previous=TurnEffect(observation=noise)))
    with pytest.raises(CodecError, match="exceed the limit"):
        decode_any(b"HR" + noise)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (Array("object", (1,), b"x"), "not allowed"),
        (Array("int32", (2,), b"\0" * 4), "needs 8 bytes, got 4"),
        (Array("int32", (-1,), b""), "non-negative"),
        (Array("int8", (1, 1, 1, 1, 1), b"\0"), "at most 4"),
        (Array("float64", (2**20, 2**20), b""), "send it by reference"),
        (Array("int32", (MAX_ARRAY_BYTES // 4 + 1,), b""), "exceed the limit"),
    ],
)
def test_an_array_that_contradicts_itself_is_refused_before_it_is_made(array: Array, text: str) -> None:
    with pytest.raises(ArrayError, match=text):
        array.numpy("field")


def test_an_array_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(ArrayError, match=r"logprobs: expected float32 with 1"):
        IDS.of_kind("logprobs", "float32", 1)
    with pytest.raises(ArrayError, match="complex128"):
        Array.of(np.zeros(1, dtype=np.complex128))


@given(
    hnp.arrays(
        dtype=st.sampled_from([np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64, np.float32, np.float64, np.bool_]),
        shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    )
)
@settings(deadline=None)
def test_arrays_keep_every_bit(values: np.ndarray) -> None:
    array = Array.of(values)
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(array), type=Array).numpy()
    assert back.dtype == values.dtype
    assert back.shape == values.shape
    assert back.tobytes() == values.tobytes(), "NaN payloads and signed zeros included"


def test_arrays_in_other_memory_orders_keep_their_values() -> None:
    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    for other in (values.T, values[:, ::-1], values.astype(">i4")):
        assert (Array.of(other).numpy() == other).all()


@given(st.binary(max_size=200), st.integers(0, len(GOLDEN_DEMAND) - 1), st.integers(0, 255))
@settings(deadline=None, max_examples=300)
def test_no_bytes_make_the_decoder_fail_otherwise(noise: bytes, position: int, value: int) -> None:
    damaged = bytearray(GOLDEN_DEMAND)
    damaged[position] = value
    for data in (noise, b"HR\x01\x00" + noise, bytes(damaged), wire(noise), wire(noise, flags=1)):
        try:
            decode_any(data)
        except CodecError:
            continue


def test_an_episode_that_lines_up_passes_and_reads_its_versions_by_token() -> None:
    checked = EPISODE.checked()
    assert checked.token_versions().tolist() == [-1, -1, 7, 7, 7]
    assert (checked.oldest_version(), checked.newest_version()) == (7, 7)


def test_the_kinds_are_what_the_recordings_name() -> None:
    assert codec.KINDS["lease"] is GroupLease
    assert codec.KINDS["ready"] is ReadyGroup
    assert codec.KINDS["episode"] is Episode
    assert len(codec.KINDS) == len(EXAMPLES) - 4


def test_every_array_field_has_its_kind_in_the_table() -> None:
    for kind in codec.KINDS.values():
        hints = get_type_hints(kind)
        fields = {name for name, hint in hints.items() if hint is Array or Array in getattr(hint, "__args__", ())}
        assert set(ARRAYS.get(kind, {})) == fields, kind


@pytest.mark.parametrize(
    ("field", "array", "text"),
    [
        ("sampled_ids", ["float32", [3], b"\0" * 12], "turn: sampled_ids: expected int32 with 1"),
        ("logprobs", ["float32", [3, 1], b"\0" * 12], "turn: logprobs: expected float32 with 1"),
        ("logprobs", ["float32", [3], b"\0" * 11], "turn: logprobs: shape .* needs 12 bytes, got 11"),
        ("prompt_ids", ["int32", [2**62], b""], "turn: prompt_ids: .* send it by reference"),
        ("prompt_ids", ["object", [1], b"x"], "turn: prompt_ids: expected int32"),
        ("prompt_ids", ["int32", [-1], b""], "turn: prompt_ids: shape .* non-negative"),
        ("raw_logprobs", ["float64", [1], b"\0" * 8], "turn: raw_logprobs: expected float32"),
        ("prompt_ids", ["int32", [1]], "prompt_ids"),
    ],
)
def test_a_message_with_another_array_than_its_field_holds_is_refused_by_the_fields_name(
    field: str, array: list[Any], text: str
) -> None:
    with pytest.raises(CodecError, match=text):
        decode_any(wire({**body_of(encode(TURN)), field: array}))


def test_bytes_behind_a_compressed_frame_are_refused() -> None:
    """They would be part of the digest and of nothing else."""
    body = msgspec.msgpack.encode(BATCH)
    frame = zstandard.ZstdCompressor().compress(body)
    assert decode_any(wire(frame, flags=1, size=len(body))) == BATCH
    for tail in (b"\0", frame):
        with pytest.raises(CodecError, match="zstd"):
            decode_any(wire(frame + tail, flags=1, size=len(body)))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"], ids=["arrays", "maps"])
def test_deep_nesting_is_refused_wherever_it_stands(opening: bytes) -> None:
    deep = opening * 200_000 + b"\xc0"
    demand = msgspec.msgpack.encode(body_of(GOLDEN_DEMAND))
    in_a_field = bytes([demand[0] + 1]) + demand[1:] + msgspec.msgpack.encode("later") + deep
    for data in (deep, in_a_field):
        with pytest.raises(CodecError, match=r"recursion|not a message"):
            decode_any(wire(data))


@pytest.mark.parametrize(
    "head", [b"\xdd\xff\xff\xff\xf0", b"\xdf\xff\xff\xff\xf0", b"\xc6\xff\xff\xff\xf0", b"\xdb\xff\xff\xff\xf0"]
)
def test_a_length_that_the_bytes_cannot_hold_reserves_nothing(head: bytes) -> None:
    """Four thousand million elements, said in five bytes."""
    eval_body = msgspec.msgpack.encode({"kind": "eval", "v": 1, "run": "t", "point": "p", "step": 0})
    lying = bytes([eval_body[0] + 1]) + eval_body[1:] + msgspec.msgpack.encode("splits") + head
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decode_any(wire(lying))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """The wire bytes of some message, damaged: bytes changed, cut out, doubled or put in; compressed ones on either side."""
    message = draw(st.sampled_from(EXAMPLES))
    if draw(st.booleans()):
        data = bytearray(encode(message))
    else:
        data = bytearray(msgspec.msgpack.encode(message))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 16))
        action = draw(st.sampled_from(["change", "cut", "repeat", "insert", "length"]))
        if action == "change" and place < len(data):
            data[place] = draw(st.integers(0, 255))
        elif action == "cut":
            del data[place : place + length]
        elif action == "repeat":
            data[place:place] = data[place : place + length]
        elif action == "length":
            data[place:place] = draw(st.sampled_from([b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"])) + b"\xff\xff\xff\x00"
        else:
            data[place:place] = draw(st.binary(max_size=length))
    body = bytes(data)
    if body[:2] == b"HR":
        return body
    if draw(st.booleans()):
        return wire(zstandard.ZstdCompressor().compress(body), flags=1, size=len(body))
    return wire(body)


@given(mutations())
@settings(deadline=None, max_examples=1500)
def test_damaged_bytes_of_any_message_are_a_message_or_a_codec_error(data: bytes) -> None:
    tracemalloc.start()
    try:
        message = decode_any(data)
        encode(message)
    except CodecError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 * 2**20, "a short message reserved memory that it cannot fill"
