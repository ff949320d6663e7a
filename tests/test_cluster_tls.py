"""Routes between cluster nodes under TLS: nodes with the run's certificate find each other, one without stays outside."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import STORE_BYTES, eventually

from schemas.table import Role, Stream
from services.bus import Bus
from services.certificates import CA, make_certificates
from services.nats_server import Cluster, binary, configuration, free_port
from services.provision import provision

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@dataclass(frozen=True)
class Node:
    name: str
    port: int
    monitor: str
    process: subprocess.Popen[bytes]

    def routes(self) -> set[str]:
        """Names of the nodes that it has a route to."""
        with urllib.request.urlopen(f"http://{self.monitor}/routez", timeout=5) as answer:
            return {str(route["remote_name"]) for route in json.load(answer)["routes"]}


def start(folder: Path, name: str, listen: str, routes: Sequence[str], certificates: Path | None) -> Node:
    port, monitor = free_port(), f"127.0.0.1:{free_port()}"
    text = configuration(
        store=folder / name,
        port=port,
        max_file_bytes=8 * 2**30,
        name=name,
        monitor=monitor,
        cluster=Cluster(listen=listen, routes=routes, secret="s3cret"),
        certificates=certificates,
    )
    file = folder / f"{name}.conf"
    file.write_text(text)
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen([binary(), "-c", str(file)], stdout=log, stderr=log, start_new_session=True)
    return Node(name, port, monitor, process)


@pytest.fixture
def stopped() -> Iterator[list[Node]]:
    """Nodes that are killed at the end."""
    nodes: list[Node] = []
    yield nodes
    for node in nodes:
        node.process.send_signal(signal.SIGKILL)
        node.process.wait(10)


async def test_nodes_with_a_certificate_meet_and_one_without_stays_outside(tmp_path: Path, stopped: list[Node]) -> None:
    made, foreign = tmp_path / "made", tmp_path / "foreign"
    make_certificates(made, ["127.0.0.1"])
    make_certificates(foreign, ["127.0.0.1"])
    routes = [f"127.0.0.1:{free_port()}" for _ in range(5)]
    members = [start(tmp_path, f"n{n}", routes[n], routes[:3], made) for n in range(3)]
    stopped += members
    strangers = [start(tmp_path, "plain", routes[3], routes, None), start(tmp_path, "other", routes[4], routes, foreign)]
    stopped += strangers

    def met() -> bool:
        with suppress(OSError):
            return all(node.routes() == {other.name for other in members} - {node.name} for node in members)
        return False

    await eventually(met, within_s=60, what="three nodes with routes to each other")
    trusted = ssl.create_default_context(cafile=str(made / CA))
    bus = await Bus.connect(f"tls://127.0.0.1:{members[0].port}", "tls", Role.SAMPLER, "0", tls=trusted)
    await provision(bus, STORE_BYTES, replicas=3)
    info = await bus.request(f"STREAM.INFO.{bus.subjects.stream(Stream.TASKS)}", {})
    await bus.close()
    assert {info["cluster"]["leader"], *(replica["name"] for replica in info["cluster"]["replicas"])} == {"n0", "n1", "n2"}
    refusals = ("TLS route handshake error", "TLS handshake error", "certificate")
    await eventually(
        lambda: any(sign in (tmp_path / "n0.log").read_text(errors="replace") for sign in refusals),
        within_s=30,
        what="a stranger is refused",
    )
    await asyncio.sleep(3.0)  # a route that must not come has no event to wait for
    assert met(), "no stranger has joined"
    assert all(not stranger.routes() & {node.name for node in members} for stranger in strangers)
