"""Sealed states by value or by reference: small ones travel inline, larger ones lie in the object store under their digest."""

from __future__ import annotations

import hashlib

from schemas.training import ObjectRef
from schemas.trajectory import StateRef
from services import blobs
from services.bus import Bus
from services.items import IntegrityError

MAX_STATE_BYTES = 256 * 2**20


async def reference(bus: Bus, *, state_hash: str, archive: bytes, tar_digest: str, inline_bytes: int) -> StateRef:
    """A reference to a sealed archive, stored first when it is larger than `inline_bytes`."""
    if len(archive) <= inline_bytes:
        return StateRef(state_hash=state_hash, tar_digest=tar_digest, size_bytes=len(archive), inline=archive)
    state = StateRef(state_hash=state_hash, tar_digest=tar_digest, size_bytes=len(archive))
    await blobs.put(bus, _object(state).name, archive)
    return state


async def load(bus: Bus, state: StateRef) -> bytes:
    """The archive. Raises `IntegrityError` when it is too large, missing, or not what the reference says."""
    if state.size_bytes > MAX_STATE_BYTES:
        raise IntegrityError(f"state {state.tar_digest[:12]}: {state.size_bytes} bytes exceed the limit of {MAX_STATE_BYTES}")
    if state.inline is None:
        return await blobs.get(bus, _object(state))
    if len(state.inline) != state.size_bytes or hashlib.sha256(state.inline).hexdigest() != state.tar_digest:
        raise IntegrityError(f"state {state.tar_digest[:12]}: its inline bytes do not match its size and digest")
    return state.inline


def _object(state: StateRef) -> ObjectRef:
    return ObjectRef(name=f"state/{state.tar_digest}", digest=state.tar_digest, size_bytes=state.size_bytes)
