"""`headrace record`: write a run's streams, or a part of them, to one file."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path

from rich.console import Console

from admission.record import RECORDED, Range, Taker, make_out
from schemas.table import Role, Stream
from services.config import Config, ConfigError, Nats, load, to_toml
from services.recording import Header, Recording, RecordingError
from services.recording_writer import RecordingWriter
from services.runtime import connect
from services.stack import on_signals
from services.stopped_run import served


def range_of(steps: str, since: str, until: str, sequences: Sequence[str]) -> Range:
    """A range as a person writes it. Raises `RecordingError` that says how it is written."""
    times = None
    if since or until:
        times = (_time_ns("--since", since) if since else 0, _time_ns("--until", until) if until else (1 << 63) - 1)
    of_streams: dict[Stream, tuple[int, int]] = {}
    for text in sequences:
        name, _, span = text.partition("=")
        if name not in RECORDED:
            raise RecordingError(f"--seq {text}: {name!r} is no recorded stream; use {', '.join(RECORDED)}, as in READY=10:20")
        of_streams[Stream(name)] = _span("--seq", span)
    return Range(steps=_span("--steps", steps) if steps else None, times_ns=times, sequences=of_streams)


def _span(option: str, text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not first.isdecimal() or (colon and not last.isdecimal()):
        raise RecordingError(f"{option} {text!r}: write one number, or the first and the last with a colon, as in 10:20")
    return int(first), int(last) if colon else int(first)


def _time_ns(option: str, text: str) -> int:
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1e9)
    except ValueError as error:
        raise RecordingError(f"{option} {text!r}: write a time as in 2026-05-01T12:30:00, or with +00:00 behind it") from error


async def run_record(config: Config, folder: Path | None, out: Path, wanted: Range, *, bodies: bool, follow: bool) -> int:
    """Record a run that goes on or has ended. Raises `BusError`, `RunFolderError` and `RecordingError`."""
    if out.exists():
        raise RecordingError(f"{out}: is there already; give another name, or remove it")
    begun = time.monotonic()
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        reachable = await stack.enter_async_context(served(config, folder))
        if follow:
            stack.enter_context(on_signals(stop.set))
        bus = await connect(reachable, Role.OBSERVER, f"record-{os.getpid()}")
        stack.push_async_callback(bus.close)
        selection = None if wanted.is_all() else await make_out(bus, wanted)
        header = Header(
            run=bus.run,
            made_ns=time.time_ns(),
            bodies=bodies,
            selection=wanted.words(),
            configs=tuple(_configurations(config, folder)),
        )
        with RecordingWriter(out, header) as writer:
            await Taker(bus, writer, bodies=bodies, selection=selection).take(stop, follow=follow)
    with Recording(out) as recording:
        for line in summary(recording, time.monotonic() - begun):
            Console(highlight=False, markup=False, emoji=False).print(line, soft_wrap=True)
    return 0


def _configurations(config: Config, folder: Path | None) -> list[str]:
    """The resolved configuration, and those that the run was under before; without how the server is reached."""
    texts = [_plain(config)]
    older = sorted(folder.glob("config.until-*.toml"), reverse=True) if folder is not None else []
    for path in older:
        try:
            texts.append(_plain(load(path)))
        except ConfigError as error:
            print(f"headrace: {path.name} is left out: {error}")
    return list(dict.fromkeys(texts))


def _plain(config: Config) -> str:
    return to_toml(config.model_copy(update={"nats": Nats(store_bytes=config.nats.store_bytes)}))


def summary(recording: Recording, seconds: float | None = None) -> list[str]:
    """What a recording holds, one aligned line a stream."""
    header, size = recording.header, recording.path.stat().st_size
    bodies = "with bodies" if header.bodies else "without bodies"
    took = "" if seconds is None else f" in {seconds:.1f} s"
    lines = [f"{recording.path}: run {header.run}, {header.selection or 'the whole run'}, {bodies}; {size} bytes{took}"]
    if header.note:
        lines.append(f"note: {header.note}")
    for stream in RECORDED:
        facts = recording.facts(stream)
        stored = sum(block.stored for block in recording.index.blocks if block.stream == stream)
        rest = "" if facts.whole else f"of {facts.last_seq} in the log"
        bad = f"  {facts.holes} hole(s), {facts.damaged} damaged" if facts.holes or facts.damaged else ""
        lines.append(f"  {stream:<9} {facts.records:>9} messages {stored:>12} bytes  {rest}{bad}".rstrip())
    lines.append(f"  digest    {recording.digest()}")
    return lines
