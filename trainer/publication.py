"""A step's weights on their way out, stored under an immutable name: the sparse patch, or an anchor for a new incarnation."""

from __future__ import annotations

import asyncio

from schemas.training import ObjectRef
from services import blobs
from services.bus import Bus
from trainer.learner import Outcome


async def put_weights(bus: Bus, outcome: Outcome) -> ObjectRef:
    """Store what leads to `outcome.new`: from `outcome.old`, or from nothing where an incarnation begins. On rank 0."""
    form, encoded = ("patch", outcome.patch) if outcome.anchor is None else ("anchor", outcome.anchor)
    if encoded is None:
        raise ValueError("only rank 0 holds what leads to a step's weights")
    data = await asyncio.to_thread(encoded.tobytes)
    return await blobs.put(bus, f"{form}-{outcome.new.incarnation}-{outcome.new.version}-{outcome.new.digest[:16]}", data)
