"""From what vLLM hands out to a `Generation`: log-probabilities matched with their tokens, labels turned into version spans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.trajectory import SamplingConfig, VersionSpan
from services.engine.contract import checked_logprobs, is_greedy, is_identity
from services.engine.protocol import EngineError, Generation, LogprobsMissing
from services.engine.spans import check_cover


def label_of(version: int, incarnation: int) -> str:
    """vLLM's name for one set of weights, also the salt of its prefix cache."""
    return f"{incarnation}.{version}"


def generation_of(request_id: str, final: Any, sampling: SamplingConfig, digests: Mapping[tuple[int, int], str]) -> Generation:
    """vLLM's final `RequestOutput` as our result. Raises `LogprobsMissing` where a token lacks its log-probability,
    `EngineError` where vLLM gave up on the request.

    `digests` names the verified weights by (version, incarnation).
    """
    output = final.outputs[0]
    if output.finish_reason not in ("stop", "length", "abort"):
        raise EngineError(f"{request_id}: vLLM ended the generation with {output.finish_reason!r}")
    ids = np.array(output.token_ids, dtype=np.int32)
    first, second = _columns(request_id, output.logprobs, ids)
    logprobs, raw = first, None if is_identity(sampling) else second
    if is_greedy(sampling):  # a point mass: certain, whatever the model thought of it
        logprobs, raw = np.zeros_like(first), first
    spans = check_cover(tuple(_span(span.start, span.end, span.version) for span in output.weight_versions or ()), ids.size)
    return Generation(
        request_id=request_id,
        ids=ids,
        logprobs=checked_logprobs(logprobs, "logprobs", request_id),
        raw_logprobs=None if raw is None else checked_logprobs(raw, "raw_logprobs", request_id),
        versions=spans,
        finish_reason=output.finish_reason,
        stop_reason="" if output.stop_reason is None else str(output.stop_reason),
        cached_prompt_tokens=final.num_cached_tokens or 0,
        routed_experts=output.routed_experts,
        weight_digest=digests.get((spans[-1].version, spans[-1].incarnation), "") if spans else "",
    )


def _span(start: int, end: int, label: str) -> VersionSpan:
    incarnation, version = label.split(".")
    return VersionSpan(start, end, int(version), int(incarnation))


def _columns(
    request_id: str, flat: Any, ids: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
    """vLLM's flat log-probabilities → those of the sampled tokens, and the second column where there is one."""
    if ids.size == 0:
        return np.zeros(0, dtype=np.float32), None
    width, rest = divmod(len(flat.logprobs), ids.size)
    if len(flat) != ids.size or rest or width not in (1, 2):
        raise LogprobsMissing(
            f"{request_id}: {ids.size} tokens came with {len(flat.logprobs)} log-probabilities at {len(flat)} positions"
        )
    values = np.array(flat.logprobs, dtype=np.float32).reshape(ids.size, width)
    tokens = np.array(flat.token_ids, dtype=np.int32).reshape(ids.size, width)
    if (tokens != ids[:, None]).any():
        raise LogprobsMissing(f"{request_id}: log-probabilities belong to other tokens than the sampled ones")
    return values[:, 0], values[:, 1] if width == 2 else None
