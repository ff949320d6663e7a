"""Evaluation points: when they are due, which groups they lease, and what they found. A pure fold; nothing here has a clock.

A point is named by the policy version that it asks about: `step-00000` before any training, `step-00020` after twenty steps.
The first and the last are exact, since nothing trains beside them; those between run beside training, and their versions are
reported as they were sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from schemas.group import LOST_VERDICT, ReadyGroup, Sibling
from schemas.lease import GroupLease
from schemas.task import Split
from schemas.termination import Termination
from schemas.training import EvalResult, SplitScore

HELDOUT: tuple[Split, ...] = ("heldout_instance", "heldout_template")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """Which points there are, and how many attempts each split gets."""

    at_start: bool
    at_end: bool
    every_steps: int
    max_steps: int
    evaluate_only: bool
    group_size: int  # attempts of one task that one lease holds at most
    full_attempts: Mapping[Split, int]
    interim_attempts: int
    tasks: Mapping[Split, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation: `step` is the policy version that it is about."""

    step: int
    kind: Literal["start", "interim", "final"]

    @property
    def name(self) -> str:
        return f"step-{self.step:05d}"


@dataclass(frozen=True, slots=True)
class EvalGroup:
    """One lease of a point: some attempts of one held-out task."""

    index: int
    split: Split
    task_id: str
    size: int


def plan(point: Point, settings: EvalSettings) -> tuple[EvalGroup, ...]:
    """The leases of a point, in order. Attempts go round-robin over a split's tasks, then each task's into groups."""
    groups: list[tuple[Split, str, int]] = []
    for split in HELDOUT:
        tasks = settings.tasks.get(split, ())
        attempts = settings.interim_attempts if point.kind == "interim" else settings.full_attempts.get(split, 0)
        for index, task_id in enumerate(tasks):
            left = attempts // len(tasks) + (index < attempts % len(tasks))
            while left > 0:
                groups.append((split, task_id, min(left, settings.group_size)))
                left -= settings.group_size
    return tuple(EvalGroup(index, split, task_id, size) for index, (split, task_id, size) in enumerate(groups))


@dataclass(slots=True)
class _Progress:
    leased: int = 0
    first_ns: int = 0
    last_ns: int = 0
    graded: dict[str, ReadyGroup] = field(default_factory=dict)


class EvalBook:
    """The fold over evaluation leases, graded groups and published results."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        self._points: dict[str, _Progress] = {}
        self._leases: dict[str, GroupLease] = {}
        self._lost: dict[str, int] = {}  # group whose graded entry cannot be used -> the server's time of it

    def lease(self, lease: GroupLease) -> None:
        """An evaluation group was leased; the caller tells each once."""
        self._at(lease.eval_point).leased += 1
        self._leases[lease.group] = lease
        if lease.group in self._lost:
            self.lost(lease.group, self._lost[lease.group])

    def lease_stored(self, point: str, time_ns: int) -> None:
        """When the server stored a lease of the point."""
        progress = self._at(point)
        progress.first_ns = min(progress.first_ns or time_ns, time_ns)

    def graded(self, group: ReadyGroup, time_ns: int) -> None:
        """All attempts of an evaluation group are judged. A repeat changes nothing."""
        if group.eval_point not in self.done:
            progress = self._at(group.eval_point)
            progress.graded[group.group] = group
            progress.last_ns = max(progress.last_ns, time_ns)

    def lost(self, group: str, time_ns: int) -> None:
        """What stands on `graded.<group>` cannot be used, so nobody will ever know its attempts: they count as censored."""
        self._lost[group] = time_ns
        if lease := self._leases.get(group):
            self.graded(lost_group(lease), time_ns)

    def result(self, point: str) -> None:
        """The point's result is published; its groups are no longer needed."""
        self.done.add(point)
        if progress := self._points.get(point):
            progress.graded.clear()

    def leased(self, point: str) -> int:
        return self._at(point).leased

    def in_flight(self) -> int:
        """Leased and not yet graded groups of unfinished points."""
        return sum(p.leased - len(p.graded) for name, p in self._points.items() if name not in self.done)

    def unfinished(self) -> tuple[str, ...]:
        """Points that have leases and no result, earliest first."""
        return tuple(sorted(name for name, p in self._points.items() if p.leased and name not in self.done))

    def score(self, run: str, point: Point, groups: int) -> EvalResult | None:
        """The result once all `groups` leases of the point are graded, else `None`."""
        progress = self._at(point.name)
        if progress.leased < groups or len(progress.graded) < progress.leased:
            return None
        graded = sorted(progress.graded.values(), key=lambda group: group.ordinal)
        splits = tuple(score(split, [g for g in graded if g.split == split]) for split in HELDOUT)
        seconds = (progress.last_ns - progress.first_ns) / 1e9 if progress.first_ns else 0.0
        return EvalResult(
            run=run, point=point.name, step=point.step, splits=tuple(s for s in splits if s.tasks), seconds=max(0.0, seconds)
        )

    def _at(self, point: str) -> _Progress:
        return self._points.setdefault(point, _Progress())


