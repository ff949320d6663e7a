"""The wire codec: msgpack, zstd above a threshold, every size checked before memory is reserved.

Layout: `b"HR"`, codec version (1 byte), flags (1 byte: 1 = zstd), payload length before
compression (u32 little-endian), payload.
The digest of an item is the SHA-256 of exactly these bytes; it travels in a header and in every reference to the item.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TypeVar, cast

import msgspec
import zstandard

from schemas.array_fields import check_arrays
from schemas.arrays import ArrayError
from schemas.attempts import AttemptEnded, AttemptOpened, AttemptPlayed, AttemptTakeover, GroupClaim, GroupRelease
from schemas.dead_letter import DeadLetter, LostRange
from schemas.generation import AbortRequest, GenerateRequest, GenerateResult
from schemas.group import ReadyGroup
from schemas.health import Heartbeat
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, QuarantineEntry
from schemas.manifest import PolicyManifest
from schemas.message import SCHEMA_VERSION, Message
from schemas.ownership import Owner
from schemas.policy import ApplyOrder, EngineState, FleetVersions, WeightsManifest
from schemas.sandbox import SandboxAttach, SandboxCleanup, SandboxReset, SandboxResult, SandboxRun, SandboxSeal
from schemas.training import BatchDemand, EvalResult, StepCommit
from schemas.trajectory import Episode, TurnRecord, Verdict

CODEC_VERSION = 1
MAX_WIRE_BYTES = 8 * 2**20 - 4096
MAX_DECODED_BYTES = 64 * 2**20
COMPRESS_ABOVE_BYTES = 1024
_HEADER = struct.Struct("<2sBBI")
_MAGIC = b"HR"
_ZSTD = 1

AnyMessage = (
    GroupLease
    | GenerateRequest
    | AbortRequest
    | GenerateResult
    | SandboxReset
    | SandboxRun
    | SandboxSeal
    | SandboxAttach
    | SandboxCleanup
    | SandboxResult
    | TurnRecord
    | GroupClaim
    | GroupRelease
    | AttemptOpened
    | AttemptTakeover
    | AttemptPlayed
    | AttemptEnded
    | Episode
    | Verdict
    | ReadyGroup
    | BatchEntry
    | QuarantineEntry
    | AbandonEntry
    | BatchDemand
    | StepCommit
    | EvalResult
    | WeightsManifest
    | ApplyOrder
    | EngineState
    | FleetVersions
    | PolicyManifest
    | Heartbeat
    | Owner
    | DeadLetter
    | LostRange
)
M = TypeVar("M", bound=Message)


class CodecError(ValueError):
    """A payload that is refused. The text names the rule that it broke."""


class _Envelope(msgspec.Struct):
    kind: str
    v: int


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
KINDS: dict[str, type[Message]] = {cast(str, t.__struct_config__.tag): t for t in AnyMessage.__args__}


def encode(message: Message) -> bytes:
    """Message to wire bytes. Raises `CodecError` when the result would exceed what one message may carry."""
    body = _encoder.encode(message)
    flags, payload = 0, body
    if len(body) > COMPRESS_ABOVE_BYTES:
        packed = zstandard.ZstdCompressor(level=1).compress(body)
        if len(packed) < len(body):
            flags, payload = _ZSTD, packed
    if len(body) > MAX_DECODED_BYTES or len(payload) + _HEADER.size > MAX_WIRE_BYTES:
        raise CodecError(
            f"{type(message).__name__} of {len(payload)} bytes exceeds {MAX_WIRE_BYTES}; send its body by reference"
        )
    return _HEADER.pack(_MAGIC, CODEC_VERSION, flags, len(body)) + payload


def decode(data: bytes, kind: type[M]) -> M:
    """Wire bytes to a message of exactly `kind`. Raises `CodecError` with the reason; allocates at most the declared size."""
    message = decode_any(data)
    if not isinstance(message, kind):
        raise CodecError(f"expected a {kind.__name__}, got a {type(message).__name__}")
    return message


def decode_any(data: bytes) -> Message:
    """Wire bytes to whichever message they hold. Raises `CodecError` with the reason."""
    body = _unpack(data)
    try:
        envelope = _envelope_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CodecError(f"not a message: {error}") from error
    if envelope.kind not in KINDS:
        raise CodecError(f"unknown kind {envelope.kind[:64]!r}; this build knows {sorted(KINDS)}; run one build everywhere")
    if envelope.v != SCHEMA_VERSION:
        raise CodecError(
            f"{envelope.kind}: schema version {envelope.v} is unknown; this build speaks version {SCHEMA_VERSION}; "
            "run one build everywhere"
        )
    try:
        message = _decoder.decode(body)
        check_arrays(message)
    except (msgspec.DecodeError, RecursionError, ArrayError) as error:
        raise CodecError(f"{envelope.kind}: {error}") from error
    return message


def digest(data: bytes) -> str:
    """SHA-256 hex of wire bytes."""
    return hashlib.sha256(data).hexdigest()


def _unpack(data: bytes) -> bytes:
    if len(data) > MAX_WIRE_BYTES:
        raise CodecError(f"{len(data)} bytes exceed the limit of {MAX_WIRE_BYTES}")
    if len(data) < _HEADER.size:
        raise CodecError(f"truncated: {len(data)} bytes are fewer than the header's {_HEADER.size}")
    magic, version, flags, size = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise CodecError(f"not a headrace message: it starts with {magic!r}")
    if version != CODEC_VERSION:
        raise CodecError(f"codec version {version} is unknown; this build speaks version {CODEC_VERSION}")
    if flags not in (0, _ZSTD):
        raise CodecError(f"unknown flags {flags:#x}")
    if size > MAX_DECODED_BYTES:
        raise CodecError(f"declares {size} bytes, more than the limit of {MAX_DECODED_BYTES}")
    payload = data[_HEADER.size :]
    if not flags:
        if len(payload) != size:
            what = "truncated" if len(payload) < size else "trailing bytes"
            raise CodecError(f"{what}: {len(payload)} of {size} bytes")
        return payload
    try:
        declared = zstandard.get_frame_parameters(payload).content_size
        if declared != size:
            raise CodecError(f"the zstd frame declares {declared} bytes, the header {size}")
        body = zstandard.ZstdDecompressor().decompress(payload, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd: {error}") from error
    if len(body) != size:
        raise CodecError(f"decompressed to {len(body)} bytes instead of {size}")
    return body
