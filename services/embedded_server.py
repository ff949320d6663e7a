"""The servers that a local run brings along: one, or a cluster; their keys, their configuration files and their processes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from schemas.permissions import IDENTITIES, Instances
from schemas.table import Role
from services.child import ChildSpec
from services.config import Config, ConfigError
from services.health import pause
from services.identity import make_keys, run_keys
from services.items import BusError
from services.nats_server import Cluster, accepts, binary, configuration, free_port
from services.run_folder import RunFolder
from services.server_accounts import account, accounts
from services.store_watch import StoreWatch
from services.supervisor import GaveUp, Limits, Supervisor

SERVER = "nats-server"
_START_S = 30.0
_HEAD_ROOM = 1.1  # the server counts what streams reserve, and file blocks round up
_SHARED_ACCOUNT = "$G"  # of a server without accounts


class EmbeddedServers:
    """The servers of one local run in its locked folder, each kept running by a supervisor of its own.

    Raises `ConfigError` when the folder's store was made by another kind of server.
    """

    def __init__(self, config: Config, folder: RunFolder, say: Callable[[str], None], limits: Limits | None = None) -> None:
        self._folder = folder
        self._say = say
        self.given_up: list[str] = []
        self._ports = [free_port() for _ in range(config.nats.nodes)]
        self._monitors = [f"127.0.0.1:{free_port()}" for _ in self._ports]
        self._labels = [SERVER] if config.nats.nodes == 1 else [f"{SERVER}-{n}" for n in range(1, config.nats.nodes + 1)]
        home = (folder.path / "nats").resolve()
        self._stores = [home / name for name in _stores(config.nats.nodes)]
        _check_store(config, home)
        plans = _plans(config, folder, home, self._labels, self._ports, self._monitors)
        self.supervisors = {plan.label: Supervisor([plan], say, limits) for plan in plans}
        self.nats = config.nats.model_copy(
            update={
                **dict.fromkeys(("nkey_seed_file", "admin_seed_file", "tls_ca_file"), ""),
                "url": ",".join(f"nats://127.0.0.1:{port}" for port in self._ports),
                "nkey_folder": str(run_keys(folder.path)) if config.nats.embedded_keys else "",
            }
        )

    @asynccontextmanager
    async def running(self, on_lost: Callable[[str], None]) -> AsyncIterator[None]:
        """While the servers run: answering on entry, stopped on exit. Raises `BusError` naming one that does not answer.

        `on_lost` is called when so many were given up that the rest cannot decide anything.
        """
        stop = asyncio.Event()
        tasks = [asyncio.create_task(self._keep(label, stop, on_lost), name=label) for label in self._labels]
        tasks.append(asyncio.create_task(self._note_readiness(stop), name="nats-server readiness"))
        tasks += [asyncio.create_task(watch.run(stop), name="store") for watch in self._store_watches()]
        try:
            for label, port in zip(self._labels, self._ports, strict=True):
                if not await accepts(port, _START_S):
                    raise BusError(f"the embedded {label} does not answer on port {port}; see {self._folder.log(label)}")
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)

    def pid(self, label: str) -> int | None:
        """Process id of a server that runs now."""
        return self.supervisors[label].pid(label)

    def _store_watches(self) -> list[StoreWatch]:
        return [
            StoreWatch(label, monitor, store, restart=partial(self.supervisors[label].restart, label), say=self._say)
            for label, monitor, store in zip(self._labels, self._monitors, self._stores, strict=True)
        ]

    async def _keep(self, label: str, stop: asyncio.Event, on_lost: Callable[[str], None]) -> None:
        try:
            await self.supervisors[label].run(stop)
        except GaveUp as error:
            self.given_up.append(label)
            majority_is_left = 2 * len(self.given_up) < len(self._labels)
            (self._say if majority_is_left else on_lost)(str(error))

    async def _note_readiness(self, stop: asyncio.Event) -> None:
        """Tell the supervisor of each process that answers, so that killing a server again and again is never given up."""
        seen: dict[str, int] = {}
        while not await pause(stop, 0.1):
            for label, port in zip(self._labels, self._ports, strict=True):
                pid = self.pid(label)
                if pid is not None and pid != seen.get(label) and await accepts(port, 0.2):
                    self.supervisors[label].ready(label, pid)
                    seen[label] = pid


def instances_by_role(config: Config) -> Instances:
    """The names that the configuration lists, and those that may join; consumers are called after them."""
    joining = config.nats.joining
    if "*" in joining:
        return {}
    return {Role.ENGINE: (*config.engine.names, *joining), Role.SANDBOX: (*config.sandbox.names, *joining)}


def store_limit(config: Config) -> int:
    """Bytes that each server must be allowed to store."""
    return int(config.nats.store_bytes * _HEAD_ROOM) + 2**26


def _plans(
    config: Config, folder: RunFolder, home: Path, labels: list[str], ports: list[int], monitors: list[str]
) -> list[ChildSpec]:
    """One process per server. Each inherits the folder's lock: the store is in use for as long as one of them lives."""
    known = ""
    if config.nats.embedded_keys:
        keys = make_keys(run_keys(folder.path), IDENTITIES)
        known = accounts(config.run.name, keys, instances_by_role(config))
    routes = [f"127.0.0.1:{free_port()}" for _ in labels]
    secret = secrets.token_hex(16)
    plans = []
    for label, port, monitor, route, store in zip(labels, ports, monitors, routes, _stores(len(labels)), strict=True):
        text = configuration(
            store=home / store,
            port=port,
            max_file_bytes=store_limit(config),
            monitor=monitor,
            name="headrace" if len(labels) == 1 else label,
            cluster=Cluster(listen=route, routes=routes, secret=secret) if len(labels) > 1 else None,
            accounts=known,
        )
        file = home / f"{store.replace('store', 'nats')}.conf"
        file.touch(0o600)
        file.chmod(0o600)
        file.write_text(text, encoding="utf-8")
        plans.append(ChildSpec(label=label, argv=(binary(), "-c", str(file)), log=folder.log(label), inherit=(folder.lock,)))
    return plans


def _stores(nodes: int) -> list[str]:
    return ["store"] if nodes == 1 else [f"store-{n}" for n in range(1, nodes + 1)]


def _check_store(config: Config, home: Path) -> None:
    """A store belongs to as many servers, with or without keys, as made it; others would begin anew beside it."""
    found = {path.name for path in home.glob("store*") if path.is_dir()}
    wanted = set(_stores(config.nats.nodes))
    rest = "or give --fresh, or another run.name"
    if found - wanted:
        raise ConfigError(f"nats.nodes: {home} holds the store of {len(found)} server(s), not {len(wanted)}; set it so, {rest}")
    held = {path.name for path in home.glob("store*/jetstream/*") if (path / "streams").is_dir()}
    ours, other = account(config.run.name), _SHARED_ACCOUNT
    if not config.nats.embedded_keys:
        ours, other = other, ours
    if other in held and ours not in held:
        made = "without" if other == _SHARED_ACCOUNT else "with"
        keys = "false" if other == _SHARED_ACCOUNT else "true"
        raise ConfigError(f"nats.embedded_keys: the store in {home} was made {made} keys; set it to {keys}, {rest}")
