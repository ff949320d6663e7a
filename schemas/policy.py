"""Policy versions: what each one is, how to get there, and which engine serves which.

`policy.staged.<v>` and `policy.anchor.<v>` come from param_sync (`<v>-<i>` from the trainer's incarnation `i` > 0),
`policy.apply.<engine>` are its orders, `policy.engine.<engine>` the engines' confirmed changes, `policy.active` the fleet's
version vector.
"""

from __future__ import annotations

from typing import Literal

from schemas.message import Message
from schemas.training import ObjectRef

InFlightMode = Literal["finish_old", "continue_keep", "continue_recompute"]
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
    paused_s: float = 0.0  # of the last apply
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
