"""A trainer's publications without a trainer: real bits, real patches, a share of the elements moved by one step each."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from loadtests.patch_codec import to_bf16
from param_sync.patch.bits import Bits
from param_sync.patch.codec import encode
from param_sync.patch.snapshot import Snapshot
from schemas.training import StepCommit
from services import blobs
from services.base_weights import snapshot_of
from services.bus import Bus


class Steps:
    """Commits one version after another, from the checkpoint in `folder`."""

    def __init__(self, bus: Bus, folder: str, share: float = 0.01, seed: int = 0) -> None:
        self._bus = bus
        self._newest = snapshot_of(folder)
        self._share = share
        self._random = np.random.default_rng(seed)

    async def commit(self, version: int) -> StepCommit:
        """Publish the patch to `version` and its step."""
        old = self._newest
        new = await asyncio.to_thread(self._moved, version)
        data = (await asyncio.to_thread(lambda: encode(old, new, level=2))).tobytes()
        reference = await blobs.put(self._bus, f"patch-0-{version}-{new.digest[:16]}", data)
        commit = StepCommit(
            run=self._bus.run,
            step=version - 1,
            version=version,
            incarnation=0,
            digest=new.digest,
            base_digest=old.digest,
            groups=(),
            rows=0,
            trained_tokens=0,
            optimizer_steps=1,
            patches=(reference,),
            patch_bytes=reference.size_bytes,
            metrics={},
            ledger_seq=0,
        )
        await self._bus.publish_once(self._bus.subjects.step(version - 1, 0), commit)
        self._newest = new
        return commit

    def _moved(self, version: int) -> Snapshot:
        """Flip the lowest bit of a share of the elements: one representable number up or down."""
        tensors = {}
        for name, held in self._newest.tensors.items():
            words = held.data.copy()
            words[self._random.random(words.size) < self._share] ^= 1
            tensors[name] = Bits(held.dtype, held.shape, words)
        return Snapshot.of(tensors, version=version, incarnation=0)


def step(masters: npt.NDArray[np.float32], direction: npt.NDArray[np.float32], density: float) -> npt.NDArray[np.uint16]:
    """The bfloat16 bits after a step whose size makes about `density` of a sample change."""
    sample = slice(0, min(masters.size, 1 << 19))
    before, low, high = to_bf16(masters[sample]), 1e-9, 1.0
    for _ in range(40):
        rate = np.float32((low * high) ** 0.5)
        share = np.mean(to_bf16(masters[sample] - rate * direction[sample]) != before)
        low, high = (float(rate), high) if share < density else (low, float(rate))
    return to_bf16(masters - np.float32(high) * direction)
