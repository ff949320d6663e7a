"""One item's life as one page that needs nothing else: a timeline in SVG, a lane for each party, and all events below it."""

from __future__ import annotations

from html import escape

from admission.life import Event, Life

_WIDTH, _LABEL, _ROW, _TOP = 1100, 110, 26, 24
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #667; --line: #d5d9e0; --paper: #fff;
  --work: #2f7fb8; --sandbox: #5b9a68; --wait: #d9a441; --point: #b4434f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --dim: #99a; --line: #3a404a; --paper: #16191d;
  --work: #4fa3dd; --sandbox: #6fb57e; --wait: #d9a441; --point: #e0707c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1140px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0; } .answer { font-size: 1.1rem; margin: .3rem 0 1.2rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 12px; } svg line { stroke: var(--line); }
.work { fill: var(--work); } .sandbox { fill: var(--sandbox); } .wait { fill: var(--wait); } .point { fill: var(--point); }
table { border-collapse: collapse; width: 100%; margin-top: 1.2rem; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .15rem .6rem .15rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
table.rows { margin: 0; }
td.n, th.n { text-align: right; white-space: nowrap; } th { color: var(--dim); font-weight: 500; white-space: nowrap; }
.key span { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 1em; }
"""


def page(life: Life) -> str:
    """The whole HTML document."""
    begun = min((event.at_ns for event in life.events), default=0)
    facts = "".join(f"<tr><th>{escape(name)}</th><td>{_value(value)}</td></tr>" for name, value in life.facts.items())
    events = "".join(_row(event, begun) for event in life.events)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(life.title)}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(life.title)}</h1>\n"
        f'<p class="answer">{escape(life.answer)}</p>\n{timeline(life)}\n'
        '<p class="key"><span style="background:var(--work)"></span>work<span style="background:var(--sandbox)"></span>sandbox'
        '<span style="background:var(--wait)"></span>waiting'
        '<span style="background:var(--point)"></span>moment</p>\n'
        f"<table>{facts}</table>\n<table><tr><th class=n>after, s</th><th class=n>lasted, s</th><th>who</th><th>what</th></tr>"
        f"{events}</table>\n</body></html>\n"
    )


def _value(value: object) -> str:
    """Rows of one kind as a table, mappings and lists as words, the rest as it is."""
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        head = "".join(f"<th>{escape(str(name))}</th>" for name in value[0])
        rows = "".join("<tr>" + "".join(f"<td>{_value(cell)}</td>" for cell in row.values()) + "</tr>" for row in value)
        return f'<table class="rows"><tr>{head}</tr>{rows}</table>'
    if isinstance(value, dict):
        return ", ".join(f"{escape(str(name))} {_value(held)}" for name, held in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(_value(held) for held in value) or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "none" if value is None else escape(str(value))


def _row(event: Event, begun: int) -> str:
    lasted = f"{event.seconds:.3f}" if event.until_ns > event.at_ns else ""
    after = f"{(event.at_ns - begun) / 1e9:.3f}"
    return (
        f"<tr><td class=n>{after}</td><td class=n>{lasted}</td><td>{escape(event.lane)}</td><td>{escape(event.what)}</td></tr>"
    )


def timeline(life: Life) -> str:
    """The SVG: a row for each lane in the order of its first event; what lasted is a bar, a moment a dot."""
    if not life.events:
        return ""
    lanes = _lanes(life)
    begun = min(event.at_ns for event in life.events)
    ended = max(max(event.at_ns, event.until_ns) for event in life.events)
    span = max(1, ended - begun)
    height = _TOP + _ROW * len(lanes) + 8

    def x(at_ns: int) -> float:
        return _LABEL + (at_ns - begun) / span * (_WIDTH - _LABEL - 10)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline of {escape(life.title)}">']
    for tick in range(6):
        at = x(begun + span * tick // 5)
        anchor = "end" if tick == 5 else "start"
        parts.append(f'<line x1="{at:.1f}" y1="{_TOP - 6}" x2="{at:.1f}" y2="{height - 8}"/>')
        parts.append(f'<text x="{at:.1f}" y="12" text-anchor="{anchor}">{span * tick / 5e9:.4g} s</text>')
    for place, lane in enumerate(lanes):
        parts.append(f'<text x="0" y="{_TOP + _ROW * place + 15}">{escape(lane)}</text>')
    for event in life.events:
        top = _TOP + _ROW * lanes.index(event.lane)
        parts.append(_mark(event, x(event.at_ns), x(max(event.at_ns, event.until_ns)), top))
    return "".join([*parts, "</svg>"])


def _lanes(life: Life) -> list[str]:
    """In the order of their first events, slots by their number."""
    found = list(dict.fromkeys(event.lane for event in life.events))
    slots = iter(sorted((lane for lane in found if lane.startswith("slot ")), key=lambda lane: int(lane[5:])))
    return [next(slots) if lane.startswith("slot ") else lane for lane in found]


def _mark(event: Event, left: float, right: float, top: int) -> str:
    title = f"<title>{escape(event.what)}</title>"
    if event.until_ns <= event.at_ns:
        return f'<circle class="point" cx="{left:.1f}" cy="{top + 10}" r="3.5">{title}</circle>'
    kind, height = event.kind, 8 if event.kind == "wait" else 14
    width = max(1.5, right - left)
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top + 10 - height // 2}" width="{width:.1f}" height="{height}" rx="2">'
        f"{title}</rect>"
    )
