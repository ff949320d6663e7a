"""How much of a step's gradient each of its groups carried, from recorded rewards and token counts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from schemas.group import ReadyGroup
from services.config import Config

Advantages = Callable[..., list[float | None]]  # the trainer's own credit, `trainer.credit.advantages`


@dataclass(frozen=True, slots=True)
class MassRule:
    """The run's credit and reduction. `advantages` gives each sibling's from all rewards of a group."""

    advantages: Advantages
    credit: str
    scale: str
    reduction: str
    shuffled: bool = False

    @classmethod
    def of(cls, config: Config, advantages: Advantages) -> MassRule:
        """As a configuration says."""
        trainer = config.trainer
        return cls(advantages, trainer.credit, trainer.group_scale, trainer.reduction, trainer.shuffle_rewards)

    def __str__(self) -> str:
        return f"credit {self.credit}, scale {self.scale}, reduction {self.reduction}"


def gradient_mass(groups: Sequence[ReadyGroup], rule: MassRule) -> dict[str, float]:
    """Each group's share of `sum over tokens of |weight * advantage|`, before clipping and off-policy weights; sums to 1.

    `trainer/reductions.py` has the weights: those of an episode sum to a multiple of its sampled tokens, or, where lengths are
    normalized, to the same for every episode. The batch counts as one mini-batch. All shares are 0 where no advantage is
    different from 0. Empty where rewards were permuted before credit, since the recorded ones then say nothing.
    """
    if rule.shuffled:
        return {}
    by_length = rule.reduction != "length_normalized"
    mass: dict[str, float] = {}
    for group in groups:
        credit = rule.advantages(list(group.rewards()), credit=rule.credit, scale=rule.scale)
        parts = zip(credit, group.siblings_by_slot(), strict=True)
        mass[group.group] = sum(
            abs(value or 0.0) * (s.sampled_tokens if by_length else s.sampled_tokens > 0) for value, s in parts
        )
    total = sum(mass.values())
    return {name: value / total if total else 0.0 for name, value in mass.items()}
