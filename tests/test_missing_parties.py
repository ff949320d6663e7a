"""Each service's start beside each party that is not there: the log and `headrace status` say which one, and soon.

The promise is 30 s. Here services beat more often, and the tests wait for the words, not for a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog
from admission_stage import Stage
from conftest import NatsServer, eventually
from rollout_stand import TASKS, ScriptedEngine, lease, say

import rollouter.service
import services.health
import services.status
from schemas.health import Heartbeat
from schemas.table import Role
from services.config import Config, check
from services.items import BusError
from services.nats_server import free_port
from services.outages import GoneNote
from services.registry import load_serve
from services.runtime import EXIT_NO_SERVER, ServiceContext, _live
from services.status import missing
from services.stopped_run import has_ended
from tests.trainer_stand import configuration as trainer_configuration
from tests.trainer_stand import trainer

pytestmark = pytest.mark.timeout(90)
WITHIN_S = 30.0


def configuration(url: str, run: str, folder: Path) -> Config:
    return check(
        {
            "run": {"name": run, "folder": str(folder / "runs"), "max_steps": 3},
            "nats": {"url": url, "store_bytes": 256 * 2**20},
            "rollout": {"group_size": 2, "sandbox_timeout_s": 60.0, "generate_timeout_s": 60.0},
            "window": {"max_groups": 4},
            "admission": {"groups_per_batch": 2},
            "engine": {"kind": "simulated", "names": ["e0"]},
            "eval": {"every_steps": 0, "at_start": False, "at_end": False},
            "telemetry": {"heartbeat_s": 0.3},
        }
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """Who is there, whether there is a lease to work on, and what must be said of the one who is not."""

    absent: str
    present: tuple[Role, ...]
    leased: bool = False
    played_engine: bool = False
    says: tuple[str, ...]

    def __str__(self) -> str:
        return f"no {self.absent} beside {'+'.join(self.present)}"


R = Role
CASES = (
    Case(
        absent="engine",
        present=(R.SAMPLER, R.PARAM_SYNC),
        says=(
            "an engine that serves a verified version from param_sync and the engines",
            "missing: engine: none has announced",
        ),
    ),
    Case(
        absent="engine",
        present=(R.ROLLOUTER, R.SANDBOX),
        leased=True,
        says=("an engine that serves from no engine has announced itself", "the slot is an infrastructure abort"),
    ),
    Case(
        absent="sandbox",
        present=(R.ROLLOUTER,),
        leased=True,
        played_engine=True,
        says=("sandbox result g00000000-", " from any (reset lane) for ", "missing: sandbox: none has announced itself"),
    ),
    Case(
        absent="param_sync",
        present=(R.SAMPLER, R.ENGINE),
        says=("an engine that serves a verified version from param_sync", "missing: param_sync: none", "starting"),
    ),
    Case(
        absent="rollouter",
        present=(R.BANK,),
        leased=True,
        says=("the last sibling of g00000000 from rollouter, slots [0, 1]", "missing: rollouter: none has announced itself"),
    ),
    Case(
        absent="verifier",
        present=(R.BANK, R.ROLLOUTER, R.SANDBOX),
        leased=True,
        played_engine=True,
        says=("the last sibling of g00000000 from verifier, slots [0, 1]", "missing: verifier: none has announced itself"),
    ),
    Case(
        absent="trainer",
        present=(R.ADMISSION,),
        says=("the demand after step -1 from trainer", "missing: trainer: none has announced itself"),
    ),
    Case(absent="bank", present=(R.VERIFIER,), says=("missing: bank: none has announced itself",)),
    Case(absent="sampler", present=(R.BANK,), says=("missing: sampler: none has announced itself",)),
    Case(absent="admission", present=(R.PARAM_SYNC,), says=("missing: admission: none has announced itself",)),
)


@asynccontextmanager
async def present(case: Case, config: Config) -> AsyncIterator[None]:
    async with Stage(config.nats.url, config) as stage:
        bus = await stage.bus(Role.SAMPLER, "test")
        if case.leased:
            await bus.publish_once(bus.subjects.lease(0), lease(config, 0, TASKS[0], size=2))
        if case.played_engine:
            await stage.start(Role.ENGINE, ScriptedEngine("e0", lambda ask: say("finish", "done")).serve, "e0")
        for role in case.present:
            name = {Role.ENGINE: "e0", Role.SANDBOX: "x0"}.get(role, "0")
            await stage.start(role, load_serve(role), name)
        yield


async def shown(config: Config, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    await services.status.show(config)
    return capsys.readouterr().out


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_status_says_who_is_missing(
    case: Case,
    nats_url: str,
    run_name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(rollouter.service, "DRAIN_S", 0.5)  # what waits for somebody who is not there cannot end
    config = configuration(nats_url, run_name, tmp_path)
    async with present(case, config):

        async def said() -> bool:
            text = await shown(config, capsys)
            return all(words in text for words in case.says)

        try:
            await eventually(said, within_s=WITHIN_S, what=str(case))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{await shown(config, capsys)}") from None
        told = await shown(config, capsys)
        assert not [role for role in case.present if f"missing: {role}:" in told]


@pytest.fixture
def every_log() -> Iterator[None]:
    """Whatever a command that ran in this process before has silenced."""
    before = structlog.get_config()
    structlog.reset_defaults()
    yield
    structlog.configure(**before)


@pytest.fixture
def nobody() -> str:
    """A URL at which no server is."""
    return f"nats://127.0.0.1:{free_port()}"


@pytest.mark.usefixtures("every_log")
async def test_a_start_without_a_server_names_it_at_once_and_at_the_end(nobody: str, run_name: str, tmp_path: Path) -> None:
    """The exit code tells the supervisor that it is no fault of the service."""
    config = configuration(nobody, run_name, tmp_path)
    config = config.model_copy(update={"nats": config.nats.model_copy(update={"connect_timeout_s": 5.0})})
    place = nobody.removeprefix("nats://")

    async def serve(context: ServiceContext) -> None:
        raise AssertionError("not reached")

    with structlog.testing.capture_logs() as logs:
        assert await _live(Role.BANK, "0", config, serve, 0) == EXIT_NO_SERVER
    (waits,) = [entry for entry in logs if entry["event"] == "waiting"]
    assert waits["culprit"] == f"nats-server {place}" and waits["then"] == "the service ends"
    (end,) = [entry["error"] for entry in logs if entry["log_level"] == "error"]
    assert place in end


async def test_status_without_a_server_names_it_and_since_when_the_run_misses_it(
    nobody: str, run_name: str, tmp_path: Path
) -> None:
    config = configuration(nobody, run_name, tmp_path)
    config = config.model_copy(update={"nats": config.nats.model_copy(update={"connect_timeout_s": 1.0})})
    folder = config.run_folder()
    with pytest.raises(BusError, match="no NATS server answered at") as first:
        await services.status.show(config, folder)
    assert "since" not in str(first.value)
    GoneNote(folder).write(1_700_000_000_000_000_000)
    assert not has_ended(folder)
    with pytest.raises(BusError, match=r"no NATS server answered at .*; the run has missed it since 2023-11-14T22:13:20Z"):
        await services.status.show(config, folder)


async def test_status_of_a_run_that_nobody_has_provisioned(nats_url: str, run_name: str, tmp_path: Path) -> None:
    with pytest.raises(BusError, match=rf"no run '{run_name}' on {nats_url} .*is run.name right\? `headrace provision`"):
        await services.status.show(configuration(nats_url, run_name, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_a_trainer_names_param_sync_and_then_admission(
    nats_process: NatsServer,
    run_name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    config = trainer_configuration(tmp_path, run_name, nats_process.url)
    async with Stage(nats_process.url, config) as stage:
        await stage.bus(Role.OBSERVER)
        with trainer(config, tmp_path / "trainer.log") as process:

            async def waits_for(words: str) -> None:
                async def said() -> bool:
                    assert process.process.poll() is None, process.tail()
                    return words in await shown(config, capsys)

                await eventually(said, within_s=100, what=words)

            await waits_for("version 0 from param_sync")
            await stage.start(Role.PARAM_SYNC, load_serve(Role.PARAM_SYNC))
            await waits_for("batch 0 from admission")


@pytest.mark.usefixtures("every_log")
async def test_a_wait_is_logged_with_its_culprit_deadline_and_end(
    nats_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services.health, "_NAME_AFTER_S", 0.5)
    with structlog.testing.capture_logs() as logs:
        async with Stage(nats_url, configuration(nats_url, run_name, tmp_path)) as stage:
            await stage.start(Role.ADMISSION, load_serve(Role.ADMISSION))
            await eventually(lambda: [entry for entry in logs if entry["event"] == "waiting"], within_s=WITHIN_S)
    (waits, *more) = [entry for entry in logs if entry["event"] == "waiting"]
    assert not more
    assert (waits["culprit"], waits["then"]) == ("trainer", "the wait goes on; groups stay ready")
    assert 0 < waits["deadline_in_s"] <= 600


def test_missing_tells_the_absent_from_the_stopped_and_the_silent() -> None:
    now_ns = 1_000_000_000_000

    def beat(role: Role, instance: str, phase: str, seconds_ago: float) -> Heartbeat:
        at_ns = now_ns - int(seconds_ago * 1e9)
        return Heartbeat(run="t", service=role, instance=instance, host="h", pid=1, phase=phase, at_ns=at_ns)  # type: ignore[arg-type]

    beats = [
        beat(Role.BANK, "0", "stopped", 40),
        beat(Role.ENGINE, "e0", "ready", 90),
        beat(Role.ENGINE, "e1", "ready", 75),
        beat(Role.SANDBOX, "x0", "ready", 300),
        beat(Role.SANDBOX, "x1", "starting", 1),
        beat(Role.VERIFIER, "0", "draining", 2),
    ]
    expected = (Role.BANK, Role.ENGINE, Role.SANDBOX, Role.TRAINER, Role.VERIFIER)
    assert missing(expected, beats, now_ns, 8.0) == [
        "missing: bank: 0 stopped 40 s ago; `headrace run bank` starts one",
        "missing: engine: e1 is silent for 1 m 15 s",
        "missing: trainer: none has announced itself; `headrace run trainer` starts one",
    ]
