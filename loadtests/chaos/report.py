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
        rows.append(
            {
                "service": service,
                "killed": len(hit),
                "recovered": len(units),
                "started_median_s": _median(started),
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


def rendered(result: Mapping[str, Any]) -> str:
    """One run as Markdown."""
    lines = [
        f"Seed {result['seed']}, {result['minutes']:g} minutes on {result['cores']} cores: {result['injected']} faults struck, "
        f"{result['missed']} never met their point; {result['findings']['steps']} steps, "
        f"{result['findings']['items']} stored items checked, {result['retrained']['steps']} steps trained again.",
        "",
        f"Account: {result['findings']['account']}.",
        "",
        "| service | killed | works again | process again, median | next unit, median | longest "
        "| interrupted group whole, median | longest | alone | next unit alone, median | longest alone |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in summary(result["records"]):
        lines.append(
            f"| {row['service']} | {row['killed']} | {row['recovered']} | {_s(row['started_median_s'])} | "
            f"{_s(row['unit_median_s'])} | {_s(row['unit_max_s'])} | {_s(row['whole_median_s'])} | {_s(row['whole_max_s'])} | "
            f"{row['alone']} | {_s(row['unit_median_alone_s'])} | "
            f"{_s(row['unit_max_alone_s'])} |"
        )
    lines += ["", "| other fault | service | times | next unit after its end, median | longest |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['fault']} | {row['service']} | {row['count']} | {_s(row['median_s'])} | {_s(row['max_s'])} |"
        for row in others(result["records"])
    ]
    lines += ["", "| hit | times |", "|---|---|"]
    points = Counter(f"{record['service']}: {record['point']}" for record in result["records"] if record["kind"] in _ENDS)
    lines += [f"| {point} | {count} |" for point, count in sorted(points.items())]
    problems = result["problems"]
    lines += ["", "Nothing was lost, doubled or left behind." if not problems else "**Violated:**"]
    return "\n".join([*lines, *(f"- {problem}" for problem in problems)])


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 2) if values else None


def _s(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def main(paths: Sequence[str]) -> None:
    print("\n\n".join(rendered(json.loads(Path(path).read_text(encoding="utf-8"))) for path in paths))


if __name__ == "__main__":
    main(sys.argv[1:])
