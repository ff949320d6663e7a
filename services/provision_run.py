"""`headrace provision`: create a run's streams under the admin's key, or verify them, and give them more room."""

from __future__ import annotations

import os

from schemas.permissions import ADMIN
from schemas.table import Role
from services.config import Config
from services.identity import seed_file
from services.provision import provision
from services.runtime import connect


async def provision_run(config: Config) -> list[str]:
    """Create or verify every stream, and raise limits that are below those of the configuration; gives what was raised, a line
    for each. Without keys in the configuration anybody may.

    Raises `BusError`, `TableMismatch` and `ConfigError` as connecting and `provision` do.
    """
    identity = "" if seed_file(config.nats, ADMIN) is None else ADMIN
    bus = await connect(config, Role.OBSERVER, f"provision-{os.getpid()}", identity=identity)
    try:
        return await provision(bus, config.nats.store_bytes, config.nats.replicas, raise_limits=True)
    finally:
        await bus.close()
