"""Group leases: what binds all siblings of one group.

Producer: sampler (`task.lease.<ordinal>`, once). Consumer: one rollouter at a time. The bank and admission read it
for conservation.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.manifest import PolicyManifest
from schemas.message import Message
from schemas.task import Split
from schemas.trajectory import SamplingConfig

Purpose = Literal["train", "eval"]
TaskStream = Literal["learnable", "hard", "retain", "quarantined", "evaluation"]


class GroupLease(Message, frozen=True, kw_only=True, tag="lease"):
    """One candidate group. Example group id: `g00000042` (training) or `e00000007` (evaluation)."""

    run: str
    group: str
    ordinal: int
    purpose: Purpose
    task_id: str
    family: str
    template: str
    split: Split
    group_size: int
    manifest: str  # behaviour manifest hash; siblings and trainer must agree on it
    environment: str  # suite name and version
    base_snapshot: str  # state hash that a reset must produce; empty: not declared
    sampling: SamplingConfig
    seed: int
    stream: TaskStream = "learnable"
    propensity: float = 1.0  # probability with which the sampler drew this task
    leased_at_version: int = 0
    eval_point: str = ""  # which evaluation an `eval` lease belongs to
    slot_retries: int = 2
    policy: PolicyManifest | msgspec.UnsetType = msgspec.UNSET  # what `manifest` is the hash of, so that drift has a name


def ordinal_of(group: str) -> int:
    """The ordinal in a group's name; -1 for a name that is not one."""
    return int(group[1:]) if group[:1] in ("g", "e") and group[1:].isdecimal() else -1


def group_id(purpose: Purpose, ordinal: int) -> str:
    """The group's name; sorts by ordinal."""
    return f"{'g' if purpose == 'train' else 'e'}{ordinal:08d}"
