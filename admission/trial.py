"""The settings that a replay can try, from the words of a command line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal, get_args, get_origin

from admission import recorded
from admission.what_if import Trial
from services.config import Config, ConfigError, check
from services.recording_reader import RecordingReader

GATES = ("admission.max_lag", "admission.versions", "admission.max_span", "admission.zero_variance", "admission.min_rewards")
TRIABLE = (*GATES, "admission.groups_per_batch", "window.max_groups", "trainer.demand_ahead")


def trial_of(config: Config) -> Trial:
    """The settings of a configuration that a replay follows."""
    return Trial(
        gates=recorded.gates_of(config),
        groups_per_batch=config.admission.groups_per_batch,
        window=config.window.max_groups,
        demand_ahead=config.trainer.demand_ahead,
    )


def changed(reader: RecordingReader, words: Sequence[str]) -> Config:
    """The recorded configuration with other values. Raises `ConfigError` naming the nearest setting or value."""
    tree = recorded.config_tree(reader)
    for word in words:
        _refuse(word)
        _put(tree, word)
    return check(tree)


def swept(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """`a.b=1,2` and `c.d=x,y` as every combination of `a.b=1` and the like. Raises `ConfigError`."""
    choices: list[list[str]] = []
    for text in sweeps:
        name, _, values = text.partition("=")
        found = [value.strip() for value in values.split(",") if value.strip()]
        if not found:
            raise ConfigError(f"--sweep {text}: write it like admission.max_lag=0,1,2,4")
        choices.append([f"{name.strip()}={value}" for value in found])
    return list(product(*choices))


def _refuse(word: str) -> None:
    name, separator, text = word.partition("=")
    name = name.strip()
    if not separator:
        raise ConfigError(f"{word!r}: write it like admission.max_lag=1")
    if name not in TRIABLE:
        nearest = difflib.get_close_matches(name, TRIABLE, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}?" if nearest else f"one of {', '.join(TRIABLE)}"
        known = " is a setting, but not one that a replay can try" if _is_setting(name) else ": unknown setting"
        raise ConfigError(f"{name}{known}; {hint}")
    allowed = _values(name)
    value = text.strip().strip('"')
    if allowed and value not in allowed:
        nearest = difflib.get_close_matches(value, allowed, n=1, cutoff=0.0)
        raise ConfigError(f"{name}: {value!r} is none of {', '.join(allowed)}; did you mean {nearest[0]}?")


def _annotation(name: str) -> Any:
    section, _, field = name.partition(".")
    model = Config.model_fields[section].annotation if section in Config.model_fields else None
    fields = getattr(model, "model_fields", {})
    return fields[field].annotation if field in fields else None


def _is_setting(name: str) -> bool:
    return _annotation(name) is not None


def _values(name: str) -> list[str]:
    annotation = _annotation(name)
    return [str(value) for value in get_args(annotation)] if get_origin(annotation) is Literal else []


def _put(tree: dict[str, Any], word: str) -> None:
    """Put one value in; the configuration checks its type and bounds."""
    name, _, text = word.partition("=")
    section, _, field = name.strip().partition(".")
    value = text.strip().strip('"')
    number = value.removeprefix("-").isdecimal()
    tree[section] = {**tree.get(section, {}), field: int(value) if number else value}
