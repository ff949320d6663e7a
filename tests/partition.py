"""A TCP proxy before a real server that can cut one service off: connections stay open and nothing comes through."""

from __future__ import annotations

import asyncio
from types import TracebackType

from services.nats_server import free_port


class Partition:
    """`url` leads to the server until `cut`; after `heal` what was held back is delivered, as a network would."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._open = asyncio.Event()
        self._open.set()
        self._loses = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Partition:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    def lose(self) -> None:
        """From now on what is sent gets lost, until the connections are reset."""
        self._loses = True

    async def reset(self) -> None:
        """Close every connection; what was held back or lost never arrives, and new ones are whole."""
        self._loses = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        for source, target in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pass_on(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._open.wait()
                if self._loses:
                    continue
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()
