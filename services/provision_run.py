"""`headrace provision`: create a run's streams under the admin's key, or verify them."""

from __future__ import annotations

import os

from schemas.permissions import ADMIN
from schemas.table import Role
from services.config import Config
from services.identity import seed_file
from services.provision import provision
from services.runtime import connect


async def provision_run(config: Config) -> None:
    """Create or verify every stream. Without keys in the configuration anybody may.

    Raises `BusError`, `TableMismatch` and `ConfigError` as connecting and `provision` do.
    """
    identity = "" if seed_file(config.nats, ADMIN) is None else ADMIN
    bus = await connect(config, Role.OBSERVER, f"provision-{os.getpid()}", identity=identity)
    try:
        await provision(bus, config.nats.store_bytes, config.nats.replicas)
    finally:
        await bus.close()
