"""What it costs that an acknowledged message is on disk: `sync_interval: always` against the server's default, side by side.

    python -m loadtests.bus_durability [--sizes 1000,10000,100000,1000000] [--replicas 1,3] [--rounds N] [--json OUT]

Servers of both kinds run at the same time on stores in the same folder, and the measurements take turns, so that both see the
same machine; each is the median of the rounds. `one` is a writer that waits for every acknowledgement, `many` keeps up to
sixteen megabytes or 64 messages on their way. The default tells the disk every two minutes, so its acknowledgements survive the
end of a process and not that of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.js.errors import APIError

from services.nats_server import Cluster, accepts, binary, configuration, free_port

SUBJECT = "load.x"
_STREAM = "LOAD"
_ON_THEIR_WAY_BYTES = 16 * 10**6
_ON_THEIR_WAY = 64
_MODES = ("always", "default")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Messages per second of one size on so many replicas, and how many times as long `always` takes."""

    size_bytes: int
    replicas: int
    one_always: float
    one_default: float
    one_ratio: float
    many_always: float
    many_default: float
    many_ratio: float


@asynccontextmanager
async def servers(folder: Path, mode: str, replicas: int) -> AsyncIterator[Client]:
    """A connection to as many fresh servers as there are replicas, with one empty stream."""
    ports = [free_port() for _ in range(replicas)]
    routes = [f"127.0.0.1:{free_port()}" for _ in range(replicas)]
    secret, processes = secrets.token_hex(8), []
    for number, (port, route) in enumerate(zip(ports, routes, strict=True)):
        home = folder / f"{mode}-{replicas}-{number}"
        home.mkdir()
        cluster = Cluster(listen=route, routes=routes, secret=secret) if replicas > 1 else None
        text = configuration(store=home, port=port, max_file_bytes=4 * 2**30, name=f"n{number}", cluster=cluster)
        (home / "nats.conf").write_text(text if mode == "always" else text.replace("sync_interval: always", ""))
        processes.append(
            await asyncio.create_subprocess_exec(
                *(binary(), "-c", str(home / "nats.conf")), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
            )
        )
    try:
        for port in ports:
            if not await accepts(port, 60):
                raise SystemExit(f"a server does not answer on port {port}")
        client = await nats.connect([f"nats://127.0.0.1:{port}" for port in ports], pending_size=2 * _ON_THEIR_WAY_BYTES)
        await _create(client, replicas)
        yield client
        await client.close()
    finally:
        for process in processes:
            process.kill()
            await process.wait()


async def _create(client: Client, replicas: int) -> None:
    for _ in range(120):  # a cluster needs a moment to find its leader
        try:
            await client.jetstream().add_stream(
                name=_STREAM, subjects=[SUBJECT], num_replicas=replicas, max_bytes=3 * 2**30, max_msg_size=8 * 2**20
            )
            return
        except (APIError, nats.errors.TimeoutError):
            await asyncio.sleep(0.5)
    raise SystemExit(f"no stream with {replicas} replicas after 60 s")


async def rate(client: Client, size: int, at_once: int, seconds: float) -> float:
    """Acknowledged messages per second, of `size` bytes, `at_once` of them on their way."""
    stream, data = client.jetstream(), os.urandom(size)
    end = time.monotonic() + seconds
    done = 0

    async def writer() -> None:
        nonlocal done
        while time.monotonic() < end:
            await stream.publish(SUBJECT, data, timeout=30)
            done += 1

    begun = time.monotonic()
    await asyncio.gather(*(writer() for _ in range(at_once)))
    taken = time.monotonic() - begun
    await stream.purge_stream(_STREAM)
    return done / taken


async def measure(replicas: int, sizes: list[int], rounds: int, seconds: float, folder: Path) -> list[Row]:
    """One row for each size. Modes alternate within a round, and each round begins with the other one."""
    rows = []
    async with AsyncExitStack() as stack:
        clients = {mode: await stack.enter_async_context(servers(folder, mode, replicas)) for mode in _MODES}
        for client in clients.values():
            await rate(client, 1000, 8, seconds)  # warm
        for size in sizes:
            many = max(2, min(_ON_THEIR_WAY, _ON_THEIR_WAY_BYTES // size))
            found: dict[tuple[str, int], list[float]] = {}
            for number in range(rounds):
                for mode in _MODES if number % 2 else reversed(_MODES):
                    for at_once in (1, many):
                        found.setdefault((mode, at_once), []).append(await rate(clients[mode], size, at_once, seconds))
            rows.append(_row(size, replicas, many, {key: statistics.median(rates) for key, rates in found.items()}))
    return rows


def _row(size: int, replicas: int, many: int, rates: dict[tuple[str, int], float]) -> Row:
    return Row(
        size_bytes=size,
        replicas=replicas,
        one_always=rates["always", 1],
        one_default=rates["default", 1],
        one_ratio=rates["default", 1] / rates["always", 1],
        many_always=rates["always", many],
        many_default=rates["default", many],
        many_ratio=rates["default", many] / rates["always", many],
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table; with `--json` also write it."""
    parser = argparse.ArgumentParser(description="The cost of acknowledgements that mean: on disk")
    parser.add_argument("--sizes", default="1000,10000,100000,1000000", help="message sizes in bytes")
    parser.add_argument("--replicas", default="1", help="copies of each message, e.g. 1,3")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind, the median counts")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one measurement")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the rows to this file")
    options = parser.parse_args(argv)
    sizes = [int(size) for size in options.sizes.split(",")]
    rows: list[Row] = []
    print("    size  copies | one: always  default  times | many: always  default  times")
    for replicas in map(int, options.replicas.split(",")):
        with tempfile.TemporaryDirectory(prefix="bus-durability-") as folder:
            found = asyncio.run(measure(replicas, sizes, options.rounds, options.seconds, Path(folder)))
        for row in found:
            print(
                f"{row.size_bytes:8}  {row.replicas:6} | {row.one_always:11.0f}  {row.one_default:7.0f}  {row.one_ratio:5.2f}"
                f" | {row.many_always:12.0f}  {row.many_default:7.0f}  {row.many_ratio:5.2f}",
                flush=True,
            )
        rows += found
    if options.json is not None:
        report = {"rounds": options.rounds, "seconds": options.seconds, "unit": "messages per second", "rows": rows}
        options.json.write_text(json.dumps({**report, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
