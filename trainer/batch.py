"""Training rows: exactly the sampled token ids, their behaviour log-probabilities, one advantage; nothing is re-tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from schemas.arrays import ArrayError
from schemas.trajectory import Episode


class BatchError(ValueError):
    """An episode cannot become a training row; the text names group, slot, field and rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """One sequence to train on. `T` tokens; the log-probability of token `t` is read from the context `ids[:t]`.

    `advantage` None: the episode is censored, or the row is padding; no token of it carries loss or is counted.
    """

    ids: npt.NDArray[np.int32]  # [T]
    mask: npt.NDArray[np.bool_]  # [T], true on sampled tokens
    logprobs: npt.NDArray[np.float32]  # [T], behaviour policy's; 0 where mask is false
    advantage: float | None
    group: str = ""
    slot: int = -1
    lag: int = 0  # versions: the one about to be updated minus the oldest among the sampled tokens
    turn_starts: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))  # [turns]
    family: str = ""
    reward: float | None = None
    reference_logprobs: npt.NDArray[np.float32] | None = None  # [T], reference policy's, where the objective needs them

    @property
    def length(self) -> int:
        """`T`, tokens."""
        return int(self.ids.shape[0])

    @property
    def counted(self) -> bool:
        """True when the row's episode is one of the `B` that the loss is normalised by."""
        return self.advantage is not None and bool(self.mask.any())

    def turn_of_token(self) -> npt.NDArray[np.int32]:
        """Turn index of each position, int32 [T]; -1 before the first turn's first sampled token."""
        return np.asarray(np.searchsorted(self.turn_starts, np.arange(self.length), side="right") - 1, dtype=np.int32)


def padding_row() -> TrainRow:
    """A row without loss that fills a rank's share; two tokens, so that the model has one position to run."""
    return TrainRow(
        ids=np.zeros(2, dtype=np.int32),
        mask=np.zeros(2, dtype=np.bool_),
        logprobs=np.zeros(2, dtype=np.float32),
        advantage=None,
    )


def row_from_episode(
    episode: Episode, advantage: float | None, *, updating_version: int, reward: float | None = None
) -> TrainRow:
    """The row of one sealed episode. `updating_version`: the policy version that the coming step will update.

    Raises `BatchError` naming the field when ids, mask, log-probs, turns and versions contradict each other, when the first
    token claims to be sampled (it has no context), or when the episode was sampled by a version newer than the trainer's.
    """
    where = f"group {episode.group!r} slot {episode.slot}"
    try:
        episode.checked()
        turn_starts = episode.turn_starts.of_kind("turn_starts", "int32", 1)
    except (ArrayError, ValueError) as failure:
        raise BatchError(f"{where}: {failure}") from failure
    ids, mask = episode.ids.numpy("ids"), episode.mask.numpy("mask")
    logprobs = np.where(mask, episode.logprobs.numpy("logprobs"), np.float32(0.0)).astype(np.float32)
    if ids.shape[0] < 2:
        raise BatchError(f"{where}: ids: {ids.shape[0]} token(s); a row needs a context and a sampled token")
    if mask[0]:
        raise BatchError(f"{where}: mask: position 0 is marked as sampled, but it has no context")
    _check_turns(where, turn_starts, mask, episode.turns)
    lag = updating_version - episode.oldest_version() if mask.any() else 0
    if mask.any() and episode.newest_version() > updating_version:
        raise BatchError(f"{where}: versions: {episode.newest_version()} is newer than the trainer's {updating_version}")
    if advantage is not None and not np.isfinite(advantage):
        raise BatchError(f"{where}: advantage: {advantage} must be finite, or None for a censored episode")
    return TrainRow(
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        advantage=advantage,
        group=episode.group,
        slot=episode.slot,
        lag=lag,
        turn_starts=turn_starts,
        family=episode.family,
        reward=reward,
    )


def _check_turns(where: str, turn_starts: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_], turns: int) -> None:
    if turn_starts.shape[0] > turns:
        raise BatchError(f"{where}: turn_starts: {turn_starts.shape[0]} starts, but the episode has {turns} turn(s)")
    if turn_starts.shape[0] and (turn_starts[0] < 0 or turn_starts[-1] >= mask.shape[0] or (np.diff(turn_starts) <= 0).any()):
        raise BatchError(f"{where}: turn_starts: {turn_starts.tolist()} must rise within [0, {mask.shape[0]})")
    if not mask[turn_starts].all():
        raise BatchError(f"{where}: turn_starts: every start must point at a sampled token")
    first = int(np.argmax(mask)) if mask.any() else mask.shape[0]
    if mask.any() and (turn_starts.shape[0] == 0 or first < turn_starts[0]):
        raise BatchError(f"{where}: turn_starts: the sampled token at position {first} belongs to no turn")


def token_count(rows: Sequence[TrainRow]) -> int:
    """Sampled tokens that carry loss."""
    return sum(int(row.mask.sum()) for row in rows if row.counted)
