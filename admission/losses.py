"""Groups that lost an item after it was written: what proves the loss, and the ledger entry that closes such a group.

A group may be lost between its batch and the trainer's fetch. The trainer then leaves it out of the step, and the step's commit
is the evidence for ever, whatever can be read later: the group is taken out of the batch and abandoned.

When a loss is noticed depends on when somebody looks, so the entry's place in the ledger is the one thing that timing decides;
everything that stands in it follows from the lost item. A replay looks whether the item is really not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from admission.assembly import Assembly
from schemas.group import ReadyGroup
from schemas.ledger import AbandonEntry, AbandonReason, LostItem
from schemas.table import Stream


def lost_entries(state: Assembly, run: str, settings_hash: str) -> list[AbandonEntry]:
    """The entries that close the groups of which the state knows a loss."""
    return [
        loss_entry(run, loss.group, loss.family, loss.ready_seq, loss.item, settings_hash, step=loss.step)
        for loss in state.losses()
    ]


def loss_entry(
    run: str,
    group: str,
    family: str,
    ready_seq: int,
    item: LostItem,
    settings_hash: str,
    *,
    step: int | msgspec.UnsetType = msgspec.UNSET,
) -> AbandonEntry:
    """Close `group` because of `item`; `step` names the batch that it is taken out of."""
    if item.stream == Stream.READY:
        detail = f"its ready entry at READY {item.seq} cannot be used"
    else:
        detail = f"EPISODES {item.seq} is not the item {item.digest[:12]} that READY {ready_seq} names"
    if isinstance(step, int):
        detail = f"step {step} could not fetch it: {detail}"
    return AbandonEntry(
        run=run,
        group=group,
        ready_seq=ready_seq,
        reason=AbandonReason.LOST_ITEM,
        detail=detail,
        family=family,
        settings_hash=settings_hash,
        lost=item,
        step=step,
    )


def first_lost(group: ReadyGroup, episodes: Mapping[int, str]) -> LostItem | None:
    """The first item of a ready group that is not in EPISODES (sequence → digest of what stands there); `None`: all are."""
    for sibling in sorted(group.siblings, key=lambda s: s.slot):
        for seq, digest in ((sibling.episode_seq, sibling.episode_digest), (sibling.verdict_seq, sibling.verdict_digest)):
            if seq and episodes.get(seq) != digest:
                return LostItem(str(Stream.EPISODES), seq, digest)
    return None


@dataclass(frozen=True)
class Evidence:
    """What a replay needs besides READY, TRAIN and LEDGER to prove losses.

    `families`: family of every leased training group. `episodes`: digest of what stands at each EPISODES sequence.
    """

    families: Mapping[str, str] = field(default_factory=dict)
    episodes: Mapping[int, str] | None = None  # none: EPISODES was not read

    def refutes(self, entry: AbandonEntry, item: LostItem, ready: Mapping[int, ReadyGroup]) -> str:
        """Why `item` does not prove that the group lost it; empty when it does."""
        if item.stream == Stream.READY:
            held = ready.get(item.seq)
            return f"READY {item.seq} holds the group" if held is not None and held.group == entry.group else ""
        if self.episodes is None:
            return "EPISODES was not read, so the loss cannot be seen"
        if self.episodes.get(item.seq) == item.digest:
            return f"EPISODES {item.seq} holds the item"
        group = ready.get(entry.ready_seq)
        named = {(s.episode_seq, s.episode_digest) for s in group.siblings} if group else set()
        named |= {(s.verdict_seq, s.verdict_digest) for s in group.siblings} if group else set()
        return "" if (item.seq, item.digest) in named else f"READY {entry.ready_seq} does not name EPISODES {item.seq}"
