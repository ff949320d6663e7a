"""Complete verified groups, as references and the numbers that admission decides from.

Producer: bank (`ready.<group>` for training, `graded.<group>` for evaluation; once). Consumers: admission, sampler, trainer.
Admission needs no trajectory body: everything that its decision uses stands here.
"""

from __future__ import annotations

import msgspec

from schemas.lease import Purpose
from schemas.message import Message
from schemas.task import Split
from schemas.termination import Termination

LOST_EPISODE, LOST_VERDICT = "lost_episode", "lost_verdict"
LOST = (LOST_EPISODE, LOST_VERDICT)  # statuses of siblings of which an item is damaged or missing; sequence 0: missing


class IncarnationSpan(msgspec.Struct, frozen=True, array_like=True):
    """The newest version of one trainer incarnation among an episode's sampled tokens."""

    incarnation: int
    newest_version: int


class Sibling(msgspec.Struct, frozen=True, kw_only=True):
    """One sealed and judged episode, by stream sequence and digest."""

    slot: int
    episode_seq: int
    episode_digest: str
    verdict_seq: int
    verdict_digest: str
    termination: Termination
    status: str  # the verdict's, or one of `LOST`
    reward: float | None
    success: bool | None
    oldest_version: int
    newest_version: int
    incarnation: int
    sampled_tokens: int
    total_tokens: int
    turns: int
    manifest: str
    finite: bool = True  # log-probs present, finite and aligned
    incarnations: tuple[IncarnationSpan, ...] | msgspec.UnsetType = msgspec.UNSET  # where there are several; unset: one

    def names(self) -> tuple[IncarnationSpan, ...]:
        """The newest version of every incarnation among the sampled tokens."""
        if isinstance(self.incarnations, msgspec.UnsetType):
            return (IncarnationSpan(self.incarnation, self.newest_version),)
        return self.incarnations


class ReadyGroup(Message, frozen=True, kw_only=True, tag="ready"):
    """A group whose last sibling has been verified. Stream order is completion order."""

    run: str
    group: str
    ordinal: int
    purpose: Purpose
    task_id: str
    family: str
    template: str
    split: Split
    manifest: str
    group_size: int
    siblings: tuple[Sibling, ...]
    eval_point: str = ""

    def stands_on(self, subject: str) -> bool:
        """Whether this is the entry that the subject promises; on another group's subject it is nobody's."""
        return subject.rpartition(".")[2] == self.group

    def oldest_version(self) -> int:
        """Oldest policy version among all sampled tokens of the group; siblings without tokens do not count."""
        return min((s.oldest_version for s in self.siblings if s.sampled_tokens), default=-1)

    def newest_version(self) -> int:
        return max((s.newest_version for s in self.siblings if s.sampled_tokens), default=-1)

    def siblings_by_slot(self) -> list[Sibling]:
        """The siblings, by slot."""
        return sorted(self.siblings, key=lambda sibling: sibling.slot)

    def rewards(self) -> tuple[float | None, ...]:
        """Rewards by slot; `None` where the sibling is censored."""
        return tuple(s.reward for s in sorted(self.siblings, key=lambda s: s.slot))
