"""A real nats-server that knows the identities of one run by their keys, and connections under each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from conftest import STORE_BYTES, NatsServer

from schemas.permissions import ADMIN, IDENTITIES
from schemas.table import Role, Stream
from services import nats_server
from services.bus import Bus
from services.config import Config, check
from services.identity import make_keys, read_seed, seed_path
from services.provision import provision
from services.server_accounts import accounts

RUN = "keyed-1"
INSTANCES = {Role.ENGINE: ("e0", "e1"), Role.SANDBOX: ("x0",)}


class KeyedServer(NatsServer):
    """As the embedded server of `headrace up`: an account for the streams and one for each identity."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.keys = folder / "keys"
        known = accounts(RUN, make_keys(self.keys, IDENTITIES), INSTANCES)
        text = nats_server.configuration(store=folder / "store", port=self.port, max_file_bytes=8 * 2**30, accounts=known)
        self._config.write_text(text, encoding="utf-8")

    async def connect(self, identity: str, *, on_fatal: Callable[[str], None] | None = None) -> Bus:
        """A connection under one identity's own key."""
        seed = read_seed(seed_path(self.keys, identity))
        role = Role.OBSERVER if identity == ADMIN else Role(identity)
        return await Bus.connect(self.url, RUN, role, "t", nkeys_seed=seed, on_fatal=on_fatal, identity=identity)

    @asynccontextmanager
    async def bus(self, identity: str) -> AsyncIterator[Bus]:
        connection = await self.connect(identity)
        try:
            yield connection
        finally:
            await connection.close()

    async def provision(self) -> None:
        async with self.bus(ADMIN) as admin:
            await provision(admin, STORE_BYTES)

    def config(self, **nats: object) -> Config:
        """A service's configuration for this server; without more, it has no key."""
        return check(
            {
                "run": {"name": RUN},
                "nats": {"url": self.url, "store_bytes": STORE_BYTES, "connect_timeout_s": 20, **nats},
                "telemetry": {"heartbeat_s": 0.2},
            }
        )


async def stored(admin: Bus) -> dict[str, tuple[int, int]]:
    """Messages and last sequence of every stream of the run, as the admin sees them."""
    names = [*(admin.subjects.stream(stream) for stream in Stream), admin.subjects.blob_stream()]
    states = {name: (await admin.request(f"STREAM.INFO.{name}", {}))["state"] for name in names}
    return {name: (state["messages"], state["last_seq"]) for name, state in states.items()}
