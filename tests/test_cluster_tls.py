"""Routes between nodes under TLS: three with certificates of one authority make a cluster, and nobody else joins it."""

from __future__ import annotations

import asyncio
import secrets
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import nats
import pytest
from conftest import eventually

from services.certificates import CA, CERTIFICATE, KEY, make_certificates
from services.nats_server import Cluster, binary, configuration, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
SECRET = secrets.token_hex(8)


@dataclass
class Node:
    """One server of a cluster; it knows the secret, so that certificates alone decide."""

    name: str
    folder: Path
    routes: list[str]
    listen: str
    certificates: Path | None

    def __post_init__(self) -> None:
        self.port, self.monitor = free_port(), f"127.0.0.1:{free_port()}"
        self.log = self.folder / f"{self.name}.log"
        text = configuration(
            store=self.folder / self.name,
            port=self.port,
            max_file_bytes=2**28,
            name=self.name,
            monitor=self.monitor,
            cluster=Cluster(listen=self.listen, routes=self.routes, secret=SECRET),
            certificates=self.certificates,
        )
        file = self.folder / f"{self.name}.conf"
        file.write_text(text)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen([binary(), "-c", str(file)], stdout=output, stderr=output)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    async def peers(self) -> set[str]:
        """Names of the servers at the other end of its routes."""
        try:
            async with aiohttp.ClientSession() as session, session.get(f"http://{self.monitor}/routez") as answer:
                return {str(route["remote_name"]) for route in (await answer.json(content_type=None))["routes"] or ()}
        except aiohttp.ClientError:
            return set()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority") / "tls"
    make_certificates(folder, [])
    return folder


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[list[Node]]:
    folder = tmp_path_factory.mktemp("nodes")
    routes = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    started: list[Node] = []
    try:
        for number, listen in enumerate(routes):
            started.append(Node(f"n{number}", folder, routes, listen, certificates))
        yield started
    finally:
        for node in started:
            node.stop()


async def joined(nodes: list[Node]) -> None:
    for node in nodes:
        others = {other.name for other in nodes} - {node.name}

        async def sees_them(node: Node = node, others: set[str] = others) -> bool:
            return await node.peers() >= others

        await eventually(sees_them, within_s=60, what=f"{node.name} has routes to {others}")


async def test_three_nodes_with_certificates_store_in_three_places(nodes: list[Node], certificates: Path) -> None:
    await joined(nodes)
    trusted = ssl.create_default_context(cafile=str(certificates / CA))
    as_node = ssl.create_default_context(cafile=str(certificates / CA))
    as_node.load_cert_chain(certificates / CERTIFICATE, certificates / KEY)
    for node in nodes:  # the port of the routes speaks TLS
        host, port = node.listen.split(":")
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port), ssl=as_node), 30)
        assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"INFO ")
        writer.close()
        with suppress(ssl.SSLError, OSError):
            await writer.wait_closed()
    client = await asyncio.wait_for(nats.connect([f"tls://127.0.0.1:{node.port}" for node in nodes], tls=trusted), 60)

    async def is_made() -> bool:
        try:
            await client.jetstream().add_stream(name="S", subjects=["s.>"], num_replicas=3)
        except (nats.js.errors.APIError, nats.errors.TimeoutError):
            return False
        return True

    await eventually(is_made, within_s=90, what="a stream on three nodes")
    assert (await client.jetstream().publish("s.1", b"x", timeout=30)).seq == 1
    info = await client.jetstream().stream_info("S")
    assert info.cluster is not None
    assert {info.cluster.leader, *(peer.name for peer in info.cluster.replicas or ())} == {"n0", "n1", "n2"}
    await client.close()


@pytest.mark.parametrize("has", ["no certificate", "a certificate of another authority"])
async def test_whoever_knows_the_secret_alone_does_not_join(nodes: list[Node], tmp_path: Path, has: str) -> None:
    await joined(nodes)
    theirs: Path | None = None
    if has != "no certificate":
        theirs = tmp_path / "tls"
        make_certificates(theirs, [])
    before = [node.log.stat().st_size for node in nodes]
    stranger = Node("stranger", tmp_path, [node.listen for node in nodes], f"127.0.0.1:{free_port()}", theirs)
    try:

        def refused_by_all() -> bool:
            heard = [node.log.read_bytes()[size:] for node, size in zip(nodes, before, strict=True)]
            return all(b"TLS route handshake error" in said for said in heard)

        await eventually(refused_by_all, within_s=90, what="every node refuses it")
        assert not await stranger.peers()
        for node in nodes:
            assert "stranger" not in await node.peers()
    finally:
        stranger.stop()
