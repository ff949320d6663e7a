"""Rows to micro-batches: within a token budget, the same number on every rank, and always the same way for the same lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class PackingError(ValueError):
    """The rows cannot be packed under the configured budget; the text names the row and the budget."""


@dataclass(frozen=True, slots=True)
class Packing:
    """`micro_batches[rank][k]`: row indices of rank's k-th micro-batch; an empty tuple keeps the ranks in step."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    padded_tokens: int  # what the devices compute: rows x longest row, summed over micro-batches
    row_tokens: int  # what the rows hold

    @property
    def waste(self) -> float:
        """Share of computed tokens that is padding, 0 to 1."""
        return 1.0 - self.row_tokens / self.padded_tokens if self.padded_tokens else 0.0


def pack(lengths: Sequence[int], ranks: int, token_budget: int, overhead_tokens: int = 0) -> Packing:
    """Share rows of these lengths (tokens) out over ranks and cut each share into micro-batches.

    Rows are sorted by length (ties by index) and dealt back and forth, so that ranks carry nearly equal work. Each share is
    then cut where it costs least: `rows x longest` within the budget for each part, plus `overhead_tokens` to start it.
    Shares with fewer parts get empty micro-batches at the end.
    Raises `PackingError` when one row alone is over the budget, or there is no rank.
    """
    if ranks < 1:
        raise PackingError(f"ranks: {ranks} must be at least 1")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for turn, index in enumerate(order):
        lap, seat = divmod(turn, ranks)
        shares[seat if lap % 2 == 0 else ranks - 1 - seat].append(index)
    cut = [_cut(share, lengths, token_budget, overhead_tokens) for share in shares]
    count = max((len(parts) for parts in cut), default=0)
    even = tuple(tuple(parts) + ((),) * (count - len(parts)) for parts in cut)
    padded = sum(len(part) * lengths[part[0]] for parts in cut for part in parts)
    return Packing(even, padded, sum(lengths))


def _cut(share: Sequence[int], lengths: Sequence[int], token_budget: int, overhead_tokens: int) -> list[tuple[int, ...]]:
    """Cut one rank's rows, longest first, into consecutive parts of least total cost; a part begins with its longest row."""
    count = len(share)
    for index in share:
        if lengths[index] > token_budget:
            raise PackingError(
                f"row {index}: its {lengths[index]} tokens are over micro_batch_tokens = {token_budget}; raise it"
            )
    cost = [0] * (count + 1)  # of the rows from here to the end
    size = [0] * count  # rows of the part that starts here
    for start in range(count - 1, -1, -1):
        longest = lengths[share[start]]
        choices = range(1, min(count - start, token_budget // max(1, longest)) + 1)
        size[start] = min(choices, key=lambda rows: (rows * longest + cost[start + rows], -rows))
        cost[start] = overhead_tokens + size[start] * longest + cost[start + size[start]]
    parts, start = [], 0
    while start < count:
        parts.append(tuple(share[start : start + size[start]]))
        start += size[start]
    return parts
