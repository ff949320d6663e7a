"""The weights inside vLLM's worker processes: every call reaches every rank of every replica, and all must agree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from param_sync.patch.digest import Entry, state_digest
from services.engine import checkpoint_files
from services.engine.changes import BaseDiffers, ChangeError
from services.engine.protocol import EngineUnavailable, WeightsRejected, WeightUpdate
from services.engine.staging import sliced, staged, staged_changes, staging_file
from services.engine.vllm_options import VllmOptions
from services.engine.weight_switch import Loaded

Call = Callable[..., Awaitable[list[Any]]]
"""(method of `vllm_plugin.WeightWorker`, its arguments) → the results of all ranks of all replicas."""


class WeightWorkers:
    """Weights in, digests out. `whole_tensors`: why the model takes no single elements, known after `prepare`."""

    def __init__(self, options: VllmOptions, call: Call) -> None:
        self._options = options
        self._call = call
        self._slices: list[list[str]] = []  # tensors that are read back together
        self.held: set[str] = set()
        self.whole_tensors = ""
        self._laid_out: list[int] = []  # elements, by rank

    async def prepare(self) -> bool:
        """Let every rank learn where the checkpoint's tensors land; whether samplers give both log-probabilities.

        Raises `EngineUnavailable` for a model whose weights could never be verified.
        """
        shapes = await asyncio.to_thread(checkpoint_files.shapes_of, self._options.model)
        reports = await self._call("headrace_prepare", [(name, list(shape)) for name, shape in shapes])
        if refused := next((report["refused"] for report in reports if report["refused"]), ""):
            raise EngineUnavailable(f"{self._options.model}: {refused}; serve the bfloat16 or float32 checkpoint")
        self.held = {name for report in reports for name in report["names"]}
        self.whole_tensors = next((report["whole_tensors"] for report in reports if report["whole_tensors"]), "")
        self._slices = sliced(shapes, self.held, self._options.audit_slice_bytes)
        return all(report["both_logprobs"] for report in reports)

    async def digest(self) -> str:
        """Read all weights back, a slice between two steps. Raises `WeightsRejected` when ranks disagree."""
        entries: dict[str, Entry] = {}
        for names in self._slices:
            replies = await self._call("headrace_entries", names)
            if any(reply != replies[0] for reply in replies):
                raise WeightsRejected(f"ranks disagree about the weights among {names[:3]}")
            entries |= {name: (dtype, tuple(shape), digest) for name, (dtype, shape, digest) in replies[0].items()}
        return state_digest(entries)

    async def lay_out(self, update: WeightUpdate) -> None:
        """Bring changed elements to every rank. Raises `ChangeError`, `BaseDiffers`."""
        self._laid_out = []
        changes = iter(update.changes() if update.changes is not None else ())
        with staging_file(self._options.staging_folder()) as path:
            chunks = staged_changes(path, changes, self._options.staging_chunk_bytes)
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                replies = await self._call("headrace_stage", chunk.path, chunk.digest, chunk.changes)
                for kind, text, _ in replies:
                    if kind:
                        raise (BaseDiffers if kind == "BaseDiffers" else ChangeError)(text)
                self._laid_out = [elements for _, _, elements in replies]  # all that a rank has by now

    async def drop(self) -> None:
        """Forget what was laid out."""
        if not self.whole_tensors:
            await self._call("headrace_drop")

    async def write(self, update: WeightUpdate) -> Loaded:
        """Write what was laid out; every rank reads its elements back and compares them.

        Raises `WeightsRejected` where a rank did not write what it had been given.
        """
        began = time.monotonic()
        reports = await self._call("headrace_commit")
        if (written := [elements for elements, _, _ in reports]) != self._laid_out:
            raise WeightsRejected(f"ranks wrote {written} elements, laid out were {self._laid_out}")
        tensors, size = max(tensors for _, tensors, _ in reports), sum(size for _, _, size in reports)
        return Loaded(digest=update.digest, tensors=tensors, bytes=size, load_s=time.monotonic() - began)

    async def replace(self, update: WeightUpdate) -> Loaded:
        """Whole tensors through the model's own loader, then everything is read back."""
        began = time.monotonic()
        count = size = 0
        with staging_file(self._options.staging_folder()) as path:
            chunks = staged(path, update.load(), self._options.staging_chunk_bytes)
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                await self._call("headrace_load", chunk.path, chunk.tensors)
                count, size = count + len(chunk.tensors), size + chunk.bytes
        loaded = time.monotonic()
        digest = await self.digest()
        return Loaded(digest=digest, tensors=count, bytes=size, load_s=loaded - began, verify_s=time.monotonic() - loaded)
