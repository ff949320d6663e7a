"""One byte stream of a frame: zstd where that is smaller, stored as it is where not. Both ends know the raw length beforehand.

The fast strategy with a small hash table and long matches is nearly a plain Huffman coder on streams like ours (gap symbols,
magnitudes), which have skewed symbols and few repeats: smaller than the default level 1, and faster.
"""

from __future__ import annotations

import threading

import zstandard

from param_sync.patch.errors import Corrupt

# A zstd block expands at most 128 KiB out of 4 bytes, so a longer announced length is a lie.
MAX_EXPANSION = 32768
_SMALLEST = 32
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=17, hash_log=12, min_match=7, target_length=0, strategy=zstandard.STRATEGY_FAST
)


class _Workspaces(threading.local):
    """Compressor and decompressor of a thread: they may not be shared, and making them costs as much as a small stream."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()


_own = _Workspaces()


def pack(raw: bytes) -> tuple[bytes, bool]:
    """The stream as it travels, and whether it is compressed. Never longer than `raw`."""
    if len(raw) < _SMALLEST:
        return raw, False
    packed = _own.compressor.compress(raw)
    return (packed, True) if len(packed) < len(raw) else (raw, False)


def check(stored: memoryview, compressed: bool, raw_bytes: int) -> None:
    """Refuse a stream that cannot hold `raw_bytes`, before anything is allocated. Raises `Corrupt`."""
    if not compressed:
        if len(stored) != raw_bytes:
            raise Corrupt(f"a stored stream must have {raw_bytes} bytes, got {len(stored)}")
        return
    if raw_bytes > len(stored) * MAX_EXPANSION:
        raise Corrupt(f"{len(stored)} compressed bytes cannot hold {raw_bytes}")
    try:
        announced = zstandard.get_frame_parameters(stored)
    except zstandard.ZstdError as error:
        raise Corrupt(f"a compressed stream has no valid head: {error}") from error
    if announced.content_size != raw_bytes or announced.dict_id:
        raise Corrupt(f"a compressed stream must announce {raw_bytes} bytes and no dictionary, got {announced.content_size}")


def unpack(stored: memoryview, compressed: bool, raw_bytes: int) -> bytes | memoryview:
    """The raw stream, exactly `raw_bytes` long. Raises `Corrupt`; allocates at most `raw_bytes`."""
    check(stored, compressed, raw_bytes)
    if not compressed:
        return stored
    try:
        raw = _own.decompressor.decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"a compressed stream does not decode: {error}") from error
    if len(raw) != raw_bytes:
        raise Corrupt(f"a compressed stream must decode to {raw_bytes} bytes, got {len(raw)}")
    return raw
