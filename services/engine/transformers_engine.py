"""The embedded engine: a `transformers` model in this process, batched continuously on a thread. For CPU and small models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from param_sync.patch.digest import state_digest
from schemas.trajectory import SamplingConfig
from services.engine import slot_attention
from services.engine.batch_loop import BatchLoop, Sequence
from services.engine.causal_model import CausalModel
from services.engine.contract import aborted_before_start, checked_logprobs, checked_request, is_identity, starts_over
from services.engine.protocol import (
    AppliedWeights,
    EngineCapabilities,
    EngineError,
    EngineLoad,
    Generation,
    Mode,
    Unserviceable,
    WeightsRejected,
    WeightState,
    WeightUpdate,
)
from services.engine.scatter import Scatter
from services.engine.slot_rows import SlotRows
from services.engine.spans import spans_of
from services.engine.transformers_engine_options import TransformersOptions
from services.engine.weight_switch import Loaded, WeightSwitch

T = TypeVar("T")


class TransformersEngine:
    """Implements `Engine`. Deterministic for a seeded request up to rounding differences between batch shapes."""

    kind = "transformers"

    def __init__(self, options: TransformersOptions) -> None:
        self._options = options
        self._switch = WeightSwitch(options.drain_timeout_s, options.audit_every)
        self._loop: BatchLoop | None = None
        self._build = ""
        self._capabilities: EngineCapabilities | None = None
        self._laid_out = 0  # elements

    @property
    def build(self) -> str:
        return self._build

    @property
    def capabilities(self) -> EngineCapabilities:
        if self._capabilities is None:
            raise EngineError("capabilities are known after start()")
        return self._capabilities

    @property
    def weights(self) -> WeightState:
        return self._switch.state

    async def start(self) -> None:
        if self._loop is not None:
            return
        options = self._options
        loop = await asyncio.to_thread(self._load_model)
        self._capabilities = EngineCapabilities(
            max_model_len=options.max_model_len,
            vocab_size=loop.model.vocab_size,
            max_num_seqs=options.max_num_seqs,
            prefix_cache=options.prefix_cache,
            whole_tensors=loop.model.whole_tensors,
        )
        self._switch.verified(options.initial_version, options.initial_incarnation, loop.digest)
        loop.start()
        self._loop = loop

    async def stop(self) -> None:
        loop, self._loop = self._loop, None
        self._switch.unserviceable("stopped")
        await self._switch.gate.abort_all_waiting()
        if loop is not None:
            await asyncio.to_thread(loop.stop)

    async def generate(
        self, request_id: str, prompt_ids: npt.NDArray[np.int32], sampling: SamplingConfig, session: str = ""
    ) -> Generation:
        prompt = checked_request(request_id, prompt_ids, sampling, self.capabilities)
        discarded = 0
        while True:
            async with self._switch.gate.admit(request_id) as admitted:
                if not admitted:
                    return aborted_before_start(request_id, sampling)
                sequence = await self._run(request_id, prompt, sampling, session)
            if not starts_over(sequence.finish, sequence.stop_reason, len(sequence.sampled)):
                return _generation(sequence, discarded)
            discarded += len(sequence.sampled)

    async def _run(self, request_id: str, prompt: npt.NDArray[np.int32], sampling: SamplingConfig, session: str) -> Sequence:
        self._switch.check()
        loop, events = self._running(), asyncio.get_running_loop()
        finished: asyncio.Future[Sequence] = events.create_future()

        def done(sequence: Sequence) -> None:
            events.call_soon_threadsafe(_resolve, finished, sequence)

        loop.submit(Sequence(request_id, prompt, sampling, session, done))
        try:
            sequence = await finished
        except asyncio.CancelledError:
            loop.abort(request_id, "cancelled")
            raise
        if sequence.error is not None:
            self._switch.unserviceable(f"the model failed: {sequence.error}")
        return sequence

    async def abort(self, request_id: str) -> None:
        if not await self._switch.gate.abort_waiting(request_id) and self._loop is not None:
            self._loop.abort(request_id, "aborted by request")

    async def stage(self, update: WeightUpdate) -> None:
        self._running()
        await self._switch.stage(update, self)

    async def apply(self, update: WeightUpdate, mode: Mode, grace_s: float = 0.0) -> AppliedWeights:
        self._running()
        return await self._switch.apply(update, mode, grace_s, self)

    async def audit(self) -> None:
        self._running()
        await self._switch.audit(self)

    async def weight_digest(self) -> str:
        return await self._at_boundary(self._running().model.digest)

    async def load(self) -> EngineLoad:
        loop = self._running()
        rows = loop.rows
        return EngineLoad(
            running=len(rows.active),
            waiting=len(loop.waiting) + self._switch.gate.outside,
            kv_usage=rows.used_columns() / (rows.count * rows.cache.length),
            prefix_queries=loop.prefix_queries,
            prefix_hits=loop.prefix_hits,
            generated_tokens=loop.generated_tokens,
        )

    # -- the backend's side of a weight change ------------------------------------------------------------------------------

    @property
    def whole_tensors(self) -> str:
        return self._running().model.whole_tensors

    async def lay_out(self, update: WeightUpdate) -> None:
        scatter, self._laid_out = _scatter(self._running().model), 0
        changes = iter(update.changes() if update.changes is not None else ())
        while (change := await asyncio.to_thread(next, changes, None)) is not None:
            self._laid_out += await asyncio.to_thread(
                scatter.stage, change
            )  # only reads the weights, which nothing writes meanwhile

    async def clear_away(self) -> None:
        if self._loop is not None and self._loop.model.scatter is not None:
            self._loop.model.scatter.drop()

    async def read_back(self) -> str:
        model = self._running().model
        return state_digest({name: await asyncio.to_thread(model.entry, name) for name in model.names})

    async def cut(self, reason: str) -> int:
        return await self._at_boundary(lambda: self._running().discard_all(reason))

    async def freeze(self, mode: Mode) -> None:
        await self._at_boundary(lambda: self._running().freeze(True))

    async def write(self, update: WeightUpdate) -> Loaded:
        return await self._at_boundary(lambda: _written(_scatter(self._running().model), update, self._laid_out))

    async def replace(self, update: WeightUpdate) -> Loaded:
        return await self._at_boundary(lambda: _replaced(self._running().model, update))

    async def show(self, update: WeightUpdate, mode: Mode, digest: str) -> None:
        version, recompute = (update.version, update.incarnation), mode == "continue_recompute"
        await self._at_boundary(lambda: self._running().new_weights(version, digest, recompute))

    async def discard(self) -> None:
        await self._at_boundary(lambda: self._running().discard_all("weights rejected"))

    async def thaw(self) -> None:
        await self._at_boundary(lambda: self._running().freeze(False))

    def _running(self) -> BatchLoop:
        if self._loop is None:
            raise Unserviceable("the engine is not running; call start() first")
        return self._loop

    async def _at_boundary(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._running().at_boundary(work))

    def _load_model(self) -> BatchLoop:
        from services.engine.hf_models import load_causal_lm, use_attention

        options = self._options
        if options.threads:
            torch.set_num_threads(options.threads)
        module = load_causal_lm(options.model, options.dtype, options.device)
        use_attention(module, slot_attention.NAME, slot_attention.slot_attention)
        model = CausalModel(module)
        rows = SlotRows(
            model.new_cache(options.max_num_seqs, options.max_model_len), options.max_num_seqs, options.prefix_cache
        )
        self._build = f"transformers torch {torch.__version__} {model.device.type} {str(model.dtype).removeprefix('torch.')}"
        return BatchLoop(model, rows, (options.initial_version, options.initial_incarnation), model.digest())


def _scatter(model: CausalModel) -> Scatter:
    if model.scatter is None:
        raise EngineError(f"this model takes whole tensors only: {model.whole_tensors}")
    return model.scatter


def _written(scatter: Scatter, update: WeightUpdate, laid_out: int) -> Loaded:
    """On the loop's thread: what was laid out goes into the model; every element is read back and compared."""
    began = time.monotonic()
    tensors, size = scatter.staged_tensors, scatter.staged_bytes
    if (written := scatter.commit()) != laid_out:
        raise WeightsRejected(f"{written} elements were written, laid out were {laid_out}")
    return Loaded(digest=update.digest, tensors=tensors, bytes=size, load_s=time.monotonic() - began)


