"""A TCP proxy between one service and the server, whose connections can be cut, slowed down, held and made deaf."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loadtests.chaos.schedule import CutMode

_CHUNK_BYTES = 64 * 1024
_DELAY_S = 0.25


class Proxy:
    """Listens on a port of its own. Until `target` is set, connections are closed at once, as by a server that is away."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.target = 0
        self.cut_connections = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._towards_server = _Gate()
        self._towards_client = _Gate()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection; new ones are let through."""
        for writer in list(self._writers):
            self.cut_connections += 1
            writer.transport.abort()

    @asynccontextmanager
    async def disturbed(self, mode: CutMode) -> AsyncIterator[None]:
        """While the block runs: `delay` slows every chunk; `hold` lets nothing through, both sides open; `deaf` lets through
        what the service says and holds what it would hear, and resets at the end, so that acknowledgements are lost.
        """
        if mode == "cut":
            self.cut()
            yield
            return
        if mode == "delay":
            self._towards_server.delay_s = self._towards_client.delay_s = _DELAY_S
        else:
            self._towards_client.shut()
        if mode == "hold":
            self._towards_server.shut()
        try:
            yield
        finally:
            if mode == "deaf":
                self.cut()
                await asyncio.sleep(0)
            for gate in (self._towards_server, self._towards_client):
                gate.delay_s = 0.0
                gate.open()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        pumps = [
            asyncio.create_task(_pump(reader, far_writer, self._towards_server)),
            asyncio.create_task(_pump(far_reader, writer, self._towards_client)),
        ]
        self._tasks |= set(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in (writer, far_writer):
                end.transport.abort()
                self._writers.discard(end)
            for task in pumps:
                task.cancel()
            self._tasks -= set(pumps)


class _Gate:
    """What one direction of every connection passes through."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self._open = asyncio.Event()
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        await self._open.wait()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: _Gate) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while data := await reader.read(_CHUNK_BYTES):
            await gate.passed()
            writer.write(data)
            await writer.drain()
