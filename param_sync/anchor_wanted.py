"""A committed version that cannot be reproduced here: ask the living trainer for an anchor of it or of a newer one."""

from __future__ import annotations

from collections.abc import Collection

from param_sync.patch.codec import apply
from param_sync.patch.errors import PatchError
from param_sync.patch.snapshot import Snapshot
from schemas.lineage import Lineage
from schemas.policy import AnchorWanted
from schemas.table import Stream
from schemas.training import ObjectRef, StepCommit
from services import blobs
from services.bus import Bus, IntegrityError, Item
from services.consume import read_events
from services.ownership import Ownership


async def ask(bus: Bus, ownership: Ownership, commit: StepCommit, reason: str) -> None:
    """Say once what is wanted. It may be said again at any time."""
    await ownership.confirm()
    wanted = AnchorWanted(run=bus.run, version=commit.version, incarnation=commit.incarnation, reason=reason[:500])
    await bus.publish(bus.subjects.wanted(), wanted)


async def answer(bus: Bus, commit: StepCommit) -> tuple[StepCommit, ObjectRef, Snapshot] | None:
    """The newest commit on the line, from `commit` on, of which the store holds a good anchor, with its weights."""
    line = Lineage()
    seen: list[StepCommit] = []
    for event in await read_events(bus, Stream.TRAIN, "train.step.*"):
        if isinstance(event, Item):
            seen.append(event.decode(StepCommit))
            line.add(seen[-1])
    return await _good(bus, candidates(seen, line, commit), await blobs.names(bus))


def candidates(commits: Collection[StepCommit], line: Lineage, since: StepCommit) -> list[StepCommit]:
    """The commits on the line that lead as far as `since` or further, newest first. Pure."""
    beyond = [c for c in commits if (c.incarnation, c.version) >= (since.incarnation, since.version)]
    living = [c for c in beyond if line.on_line(c.incarnation, c.version)]
    return sorted(living, key=lambda c: (c.incarnation, c.version), reverse=True)


async def _good(
    bus: Bus, commits: Collection[StepCommit], stored: Collection[str]
) -> tuple[StepCommit, ObjectRef, Snapshot] | None:
    for commit in commits:
        name = f"anchor-{commit.incarnation}-{commit.version}-{commit.digest[:16]}"
        reference = await blobs.find(bus, name) if name in stored else None
        if reference is None:
            continue
        try:
            made = apply(None, await blobs.get(bus, reference))
        except (PatchError, IntegrityError):  # a damaged one is no answer; an older one may be
            continue
        if (made.version, made.incarnation, made.digest) == (commit.version, commit.incarnation, commit.digest):
            return commit, reference, made
    return None
