"""`headrace explain`: one item's life, from a recording, a run that goes on, or one that has ended."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from admission import recorded
from admission.explain import OF_GROUP, Question, explain, question
from admission.explain_page import page
from admission.explain_step import told_of_step
from admission.gradient_mass import Advantages, MassRule
from admission.life import Life, Told, told_of_group
from schemas.lease import ordinal_of
from schemas.table import Role, Stream
from services.bus import Bus
from services.config import Config
from services.consume import read_events
from services.items import Item
from services.recording import Form, Record, RecordingError
from services.recording_reader import RecordingReader
from services.replay_arguments import write_out
from services.runtime import connect
from services.stopped_run import served

EXIT_OK = 0


def run_explain(options: argparse.Namespace, config: Config | None, folder: Path | None, advantages: Advantages) -> int:
    """Carry the command out; gives the exit code. `advantages` is the trainer's credit.

    Raises `Unexplained` where nothing tells of the item.
    """
    asked = question(options.what, options.item)
    if config is None:
        with RecordingReader(options.recording) as reader:
            life = explain(asked, reader.about, _rule(reader, advantages))
    else:
        life = asyncio.run(_of_run(config, folder, asked, advantages))
    if options.json and options.json != "-":
        write_out("--json", options.json, json.dumps(as_json(life), indent=1) + "\n")
    if options.html:
        write_out("--html", options.html, page(life))
    if options.json == "-":
        print(json.dumps(as_json(life), indent=1))
    else:
        console = Console(highlight=False, markup=False, emoji=False)
        for line in text(life):
            console.print(line, soft_wrap=True)
    return EXIT_OK


def _rule(reader: RecordingReader, advantages: Advantages) -> MassRule | None:
    """None where the recording's configuration cannot be read; everything else can be told all the same."""
    try:
        return MassRule.of(recorded.run_config(reader), advantages)
    except RecordingError:
        return None


async def _of_run(config: Config, folder: Path | None, asked: Question, advantages: Advantages) -> Life:
    async with served(config, folder) as reachable:
        bus = await connect(reachable, Role.OBSERVER, f"explain-{os.getpid()}")
        try:
            told = await gather(bus, asked)
        finally:
            await bus.close()
    rule = MassRule.of(config, advantages)
    return explain(asked, lambda names, streams: [item for item in told if item[0] in tuple(streams)], rule)


async def gather(bus: Bus, asked: Question) -> list[Told]:
    """What a run's streams tell of an item; the server is asked for little besides."""
    told: list[Told] = []
    step = asked.number if asked.what == "step" else -1
    if asked.group:
        for stream in OF_GROUP:
            told += await read(bus, stream, *_patterns(stream, asked.group))
        batch = told_of_group(asked.group, told).batch()
        step = -1 if batch is None else batch[2].step
    if step >= 0:
        for stream, patterns in ((Stream.LEDGER, ["ledger.batch.*"]), (Stream.TRAIN, []), (Stream.POLICY, [])):
            told += [] if asked.group and stream is Stream.LEDGER else await read(bus, stream, *patterns)
    if step >= 0 and (found := told_of_step(step, told).batch) is not None:
        others = [member.group for member in found[2].groups if member.group != asked.group]
        told += await read(bus, Stream.READY, *(f"ready.{group}" for group in others)) if others else []
    return told


def _patterns(stream: Stream, group: str) -> list[str]:
    return {
        Stream.TASKS: [f"task.lease.{ordinal_of(group)}"],
        Stream.TURNS: [f"turn.{group}.*.*.*"],
        Stream.EPISODES: [f"episode.{group}.*", f"verdict.{group}.*"],
        Stream.READY: [f"ready.{group}", f"graded.{group}"],
        Stream.LEDGER: [f"ledger.quarantine.{group}", f"ledger.abandon.{group}", "ledger.batch.*"],
    }[stream]


async def read(bus: Bus, stream: Stream, *patterns: str) -> list[Told]:
    """What stands on these subjects, as records."""
    found = [event for event in await read_events(bus, stream, *patterns) if isinstance(event, Item)]
    prefix = bus.subjects.prefix
    return [(stream, Record(i.seq, i.time_ns, i.subject.removeprefix(prefix), Form.WHOLE, i.data)) for i in found]


def text(life: Life) -> list[str]:
    """The answer, the facts, and a line for each event: when, how long, who, what."""
    lines = [life.title, life.answer, ""]
    width = max((len(name) for name in life.facts), default=0)
    for name, value in life.facts.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{name}:")
            lines += table(value)
        else:
            lines.append(f"{name:<{width}}  {_plain(value)}")
    if life.events:
        begun = life.events[0].at_ns
        lines += ["", f"from {clock(begun)}"]
        lane = max(len(event.lane) for event in life.events)
        for event in life.events:
            lasted = f"{event.seconds:9.3f} s" if event.until_ns > event.at_ns else " " * 11
            lines.append(f"{(event.at_ns - begun) / 1e9:+11.3f} s {lasted}  {event.lane:<{lane}}  {event.what}")
    return lines


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Aligned columns with their names above; numbers to the right."""
    columns = list(rows[0])
    cells = [[_plain(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]
    numeric = [all(isinstance(row.get(column), int | float | None) for row in rows) for column in columns]

    def line(values: Iterable[str]) -> str:
        parts = [v.rjust(w) if right else v.ljust(w) for v, w, right in zip(values, widths, numeric, strict=True)]
        return "  " + "  ".join(parts).rstrip()

    return [line(columns), *(line(row) for row in cells)]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(held)}" for name, held in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(_plain(held) for held in value) or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "none" if value is None else str(value)


def clock(time_ns: int) -> str:
    """A server's time, readable, in UTC."""
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(sep=" ", timespec="milliseconds")


def as_json(life: Life) -> dict[str, Any]:
    """The same for programs."""
    return {
        "title": life.title,
        "answer": life.answer,
        "facts": life.facts,
        "events": [asdict(event) | {"seconds": event.seconds} for event in life.events],
    }
