"""The training row of one episode: `prompt ++ sampled ++ glue ++ sampled ++ ...`, never re-tokenized. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.trajectory import VersionSpan, concatenate

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


class SampleError(ValueError):
    """An engine's answer does not line up; the turn is lost and never padded. The text names field, value and rule."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The sampled tokens of one turn. All arrays have one length S, and `versions` tile `[0, S)`."""

    ids: Ids  # [S]
    logprobs: Floats  # [S], of the distribution that was sampled from
    raw_logprobs: Floats | None  # [S], of the untransformed model
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    stop_reason: str = ""
    engine: str = ""
    generator: str = ""
    weight_digest: str = ""
    cached_prompt_tokens: int = 0

    def checked(self) -> Sampled:
        """Raises `SampleError` unless every token has a finite log-probability and one policy version."""
        size = self.ids.shape[0]
        if size == 0:
            raise SampleError("sampled_ids: a generation of no tokens is no turn")
        if int(self.ids.min()) < 0:
            raise SampleError(f"sampled_ids: {int(self.ids.min())} is no token id")
        _check_logprobs("logprobs", self.logprobs, size)
        if self.raw_logprobs is not None:
            _check_logprobs("raw_logprobs", self.raw_logprobs, size)
        position = 0
        for span in self.versions:
            if span.start != position or span.end <= span.start or span.version < 0:
                raise SampleError(f"versions: {self.versions} must tile [0, {size}) with versions of 0 or more")
            position = span.end
        if position != size:
            raise SampleError(f"versions: {self.versions} cover {position} of {size} tokens")
        return self


def _check_logprobs(field_name: str, values: Floats, size: int) -> None:
    if values.shape != (size,):
        raise SampleError(f"{field_name}: {values.shape[0]} values for {size} tokens")
    bad = ~np.isfinite(values) | (values > 1e-4) | (values <= -9998.0)  # -9999 is a sentinel for a missing value
    if bad.any():
        where = int(np.flatnonzero(bad)[0])
        raise SampleError(f"{field_name}[{where}]: {values[where]} is no log-probability")


@dataclass
class Row:
    """Grows turn by turn. `length` tokens so far; masked tokens are exactly the sampled ones."""

    length: int = 0
    turn_starts: list[int] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    _ids: list[Ids] = field(default_factory=list)
    _mask: list[Mask] = field(default_factory=list)
    _logprobs: list[Floats] = field(default_factory=list)
    _raw: list[Floats] = field(default_factory=list)
    _raw_missing: bool = False

    def feed(self, ids: Ids) -> None:
        """Append tokens that the policy did not sample."""
        zeros = np.zeros(ids.shape[0], dtype=np.float32)
        self._append(ids, np.zeros(ids.shape[0], dtype=np.bool_), zeros, zeros)

    def sampled(self, turn: Sampled) -> None:
        """Append one turn's sampled tokens; their version spans move to the row's positions."""
        self.turn_starts.append(self.length)
        at = self.length
        self.versions += [VersionSpan(at + s.start, at + s.end, s.version, s.incarnation) for s in turn.versions]
        if turn.engine and turn.engine not in self.engines:
            self.engines.append(turn.engine)
        self._raw_missing |= turn.raw_logprobs is None
        raw = turn.logprobs if turn.raw_logprobs is None else turn.raw_logprobs
        self._append(turn.ids, np.ones(turn.ids.shape[0], dtype=np.bool_), turn.logprobs, raw)

    def _append(self, ids: Ids, mask: Mask, logprobs: Floats, raw: Floats) -> None:
        self._ids.append(ids)
        self._mask.append(mask)
        self._logprobs.append(logprobs)
        self._raw.append(raw)
        self.length += int(ids.shape[0])

    @property
    def turns(self) -> int:
        return len(self.turn_starts)

    def ids(self) -> Ids:
        """[T]"""
        return _joined(self._ids, "int32")

    def mask(self) -> Mask:
        """[T]"""
        return _joined(self._mask, "bool")

    def logprobs(self) -> Floats:
        """[T], 0 where the mask is false."""
        return _joined(self._logprobs, "float32")

    def raw_logprobs(self) -> Floats | None:
        """[T], or None unless every turn has them."""
        return None if self._raw_missing or not self.turns else _joined(self._raw, "float32")


def _joined(parts: list[Any], dtype: str) -> npt.NDArray[Any]:
    return concatenate(parts, dtype)
