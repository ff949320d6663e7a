"""The account of what was not trained on, out of the fates of all groups: an object for programs, and lines to read. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from services.fates import Fates, Untrained, as_rows, bias, mean, seconds

_SHOWN = 15  # combinations on the terminal; the JSON has all


def report(fates: Fates, run: str, now_ns: int) -> dict[str, Any]:
    """Everything. `now_ns` is the time that open groups have waited until."""
    untrained, trained = fates.untrained(), fates.trained()
    still_open = [group for group in fates.leased_ns if group not in fates.closed_ns]
    ready = [group for group in still_open if group in fates.ready_ns]
    reasons = Counter[str]()
    for one, n in untrained.items():
        reasons[one.reason] += n
    return {
        "run": run,
        "groups": {
            "leased": len(fates.leased_ns),
            "trained": len(trained),
            "not_trained": sum(reasons.values()),
            "open": len(still_open),
            "ready": len(ready),
        },
        "not_trained": {
            "by_reason": dict(sorted(reasons.items())),
            **{f"by_{axis}": _by(untrained, axis) for axis in ("family", "length", "reward", "lag")},
            "all": as_rows(untrained),
        },
        "mix": {
            "family": _mix(fates.mix(), "leased"),
            "length": _mix(fates.mix_of_whole("length"), "whole"),
            "reward": _mix(fates.mix_of_whole("reward"), "whole"),
        },
        "lag": dict(sorted(Counter(trained.values()).items())),
        "queue": {
            "lease_to_ready_s": _spread(fates.makes_s(trained)),
            "ready_to_batch_s": _spread(fates.bank_waits_s(trained)),
            "ready_to_refusal_s": _spread(fates.bank_waits_s(group for group in fates.closed_ns if group not in trained)),
            "oldest_open": _oldest(fates.leased_ns, still_open, now_ns),
            "oldest_ready": _oldest(fates.ready_ns, ready, now_ns),
            "most_ready": _peak(fates.most_ready()),
            "most_open": _peak(fates.most_open()),
        },
    }


def _by(untrained: Counter[Untrained], axis: str) -> dict[str, dict[str, int]]:
    """Groups by reason, for each value of one axis."""
    found: dict[str, Counter[str]] = {}
    for one, n in untrained.items():
        found.setdefault(getattr(one, axis), Counter())[one.reason] += n
    return {value: dict(sorted(counted.items())) for value, counted in sorted(found.items())}


def _mix(mix: dict[str, tuple[int, int]], of: str) -> dict[str, Any]:
    before, after = sum(a for a, _ in mix.values()), sum(b for _, b in mix.values())
    rows = {
        name: {
            of: a,
            "trained": b,
            f"{of}_share": a / before if before else None,
            "trained_share": b / after if after else None,
        }
        for name, (a, b) in mix.items()
    }
    return {"bias": bias(mix), "values": rows}


def _spread(values: list[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    if not ordered:
        return {"mean": None, "p50": None, "p95": None, "max": None}
    at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in (("p50", 0.5), ("p95", 0.95))}
    return {"mean": mean(ordered), **at, "max": ordered[-1]}


def _oldest(since_ns: dict[str, int], groups: list[str], now_ns: int) -> dict[str, Any] | None:
    if not groups:
        return None
    group = min(groups, key=lambda name: since_ns[name])
    return {"group": group, "age_s": seconds(since_ns[group], now_ns)}


def _peak(found: tuple[int, int]) -> dict[str, int]:
    return {"groups": found[0], "at_ns": max(0, found[1])}


def lines(told: dict[str, Any]) -> list[str]:
    """The same to read."""
    groups, queue, mix = told["groups"], told["queue"], told["mix"]
    out = [
        f"run {told['run']}: {groups['leased']} leased = {groups['trained']} trained + {groups['not_trained']} not trained "
        f"+ {groups['open']} open ({groups['ready']} of them ready)",
        "",
        "not trained, by reason",
        *_counts(told["not_trained"]["by_reason"], groups["leased"]),
    ]
    rows = told["not_trained"]["all"]
    if rows:
        out += ["", f"{'groups':>6}  {'reason':<16} {'family':<16} {'tokens':<12} {'reward':<10} lag"]
        out += [
            f"{row['groups']:>6}  {row['reason']:<16} {row['family']:<16} {row['length']:<12} {row['reward']:<10} {row['lag']}"
            for row in rows[:_SHOWN]
        ]
        if len(rows) > _SHOWN:
            out.append(f"        and {len(rows) - _SHOWN} more combinations; --json OUT lists all")
    for axis, of in (("family", "leased"), ("length", "whole"), ("reward", "whole")):
        out += ["", f"trained against {of}, by {axis}: bias {_number(mix[axis]['bias'])} (0: alike, 1: nothing in common)"]
        out += [
            f"  {name:<16} {row[of]:>6} ({_percent(row[f'{of}_share'])})  trained {row['trained']:>6} "
            f"({_percent(row['trained_share'])})"
            for name, row in mix[axis]["values"].items()
        ]
    out += ["", "lag at hand-over: " + (", ".join(f"{lag}: {n}" for lag, n in told["lag"].items()) or "none"), ""]
    for name, text in (
        ("lease_to_ready_s", "lease to ready"),
        ("ready_to_batch_s", "ready to batch"),
        ("ready_to_refusal_s", "ready to refusal"),
    ):
        spread = queue[name]
        told_s = "  ".join(f"{key} {_number(value)} s" for key, value in spread.items())
        out.append(f"{text:<18} {told_s}")
    out.append(f"most at once       {queue['most_ready']['groups']} ready, {queue['most_open']['groups']} open")
    for name, text in (("oldest_open", "oldest open"), ("oldest_ready", "oldest ready")):
        held = queue[name]
        out.append(f"{text:<18} " + (f"{held['group']}, {held['age_s']:.1f} s" if held else "none"))
    return out


def _counts(counted: dict[str, int], of: int) -> list[str]:
    ordered = sorted(counted.items(), key=lambda held: (-held[1], held[0]))
    return [f"  {name:<18} {n:>6}  ({_percent(n / of if of else None)} of leased)" for name, n in ordered] or ["  none"]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
