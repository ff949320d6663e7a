"""The fixed optimizer schedule: how many steps a batch gives, and with how many padding rows, whatever the rollouts emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Row = TypeVar("Row")


class ScheduleError(ValueError):
    """The batch does not fit the schedule; the text names the numbers."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one batch."""

    mini_batches: int
    epochs: int
    rows: int
    padded_rows: int

    @property
    def optimizer_steps(self) -> int:
        """Mini-batches times epochs."""
        return self.mini_batches * self.epochs

    @property
    def rows_per_mini_batch(self) -> int:
        """The same for every mini-batch, padding included."""
        return self.padded_rows // self.mini_batches


def padded_rows(rows: int, mini_batches: int, ranks: int) -> int:
    """`rows` raised to a multiple of `mini_batches * ranks`: (513, 1, 2) → 514, (270, 4, 2) → 272, (601, 3, 4) → 612."""
    if rows < 0 or mini_batches < 1 or ranks < 1:
        raise ScheduleError(f"rows {rows} must be >= 0; mini_batches {mini_batches} and ranks {ranks} must be >= 1")
    unit = mini_batches * ranks
    return -(-rows // unit) * unit


def schedule(*, source_prompts: int, mini_batch_prompts: int, rows: int, ranks: int, epochs: int = 1) -> Schedule:
    """The schedule of a batch of `source_prompts` groups: `source_prompts / mini_batch_prompts` mini-batches per epoch.

    `rows` is what the groups' episodes became (any number). Raises `ScheduleError` when the mini-batch size does not divide
    the batch, since a remainder would silently change the number of steps.
    """
    if mini_batch_prompts < 1 or source_prompts < 1 or source_prompts % mini_batch_prompts:
        raise ScheduleError(f"mini_batch_prompts: {mini_batch_prompts} must divide the batch of {source_prompts} prompts")
    if epochs < 1:
        raise ScheduleError(f"epochs: {epochs} must be at least 1")
    count = source_prompts // mini_batch_prompts
    return Schedule(count, epochs, rows, padded_rows(rows, count, ranks))


def mini_batches(rows: Sequence[Row], plan: Schedule, padding: Row) -> list[list[Row]]:
    """The rows of every optimizer step in order, epochs unrolled: padding is appended, then the rows are cut evenly.

    Rows keep their order (a group's rows stand together), so the same batch always gives the same steps.
    Raises `ScheduleError` when the plan was made for another number of rows.
    """
    if len(rows) != plan.rows:
        raise ScheduleError(f"rows: {len(rows)} given, but the schedule was made for {plan.rows}")
    filled = [*rows, *[padding] * (plan.padded_rows - len(rows))]
    size = plan.rows_per_mini_batch
    once = [filled[place * size : (place + 1) * size] for place in range(plan.mini_batches)]
    return once * plan.epochs
