"""What every engine checks in the same words: requests on the way in, log-probabilities on the way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.trajectory import SamplingConfig
from services.engine.protocol import EngineCapabilities, Generation, LogprobsMissing, RequestRefused

GREEDY_BELOW = 1e-5  # a lower temperature means argmax
SENTINEL = -9998.0  # vLLM writes -9999 where it has no log-probability


def is_identity(sampling: SamplingConfig) -> bool:
    """True when the sampler changes nothing, so behaviour and raw log-probabilities are one."""
    return sampling.temperature == 1.0 and sampling.top_p == 1.0 and sampling.top_k == 0


def is_greedy(sampling: SamplingConfig) -> bool:
    return sampling.temperature < GREEDY_BELOW


def aborted_before_start(request_id: str, sampling: SamplingConfig) -> Generation:
    """The result of a request that was aborted while it still waited outside the engine."""
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


def starts_over(finish_reason: str | None, stop_reason: str, tokens: int) -> bool:
    """Whether a generation that was cancelled for a weight change begins again under the new weights.

    With `regenerate` it does; with `restart` it goes back to its requester, unless nothing of it had been sampled yet.
    """
    return finish_reason == "abort" and (stop_reason == "regenerate" or (stop_reason == "restart" and tokens == 0))


def checked_logprobs(values: npt.NDArray[Any], what: str, request_id: str) -> npt.NDArray[np.float32]:
    """float32 copy of `values`; raises `LogprobsMissing` for NaN, infinities, the -9999 sentinel, or a positive value."""
    out = np.asarray(values, dtype=np.float32)
    bad = ~np.isfinite(out) | (out <= SENTINEL) | (out > 1e-4)
    if bad.any():
        where = int(np.flatnonzero(bad)[0])
        raise LogprobsMissing(
            f"{request_id}: {what}[{where}] is {out[where]}; every sampled token needs a finite log-probability"
        )
    return np.minimum(out, np.float32(0.0))


def checked_request(
    request_id: str, prompt_ids: npt.NDArray[np.int32], sampling: SamplingConfig, capabilities: EngineCapabilities
) -> npt.NDArray[np.int32]:
    """The prompt as contiguous int32 [P]; raises `RequestRefused` naming the field, the value and the rule."""
    ids = np.ascontiguousarray(prompt_ids, dtype=np.int32)
    if ids.ndim != 1 or ids.size == 0:
        raise RequestRefused(f"{request_id}: prompt_ids has shape {ids.shape}; it must be one-dimensional and not empty")
    if int(ids.min()) < 0 or int(ids.max()) >= capabilities.vocab_size:
        raise RequestRefused(f"{request_id}: prompt_ids holds an id outside 0..{capabilities.vocab_size - 1}")
    if sampling.max_tokens < 1:
        raise RequestRefused(f"{request_id}: max_tokens is {sampling.max_tokens}; it must be at least 1")
    if ids.size + sampling.max_tokens > capabilities.max_model_len:
        raise RequestRefused(
            f"{request_id}: prompt {ids.size} + max_tokens {sampling.max_tokens} exceed "
            f"max_model_len {capabilities.max_model_len}"
        )
    if not sampling.temperature >= 0.0 or not 0.0 < sampling.top_p <= 1.0 or sampling.top_k < 0:
        raise RequestRefused(
            f"{request_id}: temperature {sampling.temperature} (≥ 0), top_p {sampling.top_p} (0 < p ≤ 1) "
            f"or top_k {sampling.top_k} (≥ 0) is out of range"
        )
    if any(not 0 <= token < capabilities.vocab_size for token in sampling.stop_token_ids):
        raise RequestRefused(f"{request_id}: stop_token_ids {sampling.stop_token_ids} leave 0..{capabilities.vocab_size - 1}")
    return ids
