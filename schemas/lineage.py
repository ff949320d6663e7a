"""The line of policy versions that training stands on, after a recovered trainer had to leave a branch behind.

A recovered trainer whose step comes out with other bits than were published may not reuse the name: it begins the next
incarnation at that step. Versions made before the step stay shared, those that the left incarnation made from it on are a
dead branch. Pure; producer of the facts: trainer (step commits, demands). Users: trainer, admission, param_sync, progress.
"""

from __future__ import annotations

from collections.abc import Sequence

from schemas.training import Branch, StepCommit


def on_line(branches: Sequence[Branch], incarnation: int, version: int) -> bool:
    """Whether this version of this incarnation belongs to the line that the branches lead to; else it is a dead branch's."""
    return all(version <= branch.version for branch in branches if branch.incarnation > incarnation)


class Lineage:
    """The fold over `train.step.*` in stream order. Items may come again.

    `incarnation`: the newest one that has published a step; 0 before any did.
    """

    def __init__(self) -> None:
        self.incarnation = 0
        self._commits: dict[tuple[int, int], StepCommit] = {}
        self._began: dict[int, int] = {}  # incarnation -> its first step, which is also the version that this step updated

    def add(self, commit: StepCommit) -> bool:
        """Take one commit in; true when it is on the line, false when it is of a branch that was left."""
        self._commits.setdefault((commit.incarnation, commit.step), commit)
        if commit.incarnation not in self._began:
            self._began[commit.incarnation] = commit.step
        self.incarnation = max(self.incarnation, commit.incarnation)
        return self.on_line(commit.incarnation, commit.version)

    def branches(self) -> tuple[Branch, ...]:
        """Where each incarnation after the first began, oldest first."""
        later = sorted(incarnation for incarnation in self._began if incarnation > 0)
        return tuple(Branch(incarnation, self._began[incarnation]) for incarnation in later)

    def on_line(self, incarnation: int, version: int) -> bool:
        """See the function of this name."""
        return on_line(self.branches(), incarnation, version)

    def maker_of(self, step: int, up_to: int | None = None) -> int:
        """The incarnation that made the step on the line, as it stood in incarnation `up_to` (none: as it stands now)."""
        later = (branch for branch in self.branches() if branch.version <= step)
        return max((branch.incarnation for branch in later if up_to is None or branch.incarnation <= up_to), default=0)

    def commit_of(self, step: int, up_to: int | None = None) -> StepCommit | None:
        """The step's commit on the line, if it was published; `up_to` as in `maker_of`."""
        return self._commits.get((self.maker_of(step, up_to), step))

    def began_with(self, commit: StepCommit) -> bool:
        """Whether this commit is the first of an incarnation after the first, so that it brings an anchor and not a patch."""
        return commit.incarnation > 0 and self._began.get(commit.incarnation, commit.step) == commit.step
