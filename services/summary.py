"""What a run came to, in a few lines: held-out before and after with intervals, reward, speed, and where every group went."""

from __future__ import annotations

from pathlib import Path

from schemas.training import EvalResult
from services.config import Config
from services.intervals import interval
from services.progress import HELDOUT, is_complete
from services.tally import Tally

_EDGE_STEPS = 5  # training reward is the mean over this many steps at either end


def summary(tally: Tally, config: Config, folder: Path) -> str:
    """The end summary. Counts come from the streams, so that a later look gives the same."""
    done = len(tally.steps)
    state = "complete" if is_complete(tally, config) else "stopped"
    lines = [f"run {config.run.name}: {state} after {done} step{'s' if done != 1 else ''}"]
    points = sorted(tally.evaluations.values(), key=lambda result: result.step)
    if points:
        lines += _heldout(points[0], points[-1])
    if done:
        ordered = sorted(tally.steps)
        first, last = tally.train_reward(ordered[:_EDGE_STEPS]), tally.train_reward(ordered[-_EDGE_STEPS:])
        if first is not None and last is not None:
            lines.append(f"  train reward         {first:.3f} -> {last:.3f}  (first and last {min(done, _EDGE_STEPS)} steps)")
        seconds = tally.seconds()
        if seconds > 0:
            lines.append(
                f"  speed                {done / seconds:.3f} steps/s  ({seconds:.0f} s from first lease to last commit)"
            )
    lines.append(f"  groups               {groups_line(tally)}")
    lines.append(f"  run folder           {folder}")
    return "\n".join(lines)


def groups_line(tally: Tally) -> str:
    """Where the training groups are; the parts add up to the leased ones."""
    groups = tally.groups()
    parts = [
        f"{groups['consumed']} consumed",
        f"{groups['quarantined']} quarantined{_by(tally.quarantined_by)}",
        f"{groups['abandoned']} abandoned{_by(tally.abandoned_by)}",
        f"{groups['open']} open",
    ]
    return f"{groups['leased']} leased = {' + '.join(parts)}"


def _by(reasons: dict[str, int]) -> str:
    return f" ({', '.join(f'{name} {count}' for name, count in sorted(reasons.items()))})" if reasons else ""


def _heldout(first: EvalResult, last: EvalResult) -> list[str]:
    lines = []
    for split in HELDOUT:
        cells = [f"{_score(result, split)} at step {result.step}" for result in _ends(first, last)]
        lines.append(f"  {'new ' + split.removeprefix('heldout_') + 's':<20} {' -> '.join(cells)}")
    return lines


def _ends(first: EvalResult, last: EvalResult) -> list[EvalResult]:
    return [first] if first.point == last.point else [first, last]


def _score(result: EvalResult, split: str) -> str:
    for score in result.splits:
        if score.split == split and score.attempts:
            low, high = interval(score)
            return f"{score.successes / score.attempts:.3f} [{low:.3f}, {high:.3f}] ({score.successes}/{score.attempts})"
    return "not evaluated"
