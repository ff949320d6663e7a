"""Strata of groups: by task family, length and reward, so that one sees whom a setting turns away. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from schemas.group import ReadyGroup

Length = Literal["short", "middle", "long", "?"]
Reward = Literal["none", "low", "middle", "high", "?"]


class Stratum(NamedTuple):
    """Length is the third of the recorded groups, by sampled tokens, in which a group lies; reward its mean reward: none, below
    1/3, up to 2/3, above. `?`: it never became whole."""

    family: str
    length: Length = "?"
    reward: Reward = "?"

    def __str__(self) -> str:
        return self.family if self.length == "?" else f"{self.family}, {self.length}, reward {self.reward}"


def thirds(groups: Sequence[ReadyGroup]) -> tuple[float, float]:
    """Sampled tokens up to which groups are short, and up to which they are middle."""
    if not groups:
        return 0.0, 0.0
    low, high = np.quantile([_tokens(group) for group in groups], [1 / 3, 2 / 3]).tolist()
    return low, high


def stratum_of(group: ReadyGroup, bounds: tuple[float, float]) -> Stratum:
    """Where a whole group lies."""
    tokens = _tokens(group)
    length: Length = "short" if tokens <= bounds[0] else "middle" if tokens <= bounds[1] else "long"
    rewards = [reward for reward in group.rewards() if reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    reward: Reward = "none" if mean is None else "low" if mean < 1 / 3 else "middle" if mean <= 2 / 3 else "high"
    return Stratum(group.family, length, reward)


def _tokens(group: ReadyGroup) -> int:
    return sum(sibling.sampled_tokens for sibling in group.siblings)
