"""A story as aligned text and as plain data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from admission.story import Story, Value


def as_text(story: Story) -> list[str]:
    """The answer first, then the figures, then the table, then the timeline with seconds from its beginning."""
    lines = [story.answer, ""]
    width = max((len(name) for name in story.facts), default=0)
    lines += [f"  {name:<{width}}  {shown(value)}" for name, value in story.facts.items()]
    if story.rows:
        lines += ["", *table(story.rows)]
    if story.events:
        begin = story.events[0].at_ns
        lanes = max(len(event.lane) for event in story.events)
        whats = max(len(event.what) for event in story.events)
        lines += ["", f"timeline from {when(begin)} (run {story.run})", f"  {'at s':>10}  {'took s':>8}"]
        for event in story.events:
            took = f"{event.seconds:8.3f}" if event.until_ns else " " * 8
            lines.append(
                f"  {(event.at_ns - begin) / 1e9:10.3f}  {took}  {event.lane:<{lanes}}  {event.what:<{whats}}  {event.text}"
            )
    return lines


def table(rows: Sequence[dict[str, Value]]) -> list[str]:
    """Rows with one heading, numbers to the right."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[shown(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[place]) for line in cells)) for place, name in enumerate(names)]
    right = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in names]

    def line(words: Sequence[str]) -> str:
        parts = [
            word.rjust(width) if is_right else word.ljust(width)
            for word, width, is_right in zip(words, widths, right, strict=True)
        ]
        return ("  " + "  ".join(parts)).rstrip()

    return [line(names), *(line(words) for words in cells)]


def shown(value: Value) -> str:
    """One value for a person."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def when(time_ns: int) -> str:
    """A moment, to the millisecond, in UTC."""
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_ns // 1_000_000_000))
    return f"{whole}.{time_ns // 1_000_000 % 1000:03d} UTC"


def as_data(story: Story) -> dict[str, Any]:
    """The same for programs; times in nanoseconds since the epoch."""
    return {
        "kind": story.kind,
        "name": story.name,
        "run": story.run,
        "answer": story.answer,
        "facts": story.facts,
        "rows": story.rows,
        "events": [
            {
                "at_ns": event.at_ns,
                "until_ns": event.until_ns or None,
                "lane": event.lane,
                "what": event.what,
                "text": event.text,
                "details": event.details,
            }
            for event in story.events
        ],
    }
