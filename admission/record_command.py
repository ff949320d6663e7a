"""`headrace record`: a run's streams into one file, from a run that goes on, from one that has ended, or from a cluster."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from admission.slim import slim_bytes
from schemas.table import Role, Stream
from services.config import Config, to_toml
from services.recorded_range import Range, RangeError
from services.recorder import Recorded, record
from services.recording import RECORDED
from services.runtime import connect
from services.stopped_run import has_ended, served

EXIT_OK = 0


async def run_record(config: Config, folder: Path | None, out: Path, asked: Range, *, bodies: bool) -> int:
    """Record; gives the exit code. Raises `BusError` when the run cannot be reached, `RecordingError` when `out` cannot be
    written."""
    console = Console(highlight=False, markup=False, emoji=False)
    done = await record_run(config, folder, out, asked, bodies=bodies)
    for stream in RECORDED:
        console.print(f"{stream:<10} {done.records.get(stream, 0):>10} messages", soft_wrap=True)
    bodies_said = "with bodies" if bodies else "without bodies"
    total = sum(done.records.values())
    console.print(
        f"recorded run {config.run.name} to {out}: {total} messages, {done.size_bytes:,} bytes, {bodies_said}, "
        f"in {done.seconds:.1f} s",
        soft_wrap=True,
    )
    return EXIT_OK


async def record_run(config: Config, folder: Path | None, out: Path, asked: Range, *, bodies: bool) -> Recorded:
    """Record without a word."""
    source = f"run folder {folder.name}" if folder is not None and has_ended(folder) else "live"
    async with served(config, folder) as reachable:
        bus = await connect(reachable, Role.OBSERVER, f"record-{os.getpid()}")
        try:
            slim = None if bodies else slim_bytes
            text = to_toml(_without_places(config))
            return await record(bus, out, asked=asked, slim=slim, config=text, source=source, say=lambda line: None)
        finally:
            await bus.close()


def _without_places(config: Config) -> Config:
    """A recording is passed on: it names no server, key file or folder of the machine that it was made on."""
    places = {"url": "", "nkey_seed_file": "", "nkey_folder": "", "admin_seed_file": "", "tls_ca_file": ""}
    run, sandbox = {"folder": "runs"}, {"root": ""}
    return config.model_copy(
        update={
            "nats": config.nats.model_copy(update=places),
            "run": config.run.model_copy(update=run),
            "sandbox": config.sandbox.model_copy(update=sandbox),
        }
    )


def asked_for(seqs: list[str], since: str | None, until: str | None, from_step: int | None, to_step: int | None) -> Range:
    """The range that a command line asks for. Raises `RangeError` naming the word that is wrong."""
    for option, step in (("--from-step", from_step), ("--to-step", to_step)):
        if step is not None and step < 0:
            raise RangeError(f"{option} {step}: steps are numbered from 0")
    if from_step is not None and to_step is not None and from_step > to_step:
        raise RangeError(f"--from-step {from_step} lies behind --to-step {to_step}; give the lower one first")
    since_ns, until_ns = _time_ns("--since", since), _time_ns("--until", until)
    if until_ns and since_ns > until_ns:
        raise RangeError(f"--since {since} lies behind --until {until}; give the earlier one first")
    return Range(
        seqs=dict(_seqs(text) for text in seqs),
        since_ns=since_ns,
        until_ns=until_ns,
        from_step=from_step,
        to_step=to_step,
    )


def _seqs(text: str) -> tuple[Stream, tuple[int, int]]:
    name, _, numbers = text.partition("=")
    first, dash, last = numbers.partition("-")
    if name not in tuple(Stream) or not first.isdecimal() or (last and not last.isdecimal()):
        raise RangeError(f"--seq {text}: write STREAM=FIRST-LAST, e.g. EPISODES=100-500; streams: {', '.join(RECORDED)}")
    return Stream(name), (max(1, int(first)), int(last) if last else 0 if dash else int(first))


def _time_ns(option: str, text: str | None) -> int:
    if not text:
        return 0
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise RangeError(f"{option} {text}: is no time; write it like 2026-01-31T12:00:00+00:00") from error
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1e9)
