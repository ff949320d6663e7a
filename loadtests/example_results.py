"""What the terminal example learns: several seeds, each against a frozen policy and against rewards shuffled within groups.

`python -m loadtests.example_results --seeds 0 1 2 --out docs/results`. Steps and every other setting come from the
example's own
`run.toml` and are fixed beforehand. Each condition is a whole `headrace up`; held-out success is measured at step 0
and at the last
step on both splits. Writes one JSON file per run, `summary.json` and `learning.png`. Runs that are there already are
not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CONFIG = "examples/terminal/run.toml"
SPLITS = ("heldout_instance", "heldout_template")
CONDITIONS: dict[str, tuple[str, ...]] = {
    "frozen": ("run.evaluate_only=true", "eval.seed=1000"),
    "trained": (),
    "shuffled": ("trainer.shuffle_rewards=true",),
}
Counts = npt.NDArray[np.float64]


def run_condition(condition: str, seed: int, folder: Path, extra: Sequence[str]) -> dict[str, Any]:
    """One whole run; its evaluation and step rows, without what only matters inside the run."""
    name = f"{condition}-{seed}"
    overrides = [f"run.name={name}", f"run.folder={folder}", f"run.seed={seed}", *CONDITIONS[condition], *extra]
    command = [sys.executable, "-m", "services.cli", "up", "--config", CONFIG, "--fresh"]
    subprocess.run([*command, *(part for override in overrides for part in ("--set", override))], check=True)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [
        {key: row[key] for key in ("step", "reward_mean", "lag_mean", "lag_max", "step_s", "wait_s", "train_s", "tokens_per_s")}
        for row in rows
        if row["kind"] == "step"
    ]
    return {
        "condition": condition,
        "seed": seed,
        "settings": list(CONDITIONS[condition]) + list(extra),
        "evaluations": [row for row in rows if row["kind"] == "eval"],
        "steps": steps,
    }


def counts_of(run: dict[str, Any], split: str, *, last: bool) -> Counts:
    """(successes, attempts) by task, [tasks, 2], of the first or last exact evaluation."""
    evaluations = sorted(run["evaluations"], key=lambda row: row["step"])
    row = evaluations[-1 if last else 0]
    return np.array([counts for _, counts in sorted(row["splits"][split]["by_task"].items())], dtype=np.float64)


def rate(counts: Counts) -> float:
    return float(counts[:, 0].sum() / counts[:, 1].sum())


def gain(pairs: Sequence[tuple[Counts, Counts]], draws: int = 10_000) -> dict[str, float]:
    """Mean over seeds of (after - before), and its 95 % interval.

    Percentile bootstrap: seeds are resampled, and within each seed whole tasks, the same ones before and after, since attempts
    on one task resemble each other.
    """
    rng = np.random.default_rng(0)
    differences = np.empty(draws)
    for draw in range(draws):
        values = []
        for index in rng.integers(0, len(pairs), len(pairs)):
            after, before = pairs[int(index)]
            tasks = rng.integers(0, len(after), len(after))
            values.append(rate(after[tasks]) - rate(before[tasks]))
        differences[draw] = np.mean(values)
    low, high = np.quantile(differences, (0.025, 0.975))
    return {"gain": float(np.mean([rate(a) - rate(b) for a, b in pairs])), "low": float(low), "high": float(high)}


def summarise(runs: dict[tuple[str, int], dict[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """Rates by split, condition and seed, and the gains over the frozen policy."""
    out: dict[str, Any] = {"seeds": list(seeds), "splits": {}}
    for split in SPLITS:
        frozen = {seed: counts_of(runs["frozen", seed], split, last=True) for seed in seeds}
        table: dict[str, Any] = {"frozen": {"rates": [rate(frozen[seed]) for seed in seeds]}}
        table["attempts_per_point"] = int(min(frozen[seed][:, 1].sum() for seed in seeds))
        for condition in ("trained", "shuffled"):
            after = {seed: counts_of(runs[condition, seed], split, last=True) for seed in seeds}
            table[condition] = {"rates": [rate(after[seed]) for seed in seeds]}
            table[condition] |= gain([(after[seed], frozen[seed]) for seed in seeds])
            table["attempts_per_point"] = min(table["attempts_per_point"], int(min(c[:, 1].sum() for c in after.values())))
        out["splits"][split] = table
    return out


def plot(runs: dict[tuple[str, int], dict[str, Any]], seeds: Sequence[int], path: Path) -> None:
    """Held-out success against steps, both splits, each seed a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    colours = {"trained": "tab:blue", "shuffled": "tab:orange"}
    titles = {"heldout_instance": "new instances", "heldout_template": "new templates"}
    for axis, split in zip(axes, SPLITS, strict=True):
        for condition, colour in colours.items():
            for seed in seeds:
                points = sorted(runs[condition, seed]["evaluations"], key=lambda row: row["step"])
                xs = [row["step"] for row in points]
                ys = [row["splits"][split]["successes"] / max(1, row["splits"][split]["attempts"]) for row in points]
                axis.plot(xs, ys, "-o", color=colour, alpha=0.8, label=condition if seed == seeds[0] else None)
        frozen = float(np.mean([rate(counts_of(runs["frozen", seed], split, last=True)) for seed in seeds]))
        axis.axhline(frozen, color="grey", linestyle="--", label="frozen")
        axis.set(title=f"held-out: {titles[split]}", xlabel="optimizer step", ylim=(0, 1))
    axes[0].set_ylabel("success")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--conditions", nargs="+", choices=tuple(CONDITIONS), default=list(CONDITIONS))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--folder", type=Path, default=Path("runs/results"))
    parser.add_argument(
        "--set", action="append", default=[], dest="extra", help="override for every run, e.g. engine.kind=vllm"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    for condition in options.conditions:
        for seed in options.seeds:
            path = options.out / f"{condition}-{seed}.json"
            if not path.exists():
                path.write_text(json.dumps(run_condition(condition, seed, options.folder, options.extra), indent=1) + "\n")
            runs[condition, seed] = json.loads(path.read_text())
    if len(options.conditions) < len(CONDITIONS):
        return  # a part of the runs; the summary needs them all
    summary = summarise(runs, options.seeds)
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot(runs, options.seeds, options.out / "learning.png")
    for split, table in summary["splits"].items():
        print(f"{split}: frozen {np.mean(table['frozen']['rates']):.3f}", end="")
        for condition in ("trained", "shuffled"):
            row = table[condition]
            print(
                f"; {condition} {np.mean(row['rates']):.3f}, gain {row['gain']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]",
                end="",
            )
        print(f"; at least {table['attempts_per_point']} attempts per point")


if __name__ == "__main__":
    main()
