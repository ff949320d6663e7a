"""95 % intervals for success rates: Wilson's where attempts are independent, a bootstrap over tasks where they share tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from schemas.training import SplitScore

_Z = 1.959963984540054  # 97.5 % point of the normal distribution


def wilson(successes: int, attempts: int) -> tuple[float, float]:
    """Wilson's score interval (1927); (0, 1) without attempts."""
    if attempts == 0:
        return 0.0, 1.0
    p, z2 = successes / attempts, _Z * _Z
    centre = (p + z2 / (2 * attempts)) / (1 + z2 / attempts)
    half = _Z * math.sqrt(p * (1 - p) / attempts + z2 / (4 * attempts * attempts)) / (1 + z2 / attempts)
    return max(0.0, centre - half), min(1.0, centre + half)


def over_tasks(by_task: Mapping[str, tuple[int, int]], *, draws: int = 4000, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap of the success rate with whole tasks resampled, since attempts on one task resemble each other."""
    counts = np.array([by_task[task] for task in sorted(by_task)], dtype=np.float64)  # [tasks, 2]
    chosen = np.random.default_rng(seed).integers(0, len(counts), size=(draws, len(counts)))
    totals = counts[chosen].sum(axis=1)  # [draws, 2]
    rates = totals[:, 0] / np.maximum(totals[:, 1], 1)
    low, high = np.quantile(rates, (0.025, 0.975))
    return float(low), float(high)


def interval(score: SplitScore) -> tuple[float, float]:
    """The wider of Wilson's interval and the bootstrap over tasks, where the score says which task each attempt was on."""
    low, high = wilson(score.successes, score.attempts)
    if sum(1 for _, attempts in score.by_task.values() if attempts > 0) >= 2:
        bootstrap = over_tasks(score.by_task)
        low, high = min(low, bootstrap[0]), max(high, bootstrap[1])
    return low, high
