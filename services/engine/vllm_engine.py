"""vLLM in process (`AsyncLLM`): the same code on CPU and GPU. The one door to `vllm`, beside its in-worker plug-in."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.trajectory import SamplingConfig
from services.engine import checkpoint_files
from services.engine.contract import aborted_before_start, checked_request, is_greedy, is_identity, starts_over
from services.engine.protocol import (
    AppliedWeights,
    EngineCapabilities,
    EngineError,
    EngineLoad,
    EngineUnavailable,
    Generation,
    Mode,
    RequestRefused,
    Unserviceable,
    WeightState,
    WeightUpdate,
)
from services.engine.vllm_options import VllmOptions, environment
from services.engine.vllm_results import generation_of, label_of
from services.engine.vllm_workers import WeightWorkers
from services.engine.weight_switch import Loaded, WeightSwitch


class _Running(msgspec.Struct):
    """A generation inside vLLM: its current vLLM id, and whether it must be started anew after a switch."""

    backend_id: str
    restart: bool = False
    cut: str = ""  # why a weight change cancelled it


class VllmEngine:
    """Implements `Engine` over `AsyncLLM`. Weights are checked by reading them back in the workers, never by label."""

    kind = "vllm"

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self._switch = WeightSwitch(options.drain_timeout_s, options.audit_every)
        self._llm: Any = None
        self._sampling_params: Any = None
        self._tokens_input: Any = None
        self._final_only: Any = None
        self._client_error: type[Exception] = Exception
        self._server_error: type[Exception] = Exception
        self._build = ""
        self._capabilities: EngineCapabilities | None = None
        self._running: dict[str, _Running] = {}
        self._ids = itertools.count()
        self._both_logprobs = False
        self._queries = self._hits = self._generated = 0
        self._weights = WeightWorkers(options, self._workers)

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
        if self._llm is not None:
            return
        options = self._options
        llm = await asyncio.wait_for(asyncio.to_thread(self._build_llm), options.start_timeout_s)
        self._llm = llm
        try:
            self._both_logprobs = await self._weights.prepare() and options.both_logprobs
            digest = await self.weight_digest()
            if options.verify_checkpoint:
                expected = await asyncio.to_thread(checkpoint_files.digest_of_folder, options.model, self._weights.held)
                if digest != expected:
                    raise EngineUnavailable(
                        f"read-back digest {digest} differs from the checkpoint's {expected}: "
                        "this build lays weights out in a way that cannot be read back"
                    )
            await llm.update_weight_version(label_of(options.initial_version, options.initial_incarnation))
        except BaseException:
            await self.stop()
            raise
        config = llm.vllm_config
        self._capabilities = EngineCapabilities(
            raw_logprobs=self._both_logprobs,
            prefix_cache=options.prefix_cache,
            max_model_len=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            max_num_seqs=config.scheduler_config.max_num_seqs,
            tensor_parallel=options.tensor_parallel_size,
            data_parallel=options.data_parallel_size,
            whole_tensors=self.whole_tensors,
        )
        self._switch.verified(options.initial_version, options.initial_incarnation, digest)

    async def stop(self) -> None:
        llm, self._llm = self._llm, None
        self._switch.unserviceable("stopped")
        await self._switch.gate.abort_all_waiting()
        if llm is not None:
            with contextlib.suppress(self._server_error):  # a dead vLLM has nothing left to abort
                await llm.abort([entry.backend_id for entry in self._running.values()])
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # it would report the end of vLLM's processes as a failure
            await asyncio.to_thread(llm.shutdown, self._options.stop_grace_s or (2.0 if self._options.one_worker else 30.0))

    async def generate(
        self, request_id: str, prompt_ids: npt.NDArray[np.int32], sampling: SamplingConfig, session: str = ""
    ) -> Generation:
        prompt = checked_request(request_id, prompt_ids, sampling, self.capabilities)
        discarded = 0
        while True:
            async with self._switch.gate.admit(request_id) as admitted:
                if not admitted:
                    return aborted_before_start(request_id, sampling)
                out = await self._generate(request_id, prompt, sampling, session)
            if out is None:
                continue
            if not starts_over(out.finish_reason, out.stop_reason, out.ids.size):
                return msgspec.structs.replace(out, discarded_tokens=discarded)
            discarded += out.ids.size

    async def _generate(
        self, request_id: str, prompt: npt.NDArray[np.int32], sampling: SamplingConfig, session: str
    ) -> Generation | None:
        """One attempt; None when it had not sampled anything at a weight switch and must start anew under the new salt."""
        self._switch.check()
        llm = self._alive()
        entry = _Running(f"{request_id}/{next(self._ids)}")
        label = label_of(self.weights.version, self.weights.incarnation)
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
            if llm.errored:
                self._switch.unserviceable(f"vLLM died: {error}")
            raise EngineError(f"{request_id}: vLLM failed: {error}") from error
        finally:
            if self._running.get(request_id) is entry:
                del self._running[request_id]
        if final is None:
            raise EngineError(f"{request_id}: vLLM ended the generation without an output")
        if entry.restart and not final.outputs[0].token_ids:
            return None
        generation = generation_of(request_id, final, sampling, self._switch.digests)
        self._queries, self._hits = self._queries + prompt.size, self._hits + generation.cached_prompt_tokens
        self._generated += generation.ids.size
        cut = entry.cut if generation.finish_reason == "abort" else ""
        return msgspec.structs.replace(generation, stop_reason=cut) if cut else generation

    async def abort(self, request_id: str) -> None:
        entry = self._running.get(request_id)
        if entry is not None and self._llm is not None:
            entry.restart, entry.cut = False, ""
            await self._llm.abort(entry.backend_id)
        else:
            await self._switch.gate.abort_waiting(request_id)

    async def stage(self, update: WeightUpdate) -> None:
        self._alive()
        await self._switch.stage(update, self)

    async def apply(self, update: WeightUpdate, mode: Mode, grace_s: float = 0.0) -> AppliedWeights:
        self._alive()
        return await self._switch.apply(update, mode, grace_s, self)

    async def audit(self) -> None:
        self._alive()
        await self._switch.audit(self)

    async def weight_digest(self) -> str:
        return await self._weights.digest()

    async def load(self) -> EngineLoad:
        llm = self._alive()
        states = llm.output_processor.request_states.values()
        started = [state for state in list(states) if not state.is_prefilling]
        tokens = sum(state.prompt_len + state.detokenizer.num_output_tokens() for state in started)
        cache = llm.vllm_config.cache_config
        capacity = (cache.num_gpu_blocks or 0) * (cache.block_size or 0) or 1
        return EngineLoad(
            running=len(started),
            waiting=len(self._running) - len(started) + self._switch.gate.outside,
            kv_usage=min(1.0, tokens / capacity),
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            generated_tokens=self._generated,
        )

    # -- the backend's side of a weight change ------------------------------------------------------------------------------

    @property
    def whole_tensors(self) -> str:
        return self._weights.whole_tensors

    async def lay_out(self, update: WeightUpdate) -> None:
        await self._weights.lay_out(update)

    async def clear_away(self) -> None:
        if self._llm is not None:
            await self._weights.drop()

    async def read_back(self) -> str:
        return await self._weights.digest()

    async def cut(self, reason: str) -> int:
        for entry in self._running.values():
            entry.restart, entry.cut = False, reason
        await self._alive().abort([entry.backend_id for entry in self._running.values()])
        return len(self._running)

    async def freeze(self, mode: Mode) -> None:
        # `keep` freezes requests between two steps. Clearing the cache at that point preempts them, so that their KV is
        # recomputed under the new weights; `clear_cache`, on by default, would do so unasked.
        await self._alive().pause_generation(mode="keep", clear_cache=mode != "continue_keep")
        if mode == "continue_keep":
            await self._restart_unstarted()

    async def write(self, update: WeightUpdate) -> Loaded:
        return await self._weights.write(update)

    async def replace(self, update: WeightUpdate) -> Loaded:
        return await self._weights.replace(update)

    async def show(self, update: WeightUpdate, mode: Mode, digest: str) -> None:
        # Frozen requests hold their blocks, so with KV kept this cannot empty the cache: the salt keeps others out of it.
        await self._alive().reset_prefix_cache(reset_running_requests=False)
        await self._alive().update_weight_version(label_of(update.version, update.incarnation))

    async def discard(self) -> None:
        for entry in self._running.values():
            entry.restart, entry.cut = False, ""
        with contextlib.suppress(self._server_error):  # dead: its requests have failed already
            await self._alive().abort([entry.backend_id for entry in self._running.values()])

    async def thaw(self) -> None:
        with contextlib.suppress(self._server_error):
            await self._alive().resume_generation()

    async def _restart_unstarted(self) -> None:
        """Requests that wait inside vLLM carry the old version's salt; they must not start on the old version's KV."""
        llm = self._alive()
        states = llm.output_processor.request_states
        unstarted = {state.external_req_id for state in states.values() if not state.detokenizer.num_output_tokens()}
        for entry in self._running.values():
            if entry.backend_id in unstarted:
                entry.restart = True
                await llm.abort(entry.backend_id)

    def _build_llm(self) -> Any:
        with environment(self._options.environment()):
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

    def _parameters(self, sampling: SamplingConfig) -> Any:
        greedy = is_greedy(sampling)
        both = self._both_logprobs and not is_identity(sampling) and not greedy
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

    async def _workers(self, method: str, *args: Any) -> list[Any]:
        """Call a plug-in method on every rank of every data-parallel replica; all their results."""
        # `AsyncLLM.collective_rpc` would call all replicas but report only the first one's results
        call = self._alive().engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        replicas = await asyncio.wait_for(call, self._options.weights_timeout_s)
        return [result for ranks in replicas for result in ranks]
