"""Which engine gets a turn: pure decisions over what is known of the engines.

A conversation stays on the engine that holds its history while that engine is not much busier than the idlest one. A new
conversation goes to its group's engine (consistent hashing with bounded load), so that siblings share their prompt's prefix and
no engine is overloaded while another idles. Paper: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads".
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

AFFINITY_MARGIN = 2  # turns in flight by which a conversation's engine may be ahead of the idlest one
LOAD_FACTOR = 1.25
_POINTS_PER_ENGINE = 64


class Reason(StrEnum):
    """Why an engine was chosen; each is a counter."""

    KEPT = "affinity_kept"
    NEW_PREFERRED = "new_preferred"  # the group's own engine
    NEW_OVERFLOW = "new_overflow"  # the group's engine is at its bound, the next on the ring takes it
    BROKEN_LOAD = "affinity_broken_load"
    BROKEN_GONE = "affinity_broken_gone"  # its engine does not serve now
    BROKEN_AVOIDED = "affinity_broken_avoided"  # its engine just failed this very turn


@dataclass(frozen=True, slots=True)
class Choice:
    engine: str
    reason: Reason


def bound(total_in_flight: int, engines: int) -> int:
    """Most turns that one engine may hold once a new conversation is added: `ceil(1.25 * mean)`."""
    return math.ceil(LOAD_FACTOR * (total_in_flight + 1) / engines)


def choose(in_flight: Mapping[str, int], group: str, held_by: str | None, avoid: Collection[str] = ()) -> Choice | None:
    """The engine of one turn; None when no engine serves.

    `in_flight` has exactly the engines that serve now, with our turns in flight on each. `held_by` is the engine that holds the
    conversation's history. Engines in `avoid` failed this turn before and are taken only when there are no others.
    """
    serving = {name: load for name, load in in_flight.items() if name not in avoid} or dict(in_flight)
    if not serving:
        return None
    if held_by is not None and held_by in serving and serving[held_by] - min(serving.values()) <= AFFINITY_MARGIN:
        return Choice(held_by, Reason.KEPT)
    limit = bound(sum(serving.values()), len(serving))
    order = preference(group, tuple(sorted(serving)))
    engine = next(name for name in order if serving[name] < limit)  # one exists: the bound exceeds the mean
    if held_by is None:
        return Choice(engine, Reason.NEW_PREFERRED if engine == order[0] else Reason.NEW_OVERFLOW)
    if held_by in serving:
        return Choice(engine, Reason.BROKEN_LOAD)
    return Choice(engine, Reason.BROKEN_AVOIDED if held_by in in_flight else Reason.BROKEN_GONE)


def preference(key: str, engines: Sequence[str]) -> tuple[str, ...]:
    """All engines in the order in which the ring meets them from `key`; a leaving engine moves only its own keys."""
    points, owners = _ring(tuple(engines))
    first = bisect_right(points, _point(key))
    return tuple(dict.fromkeys(owners[(first + k) % len(owners)] for k in range(len(owners))))


@lru_cache(maxsize=64)
def _ring(engines: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    placed = sorted((_point(f"{engine}#{k}"), engine) for engine in engines for k in range(_POINTS_PER_ENGINE))
    return tuple(point for point, _ in placed), tuple(engine for _, engine in placed)


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
