"""Keys from making to use: `headrace init`, a server that knows them, TLS, who creates streams, what sandboxes see."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
from conftest import STORE_BYTES, NatsServer, eventually
from keyed_server import RUN, KeyedServer

from schemas.permissions import ADMIN, IDENTITIES
from schemas.table import Role, Stream
from services.bus import Bus
from services.cli import main
from services.config import Config, ConfigError, check, to_toml
from services.health import Health
from services.identity import make_keys, public_key, read_seed, run_keys, seed_file, seed_path
from services.items import BusError, Forbidden
from services.nats_server import accepts, binary, free_port
from services.provision import await_streams
from services.provision_run import provision_run
from services.run_folder import url_file
from services.runtime import EXIT_CLEAN, EXIT_FAILED, ServiceContext, _live, connect
from services.sandbox.box import Box
from services.sandbox.command import Limits
from tests.finished_run import ROOT, FinishedRun, logs_of, run_up
from tests.sandbox_ground import needs_bwrap, opened_host

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    keyed = KeyedServer(tmp_path_factory.mktemp("keyed"))
    keyed.start()
    asyncio.run(keyed.provision())
    yield keyed
    keyed.kill()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder that `headrace init` made, with a certificate for this machine."""
    folder = tmp_path / "made"
    words = ["--run", RUN, "--out", str(folder), "--tls", "--set", f"nats.store_bytes={STORE_BYTES}"]
    assert main(["init", *words]) == 0
    return folder


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    """A server on `headrace init`'s own configuration, but for the ports."""
    port = free_port()
    moved = folder / "moved.conf"
    text = re.sub(r'listen: ".*"', f'listen: "127.0.0.1:{port}"', (folder / "nats.conf").read_text())
    moved.write_text(re.sub(r"http: .*", "", text))
    process = await asyncio.create_subprocess_exec(
        binary(), "-c", str(moved), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert await accepts(port, 60)
        yield f"nats://localhost:{port}"
    finally:
        process.kill()
        await process.wait()


def config(url: str, **nats: object) -> Config:
    """A service's configuration; without more it has no key."""
    return check(
        {
            "run": {"name": RUN},
            "nats": {"url": url, "store_bytes": STORE_BYTES, "connect_timeout_s": 30, **nats},
            "telemetry": {"heartbeat_s": 0.2},
        }
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- making ------------------------------------------------------------------------------------------------------------------


def test_init_makes_a_key_for_each_identity_that_its_owner_alone_can_read(made: Path) -> None:
    assert mode(made) == mode(made / "keys") == mode(made / "tls") == 0o700
    assert {path.name for path in (made / "keys").iterdir()} == {f"{identity}.nk" for identity in IDENTITIES}
    for path in (*(made / "keys").iterdir(), made / "nats.conf", made / "tls" / "server-key.pem"):
        assert mode(path) == 0o600
    text = (made / "nats.conf").read_text()
    seeds = [read_seed(seed_path(made / "keys", identity)) for identity in IDENTITIES]
    assert len(set(seeds)) == len(IDENTITIES)
    assert not any(seed in text for seed in seeds)
    assert all(f"nkey: {public_key(seed)}" in text for seed in seeds)
    assert "sync_interval: always" in text


def test_init_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["init", "--run", "big", "--out", str(tmp_path / "k"), "--nodes", "3", "--hosts", "a,b,c", "--store", "/data"])
        == 0
    )
    said = capsys.readouterr().out
    for words in ("on b: nats-server -c", "headrace provision", 'nats.url = "nats://a:4222,nats://b:4222,nats://c:4222"'):
        assert words in said
    for number, name in enumerate("abc", start=1):
        text = (tmp_path / "k" / f"nats-{number}.conf").read_text()
        assert f"server_name: {name}\n" in text
        assert 'store_dir: "/data"' in text
    secrets = {re.search(r"nats://route:(\w+)@a:6222", path.read_text())[1] for path in (tmp_path / "k").glob("*.conf")}  # type: ignore[index]
    assert len(secrets) == 1


def test_init_never_overwrites_keys(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in (made / "keys").iterdir()}
    assert main(["init", "--run", RUN, "--out", str(made)]) == 2
    assert f"--out: {made} exists, and keys are never overwritten; give another folder" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (made / "keys").iterdir()} == before


