"""The KV cache of the embedded engine: one row per sequence, written at each row's own position.

Duck-typed to what a `transformers` decoder layer asks of `past_key_values` (`update`), so nothing is imported from there.
Rows are left-aligned: position p of a sequence lives at column p. Columns past a row's length hold garbage, which the mask
hides until the row's own token overwrites it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class SlotCache:
    """`rows` sequences of up to `length` tokens for `layers` layers of `[rows, kv_heads, length, head_dim]` keys and values."""

    def __init__(
        self, *, layers: int, rows: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (rows, kv_heads, length, head_dim)
        self.keys = [_finite(shape, dtype, device) for _ in range(layers)]
        self.values = [_finite(shape, dtype, device) for _ in range(layers)]
        self.length = length
        self.device = device
        self._rows: torch.Tensor = torch.zeros(0, dtype=torch.long)
        self._columns: torch.Tensor = torch.zeros(0, dtype=torch.long)
        self._view: slice | torch.Tensor = slice(0, 0)
        self._horizon = 0

    def aim(self, rows: list[int], starts: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare the next forward: row `rows[b]` receives `width` tokens from column `starts[b]` on.

        Returns positions, int64 [B, width], and the attention mask, bool [B, 1, width, horizon].
        """
        first = torch.tensor(starts, device=self.device)
        positions = first[:, None] + torch.arange(width, device=self.device)[None, :]  # [B, width]
        self._rows = torch.tensor(rows, device=self.device)[:, None]  # [B, 1]
        self._columns = positions.clamp(max=self.length - 1)  # padding of short rows may run past the end
        self._horizon = min(self.length, max(starts) + width)
        contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
        self._view = slice(rows[0], rows[0] + len(rows)) if contiguous else self._rows[:, 0]
        mask = torch.arange(self._horizon, device=self.device)[None, None, :] <= positions[:, :, None]
        return positions, mask[:, None]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `[B, kv_heads, width, head_dim]` and return all columns up to the horizon of the aimed rows."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self._rows, :, self._columns] = key.transpose(1, 2)
        values[self._rows, :, self._columns] = value.transpose(1, 2)
        return keys[self._view, :, : self._horizon], values[self._view, :, : self._horizon]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of row `source` to row `target`."""
        for cache in (*self.keys, *self.values):
            cache[target, :, :length] = cache[source, :, :length]

    def swap(self, left: int, right: int, length: int) -> None:
        """Exchange the first `length` columns of two rows."""
        for cache in (*self.keys, *self.values):
            held = cache[left, :, :length].clone()
            cache[left, :, :length] = cache[right, :, :length]
            cache[right, :, :length] = held


def _finite(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros: a masked column has weight 0, and 0 times garbage is only 0 when the garbage is finite.

    On CPU the pages come from numpy, which leaves them uncommitted until a row uses them.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)).view(dtype)
