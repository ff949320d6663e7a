"""What was published of every step, and the one way to publish the next: rank 0's view of `train.step.*`.

The store may have lost commits. A step whose commit is gone is known by what names its digest besides: the step after it, which
starts from it, and the manifest of its version. If it is taken again it is announced again, and only with those bits.
"""

from __future__ import annotations

from typing import TypeVar

import structlog

from schemas.codec import CodecError, decode
from schemas.ledger import LostItem
from schemas.lineage import Lineage
from schemas.message import Message
from schemas.policy import WeightsManifest
from schemas.table import Stream
from schemas.training import StepCommit
from services.bus import Bus
from services.consume import read_events
from services.continuity import Hole
from services.dead_letters import pass_over
from services.items import Item
from services.pull import Damaged
from trainer.checkpoint import Commit

log = structlog.get_logger()
M = TypeVar("M", bound=Message)
_STEPS = "train.step.*"


class StepLog:
    """The line of published versions. Every append is fenced by the position of the last commit that was seen.

    So a trainer that another one has overtaken cannot publish: it gets `Fenced`, ends, and folds the log again.
    """

    def __init__(self, bus: Bus, base_digest: str) -> None:
        self.line = Lineage()
        self._bus = bus
        self._base_digest = base_digest
        self._last_seq = 0
        self._newest_step = -1
        self._lost: dict[int, dict[str, LostItem]] = {}
        self._manifests: dict[tuple[int, int], str] = {}  # incarnation, version -> digest

    async def read(self) -> None:
        """Fold what is stored. What cannot be read is passed over with an alarm: ledger and checkpoints tell it again."""
        for event in await read_events(self._bus, Stream.TRAIN, _STEPS, start=self._last_seq + 1):
            if isinstance(event, Hole):
                continue
            item = event.item if isinstance(event, Damaged) else event
            self._last_seq = max(self._last_seq, item.seq)
            if (commit := await self._readable(event, StepCommit)) is not None:
                self._take(item.seq, commit)
        for event in await read_events(self._bus, Stream.POLICY, "policy.staged.*", "policy.anchor.*"):
            if not isinstance(event, Hole) and (link := await self._readable(event, WeightsManifest)) is not None:
                self._manifests[link.incarnation, link.version] = link.digest

    async def _readable(self, event: Item | Damaged, kind: type[M]) -> M | None:
        try:
            if isinstance(event, Item):
                return event.decode(kind)
            await pass_over(self._bus, event)
        except CodecError as error:
            await pass_over(self._bus, event, error)
        return None

    def lost_of(self, step: int) -> dict[str, LostItem]:
        """The groups that a published commit of the step left out, on whichever line: that was decided once."""
        return self._lost.get(step, {})

    async def announce(self, commit: StepCommit) -> None:
        """Publish a step's commit. Raises `Fenced` when another trainer published anything since we last looked."""
        subject = self._bus.subjects.step(commit.step, commit.incarnation)
        stored = await self._bus.append(subject, commit, after=self._last_seq, within=self._bus.subjects.pattern(_STEPS))
        self._take(stored.seq, commit)

    def incarnation_of(self, step: int, digest: str, groups: tuple[str, ...] | None = None) -> int:
        """The incarnation under which the step's outcome must be published, if it came of these groups and has this digest.

        That of the published commit if it came out the same, the newest where there is none, and else a new one: a version
        names one set of weights for ever (invariant 5).
        """
        known, maker = self.digest_of(step + 1), self.line.maker_of(step)
        published = self.line.commit_of(step)
        if known in ("", digest) and (groups is None or published is None or published.groups == groups):
            return maker
        log.error(
            "step came out with other bits" if known != digest else "step came out of other groups",
            step=step,
            published=known[:12],
            came_out=digest[:12],
            left=maker,
            begins=self.line.incarnation + 1,
        )
        return self.line.incarnation + 1

    def digest_of(self, version: int) -> str:
        """Digest of a version on the line; empty when it was not published."""
        if version == 0:
            return self._base_digest
        if (commit := self.line.commit_of(version - 1)) is not None:
            return commit.digest
        if (after := self.line.commit_of(version)) is not None:
            return after.base_digest
        return self._manifests.get((self.line.maker_of(version - 1), version), "")

    def steps_ahead(self, step: int) -> int:
        """Published steps from `step` on: those that a recovered trainer takes again."""
        return max(0, self._newest_step + 1 - step)

    def refusal(self, record: Commit, ranks: int) -> str:
        """Why training must not continue from a checkpoint, or empty. It must lie on the line, or directly continue it."""
        if record.ranks != ranks:
            return f"it holds {record.ranks} ranks, this trainer has {ranks}"
        published = self.line.commit_of(record.step)
        if published is not None and (published.incarnation, published.digest) == (record.incarnation, record.digest):
            return ""
        commit = pending_of(record)
        if commit is None:
            return f"step {record.step} of incarnation {record.incarnation} is not on the published line"
        before = self.digest_of(record.step)
        if commit.base_digest != before:
            return f"it continues {commit.base_digest[:12]}, the line has {before[:12] or 'nothing'} as version {record.step}"
        begins = record.incarnation == self.line.incarnation + 1
        continues = record.incarnation == self.line.incarnation and published is None
        if begins or continues:
            return ""
        return f"step {record.step} of incarnation {record.incarnation} was published with other bits or was left"

    def unannounced(self, record: Commit) -> StepCommit | None:
        """The announcement that a checkpoint holds and that a crash kept from being made."""
        published = self.line.commit_of(record.step)
        if published is not None and (published.incarnation, published.digest) == (record.incarnation, record.digest):
            return None
        return pending_of(record)

    def _take(self, seq: int, commit: StepCommit) -> None:
        self._last_seq = max(self._last_seq, seq)
        for left in commit.left_out():
            self._lost.setdefault(commit.step, {}).setdefault(left.group, left.item)
        if self.line.add(commit):
            self._newest_step = commit.step if self.line.began_with(commit) else max(self._newest_step, commit.step)


def pending_of(record: Commit) -> StepCommit | None:
    """The announcement in a checkpoint's record; `None` when there is none or it is not of these weights."""
    try:
        commit = decode(record.announcement, StepCommit)
    except CodecError:
        return None
    named = (commit.step, commit.version, commit.incarnation, commit.digest)
    return commit if named == (record.step, record.version, record.incarnation, record.digest) else None