def test_init_wants_a_host_for_each_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--out", str(tmp_path / "k"), "--nodes", "3", "--hosts", "a,b"]) == 2
    assert "--hosts: 2 names for 3 server(s)" in capsys.readouterr().err
    assert not (tmp_path / "k").exists()


def test_keys_that_are_there_stay(tmp_path: Path) -> None:
    first = make_keys(tmp_path, ["bank", "trainer"])
    again = make_keys(tmp_path, ["bank", "trainer", ADMIN])
    assert {name: again[name] for name in first} == first


@pytest.mark.parametrize("content", [None, b"", b"SUAAAA", b"\xff\xfe", b"UCXX"])
def test_a_key_that_is_none_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bank.nk"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        read_seed(path)


def test_a_service_takes_its_own_key(tmp_path: Path) -> None:
    nats = config("nats://h", nkey_folder=str(tmp_path)).nats
    assert seed_file(nats, Role.BANK) == tmp_path / "bank.nk"
    assert seed_file(nats, ADMIN) is None  # not there: this machine may not create streams
    make_keys(tmp_path, [ADMIN])
    assert seed_file(nats, ADMIN) == tmp_path / "admin.nk"
    assert seed_file(nats.model_copy(update={"nkey_seed_file": "/one"}), Role.BANK) == Path("/one")
    assert seed_file(config("nats://h").nats, Role.BANK) is None


# -- connecting --------------------------------------------------------------------------------------------------------------


async def test_a_client_without_a_key_is_told_which_setting_is_missing(server: KeyedServer) -> None:
    with pytest.raises(Forbidden, match=r"asks for a key and bank has none; set nats\.nkey_seed_file, or nats\.nkey_folder"):
        await connect(config(server.url), Role.BANK, "t")


async def test_an_unknown_key_is_told_so(server: KeyedServer, tmp_path: Path) -> None:
    make_keys(tmp_path, ["bank"])
    with pytest.raises(Forbidden, match="does not know the key of bank"):
        await connect(config(server.url, nkey_folder=str(tmp_path)), Role.BANK, "t")


async def test_a_key_opens_nothing_but_its_own_identity(server: KeyedServer) -> None:
    """A rollouter that calls itself the verifier still has the rollouter's permissions."""
    bus = await connect(config(server.url, nkey_seed_file=str(seed_path(server.keys, Role.ROLLOUTER))), Role.VERIFIER, "t")
    with pytest.raises(Forbidden, match="verdict"):  # from here on nothing would be answered: the inbox is the verifier's
        await bus.store(bus.subjects.verdict("g1", 0), b"x", {})
    await bus.close()


async def test_a_service_without_a_key_ends_with_the_reason(server: KeyedServer) -> None:
    async def serve(context: ServiceContext) -> None:
        raise AssertionError("not reached")

    with structlog.testing.capture_logs() as logs:
        assert await _live(Role.BANK, "0", config(server.url), serve, 0) == EXIT_FAILED
    assert any("asks for a key and bank has none" in str(entry.get("error")) for entry in logs)


async def test_a_refused_subject_ends_the_service_and_is_named(server: KeyedServer) -> None:
    async def serve(context: ServiceContext) -> None:
        context.ready()
        await context.bus.client.publish(context.bus.subjects.batch(1), b"x")
        await context.stop.wait()

    nats = {"nkey_folder": str(server.keys)}
    with structlog.testing.capture_logs() as logs:
        assert await _live(Role.ROLLOUTER, "0", config(server.url, **nats), serve, 0) == 70
    wanted = f"the server refuses rollouter's publish of hr.{RUN}.ledger.batch.1"
    assert any(entry.get("reason") == wanted for entry in logs)


# -- TLS ---------------------------------------------------------------------------------------------------------------------


async def test_tls_with_the_authority_that_init_made(made: Path) -> None:
    async with serving(made) as url:
        with_ca = {"nkey_folder": str(made / "keys"), "tls_ca_file": str(made / "tls" / "ca.pem")}
        await provision_run(config(url, **with_ca))
        bus = await connect(config(url, **with_ca), Role.BANK, "t")
        assert await bus.last_sequence(Stream.READY) == 0
        await bus.close()
        with pytest.raises(Forbidden, match=r"certificate is not trusted .*; set nats\.tls_ca_file to the CA of this server"):
            await connect(config(url, nkey_folder=str(made / "keys")), Role.BANK, "t")


