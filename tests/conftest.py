"""What tests share: a real nats-server per module on a fresh store, run names, and waiting with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from services import nats_server

T = TypeVar("T")
STORE_BYTES = 256 * 2**20
_runs = itertools.count()


class NatsServer:
    """A nats-server process of ours; it can be killed and started again on the same store and port."""

    def __init__(self, folder: Path) -> None:
        self.port = nats_server.free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._config = folder / "nats.conf"
        self._log = folder / "nats.log"
        text = nats_server.configuration(store=folder / "store", port=self.port, max_file_bytes=8 * 2**30)
        self._config.write_text(text, encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float = 15.0) -> None:
        """Start and wait until the port accepts connections."""
        with self._log.open("ab") as log:
            command = [nats_server.binary(), "-c", str(self._config)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise AssertionError(f"nats-server did not start:\n{self._log.read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(10)


@pytest.fixture(scope="module")
def nats_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A running server that a test may kill and start again."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def nats_url(nats_process: NatsServer) -> str:
    """URL of a real server with a fresh store, one per test module."""
    return nats_process.url


@pytest.fixture
def run_name() -> str:
    """A run name that no other test of this process uses, so that tests of a module share the server and no stream."""
    return f"t{os.getpid() % 100_000}-{next(_runs)}"


async def eventually(condition: Callable[[], Any], *, within_s: float = 10.0, what: str = "") -> Any:
    """The first truthy value of `condition` (sync or async). Fails after `within_s` with the last value that it had."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what or inspect.getsource(condition).strip()} (last: {value!r})")
        await asyncio.sleep(0.03)
