"""`headrace replay`: verify a recording, replay it under other settings, or publish it again."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from admission.record_command import summary
from admission.recorded import configurations
from admission.republish import Break, Republish, live_roles, speed_of
from admission.service import gate_settings
from admission.verify import lines_of, verify
from admission.whatif import simulate
from admission.whatif_report import MODELLED, RECORDED, as_data, lines, plot, recorded_outcome, rejudged, sweep_lines
from admission.whatif_settings import Setting, changed, recorded
from admission.whatif_trace import Trace, trace_of
from services.config import Config, ConfigError, load
from services.recording import Recording, RecordingError

EXIT_SAME, EXIT_DIFFERENT = 0, 1


def run_replay(options: argparse.Namespace) -> int:
    """Carry out `headrace replay`. Raises `RecordingError` and `ConfigError` with what to give instead."""
    if (options.sweep and options.into) or (options.verify and (options.set or options.sweep or options.into)):
        raise RecordingError("--verify, --set or --sweep, and --into are three different replays; give one")
    if options.plot and not options.sweep:
        raise RecordingError("--plot draws a sweep; give --sweep SECTION.FIELD=A,B,C as well")
    if (options.breaks or options.once) and not options.into:
        raise RecordingError("--break and --once belong to --into URL")
    with Recording(Path(options.file)) as recording:
        if options.into:
            return _into(options, recording)
        if options.set or options.sweep:
            return _whatif(options, recording)
        return _verify(options, recording)


def _say(text: list[str]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    for line in text:
        console.print(line, soft_wrap=True)


def _save(path: str | None, data: Any) -> None:
    if path:
        try:
            Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise RecordingError(f"--json {path}: cannot be written ({error.strerror}); name a file in a folder") from error


def _verify(options: argparse.Namespace, recording: Recording) -> int:
    begun = time.monotonic()
    more = [gate_settings(load(options.config))] if options.config else []
    found = verify(recording, *more)
    seconds = time.monotonic() - begun
    _say(summary(recording))
    decided = f"{found.batches} batches, {found.quarantined} quarantined, {found.abandoned} abandoned"
    text = [
        f"joined again    {found.groups} ready groups" + (f"; {found.skipped} taken as recorded" if found.skipped else ""),
        f"decided again   {found.entries} ledger entries: {decided}",
    ]
    if found.unfinished:
        text.append(f"not in READY    {found.unfinished} groups were whole when the recording ended")
    if found.difference is not None:
        text += ["FIRST DIFFERENCE", *(f"  {line}" for line in lines_of(found.difference))]
    else:
        text.append(f"every recorded decision comes out again, bit for bit ({seconds:.1f} s)")
    _say(text)
    data = {
        "holds": found.holds,
        "groups": found.groups,
        "skipped": found.skipped,
        "entries": found.entries,
        "seconds": seconds,
        "difference": None if found.difference is None else lines_of(found.difference),
    }
    _save(options.json, data)
    return EXIT_SAME if found.holds else EXIT_DIFFERENT


def _whatif(options: argparse.Namespace, recording: Recording) -> int:
    config = _config(options, recording)
    base = recorded(config)
    name, values = _sweep(options.sweep) if options.sweep else ("", [])
    point = changed(base, config, options.set)
    points = [(value, changed(base, config, [*options.set, f"{name}={value}"])) for value in values]
    trace = trace_of(recording)
    before = recorded_outcome(trace)
    data: dict[str, Any] = {"recorded": as_data(before, RECORDED)}
    if points:
        swept = [(value, simulate(trace, each)) for value, each in points]
        _say(sweep_lines(name, before, swept))
        data["sweep"] = {"setting": name, "values": {value: as_data(out, MODELLED) for value, out in swept}}
        if options.plot:
            plot(Path(options.plot), name, swept)
    else:
        _compare(trace, base, point, data)
    _save(options.json, data)
    return EXIT_SAME


def _compare(trace: Trace, base: Setting, point: Setting, data: dict[str, Any]) -> None:
    before, same, other = recorded_outcome(trace), simulate(trace, base), simulate(trace, point)
    changes = rejudged(trace, point.gates())
    _say(lines(before, same, other, changes, trace.has_turns))
    data |= {"same": as_data(same, MODELLED), "changed": as_data(other, MODELLED), "rejudged": changes}


def _config(options: argparse.Namespace, recording: Recording) -> Config:
    if options.config:
        return load(options.config)
    known = configurations(recording)
    if not known:
        raise RecordingError(f"{recording.path}: names no configuration that this build reads; give --config FILE")
    return known[0]


def _sweep(text: str) -> tuple[str, list[str]]:
    name, separator, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not separator or not found:
        raise ConfigError(f"--sweep {text!r}: write section.field=A,B,C, as in admission.max_lag=0,1,2,4,8")
    return name.strip(), found


def _into(options: argparse.Namespace, recording: Recording) -> int:
    config = _config(options, recording)
    run = config.run.model_copy(update={"name": recording.header.run})
    nats = config.nats.model_copy(update={"url": options.into})
    target = config.model_copy(update={"run": run, "nats": nats})
    republish = Republish(
        recording,
        target,
        live=live_roles(options.live),
        speed=speed_of(options.speed),
        breaks=tuple(Break.of(text) for text in options.breaks),
        once=options.once,
    )
    return asyncio.run(republish.run())
