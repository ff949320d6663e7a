"""From a ledger entry to training rows: the batch's groups by sequence, each item checked against the digest that names it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schemas.group import ReadyGroup
from schemas.ledger import BatchEntry, BatchGroup
from schemas.table import Stream
from schemas.trajectory import Episode
from services.bus import Bus
from services.items import IntegrityError
from trainer.batch import TrainRow, row_from_episode
from trainer.credit import Credit, Scale, advantages

_PARALLEL_READS = 32


@dataclass(frozen=True, kw_only=True)
class TrainingGroup:
    """One group of a batch with its sealed episodes, by slot."""

    ready: ReadyGroup
    episodes: tuple[Episode, ...]


async def fetch(bus: Bus, entry: BatchEntry) -> list[TrainingGroup]:
    """The groups of a batch in the ledger's order. Raises `IntegrityError` when an item is missing or is not the one named."""
    limit = asyncio.Semaphore(_PARALLEL_READS)

    async def episode(seq: int, digest: str) -> Episode:
        async with limit:
            item = await bus.get(Stream.EPISODES, seq)
        if item.digest != digest:
            raise IntegrityError(f"EPISODES sequence {seq} has digest {item.digest[:12]}, READY names {digest[:12]}")
        return item.decode(Episode)

    async def group(named: BatchGroup) -> TrainingGroup:
        async with limit:
            item = await bus.get(Stream.READY, named.ready_seq)
        ready = item.decode(ReadyGroup)
        if ready.group != named.group:
            raise IntegrityError(f"READY sequence {named.ready_seq} holds group {ready.group}, the ledger names {named.group}")
        siblings = sorted(ready.siblings, key=lambda sibling: sibling.slot)
        episodes = await asyncio.gather(*(episode(s.episode_seq, s.episode_digest) for s in siblings))
        return TrainingGroup(ready=ready, episodes=tuple(episodes))

    return list(await asyncio.gather(*(group(named) for named in entry.groups)))


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
