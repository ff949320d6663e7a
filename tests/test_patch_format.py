"""The format is a contract: these bytes must decode for ever, and small files (nothing compressed) are written exactly so."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash

from param_sync.patch import codec, frame, number_kernels, planes, streams
from param_sync.patch.bits import Bits, same_state
from param_sync.patch.container import decode_header
from param_sync.patch.digest import digest_of, state_digest, tensor_digest
from param_sync.patch.errors import Corrupt, PatchError
from param_sync.patch.snapshot import Snapshot

pytestmark = pytest.mark.timeout(30)

SAME = Bits("i64", (1,), np.array([7], np.uint64))
BEFORE = np.arange(0x3F80, 0x3F98).astype(np.uint16)
BEFORE[:6] = [0x0000, 0x8000, 0x7FC1, 0x7F80, 0xBF80, 0x0001]
AFTER = BEFORE.copy()
# +0 to -0, NaN payload, infinity to NaN, away from and towards zero, a denormal to a far value, and a few plain steps
AFTER[[0, 2, 3, 4, 5, 9, 12, 13, 20]] = [0x8000, 0x7FC2, 0x7F81, 0xBF7F, 0x0201, 0x3F8A, 0x3F8B, 0x3F8E, 0x3F95]
STATE = {
    "a": Bits("bf16", (2, 12), BEFORE),
    "b": Bits("f32", (), np.array([0x3F800000], np.uint32)),
    "gone": Bits("u8", (2,), np.array([1, 2], np.uint8)),
    "same": SAME,
}
NEXT = {
    "a": Bits("bf16", (2, 12), AFTER),
    "b": Bits("f32", (), np.array([0x3F800001], np.uint32)),
    "fresh": Bits("bf16", (3,), np.array([0x3F80, 0xC000, 0], np.uint16)),
    "same": SAME,
}
OLD, NEW = Snapshot.of(STATE, version=6, incarnation=1), Snapshot.of(NEXT, version=7, incarnation=1)
RAMP = np.arange(4096).astype(np.uint16) + 0x3C00
RAMP_OLD = Snapshot.of({"w": Bits("bf16", (4096,), RAMP)}, version=0, incarnation=0)
RAMP_NEW = {"w": Bits("bf16", (4096,), (RAMP + (np.arange(4096) % 7 == 0)).astype(np.uint16))}
# Small weights move by one up or down, or by many; a few larger ones by one up.
WIDE = (np.arange(8192) * 37 % 8192 + 0x3000).astype(np.uint16)
PLACE = np.arange(8192) * 61 % 8192
WIDE_STEP = np.where(WIDE < 0x3400, (PLACE % 5 == 0) * (1 - 2 * (PLACE & 1)) + (PLACE % 211 == 0) * 900, PLACE % 640 == 3)
WIDE_OLD = Snapshot.of({"w": Bits("bf16", (64, 128), WIDE)}, version=0, incarnation=0)
WIDE_NEW = {"w": Bits("bf16", (64, 128), (WIDE + WIDE_STEP).astype(np.uint16))}

PATCH = bytes.fromhex(
    "48525745494748540100010053010000c8000000000000006bafd951d8b76bc02c68f205c97f3e4087a776657273696f6e07ab696e636172"
    "6e6174696f6e01a6646967657374d94030663564323932623638323736626631653761353531393235653961633731346631343261373532"
    "353632396639636662313438623039646464393638353065ac626173655f76657273696f6e06ab626173655f646967657374d94030386563"
    "6266356261396439666435396264373665373963313835666338653065396434303363326339346266633634356137333661326430313563"
    "64323435a774656e736f72739396a161a46266313692020cc410c5061ef3a54e04386c2f7455c30e124ac410b41570d7061d6648f28790f1"
    "46faa3295696a162a366333290c410e6f9acca6893caeb591ef4e963e120d4c41022437235b8fb7497199021f14fe5dead3c96a566726573"
    "68a4626631369103c400c410f54c337c8bd3f5f69e204eef00574a7736a772656d6f76656491a4676f6e6503020000560000000000000000"
    "00000018000000090000000000000001000000090000000000000000000000020000000900000002000000000100000003020006410000ff"
    "00000000000000ff017dcf8b89d564fb76010400003c00000000000000000000000100000001000000000000000000000001000000010000"
    "0001000000010000000100000004f042b7ce9f4f460002010036000000000000000000000003000000030000000000000000000000030000"
    "00030000000001007f8000f4a177ced7a297e3"
)
ANCHOR = bytes.fromhex(
    "4852574549474854010001000e01000022010000000000002e475f8623840cc2de18ff0614f0bd7587a776657273696f6e07ab696e636172"
    "6e6174696f6e01a6646967657374d94030663564323932623638323736626631653761353531393235653961633731346631343261373532"
    "353632396639636662313438623039646464393638353065ac626173655f76657273696f6ec0ab626173655f646967657374c0a774656e73"
    "6f72739496a161a46266313692020cc400c410b41570d7061d6648f28790f146faa3296096a162a366333290c400c41022437235b8fb7497"
    "199021f14fe5dead3c96a56672657368a4626631369103c400c410f54c337c8bd3f5f69e204eef00574a773696a473616d65a36936349101"
    "c400c410deb6d224c549cbd3e8c0d782b2f6127650a772656d6f766564900002010060000000000000000000000018000000180000000000"
    "000000000000180000001800000001018402ff020c0e10141416161c1c1e202224262a2a2c2e0000ffff7e047f7f7f7f7f7f7f7f7f7f7f7f"
    "7f7f7f7f7f7f4e75fb3e4baad62e000401003c00000000000000000000000100000001000000000000000000000001000000010000000100"
    "0000010000000200007ff4f19392a8611c730002010036000000000000000000000003000000030000000000000000000000030000000300"
    "00000001007f8000f4a177ced7a297e300080000500000000000000000000000010000000100000000000000000000000100000001000000"
    "01000000010000000100000001000000010000000100000007000000000000003c6298dae4ab6875"
)
COMPRESSED = bytes.fromhex(
    "485257454947485401000100ff0000007700000000000000fae4f69a9488624c73bc03e0257ecba887a776657273696f6e01ab696e636172"
    "6e6174696f6e00a6646967657374d94064616264303732353563656662376630303736643763343166633831333234386539376132363132"
    "363162616465316637653762393363386330383364323731ac626173655f76657273696f6e00ab626173655f646967657374d94036373864"
    "6133336431643130353531356266623334303337383563663465613431366635396461646232333631383231353561333035653939346139"
    "36633763a774656e736f72739196a177a46266313691cd1000c410796b0b81295ccfbe96c75bbe8adbed69c410d15af0b21bf001eab73cbe"
    "c95ba37e0a77a772656d6f7665649003020000770000000000000000000000001000004a0200000000000000000000130000800000000000"
    "00000011000080130000800000000028b52ffd604a014d00001000060100452a800528b52ffd204a450000100000010085022c28b52ffd60"
    "4a014d00001000000100452a80059277c7b1d82c62aa"
)
GAPS = bytes.fromhex(
    "485257454947485402000100010100001601000000000000d958cbdd1491589f923161041c0903c587a776657273696f6e01ab696e636172"
    "6e6174696f6e00a6646967657374d94039363233396632353565613639663261376166333730666632613263626266323465653139623230"
    "656531343863386639336631386164646338343434623461ac626173655f76657273696f6e00ab626173655f646967657374d94062316264"
    "3239643135383961363433373832303736373230613232666466323739363339626537353539393766643362616638653262626562663363"
    "66633662a774656e736f72739196a177a4626631369240cc80c41047041e85150a5e29481f5af4f2f71921c41070bd1da5cb52cdda1a28f2"
    "4b37669031cd0116a772656d6f766564900402000116010000000000000000000000200000de0000000000000000000000ffde0000007c00"
    "00006500000001001a5c3724248b80005c00000012000000120012002412242412245c2481df3e00000040401b00ebd268003c333500af8a"
    "57004e52f41a5e0c8805ba97f0e0ee2b0be8864a63ed6f60e2b794e544cb9d36016c15263233d0a0609655360a19a632f526b925910a4202"
    "91814dcc1b31241922cc481a22672e8cb1320100278826875900000000000000000000000000000000000000000000000000000000000000"
    "00000000000080812c000000f51f0c009b0ce22880405904ec3d4c0115c6b757b1f08ab94d59c5880227e5b18b0a419836eae06af5978f87"
    "08060606060606fa4fe041157beac5"
)
RANKS = bytes.fromhex(
    "4852574549474854020002000101000005010000000000008c503ea952a78c606b3ea15eeb0d360787a776657273696f6e01ab696e636172"
    "6e6174696f6e00a6646967657374d94039363233396632353565613639663261376166333730666632613263626266323465653139623230"
    "656531343863386639336631386164646338343434623461ac626173655f76657273696f6e00ab626173655f646967657374d94062316264"
    "3239643135383961363433373832303736373230613232666466323739363339626537353539393766643362616638653262626562663363"
    "66633662a774656e736f72739196a177a4626631369240cc80c41047041e85150a5e29481f5af4f2f71921c41070bd1da5cb52cdda1a28f2"
    "4b37669031cd0105a772656d6f766564900502000205010000000000000000000000200000de000000000000000000000067ffd30000000b"
    "0000004000000016000000610000000c000000010008616180c280878ce74d4d61132c00000000408b23ae67de34860b01009ddd6c77e070"
    "e8da8d3f9ee98e2ab0f5374dd447d3ff6c3b3f0a72705e4018e6000023ac049007ad04ac04ac04be0bac04ab04c802ab0401002787bd87bc"
    "00000000000000000000000000000000000000000000000000000000000000000000000000808728000000d5ef149d8a2c3e0ba645ed9ca6"
    "a9574f72578986544c1e076a63d63b10fbe910ca9367f094976de108060606060606000000000000000000000000c46d62cc2eace68a"
)


def stamped(file: bytes, version: int, level: int) -> bytes:
    """The same file under another version and level."""
    size = int.from_bytes(file[12:16], "little")
    head = file[:8] + struct.pack("<HH", version, level) + file[12:24]
    return head + xxhash.xxh3_128_digest(head + file[40 : 40 + size]) + file[40:]


def test_the_golden_patch_is_written_and_read() -> None:
    assert codec.encode(OLD, NEW).tobytes() == stamped(PATCH, 2, 1)
    assert codec.encode(OLD, NEW, level=2).tobytes() == stamped(PATCH, 2, 2)
    made = codec.apply(OLD, PATCH)
    assert same_state(made.tensors, NEXT)
    assert made.version == 7
    _, body = decode_header(PATCH)
    assert frame.parse(memoryview(PATCH)[body:]).form == frame.SPARSE_STEPS


def test_the_golden_anchor_is_written_and_read() -> None:
    assert codec.encode_anchor(NEW).tobytes() == stamped(ANCHOR, 2, 1)
    assert same_state(codec.apply(None, ANCHOR).tensors, NEXT)
    assert decode_header(ANCHOR)[0].is_anchor


def test_a_golden_compressed_patch_is_read() -> None:
    assert same_state(codec.apply(RAMP_OLD, COMPRESSED).tensors, RAMP_NEW)


@pytest.mark.parametrize(("file", "form"), [(GAPS, frame.GAPS), (RANKS, frame.RANKS)], ids=["gaps", "ranks"])
def test_golden_compiled_forms_are_read(file: bytes, form: int) -> None:
    _, body = decode_header(file)
    parsed = frame.parse(memoryview(file)[body:])
    assert parsed.form == form
    assert number_kernels.RANS in {stream[0] for stream, _, n in parsed.streams if n}
    assert same_state(codec.apply(WIDE_OLD, file).tensors, WIDE_NEW)


def test_golden_digests() -> None:
    assert OLD.digest == "08ecbf5ba9d9fd59bd76e79c185fc8e0e9d403c2c94bfc645a736a2d015cd245"
    assert NEW.digest == "0f5d292b68276bf1e7a551925e9ac714f142a7525629f9cfb148b09ddd96850e"
    assert tensor_digest(BEFORE).hex() == "c5061ef3a54e04386c2f7455c30e124a"
    assert tensor_digest(np.empty(0, np.uint16)).hex() == "99aa06d3014798d86001c324468d497f"
    assert state_digest({}) == "7c6b45b0e46ec3c8fd5670541ab788cdc6c3587465d01fff1a1aafc2a50dca52"


def test_the_digest_depends_on_name_dtype_shape_bits_and_nothing_else() -> None:
    base = digest_of(STATE)
    assert digest_of(dict(reversed(STATE.items()))) == base
    bits = STATE["a"]
    for other in (
        {**STATE, "z": SAME},
        {name: b for name, b in STATE.items() if name != "gone"},
        {**{name: b for name, b in STATE.items() if name != "a"}, "a ": bits},
        {**STATE, "a": Bits("f16", bits.shape, bits.data)},
        {**STATE, "a": Bits("bf16", (24,), bits.data)},
        {**STATE, "a": Bits("bf16", bits.shape, AFTER)},
    ):
        assert digest_of(other) != base


def test_bits_take_any_carrier_of_the_right_size_and_refuse_the_rest() -> None:
    raw = np.arange(24).astype(np.uint8)
    assert Bits("f32", (2, 3), raw).data.dtype == np.uint32
    assert Bits("bf16", (12,), raw[::-1]).data.tolist() == raw[::-1].copy().view(np.uint16).tolist()
    assert Bits("bf16", (2,), np.frombuffer(b"0123456789", np.uint8)[1:5]).data.flags.aligned
    with pytest.raises(PatchError, match="needs 24 bytes, got 23"):
        Bits("f32", (2, 3), raw[1:])
    with pytest.raises(PatchError, match="dtype 'float' is unknown"):
        Bits("float", (6,), raw)
    with pytest.raises(PatchError, match="none negative"):
        Bits("u8", (-4, -6), raw)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("turn", [False, True])
def test_planes_round_trip(width: int, turn: bool) -> None:
    words = np.random.default_rng(width).integers(0, 256, 40 * width).astype(np.uint8).view(f"<u{width}")
    split = planes.split(words, turn)
    assert np.array_equal(planes.join(list(split), 40, turn), words)
    if turn and width == 2:
        assert split[1] == ((words >> 7) & 0xFF).astype(np.uint8).tobytes()  # the exponent, alone


def test_streams_refuse_what_they_cannot_hold() -> None:
    packed, compressed = streams.pack(bytes(100_000))
    assert compressed
    assert streams.unpack(memoryview(packed), True, 100_000) == bytes(100_000)
    for stored, flag, raw in (
        (packed, True, 99_999),
        (packed, False, 100_000),
        (b"", True, 5),
        (b"12", True, 2**40),
        (packed[:-1], True, 100_000),
    ):
        with pytest.raises(Corrupt):
            streams.unpack(memoryview(stored), flag, raw)
