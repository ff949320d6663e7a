"""The settings that a replay can vary, and what the user may write for them."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from admission.gates import GateSettings
from services.config import Config, ConfigError, check

InFlight = Literal["finish_old", "continue", "regenerate", "restart"]
IN_FLIGHT: tuple[str, ...] = get_args(InFlight)
_ALIASES = {"continue_keep": "continue", "continue_recompute": "continue"}
FIELDS = {
    "admission.groups_per_batch": "groups_per_batch",
    "admission.max_lag": "max_lag",
    "admission.versions": "versions",
    "admission.zero_variance": "zero_variance",
    "admission.min_rewards": "min_rewards",
    "window.max_groups": "window",
    "trainer.demand_ahead": "demand_ahead",
    "in_flight": "in_flight",
}
GATES = ("max_lag", "versions", "zero_variance", "min_rewards")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point of the what-if space."""

    groups_per_batch: int
    max_lag: int
    versions: Literal["mixed", "homogeneous"]
    zero_variance: Literal["keep", "skip"]
    min_rewards: int
    window: int
    demand_ahead: int
    in_flight: InFlight

    def gates(self) -> GateSettings:
        """The gates of this point."""
        return GateSettings(
            max_lag=self.max_lag, versions=self.versions, zero_variance=self.zero_variance, min_rewards=self.min_rewards
        )


def recorded(config: Config) -> Setting:
    """The point at which the run was."""
    mode = config.param_sync.mode
    return Setting(
        groups_per_batch=config.admission.groups_per_batch,
        max_lag=config.admission.max_lag,
        versions=config.admission.versions,
        zero_variance=config.admission.zero_variance,
        min_rewards=config.admission.min_rewards,
        window=config.window.max_groups,
        demand_ahead=config.trainer.demand_ahead,
        in_flight="finish_old" if mode == "finish_old" else "continue",
    )


def changed(base: Setting, config: Config, overrides: list[str]) -> Setting:
    """`base` with `section.field=value` overrides. Raises `ConfigError` naming the nearest setting or value."""
    point, tree = base, config.model_dump(mode="python")
    for override in overrides:
        name, separator, text = (part.strip() for part in override.partition("="))
        if not separator:
            raise ConfigError(f"{override!r}: write section.field=value, as in admission.max_lag=4")
        field = field_of(name)
        value = _value(text)
        if field == "in_flight":
            point = replace(point, in_flight=_in_flight(text))
            continue
        section, key = name.split(".")
        tree[section][key] = value
        point = replace(point, **{field: value})
    check(_plain(tree))  # types, bounds, and the rules between settings
    return point


def field_of(name: str) -> str:
    """The varied field of a setting's name. Raises `ConfigError` that says what can be varied."""
    if name == "param_sync.mode":
        return "in_flight"
    if name in FIELDS:
        return FIELDS[name]
    nearest = difflib.get_close_matches(name, [*FIELDS, "param_sync.mode"], n=1)
    if nearest:
        raise ConfigError(f"{name}: a replay cannot vary this; did you mean {nearest[0]}?")
    raise ConfigError(f"{name}: a replay cannot say what this would have changed; it can vary {', '.join(FIELDS)}")


def _in_flight(text: str) -> InFlight:
    word = _ALIASES.get(text.strip("\"'"), text.strip("\"'"))
    for mode in get_args(InFlight):
        if mode == word:
            found: InFlight = mode
            return found
    nearest = difflib.get_close_matches(word, IN_FLIGHT, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ConfigError(f"in_flight: {word!r} is none of {', '.join(IN_FLIGHT)}{hint}")


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _plain(value: Any) -> Any:
    """Tuples as lists, as a parsed file has them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
