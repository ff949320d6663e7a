"""The learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, peak: float, schedule: Schedule, *, steps: int = 0, warmup_steps: int = 0, final: float = 0.0
) -> float:
    """Rate of optimizer step `step` (from 0): a linear rise over `warmup_steps`, then the schedule down to `peak * final`.

    `steps` counts the warm-up; it is not used by `constant`. Raises `ValueError` for a schedule without a length.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    if steps <= warmup_steps:
        raise ValueError(f"steps: {steps} must exceed warmup_steps = {warmup_steps} for a {schedule} schedule")
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps - 1))
    shape = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (final + (1.0 - final) * shape)
