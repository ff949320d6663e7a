"""What a replay under other settings says: figures beside the recorded ones, each with the word for how it came about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from admission.explain_text import shown, table
from admission.gates import Eligible, GateSettings, Quarantine, judge
from admission.story import Value
from admission.whatif import Outcome
from admission.whatif_trace import Trace
from schemas.ledger import AbandonEntry, BatchEntry, LostItem, QuarantineEntry
from services.recording import RecordingError

RECORDED, REPLAYED, MODELLED = "recorded", "replayed", "modelled"
_TOP = 12


def recorded_outcome(trace: Trace) -> Outcome:
    """The recording itself, in the same figures."""
    out = Outcome(leased=Counter(trace.leased), steps=len(trace.steps))
    out.waits = [max(0.0, step.batch_s - step.demand_s) for step in trace.steps]
    out.seconds = trace.steps[-1].commit_s
    before = [0.0, *(step.commit_s for step in trace.steps)]
    idle = [step.batch_s - max(commit, step.demand_s) for step, commit in zip(trace.steps, before, strict=False)]
    out.idle_s = sum(max(0.0, waited) for waited in idle[1:])
    for step in trace.steps:
        out.lags.update(step.lags)
    closed = 0
    for _, entry in trace.entries:
        if isinstance(entry, BatchEntry):
            out.trained.update(trace.strata[m.group] for m in entry.groups if m.group in trace.strata)
            closed += len(entry.groups)
        else:
            kind = "abandoned: " if isinstance(entry, AbandonEntry) else ""
            out.turned_away[(kind + str(entry.reason), *trace.strata.get(entry.group, (entry.family, "?")))] += 1
            closed += 1
    out.open = sum(trace.leased.values()) - closed
    return out


def figures(out: Outcome) -> dict[str, float]:
    """The main figures of one outcome."""
    waits = sorted(out.waits)
    return {
        "steps": out.steps,
        "run s": round(out.seconds, 3),
        "batch wait s, mean": round(sum(waits) / len(waits), 3) if waits else 0.0,
        "batch wait s, p50": round(_quantile(waits, 0.5), 3),
        "batch wait s, p95": round(_quantile(waits, 0.95), 3),
        "trainer idle %": round(100 * out.idle_s / out.seconds, 1) if out.seconds else 0.0,
        "lag, mean": round(sum(lag * n for lag, n in out.lags.items()) / max(1, out.lags.total()), 3),
        "lag, max": max(out.lags, default=0),
        "groups trained on": out.trained.total(),
        "turned away": out.turned_away.total(),
        "open at the end": out.open,
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def rejudged(trace: Trace, gates: GateSettings) -> dict[str, int]:
    """Each recorded decision taken again at its own hand-over, under other gates: exact, and nothing of it is modelled.

    Counts by what was and what would be; only those that change.
    """
    groups = {group.group: group.ready for group in trace.groups}
    changes: Counter[str] = Counter()
    for _, entry in trace.entries:
        if isinstance(entry, AbandonEntry) and (isinstance(entry.lost, LostItem) or not isinstance(entry.demand_seq, int)):
            continue
        demand = trace.demands.get(entry.demand_seq) if isinstance(entry.demand_seq, int) else None
        branches = demand.left() if demand is not None else ()
        version = _version(entry, demand.version if demand is not None else 0)
        names = [member.group for member in entry.groups] if isinstance(entry, BatchEntry) else [entry.group]
        was = "trained on" if isinstance(entry, BatchEntry) else str(entry.reason)
        for name in names:
            if name in groups:
                decision = judge(groups[name], version, branches, gates)
                would = "eligible" if isinstance(decision, Eligible) else str(decision.reason)
                if isinstance(decision, Quarantine) and was == would:
                    continue
                if not (was == would or (was == "trained on" and would == "eligible")):
                    changes[f"{was} -> {would}"] += 1
    return dict(changes)


def _version(entry: BatchEntry | QuarantineEntry | AbandonEntry, asked: int) -> int:
    if isinstance(entry, BatchEntry):
        return entry.version
    return entry.at_version if isinstance(entry, QuarantineEntry) else asked


def lines(recorded: Outcome, same: Outcome, other: Outcome, changes: dict[str, int], has_turns: bool) -> list[str]:
    """The comparison for a person. The middle column shows how far the model is off where nothing was changed."""
    first, second, third = figures(recorded), figures(same), figures(other)
    rows: list[dict[str, Value]] = [
        {
            "": name,
            "as it was": f"{shown(first[name])} {RECORDED}",
            "model of the same settings": f"{shown(second[name])} {MODELLED}",
            "under the new settings": f"{shown(third[name])} {MODELLED}",
        }
        for name in first
    ]
    out = table(rows)
    if not has_turns:
        out.append("  the recording has no turns, so each group counts as one long turn")
    out += ["", "recorded decisions, taken again at their own hand-over under the new gates:"]
    out += [f"  {count:>6} {REPLAYED}  {change}" for change, count in sorted(changes.items())] or ["  none changes, replayed"]
    out += ["", "lag of trained groups:"]
    rows = [
        {
            "lag": lag,
            RECORDED: recorded.lags[lag],
            f"same settings, {MODELLED}": same.lags[lag],
            f"new settings, {MODELLED}": other.lags[lag],
        }
        for lag in sorted({*recorded.lags, *same.lags, *other.lags})
    ]
    out += table(rows)
    out += ["", "turned away, by reason, family and task stream:", *_strata(recorded.turned_away, other.turned_away)]
    out += ["", "mix, trained of leased, by family and task stream:", *_mix(recorded, other)]
    return out


def _strata(before: Counter[tuple[str, str, str]], after: Counter[tuple[str, str, str]]) -> list[str]:
    keys = sorted({*before, *after}, key=lambda key: (-max(before[key], after[key]), key))
    rows: list[dict[str, Value]] = [
        {"reason": r, "family": f, "stream": s, RECORDED: before[r, f, s], MODELLED: after[r, f, s]} for r, f, s in keys[:_TOP]
    ]
    more = [f"  and {len(keys) - _TOP} more; --json OUT has all"] if len(keys) > _TOP else []
    return table(rows) + more if rows else ["  none"]


def _mix(before: Outcome, after: Outcome) -> list[str]:
    rows: list[dict[str, Value]] = []
    for family, stream in sorted({*before.leased, *after.leased}):
        row: dict[str, Value] = {"family": family, "stream": stream}
        for name, out in ((RECORDED, before), (MODELLED, after)):
            row[name] = f"{out.trained[family, stream]} of {out.leased[family, stream]}"
            row[f"share, {name}"] = round(out.trained[family, stream] / max(1, out.trained.total()), 3)
        rows.append(row)
    return table(rows)


def as_data(out: Outcome, how: str) -> dict[str, Any]:
    """One outcome for programs."""
    return {
        "how": how,
        "figures": figures(out),
        "lags": {str(lag): count for lag, count in sorted(out.lags.items())},
        "turned_away": [
            {"reason": r, "family": f, "stream": s, "groups": n} for (r, f, s), n in sorted(out.turned_away.items())
        ],
        "mix": [
            {"family": f, "stream": s, "leased": n, "trained": out.trained[f, s]} for (f, s), n in sorted(out.leased.items())
        ],
    }


_SWEPT = ("steps", "run s", "batch wait s, mean", "batch wait s, p95", "trainer idle %", "lag, mean", "lag, max", "turned away")


def sweep_lines(name: str, recorded: Outcome, swept: Sequence[tuple[str, Outcome]]) -> list[str]:
    """One row for each value."""
    first = figures(recorded)
    rows: list[dict[str, Value]] = [{name: "as it was", "how": RECORDED, **{key: first[key] for key in _SWEPT}}]
    rows += [{name: value, "how": MODELLED, **{key: figures(out)[key] for key in _SWEPT}} for value, out in swept]
    return table(rows)


def plot(path: Path, name: str, swept: Sequence[tuple[str, Outcome]]) -> None:
    """Four small panels over the swept values, as one SVG or PNG. Raises `RecordingError` where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RecordingError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 2)
    values = [value for value, _ in swept]
    places = list(range(len(values)))
    kept = [figures(out) for _, out in swept]
    for panel, key in zip(panels.flat, ("batch wait s, mean", "trainer idle %", "lag, mean", "turned away"), strict=True):
        panel.plot(places, [row[key] for row in kept], marker="o", color="#2f7ed8")
        panel.set_title(f"{key} ({MODELLED})", fontsize=10)
        panel.set_xticks(places, values)
        panel.set_xlabel(name)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise RecordingError(f"--plot {path}: {error}; name a file that ends in .svg or .png") from error
