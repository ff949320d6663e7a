"""The format is a contract: these bytes must decode for ever, and small files (nothing compressed) are written exactly so."""

from __future__ import annotations

import numpy as np
import pytest

from param_sync.patch import codec, frame, planes, streams
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

INDEX = np.arange(600)
RANKED_BEFORE = (0x3800 + (INDEX * 40503 % 65536 >> 6)).astype(np.uint16)
MOVED = np.where(INDEX % 2 == 0, 1, -1 - (INDEX % 5 == 0) * 40)
RANKED_AFTER = np.where((INDEX * 2654435761 >> 7) % 9 == 0, RANKED_BEFORE + MOVED, RANKED_BEFORE).astype(np.uint16)
RANKED = bytes.fromhex(
    "485257454947485401000200ff000000ce0000000000000027558b3ab6d342b870941c4cdfd5e1f587a776657273696f6e01ab696e636172"
    "6e6174696f6e01a6646967657374d94032656239643633306334353733363265636633326533333038363463336466303234303930386233"
    "303762376636613435313438346533663861616432623331ac626173655f76657273696f6e00ab626173655f646967657374d94061336562"
    "3161626266333062663863313931383034613833323930373266653035363339613965643764393339636133333535336637366365323533"
    "65336164a774656e736f72739196a177a46266313692141ec410a315070a27a83bde577723ba127e25cdc410c1d8c7b9be40bac6ed6ce4ad"
    "f4cbef05cccea772656d6f7665649004020000ce000000000000000000000058020000430000000000000007000000590000002200000009"
    "000000000000000e0000000777014300000001093d00008315dd05000000e30440a010b50c00000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000ab032320103c3cbd970043043319"
    "0e170d00f42cdd36a29118b82ee682d3639d20a20b08822088208820081004510051005100510051005100510098df4e677edc044e"
)


def test_the_golden_patch_is_written_and_read() -> None:
    assert codec.encode(OLD, NEW).tobytes() == PATCH
    made = codec.apply(OLD, PATCH)
    assert same_state(made.tensors, NEXT)
    assert made.version == 7
    _, body = decode_header(PATCH)
    assert frame.parse(memoryview(PATCH)[body:]).form == frame.SPARSE_STEPS


def test_the_golden_anchor_is_written_and_read() -> None:
    assert codec.encode_anchor(NEW).tobytes() == ANCHOR
    assert same_state(codec.apply(None, ANCHOR).tensors, NEXT)
    assert decode_header(ANCHOR)[0].is_anchor


def test_a_golden_compressed_patch_is_read() -> None:
    assert same_state(codec.apply(RAMP_OLD, COMPRESSED).tensors, RAMP_NEW)


def test_a_golden_patch_of_level_2_is_read() -> None:
    base = Snapshot.of({"w": Bits("bf16", (20, 30), RANKED_BEFORE)}, version=0, incarnation=1)
    assert same_state(codec.apply(base, RANKED).tensors, {"w": Bits("bf16", (20, 30), RANKED_AFTER)})
    _, body = decode_header(RANKED)
    assert frame.parse(memoryview(RANKED)[body:]).form == frame.RANKED_STEPS


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
