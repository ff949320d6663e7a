"""Tables from the JSON of chaos runs: `python -m loadtests.chaos.report OUT.json [MORE.json ...]` prints Markdown."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

_ENDS = ("kill", "pair", "torn checkpoint")  # faults after which another process works
_TARGETS_S = {"rollouter": 5.0, "bank": 5.0, "admission": 5.0, "sandbox": 5.0, "verifier": 5.0, "param_sync": 15.0}
_LOADING = ("engine", "trainer")
_BEYOND_START_S = 5.0


def alone(record: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> bool:
    """True when no other fault was at work while this one's service recovered; of a pair neither is alone."""
    return not any(
        other is not record and other["at_s"] <= record["until_s"] and record["at_s"] <= other["until_s"] for other in others
    )


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per service for processes that were killed, times in seconds."""
    by_service: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if record["kind"] in _ENDS:
            by_service[record["service"]].append(record)
    rows = []
    for service, hit in sorted(by_service.items()):
        units = [record["unit_s"] for record in hit if record["unit_s"] is not None]
        single = [record["unit_s"] for record in hit if record["unit_s"] is not None and alone(record, records)]
        whole = [record["whole_s"] for record in hit if record["kind"] == "kill" and record["whole_s"] is not None]
        started = [record["started_s"] for record in hit if record["started_s"] is not None]
        ready = [record["ready_s"] for record in hit if record["ready_s"] is not None]
        rows.append(
            {
                "service": service,
                "killed": len(hit),
                "recovered": len(units),
                "started_median_s": _median(started),
                "ready_median_s": _median(ready),
                "unit_median_s": _median(units),
                "unit_max_s": max(units, default=None),
                "whole_median_s": _median(whole),
                "whole_max_s": max(whole, default=None),
                "alone": len(single),
                "unit_median_alone_s": _median(single),
                "unit_max_alone_s": max(single, default=None),
            }
        )
    return rows


def others(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per kind of fault that leaves the process alive: what it was, and the time from its end to the next unit."""
    by_point: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if record["kind"] not in _ENDS:
            by_point[record["point"], record["service"]].append(record)
    rows = []
    for (point, service), hit in sorted(by_point.items()):
        units = [record["unit_s"] for record in hit if record["unit_s"] is not None]
        rows.append(
            {
                "fault": point,
                "service": service,
                "count": len(hit),
                "median_s": _median(units),
                "max_s": max(units, default=None),
            }
        )
    return rows


def hits(records: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """How often each kind of fault struck, each service was hit, each point and each pair of services (in either order) met."""
    kinds = {record["fault"]: record["kind"] for record in records}
    at_point = {record["fault"]: f"{record['at_service']}: {record['point']}" for record in records if record["kind"] in _ENDS}
    ends = Counter(at_point.values())
    return {
        "kinds": dict(sorted(Counter(kinds.values()).items())),
        "services": dict(sorted(Counter(record["service"] for record in records).items())),
        "killed": dict(sorted(Counter(record["service"] for record in records if record["kind"] in _ENDS).items())),
        "points": dict(sorted(ends.items())),
        "pairs": dict(sorted(Counter(" + ".join(sorted(pair)) for pair in pairs).items())),
    }


def targets(starts: Mapping[str, float]) -> dict[str, float]:
    """Seconds within which each service's next unit should come, by the median; engine and trainer: their start and 5 s."""
    own = {
        service: max((s for label, s in starts.items() if label.rsplit("-", 1)[0] == service), default=None)
        for service in _LOADING
    }
    return _TARGETS_S | {
        service: round(start_s + _BEYOND_START_S, 1) for service, start_s in own.items() if start_s is not None
    }


def rendered(result: Mapping[str, Any]) -> str:
    """One run as Markdown, as it can stand in `docs/reliability.md`."""
    findings, hit = result["findings"], result["hits"]
    lines = [
        f"Seed {result['seed']}, {result['minutes']:g} minutes on {result['cores']} cores: {result['injected']} faults struck, "
        f"{result['missed']} never met their point; {findings['steps']} steps, {findings['incarnations']} new incarnations, "
        f"{findings['items']} stored items checked, {result['retrained']['steps']} steps trained again. "
        f"`headrace audit`: exit code {result['audit']['code']}.",
        "",
        f"Account: {findings['account']}.",
        "",
        "| service | killed | process again, median | ready, median | next unit, median | longest | alone "
        "| next unit alone, median | target | interrupted group whole, median |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    wanted = targets(result["start_s"])
    for row in summary(result["records"]):
        target = wanted.get(row["service"])
        lines.append(
            f"| {row['service']} | {row['killed']} | {_s(row['started_median_s'])} | {_s(row['ready_median_s'])} | "
            f"{_s(row['unit_median_s'])} | "
            f"{_s(row['unit_max_s'])} | {row['alone']} | {_s(row['unit_median_alone_s'])} | "
            f"{'' if target is None else f'under {target:g} s'} | {_s(row['whole_median_s'])} |"
        )
    lines += ["", "| other fault | service | times | next unit after its end, median | longest |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['fault']} | {row['service']} | {row['count']} | {_s(row['median_s'])} | {_s(row['max_s'])} |"
        for row in others(result["records"])
    ]
    lines += _counted("fault", hit["kinds"]) + _counted("killed at", hit["points"]) + _counted("killed together", hit["pairs"])
    lines += ["", "First start, all at once, seconds until ready: " + _listed(result["start_s"]) + "."]
    problems = result["problems"]
    lines += ["", "Nothing was lost, doubled or left behind." if not problems else "**Violated:**"]
    return "\n".join([*lines, *(f"- {problem}" for problem in problems)])


def _counted(what: str, counts: Mapping[str, int]) -> list[str]:
    return ["", f"| {what} | times |", "|---|---|", *(f"| {name} | {count} |" for name, count in counts.items())]


def _listed(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{label} {s:.1f}" for label, s in sorted(seconds.items()))


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 2) if values else None


def _s(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def main(paths: Sequence[str]) -> None:
    print("\n\n".join(rendered(json.loads(Path(path).read_text(encoding="utf-8"))) for path in paths))


if __name__ == "__main__":
    main(sys.argv[1:])
