"""The progress of a run on the terminal and in `metrics.jsonl`: one aligned line per step, from the streams alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from schemas.codec import CodecError, decode_any
from schemas.ledger import QuarantineEntry
from schemas.table import Stream
from schemas.training import StepCommit
from services.bus import Bus
from services.config import Config
from services.consume import events
from services.continuity import Hole
from services.health import pause
from services.items import Rewound
from services.outages import GoneNote, server_names, utc
from services.pull import Damaged
from services.run_folder import MetricsFile
from services.samples import Samples
from services.tally import Tally

_COLUMNS = (  # heading and width of each, from the left; what follows them runs to the end of the line
    ("step", 5),
    ("reward", 7),
    ("held-out inst / tmpl", 22),
    ("ready", 7),
    ("open", 6),
    ("quar", 6),
    ("lag mean/max", 14),
    ("tokens/s", 10),
    ("wait s", 8),
    ("train s", 9),
    ("publ s", 8),
)
HELDOUT = ("heldout_instance", "heldout_template")
_SETTLE_S = 0.3  # the other folds may be this much behind the commit that a line is printed for
_FOLDS: tuple[tuple[Stream, tuple[str, ...]], ...] = (
    (Stream.TASKS, ()),
    (Stream.READY, ()),
    (Stream.LEDGER, ()),
    (Stream.TRAIN, ()),
    (Stream.POLICY, ("policy.active",)),
)


class Progress:
    """Consumes: TASKS, READY, LEDGER, TRAIN, `policy.active`. Produces: lines, metrics rows, samples; nothing on the bus.

    Waits for: new items, until `stop`. On error: a hole in a stream, a damaged item, and a log that was cut short are said and
    passed over; a server that is gone is named, and whoever owns the run folder notes there since when. On stop: prints what it
    knows.
    """

    def __init__(
        self, bus: Bus, config: Config, say: Callable[[str], None], metrics: MetricsFile | None, samples: Samples | None
    ):
        self.tally = Tally()
        self.caught_up = asyncio.Event()
        self.complete = asyncio.Event()
        self._moved = asyncio.Event()
        self._bus = bus
        self._config = config
        self._say = say
        self._metrics = metrics
        self._samples = samples
        self._behind = {stream for stream, _ in _FOLDS}
        self._arrived: dict[int, float] = {}  # step -> monotonic time
        self._positions: dict[Stream, int] = {}
        self._next_step = 0
        self._points: set[str] = set()
        self._headed = False
        self._gone_ns = 0  # since when the server is gone
        self._note = GoneNote(config.run_folder()) if metrics is not None else None
        if self._note is not None:
            self._note.remove()

    async def run(self, stop: asyncio.Event) -> None:
        """Fold and print until `stop`."""
        async with asyncio.TaskGroup() as group:
            for stream, patterns in _FOLDS:
                group.create_task(self._follow(stream, patterns, stop), name=f"fold-{stream}")
            if self._samples is not None:
                group.create_task(self._samples.run(stop), name="samples")
            while not stop.is_set():
                self._look_at_server()
                self._print(settle_s=_SETTLE_S)
                if self.caught_up.is_set() and is_complete(self.tally, self._config):
                    self.complete.set()
                await pause(stop, 0.1)
        self._print(settle_s=0.0)

    async def catch_up(self, timeout_s: float) -> None:
        """Wait until everything stored by now has been seen, at most `timeout_s`."""
        wanted = {stream: await self._bus.last_sequence(stream) for stream, patterns in _FOLDS if not patterns}
        deadline = time.monotonic() + timeout_s
        while any(self._positions.get(stream, 0) < seq for stream, seq in wanted.items()):
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                return

    async def _follow(self, stream: Stream, patterns: tuple[str, ...], stop: asyncio.Event) -> None:
        """Fold a log; one that was cut short is told of and followed on from its new end, since the run goes on as well."""
        start = 1
        while not stop.is_set():
            try:
                await self._fold(stream, patterns, start, stop)
            except Rewound as error:
                self._say(f"lost: {error}")
                start = await self._bus.last_sequence(stream) + 1

    async def _fold(self, stream: Stream, patterns: tuple[str, ...], start: int, stop: asyncio.Event) -> None:
        async for event in events(self._bus, stream, *patterns, start=start, stop=stop):
            if event is None:
                self._behind.discard(stream)
                if not self._behind:
                    self.caught_up.set()
                continue
            if isinstance(event, Hole):
                self._say(f"lost: {event}")
                continue
            if isinstance(event, Damaged):
                self._say(f"damaged, passed over: {event.reason}")
                self._positions[stream] = event.item.seq
                continue
            item = event
            try:
                message = decode_any(item.data)
            except CodecError as error:
                self._say(f"unreadable, passed over: {item.subject}, sequence {item.seq} ({error})")
                self._positions[stream] = item.seq
                continue
            self.tally.add(message, item.time_ns)
            self._positions[stream] = item.seq
            self._moved.set()
            if isinstance(message, StepCommit) and self.tally.steps.get(message.step) is message:
                self._arrived[message.step] = time.monotonic()
                self._next_step = min(self._next_step, message.step)  # a new incarnation takes steps again
            if self._samples is not None and isinstance(message, (StepCommit, QuarantineEntry)):
                await self._samples.put(message)

    def _look_at_server(self) -> None:
        client = self._bus.client
        if not self._gone_ns and not client.is_connected and not client.is_closed:
            self._gone_ns = time.time_ns()
            rest = "services hold what they have, lease nothing, and go on when it is back"
            self._say(f"the server {server_names(client)} is gone since {utc(self._gone_ns)}; {rest}")
            if self._note is not None:
                self._note.write(self._gone_ns)
        elif self._gone_ns and client.is_connected:
            self._say(f"the server {server_names(client)} is back after {(time.time_ns() - self._gone_ns) / 1e9:.0f} s")
            self._gone_ns = 0
            if self._note is not None:
                self._note.remove()

    def _print(self, settle_s: float) -> None:
        if not self.caught_up.is_set():
            return
        while self._next_step in self.tally.steps and time.monotonic() - self._arrived[self._next_step] >= settle_s:
            self._print_evaluations(self._next_step)
            self._emit(self.tally.step_row(self._next_step), step_line)
            self._next_step += 1
        self._print_evaluations(self._next_step)

    def _print_evaluations(self, version: int) -> None:
        """Evaluations of policies up to `version`, whose steps have had their lines."""
        for point, result in sorted(self.tally.evaluations.items()):
            if point not in self._points and result.step <= version:
                self._points.add(point)
                self._emit(self.tally.eval_row(point), eval_line)

    def _emit(self, row: dict[str, Any], form: Callable[[dict[str, Any]], str]) -> None:
        if self._metrics is not None and not self._metrics.append(row):
            return  # printed by an earlier start of this run
        if not self._headed:
            self._say(HEADER)
            self._headed = True
        self._say(form(row))


def is_complete(tally: Tally, config: Config) -> bool:
    """Nothing is left: the last step is committed, and evaluated or (where nothing evaluates it) served by every engine."""
    last = 0 if config.run.evaluate_only else config.run.max_steps
    evaluates = config.eval.at_start if last == 0 else config.eval.at_end
    if last == 0 and not config.run.evaluate_only:
        return False  # until stopped
    if last > 0 and last - 1 not in tally.steps:
        return False
    if config.run.evaluate_only or (evaluates and config.eval.instance_attempts + config.eval.template_attempts > 0):
        return any(result.step >= last for result in tally.evaluations.values())
    return tally.fleet is not None and tally.fleet.oldest >= last


def line_of(cells: Sequence[str], rest: str) -> str:
    """Cells right-aligned under the first headings, then `rest`."""
    return "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=False)) + f"  {rest}"


HEADER = line_of([heading for heading, _ in _COLUMNS], "engine versions")


def step_line(row: dict[str, Any]) -> str:
    """A step's row as one aligned line."""
    groups = row["groups"]
    cells = [
        str(row["step"]),
        _rate(row["reward_mean"]),
        "",
        *(str(groups[name]) for name in ("ready", "open", "quarantined")),
        "-" if row["lag_max"] is None else f"{row['lag_mean']:.2f}/{row['lag_max']}",
        f"{row['tokens_per_s']:.0f}",
        *(f"{row[name]:.2f}" for name in ("wait_s", "train_s", "publish_s")),
    ]
    return line_of(cells, " ".join(f"{name}:{version}" for name, version in sorted(row["engines"].items())) or "-")


def eval_line(row: dict[str, Any]) -> str:
    """An evaluation's row under the same header, with successes and attempts of each split."""
    rates, counts = [], []
    for name in HELDOUT:
        score = row["splits"].get(name, {"successes": 0, "attempts": 0})
        rates.append(_rate(score["successes"] / score["attempts"] if score["attempts"] else None))
        censored = f" ({score['censored']} censored)" if score.get("censored") else ""
        counts.append(f"{score['successes']}/{score['attempts']} {name.removeprefix('heldout_')}s{censored}")
    return line_of([str(row["step"]), "eval", " / ".join(rates)], f"{', '.join(counts)}, {row['seconds']:.1f} s")


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
