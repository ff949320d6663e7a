"""Policy versions: what each one is, how to get there, and which engine serves which.

`policy.staged.<v>` and `policy.anchor.<v>` come from param_sync (`<v>-<i>` from the trainer's incarnation `i` > 0),
`policy.apply.<engine>` are its orders, `policy.engine.<engine>` the engines' confirmed changes, `policy.active` the fleet's
version vector.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from schemas.message import Message
from schemas.training import ObjectRef

InFlightMode = Literal["finish_old", "continue_keep", "continue_recompute", "regenerate", "restart"]
EnginePhase = Literal["starting", "serving", "applying", "failed", "draining"]


class WeightsManifest(Message, frozen=True, kw_only=True, tag="weights"):
    """One link: a patch from `base_version` to `version`, or an anchor (`base_version` = -1) that holds everything."""

    run: str
    version: int
    incarnation: int
    digest: str
    form: Literal["patch", "anchor"]
    base_version: int = -1
    base_digest: str = ""
    objects: tuple[ObjectRef, ...]
    step: int = -1


class ApplyOrder(Message, frozen=True, kw_only=True, tag="apply"):
    """param_sync lets one engine through: apply these links in order, verify each digest, then serve `version`."""

    run: str
    order_id: str
    engine: str
    version: int
    incarnation: int
    digest: str
    links: tuple[WeightsManifest, ...]
    mode: InFlightMode
    grace_s: float = 0.0  # `regenerate`: what ends within it does so under the old weights
    deadline_ns: int


class EngineState(Message, frozen=True, kw_only=True, tag="engine_state"):
    """An engine's confirmed state; it advances only after the digest was verified. Also its heartbeat in REGISTRY."""

    run: str
    engine: str
    generator: str
    phase: EnginePhase
    version: int  # -1: nothing verified yet
    incarnation: int
    digest: str
    running: int = 0
    waiting: int = 0
    max_running: int = 0
    order_id: str = ""
    error: str = ""
    paused_s: float = 0.0  # how long new generations waited for the last change of weights
    frozen_s: float = 0.0  # of that, nothing was sampled at all
    paused_total_s: float = 0.0  # of all changes since start
    weight_path: str = ""  # "changed elements", or "whole tensors: <why>"
    discarded_tokens: int = 0  # sampled, and thrown away for a change of weights, since start
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    generated_tokens: int = 0
    at_ns: int = 0


class FleetVersions(Message, frozen=True, kw_only=True, tag="fleet"):
    """The fleet's version vector, after every confirmed change.

    -1 stands for no version of the line that training stands on: nothing verified, or a branch that the trainer has left.
    """

    run: str
    target: int
    incarnation: int
    engines: dict[str, int]
    oldest: int  # among engines in rotation; -1: none
    newest: int


class PolicyManifest(Message, frozen=True, kw_only=True, tag="policy_manifest"):
    """The behaviour's fixed parts (T11). Its hash is `manifest` on leases, turns, episodes and groups."""

    model: str
    base_digest: str
    tokenizer_sha256: str
    template_sha256: str
    system_prompt_sha256: str
    tool_schemas_sha256: str
    parser: str
    memory_policy: str = "linear"
    compactor: str = "none"
    max_turns: int
    max_action_tokens: int
    max_context_tokens: int
    sampling: str

    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 over the canonical encoding."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]
