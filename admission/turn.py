"""The order in which ready groups are judged for a batch: completion order, but for those that the age limit lets go first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from admission.background import Background
from admission.gates import GateSettings
from schemas.group import ReadyGroup
from schemas.ledger import BatchGroup

Waiting = tuple[int, ReadyGroup | BatchGroup, int | msgspec.UnsetType]  # READY sequence, group, age for which it goes first


@dataclass(frozen=True, slots=True)
class Turn:
    """The open ready groups in the order in which they are judged. `looked_at`: last READY sequence that the order needs."""

    groups: list[Waiting]
    looked_at: int


def turn_of(
    waiting: Sequence[tuple[int, ReadyGroup | BatchGroup]],
    background: Background,
    ready_seq: int,
    demand_seq: int,
    settings: GateSettings,
) -> Turn | None:
    """The order for this demand, of groups in completion order; READY is folded up to `ready_seq`.

    `None`: which groups were ready when the demand was stored is not known yet.
    """
    asked_ns = background.demanded_ns(demand_seq) if settings.max_age_s else 0
    if not asked_ns:
        return Turn([(seq, group, msgspec.UNSET) for seq, group in waiting], 0)
    last = background.last_ready_by(asked_ns)
    if last is None or ready_seq < last:
        return None
    first: list[tuple[int, int, ReadyGroup | BatchGroup]] = []
    rest: list[Waiting] = []
    for seq, group in waiting:
        if isinstance(group, BatchGroup):
            age_ns = group.aged_ns if isinstance(group.aged_ns, int) else 0
        else:
            age_ns = background.age_ns(group.group, asked_ns) if seq <= last else 0
        if age_ns > settings.max_age_s * 1e9:
            first.append((-age_ns, seq, group))
        else:
            rest.append((seq, group, msgspec.UNSET))
    first.sort(key=lambda held: held[:2])
    return Turn([*((seq, group, -younger) for younger, seq, group in first), *rest], last)
