"""The trainer's requests for batches and the commit record of every step; evaluation results.

Producer: trainer (`train.demand.<step>`, `train.step.<step>`, once per incarnation) and sampler (`train.eval.<point>`, once).
Consumers: admission, param_sync, sampler, progress, audit.
"""

from __future__ import annotations

import msgspec

from schemas.ledger import LostItem
from schemas.manifest import PolicyManifest
from schemas.message import Message


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """Where an incarnation left the line before it: `version` is the last that both share, its first own is `version + 1`."""

    incarnation: int
    version: int


class BatchDemand(Message, frozen=True, kw_only=True, tag="demand"):
    """The trainer asks for the batch that updates `version`. One may be outstanding ahead of the step in work.

    Once per step and incarnation; of several for one step that of the newest incarnation counts.
    """

    run: str
    step: int
    version: int
    incarnation: int
    groups: int
    branches: tuple[Branch, ...] | msgspec.UnsetType = msgspec.UNSET  # of every incarnation after the first; unset: none
    policy: PolicyManifest | msgspec.UnsetType = msgspec.UNSET  # that every group of the batch must have; unset: not said

    def left(self) -> tuple[Branch, ...]:
        """`branches`, empty where there are none."""
        return () if isinstance(self.branches, msgspec.UnsetType) else self.branches


class ObjectRef(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable object in the object store."""

    name: str
    digest: str  # sha256 hex of the bytes
    size_bytes: int


class LostGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group of the step's batch that was not trained on, since the store no longer had `item`. It is decided once."""

    group: str
    item: LostItem


class StepCommit(Message, frozen=True, kw_only=True, tag="step"):
    """Step `step` is committed: these groups made policy `version` out of `version - 1`. Written after the checkpoint.

    The first commit of a later incarnation starts from a version of the line that it left, and its one object is an anchor.
    A step whose every group was lost has no groups and no optimizer step, and its weights are those before it.
    """

    run: str
    step: int
    version: int
    incarnation: int
    digest: str  # state digest of the bf16 weights
    base_digest: str
    groups: tuple[str, ...]
    rows: int
    trained_tokens: int
    optimizer_steps: int
    patches: tuple[ObjectRef, ...]  # one per trainer rank; together they turn the base into this version
    patch_bytes: int
    metrics: dict[str, float]
    ledger_seq: int
    checkpoint: str = ""
    wait_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    finished_ns: int = 0
    lost: tuple[LostGroup, ...] | msgspec.UnsetType = msgspec.UNSET  # in the batch's order; unset: none

    def left_out(self) -> tuple[LostGroup, ...]:
        """`lost`, empty where it is unset."""
        return () if isinstance(self.lost, msgspec.UnsetType) else self.lost

    def stands_on(self, batch: tuple[str, ...]) -> bool:
        """Whether the step trained on this batch: on all of its groups, in its order, but for those that it names as lost."""
        lost = {left.group for left in self.left_out()}
        return lost <= set(batch) and self.groups == tuple(group for group in batch if group not in lost)


class SplitScore(msgspec.Struct, frozen=True, kw_only=True):
    """Success on one held-out split."""

    split: str
    successes: int
    attempts: int
    censored: int
    tasks: int
    oldest_version: int
    newest_version: int
    by_family: dict[str, tuple[int, int]] = {}  # family -> (successes, attempts)
    by_task: dict[str, tuple[int, int]] = {}


class EvalResult(Message, frozen=True, kw_only=True, tag="eval"):
    """One evaluation point, both held-out splits apart. Example point: `step-00020`."""

    run: str
    point: str
    step: int
    splits: tuple[SplitScore, ...]
    seconds: float = 0.0
    manifest: str | msgspec.UnsetType = msgspec.UNSET  # of the behaviour that was evaluated; unset in results without
