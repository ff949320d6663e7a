"""A run that has ended, served again for whoever looks at it: its own servers on its own store, under the folder's lock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from services.config import Config, load
from services.embedded_server import EmbeddedServers
from services.run_folder import RunFolder, is_in_use

log = structlog.get_logger()


class _FolderAsItIs(RunFolder):
    """Locked, and otherwise left as it is; also one that was moved aside."""

    def __init__(self, config: Config, path: Path) -> None:
        super().__init__(config)
        self.path = path

    def _write_config(self) -> None:
        return


def has_ended(folder: Path) -> bool:
    """Whether this is the folder of a local run that nobody runs now."""
    return (folder / "config.toml").is_file() and not is_in_use(folder)


def own_store(folder: Path) -> bool:
    """Whether the run kept its streams in its folder."""
    return any((folder / "nats").glob("store*/jetstream"))


@asynccontextmanager
async def served(config: Config, folder: Path | None) -> AsyncIterator[Config]:
    """The configuration with a server that has the run: the one that it names, or that of a run that has ended.

    Raises `RunFolderError` when the folder is taken meanwhile, and `BusError` when its server does not start.
    """
    if folder is None or not has_ended(folder) or not own_store(folder):
        yield config
        return
    kept = load(folder / "config.toml")
    kept = kept.model_copy(update={"nats": kept.nats.model_copy(update={"url": ""})})
    with _FolderAsItIs(kept, folder) as held:
        servers = EmbeddedServers(kept, held, lambda line: log.info(line))
        async with servers.running(lambda reason: log.error("server lost", reason=reason)):
            yield config.model_copy(update={"nats": servers.nats})