async def test_another_authority_is_not_trusted(made: Path, tmp_path: Path) -> None:
    assert main(["init", "--run", RUN, "--out", str(tmp_path / "other"), "--tls"]) == 0
    async with serving(made) as url:
        nats = {"nkey_folder": str(made / "keys"), "tls_ca_file": str(tmp_path / "other" / "tls" / "ca.pem")}
        with pytest.raises(Forbidden, match=r"nats\.tls_ca_file is not the CA of this server"):
            await connect(config(url, **nats), Role.BANK, "t")


async def test_a_server_without_tls_is_not_taken_for_one_with(server: KeyedServer, made: Path) -> None:
    nats = {"nkey_folder": str(server.keys), "tls_ca_file": str(made / "tls" / "ca.pem")}
    with pytest.raises(Forbidden, match=r"does not use TLS, though nats\.tls_ca_file is set"):
        await connect(config(server.url, **nats), Role.BANK, "t")


async def test_a_ca_file_that_is_none_is_named(server: KeyedServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nats\.tls_ca_file: /nowhere\.pem cannot be read"):
        await connect(config(server.url, tls_ca_file="/nowhere.pem"), Role.BANK, "t")


# -- who creates streams -----------------------------------------------------------------------------------------------------


async def test_a_service_waits_for_the_streams_and_then_works(tmp_path: Path) -> None:
    server = KeyedServer(tmp_path)
    server.start()
    working = asyncio.Event()

    async def serve(context: ServiceContext) -> None:
        context.ready()
        working.set()
        context.stop.set()

    structlog.reset_defaults()  # an earlier test may have kept its logs to errors
    try:
        with structlog.testing.capture_logs() as logs:
            settings = config(server.url, nkey_folder=str(server.keys))
            service = asyncio.create_task(_live(Role.BANK, "0", settings, serve, 0))
            await eventually(lambda: any(entry["event"] == "waiting" for entry in logs), within_s=30)
            waiting = next(entry for entry in logs if entry["event"] == "waiting")
            assert (waiting["what"], waiting["culprit"]) == (f"streams of run {RUN}", "`headrace provision` or `headrace up`")
            assert not working.is_set()
            await provision_run(settings)
            assert await asyncio.wait_for(service, 60) == EXIT_CLEAN
            assert working.is_set()
    finally:
        server.kill()


async def test_the_wait_for_streams_is_bounded(tmp_path: Path) -> None:
    server = KeyedServer(tmp_path)
    server.start()
    try:
        async with server.bus(Role.TRAINER) as bus:
            waiting = await_streams(bus, STORE_BYTES, 1, health=Health(bus, 1.0), stop=asyncio.Event(), wait_s=1.0)
            with pytest.raises(BusError, match="is not there after 1 s; `headrace provision` or `headrace up` creates it"):
                await waiting
            stop = asyncio.Event()
            stop.set()
            assert not await await_streams(bus, STORE_BYTES, 1, health=Health(bus, 1.0), stop=stop, wait_s=60.0)
    finally:
        server.kill()


async def test_a_difference_from_the_table_is_found_by_who_only_looks(server: KeyedServer) -> None:
    async with server.bus(Role.TRAINER) as bus:
        looking = await_streams(bus, 2 * STORE_BYTES, 1, health=Health(bus, 1.0), stop=asyncio.Event())
        with pytest.raises(BusError, match="differs from the table:\n  max_bytes"):
            await looking


async def test_provisioning_needs_the_admins_key(server: KeyedServer, capsys: pytest.CaptureFixture[str]) -> None:
    size = f"nats.store_bytes={STORE_BYTES}"
    words = ["provision", "--nats", server.url, "--set", f"run.name={RUN}", "--set", size]
    assert await asyncio.to_thread(main, words) == 2
    assert "asks for a key" in capsys.readouterr().err
    admin = f'nats.admin_seed_file="{seed_path(server.keys, ADMIN)}"'
    assert await asyncio.to_thread(main, [*words, "--set", admin]) == 0
    assert "the streams of run keyed-1 are there" in capsys.readouterr().out


async def test_without_keys_a_service_still_makes_its_streams(nats_process: NatsServer) -> None:
    async def serve(context: ServiceContext) -> None:
        assert await context.bus.last_sequence(Stream.LEDGER) == 0
        context.stop.set()

    assert await _live(Role.BANK, "0", config(nats_process.url), serve, 0) == EXIT_CLEAN


@pytest.fixture
def run_folder(server: KeyedServer, tmp_path: Path) -> Path:
    """What `headrace up` leaves for whoever looks at its run."""
    folder = tmp_path / "looked-at"
    shutil.copytree(server.keys, run_keys(folder))
    for identity in IDENTITIES:
        if identity != Role.OBSERVER:
            seed_path(run_keys(folder), identity).unlink()  # nothing else is needed to look
    (folder / "config.toml").write_text(to_toml(config("").model_copy()))
    url_file(folder).write_text(server.url + "\n")
    return folder


async def test_who_looks_at_a_run_folder_is_the_observer(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, ["status", "--run-folder", str(run_folder)]) == 0
    assert "groups: 0 leased" in capsys.readouterr().out


# -- what a sandbox sees -----------------------------------------------------------------------------------------------------


@needs_bwrap
def test_a_sandboxed_command_finds_no_key_and_no_server(server: KeyedServer) -> None:
    """Invariant 8: the agent's commands have no identity, whatever the executor around them holds."""
    limits = Limits(memory_bytes=256 * 2**20, processes=40, disk_bytes=8 * 2**20, scratch_bytes=4 * 2**20, max_files=200)
    seed = seed_path(server.keys, Role.SANDBOX)
    os.environ["HR_TEST_SEED"] = read_seed(seed)  # as if the executor had its seed in its environment
    try:
        with opened_host() as host:
            box = Box(host, "keyless", 1, limits)
            box.open()
            tried: list[tuple[str, Callable[[str], bool]]] = [
                (f"cat {seed}", lambda out: "SU" not in out and "No such file" in out),
                ("env; cat /proc/*/environ | tr '\\0' '\\n'", lambda out: "SU" not in out and "HR_TEST_SEED" not in out),
                ("find / -name '*.nk' 2>/dev/null; echo done", lambda out: out.strip() == "done"),
                (f"exec 3<>/dev/tcp/127.0.0.1/{server.port} && head -c 20 <&3", lambda out: "INFO" not in out),
            ]
            for number, (command, harmless) in enumerate(tried):
                result = box.run(f"c{number}", f"bash -c {_quoted(command)} 2>&1", timeout_s=60, limits=limits, cpus=())
                out = result.stdout.decode(errors="replace")
                assert harmless(out), f"{command}: {out[-500:]}"
            box.close()
    finally:
        del os.environ["HR_TEST_SEED"]


def _quoted(command: str) -> str:
    return "'" + command.replace("'", "'\\''") + "'"


# -- a whole run -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_whole_run_under_keys(tmp_path: Path) -> None:
    settings = ["run.name=keys", "run.max_steps=1", "engine.kind=transformers", "admission.groups_per_batch=1"]
    settings += ["rollout.group_size=2", "window.max_groups=2", "eval.at_start=false", "eval.at_end=false"]
    settings += ["eval.every_steps=0", f"nats.store_bytes={2 * STORE_BYTES}"]
    done = await asyncio.to_thread(run_up, tmp_path, "examples/terminal/run.toml", settings, 540)
    folder = tmp_path / "keys"
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}\n{logs_of(folder)}"
    assert "the server refuses" not in logs_of(folder, lines=10_000)
    assert mode(folder / "nats" / "keys") == 0o700
    assert mode(folder / "nats" / "nats.conf") == 0o600
    assert all(mode(path) == 0o600 for path in (folder / "nats" / "keys").iterdir())
    async with FinishedRun(folder).bus() as bus:
        assert await bus.last_sequence(Stream.LEDGER) >= 1
        url = bus.client.connected_url.geturl()
        with pytest.raises(Forbidden):
            await Bus.connect(url, "keys", Role.OBSERVER, "t")


def test_a_store_is_not_taken_up_by_another_kind_of_server(tmp_path: Path) -> None:
    """Streams of a run without keys lie in another account: taken up with keys, the run would begin anew beside itself."""
    home = tmp_path / "old" / "nats" / "store" / "jetstream" / "$G" / "streams" / "hr_old_TASKS"
    home.mkdir(parents=True)
    words = ["up", "--config", "examples/terminal/run.toml", "--set", "run.name=old", "--set", f"run.folder={tmp_path}"]
    for more, said in (
        ((), "nats.embedded_keys: the store in"),
        (("--nats-nodes", "3"), "nats.nodes:"),
    ):
        command = [sys.executable, "-m", "services.cli", *words, *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment, check=False)
        assert done.returncode == 2, done.stdout + done.stderr
        assert said in done.stderr
