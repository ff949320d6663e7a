"""Changing weights, the same for every engine: lay out, close the door, settle what runs, write, read back, then serve.

The backend supplies the steps; the order, the door, the comparison and what happens on failure are here.

Why changed elements are enough to verify: the weights before were read back whole under their digest; `staged` checks that the
elements to be replaced are still theirs; the changes lead from that digest to the new one, which was computed over the whole
result before anything was written; `replace` reads every written element back; and nothing else writes. What could still go
wrong is memory that changes by itself, so every `audit_every`-th switch, and `Engine.audit` at any time, reads all of it back
while the engine serves.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from services.engine.changes import BaseDiffers
from services.engine.gate import Gate
from services.engine.protocol import (
    AppliedWeights,
    Mode,
    StagingFailed,
    Unserviceable,
    WeightsRejected,
    WeightState,
    WeightUpdate,
)

REMEMBERED = 256  # digests of past versions, for generations that began under them


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend did with an update: how much it wrote, and the digest that what it read back has."""

    digest: str
    tensors: int
    bytes: int
    load_s: float
    verify_s: float = 0.0


class Backend(Protocol):
    """An engine's side of a weight change. Between `freeze` and `thaw` it samples nothing."""

    @property
    def whole_tensors(self) -> str:
        """Why the model takes whole tensors only; empty: it takes changed elements."""

    async def lay_out(self, update: WeightUpdate) -> None:
        """Bring the changed elements beside the weights, while serving. Raises `ChangeError`; changes nothing."""

    async def clear_away(self) -> None:
        """Forget what is laid out."""

    async def read_back(self) -> str:
        """The digest of all weights, read a slice at a time, while serving."""

    async def cut(self, reason: str) -> int:
        """Cancel what is in flight, for `reason`: `regenerate` or `restart`; how many. They leave the door's inside."""

    async def freeze(self, mode: Mode) -> None:
        """Stop at a token boundary."""

    async def write(self, update: WeightUpdate) -> Loaded:
        """Write what is laid out and read every written element back."""

    async def replace(self, update: WeightUpdate) -> Loaded:
        """Load whole tensors into the running model and read all of it back."""

    async def show(self, update: WeightUpdate, mode: Mode, digest: str) -> None:
        """Stamp tokens with the new version from now on, and let nobody reuse KV of the old one."""

    async def discard(self) -> None:
        """End everything in flight as aborted: the weights that it would continue under are not verified."""

    async def thaw(self) -> None: ...


class WeightSwitch:
    """The door, the state of the weights, and the one path that changes it."""

    def __init__(self, drain_timeout_s: float, audit_every: int = 0) -> None:
        self.gate = Gate()
        self.state = WeightState(version=-1, incarnation=0, digest="", serviceable=False, reason="not started")
        self.digests: dict[tuple[int, int], str] = {}  # of verified weights, by (version, incarnation)
        self._drain_timeout_s = drain_timeout_s
        self._audit_every = audit_every
        self._unread = 0  # switches since all weights were read back
        self._laid_out: WeightUpdate | None = None
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

    async def stage(self, update: WeightUpdate, backend: Backend) -> None:
        """See `Engine.stage`."""
        async with self._one_at_a_time:
            await self._stage(update, backend)

    async def audit(self, backend: Backend) -> None:
        """See `Engine.audit`."""
        async with self._one_at_a_time:
            await self._audit(backend)

    async def apply(self, update: WeightUpdate, mode: Mode, grace_s: float, backend: Backend) -> AppliedWeights:
        """See `Engine.apply`."""
        async with self._one_at_a_time:
            clock = asyncio.get_running_loop().time
            began = clock()
            await self._stage(update, backend)
            staged = self._laid_out is update
            self.gate.close()
            closed = frozen = clock()
            try:
                in_flight = self.gate.inside
                cut = await self._settle(mode, grace_s, backend)
                frozen = clock()
                await backend.freeze(mode)
                try:
                    loaded = await self._replaced(update, mode, backend, staged)
                finally:
                    await backend.thaw()
                    thawed = clock()
            finally:
                await self.gate.reopen()
            crossed = in_flight if mode in ("continue_keep", "continue_recompute") else 0
            return AppliedWeights(
                version=update.version,
                incarnation=update.incarnation,
                digest=loaded.digest,
                path="elements" if staged else "tensors",
                tensors=loaded.tensors,
                bytes=loaded.bytes,
                continued=crossed,
                drained=in_flight - crossed - cut,
                cut=cut,
                stage_s=closed - began,
                drain_s=frozen - closed,
                load_s=loaded.load_s,
                verify_s=loaded.verify_s,
                frozen_s=thawed - frozen,
                closed_s=clock() - closed,
            )

    async def _stage(self, update: WeightUpdate, backend: Backend) -> None:
        """Lay changed elements out where that is possible at all; else leave it to whole tensors."""
        if self._laid_out is update:
            return
        await self._clear_away(backend)
        exact = self.state.serviceable and update.base_digest == self.state.digest
        if update.changes is None or not exact or backend.whole_tensors:
            return
        if self._audit_every and self._unread + 1 >= self._audit_every:
            await self._audit(backend)
        try:
            await backend.lay_out(update)
        except BaseException as error:
            await self._clear_away(backend)
            if isinstance(error, BaseDiffers):
                self.unserviceable(f"version {self.state.version}: {error}")
                await backend.discard()
            if isinstance(error, Exception):
                raise StagingFailed(f"version {update.version}: {type(error).__name__}: {error}") from error
            raise
        self._laid_out = update

    async def _clear_away(self, backend: Backend) -> None:
        self._laid_out = None
        await backend.clear_away()

    async def _audit(self, backend: Backend) -> None:
        self.check()
        found, held = await backend.read_back(), self.state
        if found != held.digest:
            self.unserviceable(f"version {held.version} reads back as {found}, it was verified as {held.digest}")
            await backend.discard()
            raise WeightsRejected(self.state.reason)
        self._unread = 0

    async def _settle(self, mode: Mode, grace_s: float, backend: Backend) -> int:
        """Bring what is in flight to where the mode wants it; how many generations were cancelled for that."""
        cut = 0
        if mode == "restart" or (mode == "regenerate" and not await self.gate.quiet(grace_s)):
            cut = await backend.cut(mode)
        if mode not in ("continue_keep", "continue_recompute"):
            await self.gate.drained(self._drain_timeout_s)
        return cut

    async def _replaced(self, update: WeightUpdate, mode: Mode, backend: Backend, staged: bool) -> Loaded:
        """Load and compare. Whatever goes wrong from here on, a cancellation included, leaves weights that nobody verified."""
        self.unserviceable(f"version {update.version} is being loaded")
        self._laid_out = None
        try:
            loaded = await (backend.write(update) if staged else backend.replace(update))
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
        self._unread = self._unread + 1 if staged else 0
        return loaded
