"""`headrace report`: what was not trained on and why, from a run's streams; a run that goes on, or one that has ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from rich.console import Console

from admission.report import lines, report
from schemas.codec import CodecError, decode_any
from schemas.table import Role, Stream
from services.bus import Bus
from services.config import Config
from services.consume import read_events
from services.fates import Fates
from services.items import Item
from services.runtime import connect
from services.stopped_run import served

EXIT_OK = 0


async def run_report(config: Config, folder: Path | None, out: str) -> int:
    """Read, print; gives the exit code. `out`: also a file for the JSON, or `-` for the JSON alone; empty: neither.

    Raises `BusError` when the run cannot be reached, and `RunFolderError` when its folder is taken.
    """
    async with served(config, folder) as reachable:
        bus = await connect(reachable, Role.OBSERVER, f"report-{os.getpid()}")
        try:
            fates, last_ns = await gather(bus)
        finally:
            await bus.close()
    goes_on = config.nats.url != "" and reachable is config
    told = report(fates, config.run.name, time.time_ns() if goes_on else last_ns)
    if out == "-":
        print(json.dumps(told, indent=1))
        return EXIT_OK
    console = Console(highlight=False, markup=False, emoji=False)
    for line in lines(told):
        console.print(line, soft_wrap=True)
    if out:
        Path(out).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return EXIT_OK


async def gather(bus: Bus) -> tuple[Fates, int]:
    """The fates of all groups up to now, and the time of the last item that tells of them. Damaged items tell nothing."""
    fates, last_ns = Fates(), 0
    for stream in (Stream.TASKS, Stream.READY, Stream.LEDGER):
        for event in await read_events(bus, stream):
            if not isinstance(event, Item):
                continue
            try:
                message = decode_any(event.data)
            except CodecError:
                continue
            fates.add(message, event.time_ns)
            last_ns = max(last_ns, event.time_ns)
    return fates, last_ns
