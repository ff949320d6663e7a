"""What every serving engine promises: tokens in, tokens out with versions, and whole, verified weights.

Consumes: prompt ids, a sampler, weight updates in checkpoint coordinates. Produces: `Generation` and `AppliedWeights`.
The service around an engine owns the bus; an engine knows nothing of it. Three engines implement this: vLLM, the embedded
`transformers` engine, and a simulated one for load tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.trajectory import SamplingConfig, VersionSpan
from services.engine.changes import TensorChange

Mode = Literal["finish_old", "continue_keep", "continue_recompute", "regenerate", "restart"]
FinishReason = Literal["stop", "length", "abort"]
# name in the checkpoint, bfloat16 bits (any layout, C order), shape
CheckpointTensor = tuple[str, npt.NDArray[np.uint16], tuple[int, ...]]


class EngineError(RuntimeError):
    """Root of everything an engine raises on purpose."""


class EngineUnavailable(EngineError):
    """The engine cannot be built here; the text says which package or device is missing."""


class RequestRefused(EngineError):
    """The request itself is impossible (too long, unknown token id, id already in flight); retrying it changes nothing."""


class Unserviceable(EngineError):
    """The engine holds weights that it could not verify; it serves nothing until an `apply` succeeds."""


class LogprobsMissing(EngineError):
    """The engine returned a sampled token without a usable log-probability; the turn is lost, never padded."""


class WeightsRejected(EngineError):
    """A weight update failed to load, or the loaded weights do not have the announced digest."""


class StagingFailed(EngineError):
    """New weights could not be laid out beside the old ones. Nothing was changed and the old weights go on serving."""


class DrainTimeout(EngineError):
    """In-flight generations did not reach the boundary in time; nothing was changed and the old weights go on serving."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One finished generation. All arrays have one length S; the sampled stop token is part of them.

    `logprobs` are those of the distribution that was sampled from (after temperature, top-k, top-p); at temperature 0 that
    distribution is a point mass, so they are 0. `raw_logprobs` are those of the untransformed model, None when it cannot tell.
    """

    request_id: str
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    raw_logprobs: npt.NDArray[np.float32] | None
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    stop_reason: str = ""  # the stop token id, or why it was aborted
    cached_prompt_tokens: int = 0
    weight_digest: str = ""  # of the weights that sampled the last token
    discarded_tokens: int = 0  # sampled before, under weights that were replaced, and thrown away: in none of the arrays
    routed_experts: npt.NDArray[Any] | None = None  # [P + S - 1, layers, top-k] where a mixture of experts reports its choices


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """New weights, in checkpoint coordinates, and the digest of the complete result.

    `changes()` are the elements that differ from the weights named `base_digest`: all that an engine needs which serves exactly
    those and whose model takes single elements. `load()` are the changed tensors whole, for every other case. Both may be
    called more than once and from another thread. After a `WeightsRejected` the next update must bring every tensor that the
    failed one may have touched; bringing all of them is always right.
    """

    version: int
    incarnation: int = 0
    digest: str
    load: Callable[[], Iterator[CheckpointTensor]]
    base_digest: str = ""
    changes: Callable[[], Iterator[TensorChange]] | None = None


class AppliedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of a verified switch."""

    version: int
    incarnation: int
    digest: str
    path: Literal["elements", "tensors"]  # what was written: the changed elements, or whole tensors
    tensors: int
    bytes: int
    continued: int  # generations that were in flight across the switch
    drained: int  # generations that were finished first
    cut: int  # generations that were cancelled for it
    stage_s: float  # laid out beside the weights, while the engine served
    drain_s: float
    load_s: float
    verify_s: float
    frozen_s: float  # nothing was sampled
    closed_s: float  # how long new generations had to wait


class WeightState(msgspec.Struct, frozen=True, kw_only=True):
    """Which weights the engine holds. `digest` is what was read back, never what was announced."""

    version: int
    incarnation: int
    digest: str
    serviceable: bool
    reason: str = ""  # why not serviceable


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What this engine can do, so that the service can refuse a configuration before the first request."""

    modes: tuple[Mode, ...] = ("finish_old", "continue_keep", "continue_recompute", "regenerate", "restart")
    whole_tensors: str = ""  # why this model takes whole tensors instead of changed elements; empty: it takes elements
    raw_logprobs: bool = True  # raw log-probabilities also where the sampler transforms
    per_request_seed: bool = True
    prefix_cache: bool = True
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    tensor_parallel: int = 1
    data_parallel: int = 1
    real_tokens: bool = True  # false: ids and log-probabilities are invented (load tests)


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for the router. Counters are since start."""

    running: int
    waiting: int
    kv_usage: float  # 0..1
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # of them found
    generated_tokens: int
    preemptions: int = 0


class Engine(Protocol):
    """One serving engine. Lifecycle: built → `start` → serving → `stop`; both are idempotent.

    Any number of `generate` calls may be in flight; `apply` calls are serialized by the engine. Cancelling a `generate` task
    aborts the request in the engine.
    """

    @property
    def kind(self) -> str: ...

    @property
    def build(self) -> str:
        """Backend, version, device and dtype in words, e.g. `vllm 0.32.0 cpu float32`. Known after `start`."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Known after `start`."""

    @property
    def weights(self) -> WeightState:
        """Known after `start`."""

    async def start(self) -> None:
        """Load the checkpoint, read it back, and serve it under the configured initial version."""

    async def stop(self) -> None:
        """Abort what is in flight (it returns with finish reason `abort`) and free everything."""

    async def generate(
        self, request_id: str, prompt_ids: npt.NDArray[np.int32], sampling: SamplingConfig, session: str = ""
    ) -> Generation:
        """Continue `prompt_ids` (int32 [P], P ≥ 1). `session` is a hint for prefix reuse.

        Raises `RequestRefused`, `Unserviceable`, `LogprobsMissing`.
        """

    async def abort(self, request_id: str) -> None:
        """Make the generation return what it has, with finish reason `abort`. An unknown id is ignored."""

    async def stage(self, update: WeightUpdate) -> None:
        """Lay the update out beside the weights and check all that can be checked, while the engine serves; `apply` of the
        same update then only writes. An update that must come as whole tensors is left for `apply`.

        Raises `StagingFailed`: nothing changed. If the reason is that the running weights are not what their name says, the
        engine is unserviceable from then on.
        """

    async def apply(self, update: WeightUpdate, mode: Mode, grace_s: float = 0.0) -> AppliedWeights:
        """Switch to `update`, verify by reading back, invalidate the prefix cache, then serve. Stages first if need be.

        `finish_old`: generations in flight end under the old weights first; new ones wait. `continue_keep` and
        `continue_recompute`: they stop at a token boundary and go on under the new weights, their KV kept or recomputed.
        `regenerate`: those that end within `grace_s` do so under the old weights; the others are cancelled and start over from
        their prompt under the new ones, with their whole token budget, since none of the discarded tokens is part of the
        result. `restart`: they are cancelled and return with finish reason `abort`, stop reason `restart`.
        Raises `WeightsRejected` (the engine is then unserviceable, and what was in flight across the switch returns with
        finish reason `abort`, holding only tokens of verified weights), or `DrainTimeout` or `StagingFailed` (nothing changed).
        """

    async def audit(self) -> None:
        """Read all weights back while serving, a slice at a time. Raises `WeightsRejected`, and serves nothing from then on,
        when they are not what their name says.
        """

    async def weight_digest(self) -> str:
        """Read the runtime parameters back into checkpoint coordinates and digest them, now."""

    async def load(self) -> EngineLoad: ...
