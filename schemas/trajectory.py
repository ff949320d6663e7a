"""The journal and the sealed trajectory: every sampled token with its policy version and its behaviour log-probability.

Producer: rollouter (`turn.<group>.<slot>.<attempt>.<k>`, `episode.<group>.<slot>`). Consumers: bank, verifier,
trainer, explain.
Nothing here is ever re-tokenized; the trainer's row is exactly `episode.ids`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.actions import Action
from schemas.arrays import Array, ArrayError
from schemas.message import Message
from schemas.termination import Termination


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `[start, end)` were sampled under this policy version (of this trainer incarnation)."""

    start: int
    end: int
    version: int
    incarnation: int = 0


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sampler of one lease. Log-probabilities are those of the distribution after these transforms."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


class TurnEffect(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn's action did: the observation as it came, and the state that it left."""

    observation: bytes = b""
    observation_dropped_bytes: int = 0
    lane: str = ""  # empty: nothing was sent to the sandbox
    exit_code: int | None = None
    timed_out: bool = False
    refused: bool = False  # nothing ran
    state_after: str = ""  # state hash; empty: as before


class TurnRecord(Message, frozen=True, kw_only=True, tag="turn"):
    """One turn, written before its action is carried out. Published once on `turn.<group>.<slot>.<attempt>.<k>`.

    What the action did stands in the next turn's `previous`, or after the last turn in `AttemptPlayed`.
    """

    run: str
    group: str
    slot: int
    attempt: int
    turn: int
    task_id: str
    manifest: str  # behaviour manifest hash
    prompt_ids: Array  # int32 [P]: the tokens that this turn added before sampling (opening, or glue + observation)
    sampled_ids: Array  # int32 [S]
    logprobs: Array  # float32 [S], of the sampling distribution
    raw_logprobs: Array | None = None  # float32 [S], of the untransformed model, where the sampler transforms
    versions: tuple[VersionSpan, ...] = ()
    engine: str = ""
    weight_digest: str = ""
    generator: str = ""  # engine kind and build
    finish_reason: str = ""
    stop_reason: str = ""
    sampling: SamplingConfig = SamplingConfig()
    previous: TurnEffect | None = None  # what the turn before did; none before the first
    action: Action
    command_id: str = ""  # of the command that this turn runs; empty: it runs none
    executor: str = ""
    state_before: str = ""  # state hash in which the action finds the sandbox
    started_ns: int = 0
    generated_ns: int = 0


class StateRef(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed state: a deterministic tar, inline when small, else in the object store under its digest."""

    state_hash: str
    tar_digest: str
    size_bytes: int
    inline: bytes | None = None


class Episode(Message, frozen=True, kw_only=True, tag="episode"):
    """A sealed trajectory. Published once on `episode.<group>.<slot>`.

    `ids[mask]` are the sampled tokens; `logprobs` is 0 where `mask` is false.
    """

    run: str
    group: str
    slot: int
    attempt: int
    task_id: str
    family: str
    template: str
    purpose: Literal["train", "eval"] = "train"
    seed: int = 0
    environment: str = ""  # suite name and version
    base_snapshot: str = ""
    manifest: str = ""
    termination: Termination
    ids: Array  # int32 [T]
    mask: Array  # bool [T], true on sampled tokens
    logprobs: Array  # float32 [T]
    raw_logprobs: Array | None = None
    versions: tuple[VersionSpan, ...] = ()  # spans over positions of `ids`; they cover every sampled token
    turn_starts: Array  # int32 [turns]: position of each turn's first sampled token
    turns: int
    invalid_actions: int = 0
    sampled_tokens: int = 0
    engines: tuple[str, ...] = ()
    executor: str = ""
    terminal_state: StateRef | None = None
    started_ns: int = 0
    sealed_ns: int = 0
    rollouter: str = ""

    def oldest_version(self) -> int:
        """The oldest policy version among the sampled tokens (invariant 7 counts from here)."""
        return min((span.version for span in self.versions), default=-1)

    def newest_version(self) -> int:
        return max((span.version for span in self.versions), default=-1)

    def token_versions(self) -> npt.NDArray[np.int64]:
        """Version of each position of `ids`, int64 [T]; -1 where the token was not sampled."""
        out = np.full(self.ids.shape[0], -1, dtype=np.int64)
        for span in self.versions:
            out[span.start : span.end] = span.version
        out[~self.mask.of_kind("mask", "bool", 1)] = -1
        return out

    def checked(self) -> Episode:
        """Raises `ArrayError` or `ValueError` naming the field unless ids, mask, log-probs and versions line up."""
        ids = self.ids.of_kind("ids", "int32", 1)
        mask = self.mask.of_kind("mask", "bool", 1)
        logprobs = self.logprobs.of_kind("logprobs", "float32", 1)
        if not ids.shape == mask.shape == logprobs.shape:
            raise ArrayError(f"ids {ids.shape}, mask {mask.shape} and logprobs {logprobs.shape} must have one length")
        if not np.isfinite(logprobs).all():
            raise ValueError("logprobs: every value must be finite; a missing log-probability is an error, never padded")
        if (logprobs[mask] > 1e-4).any():
            raise ValueError("logprobs: a log-probability is positive")
        if (self.token_versions()[mask] < 0).any():
            raise ValueError("versions: a sampled token has no policy version")
        if (ids < 0).any():
            raise ValueError("ids: token ids must not be negative")
        return self


class Verdict(Message, frozen=True, kw_only=True, tag="verdict"):
    """The verifier's judgement of one sealed episode, the reward vector kept whole. Once on `verdict.<group>.<slot>`."""

    run: str
    group: str
    slot: int
    episode_digest: str
    status: Literal["graded", "censored", "verifier_error", "tampered"]
    success: bool | None = None
    reward: float | None = None  # None exactly when the episode has no reward
    components: dict[str, float] = {}  # noqa: RUF012 (msgspec copies it)
    violations: tuple[str, ...] = ()
    state_hash: str = ""
    detail: str = ""
    verifier: str = ""
    started_ns: int = 0
    finished_ns: int = 0


def concatenate(parts: list[npt.NDArray[Any]], dtype: str) -> npt.NDArray[Any]:
    """Join 1-D parts into one array of `dtype`; an empty list gives an empty array."""
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype=dtype)
