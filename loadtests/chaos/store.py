"""The store that a run left behind, served again on another port, to be read and checked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from schemas.table import Role
from services import nats_server
from services.bus import Bus
from services.config import Config, load

_START_S = 60.0


class StoreError(RuntimeError):
    """The store cannot be served; the text says why."""


@asynccontextmanager
async def reopened(folder: Path) -> AsyncIterator[tuple[Bus, Config]]:
    """The streams of a run folder and its configuration. Nothing else may serve the store meanwhile."""
    config = load(folder / "config.toml")
    port = nats_server.free_port()
    text = (folder / "nats" / "nats.conf").read_text(encoding="utf-8")
    path = folder / "nats" / "reopened.conf"
    path.write_text(re.sub(r'listen: ".*"', f'listen: "127.0.0.1:{port}"', text, count=1), encoding="utf-8")
    with (folder / "logs" / "reopened.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(nats_server.binary(), "-c", str(path), stdout=log, stderr=log)
    try:
        if not await nats_server.accepts(port, _START_S):
            raise StoreError(f"the store of {folder} is not served within {_START_S:g} s; see logs/reopened.log there")
        bus = await Bus.connect(f"nats://127.0.0.1:{port}", config.run.name, Role.OBSERVER, "checks")
        try:
            yield bus, config
        finally:
            await bus.close()
    finally:
        process.terminate()
        await process.wait()
