"""A step's weights on their way out: the sparse patch between two verified snapshots, stored under an immutable name."""

from __future__ import annotations

import asyncio

from param_sync.patch.codec import encode
from schemas.training import ObjectRef
from services import blobs
from services.bus import Bus
from trainer.learner import Outcome


async def put_patch(bus: Bus, outcome: Outcome) -> ObjectRef:
    """Encode and store the patch from `outcome.old` to `outcome.new`."""
    data = await asyncio.to_thread(lambda: encode(outcome.old, outcome.new).tobytes())
    return await blobs.put(bus, f"patch-{outcome.new.incarnation}-{outcome.new.version}-{outcome.new.digest[:16]}", data)
