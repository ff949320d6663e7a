"""A story as one self-contained HTML page: no script, no font and no style from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jinja2

from admission.explain_text import shown, when
from admission.story import Event, Story

_WIDTH, _LEFT, _RIGHT, _LANE, _TOP = 1100, 90, 20, 26, 34
_BAR = 16
_LEAST = 3.0  # pixels of a moment
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)


@dataclass(frozen=True, slots=True)
class Bar:
    """One event's place in the picture, in pixels."""

    x: float
    y: float
    width: float
    what: str
    title: str


def page(story: Story) -> str:
    """The whole page."""
    loader = jinja2.PackageLoader("admission", package_path="")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = shown
    return environment.get_template("explain_page.jinja").render(**_picture(story))


def _picture(story: Story) -> dict[str, Any]:
    begin = min((event.at_ns for event in story.events), default=0)
    end = max((max(event.at_ns, event.until_ns) for event in story.events), default=begin)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(end - begin, 1)
    lanes = story.lanes()
    rows = {lane: _TOP + place * _LANE for place, lane in enumerate(lanes)}
    # a wait lies behind what happens in it
    behind_first = sorted(story.events, key=lambda event: event.what not in ("wait", "demand"))
    return {
        "story": story,
        "begin": when(begin),
        "lanes": [(lane, y, y + _BAR - 4) for lane, y in rows.items()],
        "bars": [_bar(event, begin, scale, rows[event.lane]) for event in behind_first],
        "ticks": [(_LEFT + seconds * 1e9 * scale, f"{seconds:g} s") for seconds in _marks((end - begin) / 1e9)],
        "whats": list(dict.fromkeys(event.what for event in story.events)),
        "events": [((event.at_ns - begin) / 1e9, event) for event in story.events],
        "columns": list(dict.fromkeys(name for row in story.rows for name in row)),
        "width": _WIDTH,
        "left": _LEFT,
        "bar": _BAR,
        "height": _TOP + len(lanes) * _LANE + 10,
    }


def _bar(event: Event, begin: int, scale: float, y: float) -> Bar:
    width = max((event.until_ns - event.at_ns) * scale if event.until_ns else 0.0, _LEAST)
    x = min(_LEFT + (event.at_ns - begin) * scale, _WIDTH - width)
    took = f" ({event.seconds:.3f} s)" if event.until_ns else ""
    return Bar(round(x, 2), y, round(width, 2), event.what, f"{event.lane}: {event.text}{took}")


def _marks(seconds: float) -> list[float]:
    """Up to about ten marks on the time axis."""
    step = next((step for step in _TICKS if seconds / step <= 10), _TICKS[-1])
    return [round(step * count, 6) for count in range(int(seconds / step) + 1)][:400]
