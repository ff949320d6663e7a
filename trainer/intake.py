"""From a ledger entry to training rows: the batch's groups by sequence, each item checked against the digest that names it.

The store may lose an item between the ledger entry and the fetch. Its group is then left out of the step, by name; which groups
those are is decided once, the same on every rank, and stands in the step's commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from schemas.codec import CodecError
from schemas.group import LOST, ReadyGroup, Sibling
from schemas.ledger import BatchEntry, BatchGroup, LostItem
from schemas.table import Stream
from schemas.training import LostGroup
from schemas.trajectory import Episode
from services.bus import Bus
from services.items import IntegrityError, Item
from trainer.batch import TrainRow, row_from_episode
from trainer.credit import Credit, Scale, advantages

_PARALLEL_READS = 32


@dataclass(frozen=True, kw_only=True)
class TrainingGroup:
    """One group of a batch with its sealed episodes, by slot."""

    ready: ReadyGroup
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the store has of one group of a batch: the whole group, or the first item that is not there."""

    group: TrainingGroup | None = None
    lost: LostItem | None = None
    place: int = -1  # of the sibling whose episode that is


async def fetch(bus: Bus, entry: BatchEntry) -> list[TrainingGroup]:
    """The groups of a batch in the ledger's order. Raises `IntegrityError` when an item is missing or is not the one named."""
    groups: list[TrainingGroup] = []
    for named, found in zip(entry.groups, await look(bus, entry), strict=True):
        if found.group is None:
            raise IntegrityError(f"{named.group}, of batch {entry.step}: its item is not in the store: {found.lost}")
        groups.append(found.group)
    return groups


async def look(bus: Bus, entry: BatchEntry, known: Mapping[str, LostItem] | None = None) -> list[Found]:
    """What the store has of a batch, in the ledger's order. Groups that are `known` to be lost are not looked for."""
    limit = asyncio.Semaphore(_PARALLEL_READS)
    lost = known or {}

    async def one(named: BatchGroup) -> Found:
        return Found(lost=lost[named.group]) if named.group in lost else await _group(bus, limit, named)

    return list(await asyncio.gather(*(one(named) for named in entry.groups)))


def marks_of(found: Sequence[Found]) -> list[int]:
    """For each group, what one rank lacks: 0 nothing, 1 the ready entry, 2 + i the i-th sibling's episode."""
    return [_mark(each) for each in found]


def _mark(found: Found) -> int:
    if found.group is not None or found.lost is None:
        return 0
    return 1 if found.lost.stream == Stream.READY else 2 + max(found.place, 0)


def settle(
    entry: BatchEntry, found: Sequence[Found], marks: Sequence[int]
) -> tuple[list[TrainingGroup], tuple[LostGroup, ...]]:
    """The groups to train on, and those that are left out, since this rank or, by its mark, another one lacks them."""
    kept: list[TrainingGroup] = []
    lost: list[LostGroup] = []
    for named, each, mark in zip(entry.groups, found, marks, strict=True):
        if each.group is not None and mark == 0:
            kept.append(each.group)
        else:
            lost.append(LostGroup(named.group, each.lost or _marked(named, each.group, mark)))
    return kept, tuple(lost)


def _marked(named: BatchGroup, group: TrainingGroup | None, mark: int) -> LostItem:
    """The item that another rank's mark stands for."""
    if group is None or mark < 2:
        return LostItem(str(Stream.READY), named.ready_seq, "")
    sibling = group.ready.siblings_by_slot()[mark - 2]
    return LostItem(str(Stream.EPISODES), sibling.episode_seq, sibling.episode_digest)


async def _group(bus: Bus, limit: asyncio.Semaphore, named: BatchGroup) -> Found:
    ready = await _ready(bus, limit, named)
    if ready is None:
        return Found(lost=LostItem(str(Stream.READY), named.ready_seq, ""))
    siblings = ready.siblings_by_slot()
    episodes = await asyncio.gather(*(_episode(bus, limit, named.group, sibling) for sibling in siblings))
    for place, (sibling, episode) in enumerate(zip(siblings, episodes, strict=True)):
        if episode is None:
            return Found(lost=LostItem(str(Stream.EPISODES), sibling.episode_seq, sibling.episode_digest), place=place)
    return Found(group=TrainingGroup(ready=ready, episodes=tuple(episode for episode in episodes if episode is not None)))


async def _ready(bus: Bus, limit: asyncio.Semaphore, named: BatchGroup) -> ReadyGroup | None:
    """The entry that the ledger names, or the one that the bank has written in its place, if that says the same."""
    async with limit:
        if (ready := _named(await _at(bus, Stream.READY, named.ready_seq), named)) is not None:
            return ready
        return _named(await _last(bus, bus.subjects.ready(named.group)), named)


def _named(item: Item | None, named: BatchGroup) -> ReadyGroup | None:
    """The item as the ready entry that the ledger names, if it is that."""
    try:
        ready = item.decode(ReadyGroup) if item is not None else None
    except CodecError:
        return None
    return ready if ready is not None and _is_named(ready, named) else None


def _is_named(ready: ReadyGroup, named: BatchGroup) -> bool:
    whole = not any(sibling.status in LOST for sibling in ready.siblings)
    versions = (ready.oldest_version(), ready.newest_version())
    return whole and ready.group == named.group and versions == (named.oldest_version, named.newest_version)


async def _episode(bus: Bus, limit: asyncio.Semaphore, group: str, sibling: Sibling) -> Episode | None:
    async with limit:
        item = await _at(bus, Stream.EPISODES, sibling.episode_seq)
        if item is None or item.digest != sibling.episode_digest:
            item = await _last(bus, bus.subjects.episode(group, sibling.slot))
    if item is None or item.digest != sibling.episode_digest:
        return None
    return item.decode(Episode)


async def _at(bus: Bus, stream: Stream, seq: int) -> Item | None:
    try:
        return await bus.get(stream, seq)
    except IntegrityError:
        return None


async def _last(bus: Bus, subject: str) -> Item | None:
    try:
        return await bus.last(subject)
    except IntegrityError:
        return None


def rows_of(
    groups: Sequence[TrainingGroup], *, updating_version: int, credit: Credit, scale: Scale, shuffle_seed: int | None
) -> list[list[TrainRow]]:
    """The rows of each group, advantages from the rewards of its siblings. `shuffle_seed` permutes rewards within each group
    (a control: the update then has the same size and no information)."""
    out: list[list[TrainRow]] = []
    for group in groups:
        rewards = list(group.ready.rewards())
        if shuffle_seed is not None:
            rewards = _shuffled(rewards, shuffle_seed, group.ready.ordinal)
        values = advantages(rewards, credit=credit, scale=scale)
        out.append(
            [
                row_from_episode(episode, advantage, updating_version=updating_version, reward=reward)
                for episode, advantage, reward in zip(group.episodes, values, rewards, strict=True)
            ]
        )
    return out


def _shuffled(rewards: list[float | None], seed: int, ordinal: int) -> list[float | None]:
    """A permutation of the rewards that are there; censored slots keep having none."""
    places = [index for index, reward in enumerate(rewards) if reward is not None]
    order = np.random.default_rng([seed, ordinal]).permutation(len(places))
    out = list(rewards)
    for place, source in zip(places, order, strict=True):
        out[place] = rewards[places[int(source)]]
    return out
