"""What it costs that an acknowledged message is on disk: `sync_interval: always` against the server's default, and several
copies against one, side by side.

    python -m loadtests.bus_durability [--sizes 1000,10000,100000,1000000] [--replicas 1,3] [--rounds N] [--json OUT]

Servers of all kinds run at the same time on stores in the same folder, and the measurements take turns, so that all see the
same machine; each is the median of the rounds. `one` is a writer that waits for every acknowledgement, `many` keeps up to
sixteen megabytes or 64 messages on their way. The default tells the disk every two minutes, so its acknowledgements survive the
end of a process and not that of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
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


@dataclass(frozen=True, kw_only=True)
class CopiesCost:
    """How many times as long a message takes on so many replicas as on one, of the same run."""

    size_bytes: int
    replicas: int
    one_always: float
    one_default: float
    many_always: float
    many_default: float


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


async def measure(copies: list[int], sizes: list[int], rounds: int, seconds: float, folder: Path) -> list[Row]:
    """Rows by size, then copies. All kinds of server run throughout and take turns; each round begins with another one."""
    kinds = list(itertools.product(_MODES, copies))
    rows = []
    async with AsyncExitStack() as stack:
        clients = {kind: await stack.enter_async_context(servers(folder, *kind)) for kind in kinds}
        for client in clients.values():
            await rate(client, 1000, 8, seconds)  # warm
        for size in sizes:
            many = max(2, min(_ON_THEIR_WAY, _ON_THEIR_WAY_BYTES // size))
            found: dict[tuple[str, int, int], list[float]] = {}
            for number in range(rounds):
                turn = number % len(kinds)
                for mode, replicas in kinds[turn:] + kinds[:turn]:
                    for at_once in (1, many):
                        rates = found.setdefault((mode, replicas, at_once), [])
                        rates.append(await rate(clients[mode, replicas], size, at_once, seconds))
            medians = {key: statistics.median(rates) for key, rates in found.items()}
            rows += [_row(size, replicas, many, medians) for replicas in copies]
    return rows


def _row(size: int, replicas: int, many: int, rates: dict[tuple[str, int, int], float]) -> Row:
    one_always, one_default = rates["always", replicas, 1], rates["default", replicas, 1]
    many_always, many_default = rates["always", replicas, many], rates["default", replicas, many]
    return Row(
        size_bytes=size,
        replicas=replicas,
        one_always=one_always,
        one_default=one_default,
        one_ratio=one_default / one_always,
        many_always=many_always,
        many_default=many_default,
        many_ratio=many_default / many_always,
    )


def copies_cost(rows: list[Row]) -> list[CopiesCost]:
    """How many times as long several copies take as one, where one was measured too."""
    alone = {row.size_bytes: row for row in rows if row.replicas == 1}
    return [
        CopiesCost(
            size_bytes=row.size_bytes,
            replicas=row.replicas,
            one_always=alone[row.size_bytes].one_always / row.one_always,
            one_default=alone[row.size_bytes].one_default / row.one_default,
            many_always=alone[row.size_bytes].many_always / row.many_always,
            many_default=alone[row.size_bytes].many_default / row.many_default,
        )
        for row in rows
        if row.replicas > 1 and row.size_bytes in alone
    ]


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
    with tempfile.TemporaryDirectory(prefix="bus-durability-") as folder:
        copies = list(map(int, options.replicas.split(",")))
        rows = asyncio.run(measure(copies, sizes, options.rounds, options.seconds, Path(folder)))
    print("    size  copies | one: always  default  times | many: always  default  times")
    for row in rows:
        print(
            f"{row.size_bytes:8}  {row.replicas:6} | {row.one_always:11.0f}  {row.one_default:7.0f}  {row.one_ratio:5.2f}"
            f" | {row.many_always:12.0f}  {row.many_default:7.0f}  {row.many_ratio:5.2f}"
        )
    costs = copies_cost(rows)
    if costs:
        print("\ntimes as long as with one copy\n    size  copies | one: always  default | many: always  default")
    for cost in costs:
        print(
            f"{cost.size_bytes:8}  {cost.replicas:6} | {cost.one_always:11.2f}  {cost.one_default:7.2f}"
            f" | {cost.many_always:12.2f}  {cost.many_default:7.2f}"
        )
    if options.json is not None:
        report = {"rounds": options.rounds, "seconds": options.seconds, "unit": "messages per second"}
        tables = {"rows": [asdict(row) for row in rows], "times_as_long_as_one_copy": [asdict(cost) for cost in costs]}
        options.json.write_text(json.dumps({**report, **tables}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
