"""What the queue server keeps its clients from: it is gone, or a stream has no room. Seen from one client's connection."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from nats.aio.client import Client

from services.bus import Bus
from services.items import BusError
from services.nats_client import NoRoom, RefusalClient

_ASK_S = 3.0


def server_names(client: Client) -> str:
    """Host and port of each server that the client knows; never what else a URL may carry."""
    return ", ".join(f"{server.hostname}:{server.port}" for server in client.servers)


def full_streams(bus: Bus) -> dict[str, NoRoom]:
    """Streams (by their name on the server) that publishers of this process hold for now, and since when."""
    if not isinstance(bus.client, RefusalClient):
        return {}
    found: dict[str, NoRoom] = {}
    for subject, refused in bus.client.without_room().items():
        in_run = subject.startswith(bus.subjects.prefix)
        stream = bus.subjects.stream(bus.stream_of(subject)) if in_run else bus.subjects.blob_stream()
        if stream not in found or refused.since_ns < found[stream].since_ns:
            found[stream] = refused
    return found


async def room_in(bus: Bus, stream: str) -> str:
    """How full a stream is, in words; what the server says within a few seconds."""
    try:
        async with asyncio.timeout(_ASK_S):
            bytes_held, limit = await usage(bus, stream)
    except (BusError, TimeoutError) as error:
        return f"{stream} refuses more ({error or 'its limit is not known'})"
    if limit <= 0:
        return f"{stream} holds {bytes_held} bytes, and the server has no room for more"
    return f"{stream} holds {bytes_held} bytes of max_bytes {limit}"


async def usage(bus: Bus, stream: str) -> tuple[int, int]:
    """Bytes that a stream holds, and its limit (not above 0: none). Raises `BusError`."""
    reply = await bus.request(f"STREAM.INFO.{stream}", {})
    return int(reply["state"]["bytes"]), int(reply["config"].get("max_bytes", -1))


def utc(time_ns: int) -> str:
    """A time for people, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_ns / 1e9))


class GoneNote:
    """A note in a local run's folder that its server is gone, and since when: who asks then cannot ask the server."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "nats" / "gone-since"

    def write(self, since_ns: int) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(f"{since_ns}\n", encoding="ascii")

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)

    def since_ns(self) -> int | None:
        """Nanoseconds since the epoch; `None` when the server was there, as far as the run knows."""
        try:
            return int(self._file.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
