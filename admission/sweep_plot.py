"""A sweep as a plot: one SVG that needs nothing else, a panel for each figure, the recorded run as a dashed line."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from admission.what_if import Outcome

_PANEL_W, _PANEL_H, _LEFT, _BOTTOM, _GAP = 300, 190, 52, 54, 24
_PANELS: tuple[tuple[str, Callable[[Outcome], float]], ...] = (
    ("batch wait, mean (s)", lambda o: o.mean_wait_s()),
    ("lag, mean", lambda o: o.mean_lag()),
    ("turned away (groups)", lambda o: float(sum(o.turned_away.values()))),
    ("trainer idle (%)", lambda o: 100 * o.idle),
)
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#556}.t{font-size:13px;fill:#1b1f24}.p{fill:none;stroke:#2f7fb8;stroke-width:2}"
    ".d{fill:#2f7fb8}.r{stroke:#b4434f;stroke-dasharray:5 4}.a{stroke:#c8cdd5}"
)


def plot(rows: list[tuple[str, Outcome]], recorded: Outcome) -> str:
    """The SVG. `rows`: each combination's words, and what the model gives for it."""
    width, height = 2 * (_PANEL_W + _GAP) + _GAP, 2 * (_PANEL_H + _GAP + 16) + 34
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{_STYLE}</style>']
    parts.append(f'<rect width="{width}" height="{height}" fill="#fff"/>')
    parts.append(f'<text x="{_GAP}" y="20">modelled from recorded service times; dashed: the recorded run</text>')
    for place, (title, value) in enumerate(_PANELS):
        left = _GAP + (place % 2) * (_PANEL_W + _GAP)
        top = 44 + (place // 2) * (_PANEL_H + _GAP + 16)
        parts.append(_panel(title, [(name, value(o)) for name, o in rows], value(recorded), left, top))
    return "".join([*parts, "</svg>\n"])


def _panel(title: str, points: list[tuple[str, float]], recorded: float, left: int, top: int) -> str:
    most = max([recorded, *(y for _, y in points), 1e-9]) * 1.08
    x0, y0 = left + _LEFT, top + _PANEL_H - _BOTTOM

    def x(place: int) -> float:
        return x0 + 14 + place * (_PANEL_W - _LEFT - 28) / max(1, len(points) - 1)

    def y(value: float) -> float:
        return y0 - value / most * (_PANEL_H - _BOTTOM - 14)

    parts = [f'<text class="t" x="{left}" y="{top}">{escape(title)}</text>']
    for share in (0.0, 0.5, 1.0):
        at = y(most * share)
        parts.append(f'<line class="a" x1="{x0}" y1="{at:.1f}" x2="{left + _PANEL_W}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{x0 - 6}" y="{at + 4:.1f}" text-anchor="end">{most * share:.3g}</text>')
    parts.append(f'<line class="r" x1="{x0}" y1="{y(recorded):.1f}" x2="{left + _PANEL_W}" y2="{y(recorded):.1f}"/>')
    path = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, (_, value) in enumerate(points))
    parts.append(f'<polyline class="p" points="{path}"/>')
    for i, (name, value) in enumerate(points):
        parts.append(
            f'<circle class="d" cx="{x(i):.1f}" cy="{y(value):.1f}" r="3.5"><title>{escape(name)}: {value:.4g}</title></circle>'
        )
        parts.append(f'<text x="{x(i):.1f}" y="{y0 + 16}" text-anchor="middle">{escape(_short(name))}</text>')
    if points:
        parts.append(f'<text x="{left + _PANEL_W}" y="{y0 + 32}" text-anchor="end">{escape(_axis(points[0][0]))}</text>')
    return "".join(parts)


def _short(name: str) -> str:
    return "/".join(part.partition("=")[2] for part in name.split(", "))


def _axis(name: str) -> str:
    return " / ".join(part.partition("=")[0] for part in name.split(", "))
