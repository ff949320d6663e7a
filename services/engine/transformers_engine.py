"""The embedded engine: a `transformers` model in this process, batched continuously on its own thread. For CPU and small models."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from schemas.trajectory import SamplingConfig
from services.engine import slot_attention
from services.engine.batch_loop import BatchLoop, Sequence
from services.engine.causal_model import CausalModel
from services.engine.gate import Gate
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
    checked_logprobs,
    checked_request,
)
from services.engine.slot_rows import SlotRows
from services.engine.spans import spans_of
from services.engine.token_sampler import is_identity


class TransformersOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the embedded engine."""

    model: str  # folder of the checkpoint
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    max_model_len: int = 1024
    max_num_seqs: int = 64
    prefix_cache: bool = True
    threads: int = 0  # torch threads; 0 leaves the process's setting alone
    initial_version: int = 0
    initial_incarnation: int = 0
    drain_timeout_s: float = 600.0


class TransformersEngine:
    """Implements `Engine`. Deterministic for a seeded request up to rounding differences between batch shapes."""

    kind = "transformers"

    def __init__(self, options: TransformersOptions) -> None:
        self._options = options
        self._gate = Gate()
        self._applying = asyncio.Lock()
        self._loop: BatchLoop | None = None
        self._build = ""
        self._capabilities: EngineCapabilities | None = None
        self._weights = WeightState(version=-1, incarnation=0, digest="", serviceable=False, reason="not started")

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
        return self._weights

    async def start(self) -> None:
        if self._loop is not None:
            return
        loop, digest = await asyncio.to_thread(self._load_model)
        options, model = self._options, loop.model
        self._capabilities = EngineCapabilities(
            max_model_len=options.max_model_len,
            vocab_size=model.vocab_size,
            max_num_seqs=options.max_num_seqs,
            prefix_cache=options.prefix_cache,
        )
        version, incarnation = options.initial_version, options.initial_incarnation
        self._weights = WeightState(version=version, incarnation=incarnation, digest=digest, serviceable=True)
        loop.start()
        self._loop = loop

    async def stop(self) -> None:
        loop, self._loop = self._loop, None
        self._weights = msgspec.structs.replace(self._weights, serviceable=False, reason="stopped")
        await self._gate.abort_all_waiting()
        if loop is not None:
            await asyncio.to_thread(loop.stop)

    async def generate(
        self, request_id: str, prompt_ids: npt.NDArray[np.int32], sampling: SamplingConfig, session: str = ""
    ) -> Generation:
        prompt = checked_request(request_id, prompt_ids, sampling, self.capabilities)
        async with self._gate.admit(request_id) as admitted:
            if not admitted:
                return _generation(Sequence(request_id, prompt, sampling, session, lambda _: None, finish="abort"))
            loop = self._serving()
            events = asyncio.get_running_loop()
            finished: asyncio.Future[Sequence] = events.create_future()

            def done(sequence: Sequence) -> None:
                events.call_soon_threadsafe(lambda: finished.done() or finished.set_result(sequence))

            loop.submit(Sequence(request_id, prompt, sampling, session, done))
            try:
                sequence = await finished
            except asyncio.CancelledError:
                loop.abort(request_id, "cancelled")
                raise
            return _generation(sequence)

    async def abort(self, request_id: str) -> None:
        if not await self._gate.abort_waiting(request_id) and self._loop is not None:
            self._loop.abort(request_id, "aborted by request")

    async def apply(self, update: WeightUpdate, mode: Mode) -> AppliedWeights:
        async with self._applying:
            loop = self._running()
            self._gate.close()
            closed = time.monotonic()
            try:
                in_flight = self._gate.inside
                drain_s = await self._gate.drained(self._options.drain_timeout_s) if mode == "finish_old" else 0.0
                recompute = mode == "continue_recompute"
                receipt = await asyncio.wrap_future(loop.at_boundary(lambda: self._switch(loop, update, recompute)))
            finally:
                await self._gate.reopen()
            return msgspec.structs.replace(
                receipt,
                continued=0 if mode == "finish_old" else in_flight,
                drained=in_flight if mode == "finish_old" else 0,
                drain_s=drain_s,
                closed_s=time.monotonic() - closed,
            )

    async def weight_digest(self) -> str:
        loop = self._running()
        return await asyncio.wrap_future(loop.at_boundary(loop.model.digest))

    async def load(self) -> EngineLoad:
        loop = self._running()
        rows = loop.rows
        return EngineLoad(
            running=len(rows.active),
            waiting=len(loop.waiting) + self._gate.outside,
            kv_usage=rows.used_columns() / (rows.count * rows.cache.length),
            prefix_queries=loop.prefix_queries,
            prefix_hits=loop.prefix_hits,
            generated_tokens=loop.generated_tokens,
        )

    def _running(self) -> BatchLoop:
        if self._loop is None:
            raise Unserviceable("the engine is not running; call start() first")
        return self._loop

    def _serving(self) -> BatchLoop:
        loop = self._running()
        if not self._weights.serviceable:
            raise Unserviceable(f"weights are not verified: {self._weights.reason}")
        return loop

    def _load_model(self) -> tuple[BatchLoop, str]:
        from services.engine.hf_models import load_causal_lm, use_attention

        options = self._options
        if options.threads:
            torch.set_num_threads(options.threads)
        module = load_causal_lm(options.model, options.dtype, options.device)
        use_attention(module, slot_attention.NAME, slot_attention.slot_attention)
        model = CausalModel(module)
        cache = model.new_cache(options.max_num_seqs, options.max_model_len)
        rows = SlotRows(cache, options.max_num_seqs, options.prefix_cache)
        self._build = f"transformers torch {torch.__version__} {model.device.type} {str(model.dtype).removeprefix('torch.')}"
        digest = model.digest()
        return BatchLoop(model, rows, (options.initial_version, options.initial_incarnation), digest), digest

    def _switch(self, loop: BatchLoop, update: WeightUpdate, recompute: bool) -> AppliedWeights:
        """On the loop's thread, between two tokens: load, read back, compare; only then show the new version."""
        began = time.monotonic()
        count = size = 0
        failure = ""
        try:
            for name, bits, shape in update.load():
                loop.model.load(name, bits, shape)
                count, size = count + 1, size + bits.nbytes
            loaded = time.monotonic()
            digest = loop.model.digest()
            if digest != update.digest:
                failure = f"loaded weights have digest {digest}, announced was {update.digest}"
        except Exception as error:  # whatever the source raised, the weights are now a mixture
            failure = f"loading failed after {count} tensor(s): {type(error).__name__}: {error}"
            digest, loaded = "", time.monotonic()
        if failure:
            reason = f"version {update.version}: {failure}"
            self._weights = msgspec.structs.replace(self._weights, digest=digest, serviceable=False, reason=reason)
            loop.abort_all("weights rejected")
            loop.rows.forget_parked()
            raise WeightsRejected(reason)
        loop.new_weights((update.version, update.incarnation), digest, recompute)
        self._weights = WeightState(version=update.version, incarnation=update.incarnation, digest=digest, serviceable=True)
        return AppliedWeights(
            version=update.version,
            incarnation=update.incarnation,
            digest=digest,
            tensors=count,
            bytes=size,
            continued=0,
            drained=0,
            drain_s=0.0,
            load_s=loaded - began,
            verify_s=time.monotonic() - loaded,
            closed_s=0.0,
        )


def _generation(sequence: Sequence) -> Generation:
    if sequence.error is not None:
        raise EngineError(f"{sequence.request_id}: the model failed: {sequence.error}") from sequence.error
    assert sequence.finish is not None
    logprobs = checked_logprobs(np.array(sequence.logprobs), "logprobs", sequence.request_id)
    raw = checked_logprobs(np.array(sequence.raw_logprobs), "raw_logprobs", sequence.request_id)
    return Generation(
        request_id=sequence.request_id,
        ids=np.array(sequence.sampled, dtype=np.int32),
        logprobs=logprobs,
        raw_logprobs=None if is_identity(sequence.sampling) else raw,
        versions=spans_of(sequence.versions),
        finish_reason=sequence.finish,
        stop_reason=sequence.stop_reason,
        cached_prompt_tokens=sequence.cached,
        weight_digest=sequence.digest,
    )
