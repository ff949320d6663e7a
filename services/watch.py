"""`headrace watch`: the view of a run that goes on elsewhere."""

from __future__ import annotations

import asyncio
import os
import time
from urllib.parse import urlsplit

from schemas.table import Role, Stream
from services.bus import Bus
from services.config import Config
from services.items import BusError
from services.progress import Progress
from services.run_folder import MetricsFile
from services.runtime import EXIT_BUS_LOST, EXIT_CLEAN, connect
from services.samples import Samples
from services.stack import first_of, on_signals, printer
from services.summary import summary


async def watch(config: Config, *, record: bool) -> int:
    """Print the progress of a run on an existing server until it is complete or a signal comes.

    `record` also writes metrics and samples to the run folder, which nobody else may be doing then.
    """
    stop, lost = asyncio.Event(), list[str]()

    def on_lost(reason: str) -> None:
        lost.append(reason)
        stop.set()

    say = printer()
    with on_signals(stop.set):
        bus = await connect(config, Role.OBSERVER, f"watch-{os.getpid()}", on_lost)
        try:
            await _streams(bus, config.nats.connect_timeout_s, stop)
            folder = config.run_folder()
            metrics, samples = None, None
            if record:
                metrics, samples = MetricsFile(folder / "metrics.jsonl"), Samples(bus, config, folder)
            progress = Progress(bus, config, say, metrics, samples)
            say(f"run {config.run.name} on {urlsplit(config.nats.url).netloc or config.nats.url}")
            async with asyncio.TaskGroup() as group:
                group.create_task(progress.run(stop))
                await first_of(progress.complete, stop)
                stop.set()
            say(summary(progress.tally, config, folder))
        finally:
            was_lost = bool(lost)
            await bus.close()
    return EXIT_BUS_LOST if was_lost else EXIT_CLEAN


async def _streams(bus: Bus, timeout_s: float, stop: asyncio.Event) -> None:
    """Wait for the run's streams, which its services create. Raises `BusError` when they do not come."""
    deadline = time.monotonic() + timeout_s
    while not stop.is_set():
        try:
            await bus.last_sequence(Stream.POLICY)
            return
        except BusError as error:
            if time.monotonic() > deadline:
                raise BusError(
                    f"no run {bus.run!r} on this server after {timeout_s:.0f} s ({error}); is run.name right?"
                ) from error
        await asyncio.sleep(0.5)
