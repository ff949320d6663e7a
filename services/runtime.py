"""The life of one service process: start, ready, draining, stopped.

Every service is a coroutine `serve(context)`. It works until `context.stop` is raised, drains, and returns. The runtime gives
it a connected bus, verified streams, heartbeats, a health endpoint and signal handling; exit code 0 means a clean drain.
"""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import structlog
import uvloop

from schemas.table import Role
from services.bus import Bus
from services.config import Config, ConfigError
from services.health import Health
from services.identity import may_create_streams, read_seed, seed_file
from services.items import BusError, Forbidden
from services.logs import start_logging
from services.nats_connection import places
from services.provision import await_streams, provision
from services.tracing import start_tracing

log = structlog.get_logger()
EXIT_CLEAN, EXIT_FAILED, EXIT_NO_SERVER, EXIT_BUS_LOST, EXIT_HARD = 0, 1, 69, 70, 130
_NAME_SERVER_AFTER_S = 3.0
_PATIENCE_OF_DRAIN_S = 8.0  # with a server or stream that takes nothing: what is not stored comes back to somebody else


@dataclass(frozen=True)
class ServiceContext:
    """What a service works with."""

    config: Config
    bus: Bus
    role: Role
    instance: str
    stop: asyncio.Event
    health: Health

    def ready(self) -> None:
        """Say that the service now does its work."""
        self.health.enter("ready")


Serve = Callable[[ServiceContext], Awaitable[None]]


def run_service(role: Role, instance: str, config: Config, serve: Serve, *, health_port: int = 0) -> int:
    """Run one service to its end and give the process's exit code."""
    start_logging(str(role), instance, config.telemetry.log_level)
    traces = config.run_folder() / "traces" / f"{role}-{instance}.jsonl" if config.telemetry.traces else None
    provider = start_tracing(str(role), instance, otlp_endpoint=config.telemetry.otlp_endpoint, file=traces)
    try:
        return uvloop.run(_live(role, instance, config, serve, health_port))
    finally:
        if provider is not None:
            provider.shutdown()


def leave(code: int) -> NoReturn:
    """End this process at once. All that it had is stored and closed by now, and taking down an interpreter with torch in it is
    seconds of work, which on a busy machine outlast the patience of whoever waits for the end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _live(role: Role, instance: str, config: Config, serve: Serve, health_port: int) -> int:
    stop = asyncio.Event()
    lost: list[str] = []

    def on_fatal(reason: str) -> None:
        if not stop.is_set() or not lost:
            log.error("bus lost", reason=reason)
        lost.append(reason)
        stop.set()

    _handle_signals(stop)
    naming = asyncio.create_task(_name_server(config), name="wait for the server")
    try:
        bus = await connect(config, role, instance, on_fatal)
    except (BusError, ConfigError) as error:
        log.error("cannot start", error=str(error))
        unanswered = isinstance(error, BusError) and not isinstance(error, Forbidden) and config.nats.url
        return EXIT_NO_SERVER if unanswered else EXIT_FAILED
    finally:
        naming.cancel()
    health = Health(bus, config.telemetry.heartbeat_s)
    context = ServiceContext(config, bus, role, instance, stop, health)
    code = EXIT_CLEAN
    background_stop = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            try:
                if health_port:
                    group.create_task(health.serve_http(health_port, background_stop), name="health")
                group.create_task(_lose_patience(bus, stop, background_stop), name="patience")
                if await _have_streams(context):
                    group.create_task(health.beat(background_stop), name="heartbeat")
                    group.create_task(health.measure_lag(background_stop), name="loop-lag")
                    await serve(context)
                health.enter("stopped" if stop.is_set() else "draining")
                if not stop.is_set():
                    raise RuntimeError(f"{role} ended without being asked to")
            finally:
                background_stop.set()
    except* (BusError, ConfigError) as errors:
        for reason in _leaves(errors):
            log.error("failed", error=str(reason))
        code = EXIT_FAILED if bus.client.is_connected else EXIT_NO_SERVER
    except* Exception as errors:  # a broken program stops here, with its trace, and the supervisor decides
        for failure in _leaves(errors):
            log.error("crashed", error=repr(failure), exc_info=failure)
        code = EXIT_FAILED
    was_lost = bool(lost) or bus.client.is_closed
    if not was_lost:
        await _say_goodbye(bus, health)
    stop.set()  # from here on a closed client is what we want, not a loss
    lost.append("closing")
    await bus.close()
    return EXIT_BUS_LOST if was_lost else code


async def _name_server(config: Config) -> None:
    """Say for which server a start waits, where it does not answer soon."""
    await asyncio.sleep(_NAME_SERVER_AFTER_S)
    left_s = round(config.nats.connect_timeout_s - _NAME_SERVER_AFTER_S)
    culprit = f"nats-server {places(config.nats.url)}"
    log.info("waiting", what="the server", culprit=culprit, deadline_in_s=left_s, then="the service ends")


def _leaves(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    """The errors themselves, out of however many task groups they came through."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def _have_streams(context: ServiceContext) -> bool:
    """Create the run's streams, or with a key, which only verifies, wait for them; false if asked to stop meanwhile."""
    nats, bus = context.config.nats, context.bus
    if not may_create_streams(nats, context.role):
        return await await_streams(bus, nats.store_bytes, nats.replicas, health=context.health, stop=context.stop)
    await provision(bus, nats.store_bytes, nats.replicas)
    return True


async def connect(
    config: Config, role: Role, instance: str, on_fatal: Callable[[str], None] | None = None, *, identity: str = ""
) -> Bus:
    """A bus connection as the configuration says, with the key of `identity` (the role's own where none is given).

    Raises `BusError` naming the server and `ConfigError` naming the file.
    """
    if not config.nats.url:
        raise BusError("nats.url is empty; pass --nats URL, or use `headrace up`, which starts a server")
    key = seed_file(config.nats, identity or role)
    return await Bus.connect(
        config.nats.url,
        config.run.name,
        role,
        instance,
        timeout_s=config.nats.connect_timeout_s,
        nkeys_seed=None if key is None else read_seed(key),
        tls=_trusted(config.nats.tls_ca_file) if config.nats.tls_ca_file else None,
        on_fatal=on_fatal,
        identity=identity,
    )


def _trusted(ca_file: str) -> ssl.SSLContext:
    """A context that trusts this CA alone."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"nats.tls_ca_file: {ca_file} cannot be read as a CA certificate ({error})") from error


async def _lose_patience(bus: Bus, stop: asyncio.Event, over: asyncio.Event) -> None:
    """Once the service drains, hold no publish for long: whoever ends us waits, and nothing unacknowledged is lost by it."""
    ends = [asyncio.create_task(event.wait()) for event in (stop, over)]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        bus.give_up_s = _PATIENCE_OF_DRAIN_S
    finally:
        for end in ends:
            end.cancel()


async def _say_goodbye(bus: Bus, health: Health) -> None:
    health.phase = "stopped"
    bus.give_up_s = 3.0
    try:
        await asyncio.wait_for(bus.publish(bus.subjects.service_heartbeat(bus.role, bus.instance), health.snapshot()), 3)
    except (BusError, asyncio.TimeoutError):
        log.info("last heartbeat not delivered")


def _handle_signals(stop: asyncio.Event) -> None:
    """First signal: drain. Second: hard stop; all state is on the bus, so nothing is lost by it."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(EXIT_HARD)
        log.info("draining", reason="signal")
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
