"""The life of a service: what ends it, with which exit code, and under which name its failure is logged."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from conftest import NatsServer

from schemas.health import Heartbeat
from schemas.table import Role, Stream
from services.bus import Bus
from services.config import Config, ConfigError, check
from services.consume import read_latest
from services.items import IntegrityError
from services.nats_server import free_port
from services.runtime import EXIT_BUS_LOST, EXIT_CLEAN, EXIT_FAILED, EXIT_NO_SERVER, ServiceContext, _live

pytestmark = pytest.mark.timeout(40)


@pytest.fixture
def config(nats_url: str, run_name: str) -> Config:
    return check(
        {
            "run": {"name": run_name},
            "nats": {"url": nats_url, "connect_timeout_s": 1, "store_bytes": 256 * 2**20},
            "telemetry": {"heartbeat_s": 0.2},
        }
    )


async def live(config: Config, serve) -> tuple[int, list[str]]:
    """Exit code and the errors that were logged."""
    with structlog.testing.capture_logs() as logs:
        code = await _live(Role.BANK, "0", config, serve, 0)
    return code, [str(entry.get("error", entry.get("reason"))) for entry in logs if entry["log_level"] == "error"]


async def test_a_clean_drain_is_exit_code_zero_and_says_goodbye(config: Config, nats_url: str, run_name: str) -> None:
    async def serve(context: ServiceContext) -> None:
        context.ready()
        context.health.count("groups", 3)
        await asyncio.sleep(0.5)
        context.stop.set()

    assert await live(config, serve) == (EXIT_CLEAN, [])
    bus = await Bus.connect(nats_url, run_name, Role.OBSERVER, "0")
    (beat,) = [item.decode(Heartbeat) for item in await read_latest(bus, Stream.REGISTRY, "reg.service.bank.*")]
    assert (beat.phase, beat.counters["groups"], beat.instance) == ("stopped", 3, "0")
    await bus.close()


async def test_a_failure_in_a_task_of_a_service_is_logged_by_its_own_words(config: Config) -> None:
    async def follow() -> None:
        raise IntegrityError("hr_t_READY: sequences 3 to 4 are missing")

    async def serve(context: ServiceContext) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(follow())

    assert await live(config, serve) == (EXIT_FAILED, ["hr_t_READY: sequences 3 to 4 are missing"])


async def test_a_wrong_setting_found_late_is_logged_without_a_trace(config: Config) -> None:
    async def serve(context: ServiceContext) -> None:
        raise ConfigError("tasks.suite: no such suite")

    assert await live(config, serve) == (EXIT_FAILED, ["tasks.suite: no such suite"])


async def test_ending_without_being_asked_to_is_a_failure(config: Config) -> None:
    async def serve(context: ServiceContext) -> None:
        context.ready()

    code, errors = await live(config, serve)
    assert code == EXIT_FAILED
    assert "ended without being asked to" in errors[0]


async def test_a_closed_client_ends_the_process(config: Config) -> None:
    async def serve(context: ServiceContext) -> None:
        await context.bus.client.close()
        await context.stop.wait()

    code, errors = await live(config, serve)
    assert code == EXIT_BUS_LOST
    assert "closed" in errors[0]


async def test_a_service_without_a_server_ends_in_time(nats_process: NatsServer, config: Config) -> None:
    async def serve(context: ServiceContext) -> None:
        raise AssertionError("not reached")

    nats = config.nats.model_copy(update={"url": f"nats://127.0.0.1:{free_port()}"})
    code, errors = await live(config.model_copy(update={"nats": nats}), serve)
    assert code == EXIT_NO_SERVER
    assert "no NATS server answered" in errors[0]
