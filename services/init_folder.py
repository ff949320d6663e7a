"""`headrace init`: keys for every identity of a run and a server configuration that knows them, for a server of one's own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from schemas.permissions import ADMIN, IDENTITIES
from services.certificates import CA, make_certificates
from services.config import Config, ConfigError
from services.embedded_server import instances_by_role, store_limit
from services.identity import make_keys, seed_path
from services.nats_server import Cluster, configuration
from services.server_accounts import accounts

_CLIENT_PORT, _ROUTE_PORT = 4222, 6222
_ANY_NODE = "nats"  # what every server of a compose stack answers to
_MONITOR = "127.0.0.1:8222"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What to make and where. `at` and `store` are paths as the server sees them; empty: those of `out` on this machine."""

    out: Path
    nodes: int = 1
    hosts: tuple[str, ...] = ()
    tls: bool = False
    at: str = ""
    store: str = ""


def init(config: Config, layout: Layout) -> list[str]:
    """Make the folder and say what to do next. Raises `ConfigError` when it exists or the hosts do not match the nodes."""
    hosts = layout.hosts or tuple(f"nats-{number}" for number in range(1, layout.nodes + 1))
    if len(hosts) != layout.nodes:
        raise ConfigError(f"--hosts: {len(hosts)} names for {layout.nodes} server(s); give one for each")
    try:
        layout.out.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise ConfigError(f"--out: {layout.out} exists, and keys are never overwritten; give another folder") from None
    except OSError as error:
        raise ConfigError(f"--out: cannot make {layout.out} ({error.strerror})") from error
    public_keys = make_keys(layout.out / "keys", IDENTITIES)
    if layout.tls:
        make_certificates(layout.out / "tls", (*hosts, _ANY_NODE))
    known = accounts(config.run.name, public_keys, instances_by_role(config))
    secret = secrets.token_hex(16)
    for number in range(1, layout.nodes + 1):
        file = layout.out / _file(layout, number)
        file.touch(mode=0o600)
        file.write_text(_configuration(config, layout, hosts, number, secret) + known, encoding="utf-8")
    return list(_next_steps(config, layout, hosts))


def _configuration(config: Config, layout: Layout, hosts: tuple[str, ...], number: int, secret: str) -> str:
    at = Path(layout.at) if layout.at else layout.out.resolve()
    several = layout.nodes > 1
    store = Path(layout.store) if layout.store else at / (f"store-{number}" if several else "store")
    routes = tuple(f"{host}:{_ROUTE_PORT}" for host in hosts)
    return configuration(
        store=store,
        port=_CLIENT_PORT,
        max_file_bytes=store_limit(config),
        host="0.0.0.0",
        name=hosts[number - 1] if several else "headrace",
        monitor=_MONITOR,
        cluster=Cluster(listen=f"0.0.0.0:{_ROUTE_PORT}", routes=routes, secret=secret) if several else None,
        certificates=at / "tls" if layout.tls else None,
    )


def _file(layout: Layout, number: int) -> str:
    return f"nats-{number}.conf" if layout.nodes > 1 else "nats.conf"


def _next_steps(config: Config, layout: Layout, hosts: tuple[str, ...]) -> Iterator[str]:
    keys = layout.out / "keys"
    yield f"{layout.out}: for run {config.run.name}, a key for each of {', '.join(IDENTITIES)}, and the server's configuration"
    yield "1. start the server(s):"
    for number, host in enumerate(hosts, start=1):
        where = f"on {host}: " if layout.nodes > 1 else ""
        yield f"   {where}nats-server -c {layout.at or layout.out.resolve()}/{_file(layout, number)}"
    yield "2. tell every service, in [nats] of its configuration or with --set:"
    url = ",".join(f"nats://{host}:{_CLIENT_PORT}" for host in hosts) if layout.nodes > 1 else f"nats://HOST:{_CLIENT_PORT}"
    yield f'   nats.url = "{url}"'
    if layout.nodes > 1:
        yield "   nats.replicas = 3"
    if layout.tls:
        yield f'   nats.tls_ca_file = "{layout.out / "tls" / CA}"'
    yield f'   nats.nkey_seed_file = "{keys}/ROLE.nk", its own alone; where all are at hand, nats.nkey_folder = "{keys}"'
    yield "3. create the streams, once:"
    yield f'   headrace provision --config run.toml --set nats.admin_seed_file="{seed_path(keys, ADMIN)}"'
