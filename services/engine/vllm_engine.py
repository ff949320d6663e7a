"""vLLM in process (`AsyncLLM`): the same code on CPU and GPU. The one door to `vllm`, beside its in-worker plug-in."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.trajectory import SamplingConfig, VersionSpan
from services.engine import checkpoint_files
from services.engine.gate import Gate
from services.engine.protocol import (
    AppliedWeights,
    EngineCapabilities,
    EngineError,
    EngineLoad,
    EngineUnavailable,
    Generation,
    LogprobsMissing,
    Mode,
    RequestRefused,
    Unserviceable,
    WeightsRejected,
    WeightState,
    WeightUpdate,
    checked_logprobs,
    checked_request,
)
from services.engine.readback import digest_of
from services.engine.spans import check_cover
from services.engine.staging import staged, staging_file
from services.engine.token_sampler import is_greedy, is_identity
from services.engine.vllm_options import VllmOptions


REMEMBERED_DIGESTS = 256


class _Running(msgspec.Struct):
    """A generation inside vLLM: its current vLLM id, and whether it must be started anew after a switch."""

    backend_id: str
    restart: bool = False


class VllmEngine:
    """Implements `Engine` over `AsyncLLM`. Weights are checked by reading them back in the workers, never by label."""

    kind = "vllm"

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self._gate = Gate()
        self._applying = asyncio.Lock()
        self._llm: Any = None
        self._sampling_params: Any = None
        self._tokens_input: Any = None
        self._final_only: Any = None
        self._client_error: type[Exception] = Exception
        self._server_error: type[Exception] = Exception
        self._build = ""
        self._capabilities: EngineCapabilities | None = None
        self._weights = WeightState(version=-1, incarnation=0, digest="", serviceable=False, reason="not started")
        self._running: dict[str, _Running] = {}
        self._ids = itertools.count()
        self._queries = self._hits = self._generated = 0
        self._digests: dict[tuple[int, int], str] = {}  # by (version, incarnation), of verified weights only

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
        if self._llm is not None:
            return
        options = self._options
        llm = await asyncio.wait_for(asyncio.to_thread(self._build_llm), options.start_timeout_s)
        self._llm = llm
        try:
            shapes = checkpoint_files.shapes_of(options.model)
            held = {name for names in await self._workers("headrace_prepare", [(n, list(s)) for n, s in shapes]) for name in names}
            digest = await self.weight_digest()
            if options.verify_checkpoint:
                expected = await asyncio.to_thread(_checkpoint_digest, options.model, held)
                if digest != expected:
                    raise EngineUnavailable(f"read-back digest {digest} differs from the checkpoint's {expected}: this build lays weights out irreversibly")
            await llm.update_weight_version(_label(options.initial_version, options.initial_incarnation))
        except BaseException:
            await self.stop()
            raise
        config = llm.vllm_config
        self._capabilities = EngineCapabilities(
            raw_logprobs=options.both_logprobs,
            prefix_cache=options.prefix_cache,
            max_model_len=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            max_num_seqs=config.scheduler_config.max_num_seqs,
            tensor_parallel=options.tensor_parallel_size,
            data_parallel=options.data_parallel_size,
        )
        self._verified(options.initial_version, options.initial_incarnation, digest)

    async def stop(self) -> None:
        llm, self._llm = self._llm, None
        self._weights = msgspec.structs.replace(self._weights, serviceable=False, reason="stopped")
        await self._gate.abort_all_waiting()
        if llm is not None:
            await llm.abort([entry.backend_id for entry in self._running.values()])
            await asyncio.sleep(0)
            await asyncio.to_thread(llm.shutdown, self._options.stop_grace_s)

    async def generate(
        self, request_id: str, prompt_ids: npt.NDArray[np.int32], sampling: SamplingConfig, session: str = ""
    ) -> Generation:
        prompt = checked_request(request_id, prompt_ids, sampling, self.capabilities)
        while True:
            async with self._gate.admit(request_id) as admitted:
                if not admitted:
                    return _empty(request_id, sampling)
                generation = await self._generate(request_id, prompt, sampling, session)
            if generation is not None:
                return generation

    async def _generate(
        self, request_id: str, prompt: npt.NDArray[np.int32], sampling: SamplingConfig, session: str
    ) -> Generation | None:
        """One attempt; None when it had not sampled anything at a weight switch and must start anew under the new salt."""
        llm = self._serving()
        entry = _Running(f"{request_id}/{next(self._ids)}")
        label = _label(self._weights.version, self._weights.incarnation)
        self._running[request_id] = entry
        final: Any = None
        try:
            async for output in llm.generate(
                self._tokens_input(prompt.tolist(), cache_salt=label),
                self._parameters(sampling),
                entry.backend_id,
                session_id=session or None,
            ):
                final = output
        except self._client_error as error:
            raise RequestRefused(f"{request_id}: {error}") from error
        except self._server_error as error:
            raise EngineError(f"{request_id}: vLLM failed: {error}") from error
        finally:
            if self._running.get(request_id) is entry:
                del self._running[request_id]
        if final is None:
            raise EngineError(f"{request_id}: vLLM ended the generation without an output")
        if entry.restart and not final.outputs[0].token_ids:
            return None
        return self._generation(request_id, final, sampling, prompt.size)

    async def abort(self, request_id: str) -> None:
        entry = self._running.get(request_id)
        if entry is not None and self._llm is not None:
            entry.restart = False
            await self._llm.abort(entry.backend_id)
        else:
            await self._gate.abort_waiting(request_id)

    async def apply(self, update: WeightUpdate, mode: Mode) -> AppliedWeights:
        async with self._applying:
            llm = self._alive()
            self._gate.close()
            closed = time.monotonic()
            try:
                in_flight, drain_s = self._gate.inside, 0.0
                if mode == "finish_old":
                    drain_s = await self._gate.drained(self._options.drain_timeout_s)
                # `keep` freezes requests between two steps. Clearing the cache at that point preempts them, so that their KV
                # is recomputed under the new weights; the default of `clear_cache` would do so unasked.
                await llm.pause_generation(mode="keep", clear_cache=mode != "continue_keep")
                try:
                    if mode == "continue_keep":
                        await self._restart_unstarted()
                    receipt = await self._switch(update)
                finally:
                    await llm.resume_generation()
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
        digests = set(await self._workers("headrace_digest"))
        if len(digests) != 1:
            raise WeightsRejected(f"ranks disagree about the weights: {sorted(digests)}")
        return str(digests.pop())

    async def load(self) -> EngineLoad:
        llm = self._alive()
        states = llm.output_processor.request_states.values()
        started = [state for state in list(states) if not state.is_prefilling]
        tokens = sum(state.prompt_len + state.detokenizer.num_output_tokens() for state in started)
        cache = llm.vllm_config.cache_config
        capacity = (cache.num_gpu_blocks or 0) * (cache.block_size or 0) or 1
        return EngineLoad(
            running=len(started),
            waiting=len(self._running) - len(started) + self._gate.outside,
            kv_usage=min(1.0, tokens / capacity),
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            generated_tokens=self._generated,
        )

    def _build_llm(self) -> Any:
        with _environment(self._options.environment()):
            from vllm import __version__, envs
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.exceptions import VLLMClientError, VLLMServerError
            from vllm.inputs.engine import tokens_input
            from vllm.sampling_params import RequestOutputKind, SamplingParams
            from vllm.v1.engine.async_llm import AsyncLLM

            from services.engine.vllm_plugin import register

            if hasattr(envs, "disable_envs_cache"):
                envs.disable_envs_cache()  # a second engine in this process may have other settings
            class QuietLLM(AsyncLLM):
                """Shut down by `stop`, never by the garbage collector at interpreter exit, where it fails noisily."""

                def __del__(self) -> None:
                    pass

            register()
            llm = QuietLLM.from_engine_args(AsyncEngineArgs(**self._options.engine_args()))
        self._sampling_params, self._tokens_input, self._final_only = SamplingParams, tokens_input, RequestOutputKind.FINAL_ONLY
        self._client_error, self._server_error = VLLMClientError, VLLMServerError
        dtype = str(llm.vllm_config.model_config.dtype).removeprefix("torch.")
        self._build = f"vllm {__version__} {self._options.device} {dtype}"
        return llm

    def _alive(self) -> Any:
        if self._llm is None:
            raise Unserviceable("the engine is not running; call start() first")
        return self._llm

    def _serving(self) -> Any:
        llm = self._alive()
        if not self._weights.serviceable:
            raise Unserviceable(f"weights are not verified: {self._weights.reason}")
        return llm

    def _parameters(self, sampling: SamplingConfig) -> Any:
        greedy = is_greedy(sampling)
        both = self._options.both_logprobs and not is_identity(sampling) and not greedy
        return self._sampling_params(
            temperature=0.0 if greedy else sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            seed=sampling.seed,
            ignore_eos=True,  # only the request's own stop tokens stop it
            detokenize=False,
            logprobs=1 if both else 0,
            flat_logprobs=True,
            output_kind=self._final_only,
        )

    def _generation(self, request_id: str, final: Any, sampling: SamplingConfig, prompt_size: int) -> Generation:
        output = final.outputs[0]
        ids = np.array(output.token_ids, dtype=np.int32)
        first, second = _columns(request_id, output.logprobs, ids)
        if is_greedy(sampling):  # a point mass: certain, whatever the model thought of it
            logprobs, raw = np.zeros(ids.size, dtype=np.float32), first
        else:
            logprobs, raw = first, (None if is_identity(sampling) else second)
        spans = tuple(_span(span.start, span.end, span.version) for span in output.weight_versions or ())
        cached = final.num_cached_tokens or 0
        self._queries, self._hits = self._queries + prompt_size, self._hits + cached
        self._generated += ids.size
        return Generation(
            request_id=request_id,
            ids=ids,
            logprobs=checked_logprobs(logprobs, "logprobs", request_id),
            raw_logprobs=None if raw is None else checked_logprobs(raw, "raw_logprobs", request_id),
            versions=check_cover(spans, ids.size),
            finish_reason=output.finish_reason,
            stop_reason="" if output.stop_reason is None else str(output.stop_reason),
            cached_prompt_tokens=cached,
            weight_digest=self._digests.get((spans[-1].version, spans[-1].incarnation), "") if spans else "",
        )

    async def _workers(self, method: str, *args: Any) -> list[Any]:
        """Call a plug-in method on every rank of every data-parallel replica; all their results."""
        # `AsyncLLM.collective_rpc` would call all replicas but report only the first one's results
        call = self._alive().engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        replicas = await asyncio.wait_for(call, self._options.weights_timeout_s)
        return [result for ranks in replicas for result in ranks]

    async def _restart_unstarted(self) -> None:
        """Requests that wait inside vLLM carry the old version's salt; they must not start on the old version's KV."""
        llm = self._alive()
        states = llm.output_processor.request_states
        unstarted = {state.external_req_id for state in states.values() if not state.detokenizer.num_output_tokens()}
        for entry in self._running.values():
            if entry.backend_id in unstarted:
                entry.restart = True
                await llm.abort(entry.backend_id)

    def _verified(self, version: int, incarnation: int, digest: str) -> None:
        self._weights = WeightState(version=version, incarnation=incarnation, digest=digest, serviceable=True)
        self._digests[version, incarnation] = digest
        for key in list(self._digests)[:-REMEMBERED_DIGESTS]:
            del self._digests[key]

    async def _switch(self, update: WeightUpdate) -> AppliedWeights:
        """With generation frozen: load on every rank, read back, compare; only then show the new version."""
        llm = self._alive()
        began = time.monotonic()
        count = size = 0
        digest = ""
        try:
            with staging_file(self._options.staging_folder()) as path:
                chunks = staged(path, update.load(), self._options.staging_chunk_bytes)
                while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                    await self._workers("headrace_load", chunk.path, chunk.tensors)
                    count, size = count + len(chunk.tensors), size + chunk.bytes
            loaded = time.monotonic()
            digest = await self.weight_digest()
            if digest != update.digest:
                raise WeightsRejected(f"loaded weights have digest {digest}, announced was {update.digest}")
            # Frozen requests hold their blocks, so with KV kept this cannot empty the cache: the salt keeps others out of it.
            await llm.reset_prefix_cache(reset_running_requests=False)
            await llm.update_weight_version(_label(update.version, update.incarnation))
        except Exception as error:  # whatever failed, the workers may now hold a mixture
            reason = f"version {update.version}: {error if isinstance(error, WeightsRejected) else f'{type(error).__name__}: {error}'}"
            self._weights = msgspec.structs.replace(self._weights, digest=digest, serviceable=False, reason=reason)
            for entry in self._running.values():
                entry.restart = False
            await llm.abort([entry.backend_id for entry in self._running.values()])
            raise WeightsRejected(reason) from error
        self._verified(update.version, update.incarnation, digest)
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


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the block; afterwards the environment is as before, vLLM's own additions included."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _checkpoint_digest(folder: str, names: set[str]) -> str:
    return digest_of(tensor for tensor in checkpoint_files.tensors_of(folder) if tensor[0] in names)


def _label(version: int, incarnation: int) -> str:
    return f"{incarnation}.{version}"


def _span(start: int, end: int, label: str) -> VersionSpan:
    incarnation, version = label.split(".")
    return VersionSpan(start, end, int(version), int(incarnation))


def _columns(request_id: str, flat: Any, ids: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
    """vLLM's flat log-probabilities → those of the sampled tokens, and the second column where there is one."""
    if ids.size == 0:
        return np.zeros(0, dtype=np.float32), None
    width, rest = divmod(len(flat.logprobs), ids.size)
    if len(flat) != ids.size or rest or width not in (1, 2):
        raise LogprobsMissing(f"{request_id}: {ids.size} tokens came with {len(flat.logprobs)} log-probabilities at {len(flat)} positions")
    values = np.array(flat.logprobs, dtype=np.float32).reshape(ids.size, width)
    tokens = np.array(flat.token_ids, dtype=np.int32).reshape(ids.size, width)
    if (tokens != ids[:, None]).any():
        raise LogprobsMissing(f"{request_id}: log-probabilities belong to other tokens than the sampled ones")
    return values[:, 0], values[:, 1] if width == 2 else None


def _empty(request_id: str, sampling: SamplingConfig) -> Generation:
    """A request that was aborted while it waited outside."""
    nothing = np.zeros(0, dtype=np.float32)
    return Generation(
        request_id=request_id,
        ids=np.zeros(0, dtype=np.int32),
        logprobs=nothing,
        raw_logprobs=None if is_identity(sampling) else nothing,
        versions=(),
        finish_reason="abort",
        stop_reason="aborted by request",
    )
