"""What was published of every step, and the one way to publish the next: rank 0's view of `train.step.*`."""

from __future__ import annotations

import structlog

from schemas.codec import CodecError, decode
from schemas.lineage import Lineage
from schemas.table import Stream
from schemas.training import StepCommit
from services.bus import Bus
from services.consume import read_all
from trainer.checkpoint import Commit

log = structlog.get_logger()
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

    async def read(self) -> None:
        """Fold what is stored."""
        for item in await read_all(self._bus, Stream.TRAIN, _STEPS, start=self._last_seq + 1):
            self._take(item.seq, item.decode(StepCommit))

    async def announce(self, commit: StepCommit) -> None:
        """Publish a step's commit. Raises `Fenced` when another trainer published anything since we last looked."""
        subject = self._bus.subjects.step(commit.step, commit.incarnation)
        stored = await self._bus.append(subject, commit, after=self._last_seq, within=self._bus.subjects.pattern(_STEPS))
        self._take(stored.seq, commit)

    def incarnation_of(self, step: int, digest: str) -> int:
        """The incarnation under which the step's outcome must be published, if these are its weights' digest.

        That of the published commit if it came out the same, the newest where there is none, and else a new one: a version
        names one set of weights for ever (invariant 5).
        """
        published = self.line.commit_of(step)
        if published is None:
            return self.line.incarnation
        if published.digest == digest:
            return published.incarnation
        log.error(
            "step came out with other bits",
            step=step,
            published=published.digest[:12],
            came_out=digest[:12],
            left=published.incarnation,
            begins=self.line.incarnation + 1,
        )
        return self.line.incarnation + 1

    def digest_of(self, version: int) -> str:
        """Digest of a version on the line; empty when it was not published."""
        if version == 0:
            return self._base_digest
        commit = self.line.commit_of(version - 1)
        return commit.digest if commit is not None else ""

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
