"""Credit: from the rewards of one group's siblings to their advantages. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Credit = Literal["rloo", "grpo", "dr_grpo"]
Scale = Literal["none", "std"]

_STD_EPSILON = 1e-6


class CreditError(ValueError):
    """The rewards or the settings of a group cannot give credit; the text names the slot or the setting."""


def advantages(rewards: Sequence[float | None], *, credit: Credit = "rloo", scale: Scale = "none") -> list[float | None]:
    """Advantage of each sibling of one group. None marks a censored sibling: it stays None and is in nobody's baseline.

    With `n` graded siblings and rewards `R`:

    * `rloo`: `R_i - mean of the others` (Ahmadian et al. 2024), divided by `std + 1e-6` only when `scale` is `std`;
    * `grpo`: `(R_i - mean) / (std + 1e-6)`, population standard deviation (DeepSeekMath), whatever `scale` says;
    * `dr_grpo`: `R_i - mean`, never scaled (Dr. GRPO).

    A lone graded sibling has nobody to be compared with and gets 0.
    Raises `CreditError` for a reward that is not finite and for a scaled `dr_grpo`, which would be GRPO under another name.
    """
    if credit == "dr_grpo" and scale == "std":
        raise CreditError("scale: 'std' contradicts dr_grpo; use credit 'grpo'")
    slots = [slot for slot, reward in enumerate(rewards) if reward is not None]
    values = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    for slot, value in zip(slots, values, strict=True):
        if not np.isfinite(value):
            raise CreditError(f"rewards: slot {slot} has reward {value}; a censored episode must be None, never a number")
    out: list[float | None] = [None] * len(rewards)
    if not slots:
        return out
    count = values.shape[0]
    centred = values - values.mean()
    if credit == "rloo" and count > 1:
        centred = centred * (count / (count - 1))  # R_i - (sum - R_i) / (n - 1)
    if scale == "std" or credit == "grpo":
        centred = centred / (values.std() + _STD_EPSILON)
    if np.ptp(values) == 0.0:
        centred = np.zeros(count)  # exactly: rounding in the mean must not invent a signal
    for slot, value in zip(slots, centred, strict=True):
        out[slot] = float(value)
    return out


def has_signal(values: Sequence[float | None]) -> bool:
    """True when some sibling's advantage is not zero, so that the group can move the policy."""
    return any(value is not None and value != 0.0 for value in values)
