"""A step's weights on their way out, stored under an immutable name: the sparse patch, or an anchor for a new incarnation."""

from __future__ import annotations

import asyncio

from param_sync.patch.codec import encode, encode_anchor
from schemas.training import ObjectRef
from services import blobs
from services.bus import Bus
from trainer.learner import Outcome


async def put_weights(bus: Bus, outcome: Outcome) -> ObjectRef:
    """Encode and store what leads to `outcome.new`: from `outcome.old`, or from nothing where an incarnation begins."""
    new = outcome.new
    begins = new.incarnation != outcome.old.incarnation
    data = await asyncio.to_thread(lambda: (encode_anchor(new) if begins else encode(outcome.old, new)).tobytes())
    form = "anchor" if begins else "patch"
    return await blobs.put(bus, f"{form}-{new.incarnation}-{new.version}-{new.digest[:16]}", data)
