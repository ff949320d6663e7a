"""Is all that a batch hands over still in the store? Asked right before the batch is appended, since a damaged store loses
items in silence and a group that the trainer cannot fetch would stop it. Reads headers only: position and digest."""

from __future__ import annotations

from collections.abc import Sequence

from admission.losses import first_lost
from schemas.group import ReadyGroup
from schemas.ledger import LostItem
from schemas.table import Stream
from services.bus import Bus
from services.consume import read_events
from services.items import Item

_GROUPS_PER_READ = 32


async def lost_items(bus: Bus, batch: Sequence[tuple[int, ReadyGroup]]) -> dict[str, LostItem]:
    """Of the groups of a batch, given with their READY sequences, those that lack an item, with that item."""
    lost: dict[str, LostItem] = {}
    for place in range(0, len(batch), _GROUPS_PER_READ):
        part = batch[place : place + _GROUPS_PER_READ]
        names = [group.group for _, group in part]
        items = [f"{kind}.{name}.*" for name in names for kind in ("episode", "verdict")]
        episodes = await _present(bus, Stream.EPISODES, items, min(s.episode_seq for _, group in part for s in group.siblings))
        ready = await _present(bus, Stream.READY, [f"ready.{name}" for name in names], min(seq for seq, _ in part))
        for seq, group in part:
            item = first_lost(group, episodes) if seq in ready else LostItem(str(Stream.READY), seq, "")
            if item is not None:
                lost[group.group] = item
    return lost


async def _present(bus: Bus, stream: Stream, patterns: list[str], start: int) -> dict[int, str]:
    """Sequence and declared digest of everything that stands on these subjects."""
    found = await read_events(bus, stream, *patterns, start=start, bodies=False)
    return {event.seq: event.digest for event in found if isinstance(event, Item)}
