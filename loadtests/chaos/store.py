"""The store that a run left behind, served again as `headrace audit` does, to be read and checked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from schemas.permissions import ADMIN
from schemas.table import Role
from services.bus import Bus
from services.config import Config, load
from services.identity import seed_file
from services.runtime import connect
from services.stopped_run import served


@asynccontextmanager
async def reopened(folder: Path) -> AsyncIterator[tuple[Bus, Config]]:
    """The streams of a run folder, for one who may read all and list consumers, and its configuration.

    Raises `RunFolderError` when the folder is in use, and `BusError` when its store cannot be served.
    """
    config = load(folder / "config.toml")
    async with served(config, folder) as reachable:
        identity = "" if seed_file(reachable.nats, ADMIN) is None else ADMIN
        bus = await connect(reachable, Role.OBSERVER, "checks", identity=identity)
        try:
            yield bus, config
        finally:
            await bus.close()
