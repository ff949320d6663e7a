"""Damage to the store of a real nats-server while it does not run: a flipped bit, a block cut short."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from conftest import NatsServer

from schemas.table import Stream, Subjects


def stop(server: NatsServer) -> None:
    """End the server in order, so that it writes its index."""
    process = server._process
    assert process is not None
    os.kill(process.pid, signal.SIGTERM)
    process.wait(30)


def block_with(server: NatsServer, run: str, stream: Stream, subject: str) -> tuple[Path, int]:
    """The block file that holds the first message on a subject, and where in it the subject's name stands."""
    folder = server._config.parent / "store"
    blocks = sorted(folder.rglob(f"{Subjects(run).stream(stream)}/msgs/*.blk"))
    for block in blocks:
        found = re.search(re.escape(subject.encode()) + rb"....NATS/1\.0", block.read_bytes(), re.DOTALL)
        if found:
            return block, found.start()
    raise AssertionError(f"no block of {stream} holds {subject}; there are {[b.name for b in blocks]}")


def flip_bit(server: NatsServer, run: str, stream: Stream, subject: str) -> None:
    """One bit of the first message on a subject."""
    block, at = block_with(server, run, stream, subject)
    data = bytearray(block.read_bytes())
    data[at + len(subject) + 20] ^= 1
    block.write_bytes(data)


def cut_block(server: NatsServer, run: str, stream: Stream, subject: str) -> None:
    """End the block within the first message on a subject; that one and all behind it are gone."""
    block, at = block_with(server, run, stream, subject)
    os.truncate(block, at)


@asynccontextmanager
async def damaged(server: NatsServer, *, crash: bool = False) -> AsyncIterator[None]:
    """The server is down inside and comes back after; `crash` leaves it without its index, as a kill does."""
    await asyncio.sleep(0.3)  # what consumers acknowledged is written within 100 ms
    if crash:
        server.kill()
    else:
        await asyncio.to_thread(stop, server)
    try:
        yield
    finally:
        await asyncio.to_thread(server.start, 30.0)
