"""The curriculum: which task the next training lease takes, and with which probability.

Two draws by ordinal alone: a stream by weight, then a task of that stream uniformly. The product is the lease's propensity, so
that a report can weigh what was trained against what could have been. Empty streams give their weight to the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from schemas.lease import TaskStream

STREAMS: tuple[TaskStream, ...] = ("learnable", "hard", "retain", "quarantined")


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What was observed of one task: rewarded attempts, successes among them, attempts that the verifier could not judge."""

    attempts: int = 0
    successes: int = 0
    untrusted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSettings:
    """Weights of the streams, and when a task leaves `learnable`. With `min_attempts` 0 no task ever leaves it."""

    weights: Mapping[TaskStream, float] = field(
        default_factory=lambda: {"learnable": 0.7, "hard": 0.2, "retain": 0.1, "quarantined": 0.0}
    )
    min_attempts: int = 0
    hard_below: float = 0.05  # success rate at or below which a task is hard
    mastered_above: float = 0.95  # success rate at or above which a task is only retained
    untrusted_above: float = 0.2  # share of unjudged attempts above which a task is quarantined


UNIFORM = CurriculumSettings()


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawn task; `propensity` is the probability with which exactly this task would be drawn."""

    task_id: str
    stream: TaskStream
    propensity: float


def stream_of(outcomes: Outcomes, settings: CurriculumSettings) -> TaskStream:
    """The stream of one task by what was observed of it."""
    seen = outcomes.attempts + outcomes.untrusted
    if not settings.min_attempts or seen < settings.min_attempts:
        return "learnable"
    if outcomes.untrusted > settings.untrusted_above * seen:
        return "quarantined"
    rate = outcomes.successes / outcomes.attempts if outcomes.attempts else 0.0
    if rate <= settings.hard_below:
        return "hard"
    return "retain" if rate >= settings.mastered_above else "learnable"


def streams_of(
    pool: Sequence[str], observed: Mapping[str, Outcomes], settings: CurriculumSettings
) -> dict[TaskStream, tuple[str, ...]]:
    """The pool, split into its streams; the order of the pool is kept."""
    if not settings.min_attempts:
        return {"learnable": tuple(pool)}
    split: dict[TaskStream, list[str]] = {stream: [] for stream in STREAMS}
    for task_id in pool:
        split[stream_of(observed.get(task_id, Outcomes()), settings)].append(task_id)
    return {stream: tuple(tasks) for stream, tasks in split.items()}


def draw(seed: int, ordinal: int, streams: Mapping[TaskStream, Sequence[str]], settings: CurriculumSettings) -> Draw:
    """The task of one ordinal: the same for the same seed, ordinal and streams. Raises `ValueError` if nothing can be drawn."""
    weights = {stream: settings.weights.get(stream, 0.0) for stream in STREAMS if streams.get(stream)}
    total = sum(weights.values())
    if total <= 0:
        raise ValueError("no stream with a task has a weight; give `learnable` one, or look at why every task is quarantined")
    at = _unit(seed, ordinal, "stream") * total
    chosen = next(stream for stream in reversed(STREAMS) if weights.get(stream, 0.0) > 0)
    for stream, weight in weights.items():
        if at < weight:
            chosen = stream
            break
        at -= weight
    tasks = streams[chosen]
    index = min(int(_unit(seed, ordinal, "task") * len(tasks)), len(tasks) - 1)
    return Draw(tasks[index], chosen, weights[chosen] / total / len(tasks))


def seed_for(*parts: object) -> int:
    """A 48-bit seed out of whatever names the thing to be seeded; stable over processes and versions of Python."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def _unit(seed: int, ordinal: int, what: str) -> float:
    return seed_for("curriculum", seed, ordinal, what) / 2**48
