"""`headrace replay FILE --set …` and `--sweep …`: what would have happened, as text, JSON and a plot."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console

from admission import recorded
from admission.explain_command import table
from admission.run_times import Measured, measure
from admission.sweep_plot import plot
from admission.trial import swept, trial_of, tried
from admission.what_if import Outcome, Trial, over_recorded_groups, simulate
from admission.what_if_strata import Stratum
from services.recording_reader import RecordingReader
from services.replay_arguments import write_out

EXIT_OK = 0
MODELLED = "(modelled)"


def run_what_if(reader: RecordingReader, options: argparse.Namespace) -> int:
    """Try settings; gives the exit code. Raises `ConfigError` for an unknown setting or value."""
    combinations = swept(options.sweep)
    trials = [tried(reader, [*options.set, *more]) for more in combinations] or [tried(reader, options.set)]
    found = measure(reader)
    lines = headline(reader, found)
    if options.sweep:
        rows = [(more, simulate(found.times, trial)) for more, trial in zip(combinations, trials, strict=True)]
        lines += sweep_lines(found, rows)
        result: dict[str, Any] = {"recorded": figures(found.outcome, modelled=False)}
        result["sweep"] = [{"set": list(more), **figures(outcome, modelled=True)} for more, outcome in rows]
        svg = options.svg or f"{options.file}.svg"
        write_out("--svg", svg, plot([(", ".join(more), outcome) for more, outcome in rows], found.outcome))
        lines.append(f"plot: {svg}")
    else:
        lines_of, result = compared(found, trial_of(recorded.run_config(reader)), trials[0])
        lines += lines_of
    console = Console(highlight=False, markup=False, emoji=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    if options.json:
        write_out("--json", options.json, json.dumps(result, indent=1) + "\n")
    return EXIT_OK


def headline(reader: RecordingReader, found: Measured) -> list[str]:
    """What was measured."""
    generated = ", GENERATED: no run made it" if reader.manifest.generated else ""
    times = found.times
    return [
        f"run {reader.manifest.run}{generated}: {len(times.groups)} groups, {len(times.steps)} steps "
        f"of {times.groups_per_batch} groups, {found.outcome.seconds:.1f} s"
    ]


def compared(found: Measured, was: Trial, trial: Trial) -> tuple[list[str], dict[str, Any]]:
    """The recorded run, the model of it (how far off the model is), and the model of what is tried."""
    again, other = simulate(found.times, was), simulate(found.times, trial)
    shown = [("recorded", found.outcome, False), ("model of the recorded", again, True), ("tried", other, True)]
    rows = [
        {"figure": label, **{name: _with_word(text, modelled) for name, text, modelled in _column(shown, label)}}
        for label in _FIGURES
    ]
    lines = ["", *table(rows)]
    for title, pick in (("turned away, by reason and stratum", _turned_away), ("trained, by stratum", _mix), ("lags", _lags)):
        keys = sorted({key for _, outcome, _ in shown for key in pick(outcome)})
        rows = [{title: key, **{n: _with_word(str(pick(o).get(key, 0)), m) for n, o, m in shown}} for key in keys]
        lines += ["", *(table(rows) if rows else [f"  {title}: none"])]
    lags, turned_away = over_recorded_groups(found.times, found.decided, trial.gates, found.lost)
    lines += ["", "the gates that are tried, over the recorded groups as they were (exact):"]
    lines.append(f"  pass {sum(lags.values())}, lags {_histogram(lags)}; turned away {_reasons(turned_away)}")
    result = {name: figures(outcome, modelled=modelled) for name, outcome, modelled in shown}
    exact = {"lags": _numbers(lags), "turned_away": _named(turned_away), "modelled": False}
    settings = {"recorded": _settings(was), "tried": _settings(trial)}
    return lines, {**result, "gates_over_recorded_groups": exact, "settings": settings}


_FIGURES: dict[str, Callable[[Outcome], str]] = {
    "batch wait, mean": lambda o: f"{o.mean_wait_s():.3f} s",
    "batch wait, longest": lambda o: f"{max(o.waits_s, default=0.0):.3f} s",
    "lag, mean": lambda o: f"{o.mean_lag():.2f}",
    "lag, largest": lambda o: f"{max(o.lags, default=0)}",
    "turned away": lambda o: f"{sum(o.turned_away.values())}",
    "trainer idle": lambda o: f"{100 * o.idle:.1f} %",
    "steps": lambda o: f"{o.steps}",
    "seconds": lambda o: f"{o.seconds:.1f}",
}


def _column(shown: list[tuple[str, Outcome, bool]], label: str) -> list[tuple[str, str, bool]]:
    return [(name, _FIGURES[label](outcome), modelled) for name, outcome, modelled in shown]


def _with_word(text: str, modelled: bool) -> str:
    return f"{text} {MODELLED}" if modelled else text


def _turned_away(outcome: Outcome) -> dict[str, int]:
    return {f"{reason}: {stratum}": n for (reason, stratum), n in outcome.turned_away.items()}


def _mix(outcome: Outcome) -> dict[str, int]:
    return {str(stratum): n for stratum, n in outcome.mix.items()}


def _lags(outcome: Outcome) -> dict[str, int]:
    return {f"lag {lag:2d}": n for lag, n in outcome.lags.items()}


def _histogram(lags: Counter[int]) -> str:
    return ", ".join(f"{lag}: {n}" for lag, n in sorted(lags.items())) or "none"


def _reasons(turned_away: Counter[tuple[str, Stratum]]) -> str:
    return "; ".join(f"{reason} {n} of {stratum}" for (reason, stratum), n in sorted(turned_away.items())) or "none"


def _numbers(lags: Counter[int]) -> dict[str, int]:
    return {str(lag): n for lag, n in sorted(lags.items())}


def _named(turned_away: Counter[tuple[str, Stratum]]) -> list[dict[str, Any]]:
    return [{"reason": reason, **_stratum(of), "groups": n} for (reason, of), n in sorted(turned_away.items())]


def _stratum(of: Stratum) -> dict[str, Any]:
    return {"family": of.family, "length": of.length, "reward": of.reward}


def _settings(trial: Trial) -> dict[str, Any]:
    plain = asdict(trial)
    return {**plain, "gates": msgspec.to_builtins(trial.gates)}


def figures(outcome: Outcome, *, modelled: bool) -> dict[str, Any]:
    """An outcome for programs; each figure says whether it is modelled."""
    plain = {
        "steps": outcome.steps,
        "seconds": outcome.seconds,
        "batch_wait_mean_s": outcome.mean_wait_s(),
        "batch_wait_max_s": max(outcome.waits_s, default=0.0),
        "lags": _numbers(outcome.lags),
        "lag_mean": outcome.mean_lag(),
        "turned_away": _named(outcome.turned_away),
        "trained": [{**_stratum(of), "groups": n} for of, n in sorted(outcome.mix.items())],
        "leased_by_family": dict(outcome.leased),
        "trainer_idle": outcome.idle,
    }
    return {name: {"value": value, "modelled": modelled} for name, value in plain.items()}


def sweep_lines(found: Measured, rows: list[tuple[tuple[str, ...], Outcome]]) -> list[str]:
    """One line for each combination, below the recorded run."""

    def row(name: str, outcome: Outcome, modelled: bool) -> dict[str, Any]:
        return {"setting": name, **{label: _with_word(show(outcome), modelled) for label, show in _FIGURES.items()}}

    listed = [row("recorded", found.outcome, False)]
    return ["", *table(listed + [row(", ".join(more), outcome, True) for more, outcome in rows])]
