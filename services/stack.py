"""`headrace up`: the local stack from lock to summary."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from rich.console import Console

from schemas.codec import CodecError, decode_any
from schemas.health import Heartbeat
from schemas.permissions import ADMIN
from schemas.table import Role, Stream
from services.bus import Bus
from services.child import ChildSpec
from services.config import Config, ConfigError, Nats
from services.consume import fold
from services.embedded_server import EmbeddedServers
from services.health import Health
from services.identity import may_create_streams, seed_file
from services.local_plan import check_model, engine_kind, label_of, service_plan
from services.logs import start_logging
from services.progress import Progress, is_complete
from services.provision import await_streams, provision
from services.provision_run import provision_run
from services.run_folder import MetricsFile, RunFolder
from services.runtime import EXIT_BUS_LOST, EXIT_CLEAN, EXIT_FAILED, EXIT_HARD, connect
from services.samples import Samples
from services.suites import resolve_suite
from services.summary import summary
from services.supervisor import GaveUp, Limits, Supervisor
from services.tally import Tally

log = structlog.get_logger()
_CATCH_UP_S = 10.0
Plan = Callable[[Config, RunFolder, str, int], list[ChildSpec]]


@dataclass(frozen=True)
class Outcome:
    """How a local run ended."""

    code: int
    tally: Tally


async def up(config: Config, *, fresh: bool) -> int:
    """Run everything on this machine until the run is complete or a signal comes; gives the exit code."""
    return (await run_stack(config, fresh=fresh, say=printer())).code


async def run_stack(
    config: Config,
    *,
    fresh: bool,
    say: Callable[[str], None],
    plan: Plan = service_plan,
    limits: Limits | None = None,
) -> Outcome:
    """The whole local run: lock, server, services, progress, drain, summary. `plan` says which processes the services are,
    `limits` how patient their supervisors are.

    Raises `ConfigError`, `RunFolderError`, `ServerError` or `BusError` for what the user can mend.
    """
    problem = check_model(config)
    if problem:
        raise ConfigError(problem)
    resolve_suite(config.tasks.suite)  # said here in one line rather than by three services in a loop
    engine = config.engine.model_copy(update={"kind": engine_kind(config)})
    config = config.model_copy(update={"engine": engine, "nats": _with_own_servers(config.nats)})
    with RunFolder(config, fresh=fresh) as folder, folder.log("supervisor").open("a", encoding="utf-8") as file:
        start_logging("supervisor", "0", config.telemetry.log_level, file)
        if folder.moved_to is not None:
            say(f"the older run folder is now {folder.moved_to}")
        return await _Stack(config, folder, say, plan, limits).run()


class _Stack:
    """One local run in a locked folder."""

    def __init__(
        self, config: Config, folder: RunFolder, say: Callable[[str], None], plan: Plan, limits: Limits | None
    ) -> None:
        self._plan = plan
        self._limits = limits
        self._config = config
        self._folder = folder
        self._say = say
        self._stop = asyncio.Event()
        self._supervisors: list[Supervisor] = []
        self._lost = ""
        self._signals = 0

    async def run(self) -> Outcome:
        with on_signals(self._on_signal):
            if self._config.nats.url:
                self._folder.note_url(self._config.nats.url)
                return await self._with_server(self._config.nats)
            return await self._with_embedded_server()

    async def _with_embedded_server(self) -> Outcome:
        servers = EmbeddedServers(self._config, self._folder, self._say, self._limits)
        self._supervisors += servers.supervisors.values()
        async with servers.running(self._on_lost):
            self._folder.note_url(servers.nats.url)
            return await self._with_server(servers.nats)

    async def _with_server(self, nats: Nats) -> Outcome:
        config = self._config.model_copy(update={"nats": nats})
        bus = await connect(config, Role.OBSERVER, f"up-{os.getpid()}", self._on_lost)
        try:
            await self._create_streams(config, bus)
            metrics = MetricsFile(self._folder.path / "metrics.jsonl")
            progress = Progress(bus, config, self._say, metrics, Samples(bus, config, self._folder.path))
            return await self._with_progress(config, bus, progress)
        finally:
            self._lost = self._lost or "closing"
            await bus.close()

    async def _create_streams(self, config: Config, bus: Bus) -> None:
        """Create the run's streams as the one who may; where we may not, wait for whoever may."""
        nats = config.nats
        if seed_file(nats, ADMIN) is not None:
            raised = await provision_run(config)
        elif may_create_streams(nats, Role.OBSERVER):
            raised = await provision(bus, nats.store_bytes, nats.replicas, raise_limits=True)
        else:
            raised = []
            health = Health(bus, config.telemetry.heartbeat_s)
            await await_streams(bus, nats.store_bytes, nats.replicas, health=health, stop=self._stop)
        for line in raised:
            self._say(f"more room: {line}")

    async def _with_progress(self, config: Config, bus: Bus, progress: Progress) -> Outcome:
        stop_progress = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(progress.run(stop_progress), name="progress")
            await first_of(progress.caught_up, self._stop)
            code = EXIT_BUS_LOST if self._lost else EXIT_CLEAN
            if not self._stop.is_set() and not is_complete(progress.tally, config):
                code = await self._run_services(config, bus, progress)
            if not self._lost:
                await progress.catch_up(_CATCH_UP_S)
            stop_progress.set()
            await watching
        self._say(summary(progress.tally, config, self._folder.path))
        return Outcome(code, progress.tally)

    async def _run_services(self, config: Config, bus: Bus, progress: Progress) -> int:
        """Services from start to drained; gives the exit code."""
        lifeline, keep_open = os.pipe()
        services = Supervisor(self._plan(config, self._folder, config.nats.url, lifeline), self._say, self._limits)
        self._supervisors.append(services)
        done = len(progress.tally.steps)
        self._say(
            f"run {config.run.name}{f' resumes after step {max(progress.tally.steps)}' if done else ' begins'}: "
            f"{config.engine.kind} engines {', '.join(config.engine.names)}; {config.nats.url}; folder {self._folder.path}"
        )
        code = EXIT_CLEAN
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [
                    group.create_task(self._stop_when_complete(progress), name="end"),
                    group.create_task(self._note_readiness(bus, services), name="readiness"),
                ]
                if not await services.run(self._stop):
                    self._say(f"not every service drained: {services.unclean()}")
                    code = EXIT_CLEAN if progress.complete.is_set() else EXIT_FAILED  # a complete run has lost nothing by it
                for helper in helpers:
                    helper.cancel()
        except* GaveUp as failures:
            self._say(str(failures.exceptions[0]))
            code = EXIT_FAILED
        finally:
            os.close(keep_open)
            os.close(lifeline)
        if self._lost:
            self._say(f"the connection to the server is lost: {self._lost}")
            return EXIT_BUS_LOST
        return code

    async def _stop_when_complete(self, progress: Progress) -> None:
        await progress.complete.wait()
        self._say("the run is complete; draining")
        self._stop.set()

    async def _note_readiness(self, bus: Bus, services: Supervisor) -> None:
        async for item in fold(bus, Stream.REGISTRY, "reg.service.*.*", stop=self._stop, latest_per_subject=True):
            if item is not None:
                try:
                    beat = decode_any(item.data)
                except CodecError as error:
                    log.error("unreadable heartbeat", subject=item.subject, seq=item.seq, error=str(error))
                    continue
                if isinstance(beat, Heartbeat) and beat.phase == "ready":
                    services.ready(label_of(beat.service, beat.instance), beat.pid)

    def _on_lost(self, reason: str) -> None:
        if not self._lost:
            self._lost = reason
            log.error("bus lost", reason=reason)
            self._stop.set()

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            for supervisor in reversed(self._supervisors):
                supervisor.kill()
            os._exit(EXIT_HARD)
        self._say("draining; a second signal stops hard")
        self._stop.set()


def _with_own_servers(nats: Nats) -> Nats:
    """The settings for servers that we start: their keys are made with them, and on a cluster one of them may be lost."""
    if nats.url:
        return nats
    foreign = dict.fromkeys(("nkey_seed_file", "nkey_folder", "admin_seed_file", "tls_ca_file"), "")
    return nats.model_copy(update={**foreign, "replicas": nats.replicas if nats.nodes == 1 else max(3, nats.replicas)})


async def first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def on_signals(handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def printer() -> Callable[[str], None]:
    """Prints whole lines, coloured or wrapped by nothing."""
    console = Console(highlight=False, markup=False, emoji=False)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    return say