def _replaced(model: CausalModel, update: WeightUpdate) -> Loaded:
    """On the loop's thread: overwrite the tensors, then read all of them back."""
    began = time.monotonic()
    count = size = 0
    for name, bits, shape in update.load():
        model.load(name, bits, shape)
        count, size = count + 1, size + bits.nbytes
    loaded = time.monotonic()
    digest = model.digest()
    return Loaded(digest=digest, tensors=count, bytes=size, load_s=loaded - began, verify_s=time.monotonic() - loaded)


def _resolve(future: asyncio.Future[Sequence], sequence: Sequence) -> None:
    if not future.done():  # the waiter may have been cancelled meanwhile
        future.set_result(sequence)


def _generation(sequence: Sequence, discarded: int) -> Generation:
    if sequence.error is not None:
        raise EngineError(f"{sequence.request_id}: the model failed: {sequence.error}") from sequence.error
    assert sequence.finish is not None
    raw = checked_logprobs(np.array(sequence.raw_logprobs), "raw_logprobs", sequence.request_id)
    return Generation(
        request_id=sequence.request_id,
        ids=np.array(sequence.sampled, dtype=np.int32),
        logprobs=checked_logprobs(np.array(sequence.logprobs), "logprobs", sequence.request_id),
        raw_logprobs=None if is_identity(sequence.sampling) else raw,
        versions=spans_of(sequence.versions),
        finish_reason=sequence.finish,
        stop_reason=sequence.stop_reason,
        cached_prompt_tokens=sequence.cached,
        weight_digest=sequence.digest,
        discarded_tokens=discarded,
    )
