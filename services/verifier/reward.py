"""From a grader's report to a reward vector: success, what it cost, and the counts, each kept apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

COST = "cost."  # prefix of violations in a vector: constraint costs, never averaged into a reward
COUNT = "count."  # prefix of plain counts
TAMPER = "tamper"


class RewardRule(msgspec.Struct, frozen=True, kw_only=True):
    """How the scalar that trains is made; the vector is kept whole beside it."""

    success: float = 1.0
    failure: float = 0.0
    violations_void_success: bool = True


DEFAULT_RULE = RewardRule()


def reward_of(success: bool, violations: Sequence[str], rule: RewardRule = DEFAULT_RULE) -> float:
    """The scalar reward of a graded episode."""
    clean = not (violations and rule.violations_void_success)
    return rule.success if success and clean else rule.failure


def reward_vector(
    components: Mapping[str, float], violations: Sequence[str], counts: Mapping[str, float], *, tampered: bool
) -> dict[str, float]:
    """The grader's components under their own names, then costs and counts under prefixes that it cannot forge."""
    own = {f"grader.{name}" if _is_ours(name) else name: float(value) for name, value in components.items()}
    costs = {COST + name: float(count) for name, count in Counter(violations).items()}
    return {**own, **costs, **{COUNT + name: float(value) for name, value in counts.items()}, TAMPER: float(tampered)}


def _is_ours(name: str) -> bool:
    return name == TAMPER or name.startswith((COST, COUNT))
