"""Changing weights, the same for every engine: close the door, settle what runs, load, read back, compare, and only then serve.

The backend supplies the five steps; the order, the door, the comparison and what happens on failure are here.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec

from services.engine.gate import Gate
from services.engine.protocol import AppliedWeights, Mode, Unserviceable, WeightsRejected, WeightState, WeightUpdate

REMEMBERED = 256  # digests of past versions, for generations that began under them


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend did with an update: how much it loaded, and the digest that it read back afterwards."""

    digest: str
    tensors: int
    bytes: int
    load_s: float
    verify_s: float


class Backend(Protocol):
    """An engine's side of a weight change. Between `freeze` and `thaw` it samples nothing."""

    async def freeze(self, mode: Mode) -> None:
        """Stop at a token boundary."""

    async def replace(self, update: WeightUpdate) -> Loaded:
        """Load the update into the running model and read the result back."""

    async def show(self, update: WeightUpdate, mode: Mode, digest: str) -> None:
        """Stamp tokens with the new version from now on, and let nobody reuse KV of the old one."""

    async def discard(self) -> None:
        """End everything in flight as aborted: the weights that it would continue under are not verified."""

    async def thaw(self) -> None: ...


class WeightSwitch:
    """The door, the state of the weights, and the one path that changes it."""

    def __init__(self, drain_timeout_s: float) -> None:
        self.gate = Gate()
        self.state = WeightState(version=-1, incarnation=0, digest="", serviceable=False, reason="not started")
        self.digests: dict[tuple[int, int], str] = {}  # of verified weights, by (version, incarnation)
        self._drain_timeout_s = drain_timeout_s
        self._one_at_a_time = asyncio.Lock()

    def verified(self, version: int, incarnation: int, digest: str) -> None:
        self.state = WeightState(version=version, incarnation=incarnation, digest=digest, serviceable=True)
        self.digests[version, incarnation] = digest
        for key in list(self.digests)[:-REMEMBERED]:
            del self.digests[key]

    def unserviceable(self, reason: str) -> None:
        self.state = msgspec.structs.replace(self.state, serviceable=False, reason=reason)

    def check(self) -> None:
        """Raises `Unserviceable` unless the weights are verified."""
        if not self.state.serviceable:
            raise Unserviceable(f"weights are not verified: {self.state.reason}")

    async def apply(self, update: WeightUpdate, mode: Mode, backend: Backend) -> AppliedWeights:
        """See `Engine.apply`."""
        async with self._one_at_a_time:
            self.gate.close()
            closed = time.monotonic()
            try:
                in_flight, drain_s = self.gate.inside, 0.0
                if mode == "finish_old":
                    drain_s = await self.gate.drained(self._drain_timeout_s)
                await backend.freeze(mode)
                try:
                    loaded = await self._replaced(update, mode, backend)
                finally:
                    await backend.thaw()
            finally:
                await self.gate.reopen()
            return AppliedWeights(
                version=update.version,
                incarnation=update.incarnation,
                digest=loaded.digest,
                tensors=loaded.tensors,
                bytes=loaded.bytes,
                continued=0 if mode == "finish_old" else in_flight,
                drained=in_flight if mode == "finish_old" else 0,
                drain_s=drain_s,
                load_s=loaded.load_s,
                verify_s=loaded.verify_s,
                closed_s=time.monotonic() - closed,
            )

    async def _replaced(self, update: WeightUpdate, mode: Mode, backend: Backend) -> Loaded:
        """Load and compare. Whatever goes wrong from here on, a cancellation included, leaves weights that nobody verified."""
        self.unserviceable(f"version {update.version} is being loaded")
        try:
            loaded = await backend.replace(update)
            if loaded.digest != update.digest:
                raise WeightsRejected(f"loaded weights have digest {loaded.digest}, announced was {update.digest}")
            await backend.show(update, mode, loaded.digest)
        except BaseException as error:
            what = str(error) if isinstance(error, WeightsRejected) else f"{type(error).__name__}: {error}"
            self.unserviceable(f"version {update.version}: {what}")
            await backend.discard()
            if isinstance(error, Exception):
                raise WeightsRejected(self.state.reason) from error
            raise
        self.verified(update.version, update.incarnation, loaded.digest)
        return loaded