def lost_group(lease: GroupLease) -> ReadyGroup:
    """A whole group of which nothing is known but its lease."""
    nothing = Sibling(
        slot=0,
        episode_seq=0,
        episode_digest="",
        verdict_seq=0,
        verdict_digest="",
        termination=Termination.INFRA_ABORT,
        status=LOST_VERDICT,
        reward=None,
        success=None,
        oldest_version=-1,
        newest_version=-1,
        incarnation=0,
        sampled_tokens=0,
        total_tokens=0,
        turns=0,
        manifest="",
    )
    return ReadyGroup(
        run=lease.run,
        group=lease.group,
        ordinal=lease.ordinal,
        purpose=lease.purpose,
        task_id=lease.task_id,
        family=lease.family,
        template=lease.template,
        split=lease.split,
        manifest=lease.manifest,
        group_size=lease.group_size,
        siblings=tuple(msgspec.structs.replace(nothing, slot=slot) for slot in range(lease.group_size)),
        eval_point=lease.eval_point,
    )


def current_point(settings: EvalSettings, book: EvalBook, committed_steps: int, serving: int) -> Point | None:
    """The point to work on now, if any. `serving` is the oldest version in rotation, -1 while no engine serves.

    A begun point comes first. Of several interim points that became due unnoticed only the last is made.
    """
    if begun := book.unfinished():
        return _named(begun[0], settings)
    start = Point(0, "start")
    if (
        (settings.at_start or settings.evaluate_only)
        and start.name not in book.done
        and (settings.evaluate_only or serving <= 0)
    ):
        return start
    if settings.evaluate_only:
        return None
    final = Point(settings.max_steps, "final")
    if settings.max_steps and committed_steps >= settings.max_steps:
        due = settings.at_end and serving == settings.max_steps and final.name not in book.done
        return final if due else None
    if settings.every_steps and serving > 0:
        interim = Point(serving - serving % settings.every_steps, "interim")
        within = interim.step > 0 and (not settings.max_steps or interim.step < settings.max_steps)
        if within and interim.name not in book.done and plan(interim, settings):
            return interim
    return None


def _named(name: str, settings: EvalSettings) -> Point:
    step = int(name.removeprefix("step-"))
    if step == 0:
        return Point(0, "start")
    return Point(step, "final" if settings.max_steps and step >= settings.max_steps else "interim")


def score(split: Split, groups: Sequence[ReadyGroup]) -> SplitScore:
    """Successes and attempts of one split. Censored siblings are counted apart: they are no attempts, and no failures."""
    judged = [(group, sibling) for group in groups for sibling in group.siblings if _is_attempt(sibling)]
    versions = [s for group in groups for s in group.siblings if s.sampled_tokens]
    return SplitScore(
        split=split,
        successes=sum(_succeeded(sibling) for _, sibling in judged),
        attempts=len(judged),
        censored=sum(len(group.siblings) for group in groups) - len(judged),
        tasks=len({group.task_id for group in groups}),
        oldest_version=min((s.oldest_version for s in versions), default=-1),
        newest_version=max((s.newest_version for s in versions), default=-1),
        by_family=_tally((group.family, sibling) for group, sibling in judged),
        by_task=_tally((group.task_id, sibling) for group, sibling in judged),
    )


def _is_attempt(sibling: Sibling) -> bool:
    """A graded attempt counts; so does a tampered one, as no success."""
    return sibling.status in ("graded", "tampered")


def _succeeded(sibling: Sibling) -> bool:
    return sibling.status == "graded" and bool(sibling.success)


def _tally(judged: Iterable[tuple[str, Sibling]]) -> dict[str, tuple[int, int]]:
    tally: dict[str, tuple[int, int]] = {}
    for key, sibling in judged:
        successes, attempts = tally.get(key, (0, 0))
        tally[key] = (successes + _succeeded(sibling), attempts + 1)
    return dict(sorted(tally.items()))
