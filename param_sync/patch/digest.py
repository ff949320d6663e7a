"""Names for weights: a digest per tensor (xxh3-128, near memory speed) and one per state (sha256 over the tensor digests).

The state digest is the name of a policy version's weights: two states have the same one exactly when every tensor has the
same name, dtype, shape and bits. xxh3 guards against accidents, not against forgers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import xxhash

from param_sync.patch.bits import State, Words, count_of, element_bytes

DIGEST_VERSION = 1
TENSOR_DIGEST_BYTES = 16
_DOMAIN = b"headrace state digest\0"

Entry: TypeAlias = tuple[str, tuple[int, ...], bytes]
"""dtype name, shape, tensor digest."""


def tensor_digest(bits: Words) -> bytes:
    """xxh3-128 (16 bytes, canonical big-endian form) over the raw little-endian bytes of the array, in C order."""
    flat = np.ascontiguousarray(bits).reshape(-1)
    if flat.dtype.byteorder == ">":
        flat = flat.astype(flat.dtype.newbyteorder("<"))
    return xxhash.xxh3_128_digest(flat.view(np.uint8).data if flat.size else b"")


def state_digest(entries: Mapping[str, Entry]) -> str:
    """sha256 (64 hex digits) over the entries in order of their UTF-8 names, each field length-prefixed.

    Raises `PatchError` for an unknown dtype or an impossible shape, `ValueError` for a digest that is not 16 bytes.
    """
    total = hashlib.sha256(_DOMAIN + struct.pack("<HI", DIGEST_VERSION, len(entries)))
    for name, (dtype, shape, digest) in sorted((n.encode(), e) for n, e in entries.items()):
        element_bytes(dtype), count_of(shape)
        if len(digest) != TENSOR_DIGEST_BYTES:
            raise ValueError(f"tensor {name.decode()!r}: a tensor digest is {TENSOR_DIGEST_BYTES} bytes, got {len(digest)}")
        kind = dtype.encode()
        total.update(struct.pack("<I", len(name)) + name + struct.pack("<B", len(kind)) + kind)
        total.update(struct.pack(f"<B{len(shape)}Q", len(shape), *shape) + digest)
    return total.hexdigest()


def entries_of(state: State) -> dict[str, Entry]:
    """Hash every tensor: the entries that `state_digest` takes."""
    return {name: (bits.dtype, bits.shape, tensor_digest(bits.data)) for name, bits in state.items()}


def digest_of(state: State) -> str:
    """The state's digest from its bits alone (a full audit: about 0.6 of the time of a copy)."""
    return state_digest(entries_of(state))
