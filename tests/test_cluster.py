"""Three real servers with keys: whichever is killed, leader or not, nothing acknowledged is lost and nothing comes twice."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from conftest import eventually
from test_cli_up import Stack, gone, wait_until

from schemas.permissions import ADMIN
from schemas.table import Role, Stream
from services.bus import Bus
from services.config import Config, load
from services.consume import fold, read_all
from services.embedded_server import EmbeddedServers
from services.items import BusError, Item
from services.provision_run import provision_run
from services.run_folder import RunFolder
from services.runtime import connect
from services.supervisor import Limits
from services.work import WorkConsumer
from tests.standin_run import lease

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHARED = pytest.mark.asyncio(loop_scope="module")
MODEL = Path(__file__).parent.parent / "examples/terminal/model"


@dataclass
class ClusterOfThree:
    """The servers of a local run, with a connection for whoever asks."""

    config: Config
    servers: EmbeddedServers
    folder: Path
    lost: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def bus(self, identity: str) -> AsyncIterator[Bus]:
        role = Role.OBSERVER if identity == ADMIN else Role(identity)
        closing = asyncio.Event()

        def on_fatal(reason: str) -> None:
            if not closing.is_set():
                self.lost.append(f"{identity}: {reason}")

        bus = await connect(self.config, role, "t", on_fatal, identity=identity)
        try:
            yield bus
        finally:
            closing.set()
            await bus.close()

    async def kill(self, label: str) -> None:
        """SIGKILL one server; its supervisor starts it again."""
        pid = self.servers.pid(label)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: self.servers.pid(label) not in (None, pid), within_s=60)

    async def meta_leader(self) -> str:
        """Who said last that it leads the cluster."""
        said: list[tuple[str, str]] = []
        for log in (self.folder / "logs").glob("nats-server-*.log"):
            for line in log.read_text(errors="replace").splitlines():
                if found := re.search(r"(\S+ \S+) \[INF\] Self is new JetStream cluster metadata leader", line):
                    said.append((found[1], log.stem))
        return max(said)[1]

    def leader_of(self, admin: Bus, stream: Stream) -> Callable[[], Awaitable[str]]:
        async def named() -> str:
            with suppress(BusError):
                info = await admin.request(f"STREAM.INFO.{admin.subjects.stream(stream)}", {}, 2.0)
                return str(info["cluster"].get("leader") or "")
            return ""

        async def leader() -> str:
            return str(await eventually(named, within_s=90, what=f"{stream} has a leader"))

        return leader

    async def healthy(self, admin: Bus) -> None:
        """Wait until every stream has a leader and two followers that are up to date: only then may another server die."""

        async def current() -> bool:
            for stream in Stream:
                reply = await admin.api(f"STREAM.INFO.{admin.subjects.stream(stream)}", {}, 2.0)
                followers = reply.get("cluster", {}).get("replicas", [])
                if not (
                    reply.get("cluster", {}).get("leader") and len(followers) == 2 and all(r["current"] for r in followers)
                ):
                    return False
            return True

        await eventually(current, within_s=120, what="every replica is up to date")


@asynccontextmanager
async def cluster(folder: Path, limits: Limits | None = None) -> AsyncIterator[ClusterOfThree]:
    base = load(
        None, ["run.name=three", f'run.folder="{folder}"', "nats.nodes=3", "nats.replicas=3", f"nats.store_bytes={2**28}"]
    )
    lost: list[str] = []
    with RunFolder(base) as run_folder:
        servers = EmbeddedServers(base, run_folder, print, limits or Limits(first_backoff_s=0.1, last_backoff_s=0.5))
        async with servers.running(lost.append):
            config = base.model_copy(update={"nats": servers.nats})
            await provision_run(config)
            yield ClusterOfThree(config, servers, run_folder.path)
    assert not lost


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ClusterOfThree]:
    """One cluster for the tests that leave it whole; each writes streams that the others leave alone."""
    async with cluster(tmp_path_factory.mktemp("three")) as shared:
        yield shared


class Writers:
    """Two logs written without a pause: TURNS by subjects that may be used once, LEDGER by one writer at expected sequences."""

    def __init__(self, rollouter: Bus, admission: Bus) -> None:
        self.rollouter, self.admission = rollouter, admission
        self.turns: dict[str, int] = {}  # subject -> sequence acknowledged
        self.ledger: dict[str, int] = {}

    async def write_turns(self, stop: asyncio.Event) -> None:
        number = 0
        while not stop.is_set():
            entry = lease(self.rollouter.run, number)
            subject = self.rollouter.subjects.turn(f"g{number:08d}", 0, 0, 0)
            self.turns[subject] = (await self.rollouter.publish_once(subject, entry)).seq
            number += 1

    async def write_ledger(self, stop: asyncio.Event) -> None:
        after = 0
        while not stop.is_set():
            entry = lease(self.admission.run, after)
            subject = self.admission.subjects.quarantine(f"g{after:08d}")
            self.ledger[subject] = after = (await self.admission.append(subject, entry, after=after)).seq

    async def go_on(self, count: int = 20) -> None:
        """Return once both have written `count` more."""
        turns, ledger = len(self.turns) + count, len(self.ledger) + count
        await eventually(
            lambda: len(self.turns) >= turns and len(self.ledger) >= ledger, within_s=120, what="both writers go on"
        )


async def _follow(bus: Bus, stream: Stream, seen: list[Item], stop: asyncio.Event) -> None:
    async for item in fold(bus, stream, stop=stop):
        if item is not None:
            seen.append(item)


@SHARED
async def test_any_server_may_be_killed_while_logs_are_written_and_read(three: ClusterOfThree) -> None:
    async with (
        three.bus(ADMIN) as admin,
        three.bus(Role.OBSERVER) as observer,
        three.bus(Role.ROLLOUTER) as rollouter,
        three.bus(Role.ADMISSION) as admission,
    ):
        writers, stop, enough = Writers(rollouter, admission), asyncio.Event(), asyncio.Event()
        seen: dict[Stream, list[Item]] = {Stream.TURNS: [], Stream.LEDGER: []}
        async with asyncio.TaskGroup() as group:
            for stream, items in seen.items():
                group.create_task(_follow(observer, stream, items, stop))
            writing = [group.create_task(write(enough)) for write in (writers.write_turns, writers.write_ledger)]
            await writers.go_on()
            for choose in (three.meta_leader, three.leader_of(admin, Stream.LEDGER), three.leader_of(admin, Stream.TURNS)):
                await three.healthy(admin)
                await three.kill(await choose())
                await writers.go_on()
            enough.set()
            await asyncio.wait(writing)
            for stream, acknowledged in ((Stream.TURNS, writers.turns), (Stream.LEDGER, writers.ledger)):
                stored = {item.subject: item.seq for item in await read_all(observer, stream)}
                assert stored == acknowledged, f"{stream}: what is stored is what was acknowledged, where it was"
                whole = list(range(1, len(stored) + 1))
                assert sorted(stored.values()) == whole
                await eventually(lambda s=stream, n=len(whole): len(seen[s]) >= n, within_s=90, what="the reader has it all")  # noqa: B008
                assert [item.seq for item in seen[stream]] == whole
            stop.set()
    assert not three.lost


@SHARED
async def test_requests_are_answered_though_servers_die(three: ClusterOfThree) -> None:
    """A request queue with its durable consumer: every request is handled, and its answer stored, whoever dies."""
    async with (
        three.bus(ADMIN) as admin,
        three.bus(Role.ROLLOUTER) as rollouter,
        three.bus(Role.ENGINE) as engine,
    ):
        stop = asyncio.Event()
        handled: set[str] = set()
        asked: set[str] = set()

        async def handler(item: Item) -> None:
            await engine.store(engine.subjects.generated("r0"), item.data, {})
            handled.add(item.data.decode())

        async def ask(count: int) -> None:
            for _ in range(count):
                name = f"request-{len(asked)}"
                await rollouter.store(rollouter.subjects.generate("e0"), name.encode(), {})
                asked.add(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(WorkConsumer(engine, "engine-{x}", x="e0", capacity=16).run(handler, stop))
            await ask(50)
            for _ in range(2):
                await three.healthy(admin)
                killing = group.create_task(three.kill(await three.leader_of(admin, Stream.GEN)()))
                await ask(50)
                await killing
            await eventually(lambda: handled >= asked, within_s=180, what="every request is handled")
            stop.set()
    assert not three.lost


async def _quietly(bus: Bus, seq: int) -> Item | None:
    with suppress(BusError):
        return await bus.get(Stream.TURNS, seq)
    return None


@SHARED
async def test_a_stranger_cannot_join_the_cluster(three: ClusterOfThree) -> None:
    """Nodes know each other by a secret, or a route would be a way around every permission."""
    conf = (three.folder / "nats" / "nats-1.conf").read_text()
    found = re.search(r'listen: "127.0.0.1:(\d+)"\s+authorization', conf)
    assert found
    reader, writer = await asyncio.open_connection("127.0.0.1", int(found[1]))
    writer.write(b'INFO {"server_id":"stranger"}\r\nCONNECT {"verbose":false,"name":"stranger"}\r\nPING\r\n')
    heard = await asyncio.wait_for(reader.read(), 60)  # until the server closes
    assert b"Authorization" in heard
    writer.close()


def test_up_starts_a_cluster_and_survives_the_death_of_each_server(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack.start(24, 1.0, "nats.nodes=3")
    try:
        wait_until(lambda: len(stack.steps()) >= 2, within_s=150)
        for label in ("nats-server-1", "nats-server-2", "nats-server-3"):
            pid, done = stack.pids()[label], len(stack.steps())
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda label=label, pid=pid: stack.pids()[label] != pid, within_s=60)
            wait_until(lambda done=done: len(stack.steps()) >= done + 3, within_s=150)
        processes = stack.processes()
        code, output = stack.end(within_s=240)
        assert code == 0, output
        assert stack.steps() == list(range(24))
        assert "72 leased = 48 consumed + 24 quarantined" in output
        gone(processes)
        url = (stack.folder / "nats" / "url").read_text().strip()
        assert len(url.split(",")) == 3
        assert "replicas = 3" in (stack.folder / "config.toml").read_text()
    finally:
        if stack._process is not None and stack._process.poll() is None:
            stack._process.kill()
            stack._process.communicate(timeout=30)


async def test_a_server_that_cannot_start_again_is_given_up_and_its_store_is_taken_up_later(tmp_path: Path) -> None:
    """Its configuration is broken, say; two of three still decide. Started again on other ports, all have what was stored."""
    entry = lease("three", 0)
    limits = Limits(first_backoff_s=0.05, last_backoff_s=0.2)  # of a server that never starts, each try is as good as the last
    async with cluster(tmp_path, limits) as three, three.bus(ADMIN) as admin, three.bus(Role.ROLLOUTER) as rollouter:
        first_url, turn = three.config.nats.url, rollouter.subjects.turn("g00000000", 0, 0, 0)
        await three.healthy(admin)
        (three.folder / "nats" / "nats-2.conf").write_text("this is no configuration {")
        pid = three.servers.pid("nats-server-2")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: three.servers.given_up == ["nats-server-2"], within_s=300, what="it is given up")
        seq = (await rollouter.publish_once(turn, entry)).seq
        assert seq == 1
        assert not three.lost
    async with cluster(tmp_path) as again, again.bus(Role.OBSERVER) as observer:
        assert again.config.nats.url != first_url
        item = await eventually(lambda: _quietly(observer, seq), within_s=90, what="the turn is there again")
        assert item.subject == turn
