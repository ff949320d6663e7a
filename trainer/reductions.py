"""How per-token losses become one number: a weight for every token, computed once from the whole mini-batch.

The loss of a mini-batch is `sum over tokens of weight * loss`. The weights carry the only normalisation there is, so any way
of cutting the mini-batch into micro-batches, or of sharing it out over ranks, gives the same value and the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainer.batch import TrainRow

Reduction = Literal["episode_sum", "length_normalized", "token_mean", "turn_mass_conserving"]


def token_weights(rows: Sequence[TrainRow], reduction: Reduction) -> list[npt.NDArray[np.float32]]:
    """Weight of each position, float32 [T] per row, for `B` counted episodes of `T_i` sampled tokens and `K_i` turns.

    * `episode_sum`: `1 / B`, the expected-return objective;
    * `length_normalized`: `1 / (B T_i)`;
    * `token_mean`: `1 / sum_i T_i`;
    * `turn_mass_conserving`: `T_i / (B K_i T_ik)` for a token of turn `k`: an episode keeps the mass that `episode_sum` gives
      it, `T_i / B`, and each of its turns carries an equal part.

    Zero off the mask, and on rows that are not counted (censored episodes and padding).
    """
    episodes = sum(1 for row in rows if row.counted)
    tokens = sum(int(row.mask.sum()) for row in rows if row.counted)
    return [_row_weights(row, reduction, episodes, tokens) if row.counted else np.zeros(row.length, np.float32) for row in rows]


def _row_weights(row: TrainRow, reduction: Reduction, episodes: int, tokens: int) -> npt.NDArray[np.float32]:
    own = int(row.mask.sum())
    weights = np.zeros(row.length, dtype=np.float64)
    match reduction:
        case "episode_sum":
            weights[row.mask] = 1.0 / episodes
        case "length_normalized":
            weights[row.mask] = 1.0 / (episodes * own)
        case "token_mean":
            weights[row.mask] = 1.0 / tokens
        case "turn_mass_conserving":
            turns = row.turn_of_token()[row.mask]
            present, place, sizes = np.unique(turns, return_inverse=True, return_counts=True)
            weights[row.mask] = own / (episodes * present.shape[0] * sizes[place])
    return weights.astype(np.float32)
