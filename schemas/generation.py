"""Token-in token-out generation and its control.

Producer of requests: rollouter; consumer: one engine. Producer of results: engine; consumer: the requester's inbox subject.
"""

from __future__ import annotations

from typing import Literal

from schemas.arrays import Array
from schemas.message import Message
from schemas.trajectory import SamplingConfig, VersionSpan


class GenerateRequest(Message, frozen=True, kw_only=True, tag="generate"):
    """Continue `prompt_ids` on `gen.<engine>.req`. `request_id` makes a repeated delivery harmless."""

    request_id: str
    requester: str
    session: str  # conversation key: keeps prefix-cache affinity
    prompt_ids: Array  # int32 [P]
    sampling: SamplingConfig
    deadline_ns: int = 0  # wall clock; after it the requester no longer waits


class AbortRequest(Message, frozen=True, kw_only=True, tag="abort"):
    """Cancel one unfinished generation on `gen.<engine>.req`."""

    request_id: str
    requester: str
    reason: str


class GenerateResult(Message, frozen=True, kw_only=True, tag="generated"):
    """The outcome of one request on `gen.out.<requester>`. An error carries no tokens."""

    request_id: str
    engine: str
    generator: str
    status: Literal["ok", "aborted", "error", "refused"]
    sampled_ids: Array | None = None  # int32 [S]
    logprobs: Array | None = None  # float32 [S]
    raw_logprobs: Array | None = None
    versions: tuple[VersionSpan, ...] = ()
    weight_digest: str = ""
    finish_reason: str = ""  # stop | length | abort
    stop_reason: str = ""
    cached_prompt_tokens: int = 0
    discarded_tokens: int = 0  # sampled before under weights that were replaced, and thrown away
    error: str = ""
    queued_ns: int = 0
    started_ns: int = 0
    finished_ns: int = 0
