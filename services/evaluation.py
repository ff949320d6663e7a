"""`headrace eval`: the starting policy on both held-out splits, by a local stack in a run folder of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from schemas.training import EvalResult
from services.config import Config
from services.intervals import interval
from services.stack import printer, run_stack

_SUFFIX = "-ev"
_MAX_NAME = 12


async def evaluate(config: Config, attempts: int | None, out: Path | None) -> int:
    """Evaluate and print both splits apart, each with a 95 % interval; gives the exit code."""
    say = printer()
    outcome = await run_stack(evaluation_config(config, attempts), fresh=True, say=say)
    results = list(outcome.tally.evaluations.values())
    if not results:
        say("no evaluation was completed")
        return outcome.code or 1
    report = as_report(results[-1])
    for split, row in report["splits"].items():
        low, high = row["interval"]
        counts = f"{row['successes']}/{row['attempts']}, {row['censored']} censored"
        say(f"{split:<18} {row['rate']:.3f}  95 % [{low:.3f}, {high:.3f}]  {counts}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return outcome.code


def evaluation_config(config: Config, attempts: int | None) -> Config:
    """The same settings, for evaluation alone and under a run name of its own."""
    name = config.run.name[: _MAX_NAME - len(_SUFFIX)].rstrip("-") + _SUFFIX
    run = config.run.model_copy(update={"name": name, "evaluate_only": True, "max_steps": 0})
    chosen: dict[str, Any] = {"at_start": True}
    if attempts is not None:
        chosen |= {"instance_attempts": attempts, "template_attempts": attempts}
    return config.model_copy(update={"run": run, "eval": config.eval.model_copy(update=chosen)})


def as_report(result: EvalResult) -> dict[str, Any]:
    """An evaluation as JSON: the counts as recorded, with rate and interval of each split."""
    splits: dict[str, Any] = {}
    for score in result.splits:
        rate = score.successes / score.attempts if score.attempts else 0.0
        splits[score.split] = {**msgspec.to_builtins(score), "rate": rate, "interval": list(interval(score))}
    return {"run": result.run, "point": result.point, "step": result.step, "seconds": result.seconds, "splits": splits}
