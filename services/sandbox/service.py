"""The sandbox service: one executor's lanes on the bus."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from schemas.codec import CodecError, decode_any
from schemas.message import Message
from schemas.sandbox import Lane, SandboxAttach, SandboxCleanup, SandboxReset, SandboxResult, SandboxRun, SandboxSeal
from schemas.trajectory import StateRef
from services import state_refs
from services.config import Config
from services.config import Sandbox as SandboxSettings
from services.health import pause
from services.items import Item
from services.runtime import ServiceContext
from services.sandbox import lane_rules
from services.sandbox.command import CommandRefused, Limits, SandboxError
from services.sandbox.cpus import plan_cpus
from services.sandbox.executor import Executor, ExecutorConfig
from services.sandbox.host import HostConfig
from services.sandbox.lane_rules import LaneSpec
from services.sandbox.lanes import LaneBusy
from services.sandbox.refusals import BadSandboxId, SandboxConflict, SandboxLost, SnapshotMismatch, UnknownSandbox
from services.sandbox.state import PackedState
from services.tracing import span
from services.work import Retry, WorkConsumer

log = structlog.get_logger()
DRAIN_S = 15.0  # given to running commands before they are cut off and their sandboxes are lost
_CUT_S = 5.0  # for those to end and to be answered
_HOUSEKEEPING_S = 2.0
_RETRY_S = 1.0
_CLOSE_S = 30.0
_REFUSED = (CommandRefused, BadSandboxId, SandboxConflict, SnapshotMismatch)
_LOST = (SandboxLost, UnknownSandbox)
_TAKES: dict[Lane, tuple[type[Message], ...]] = {
    "reset": (SandboxReset,),
    "command": (SandboxRun, SandboxSeal, SandboxAttach),
    "package": (SandboxRun,),
    "cleanup": (SandboxCleanup,),
}
Request = SandboxReset | SandboxRun | SandboxSeal | SandboxAttach | SandboxCleanup


async def serve(context: ServiceContext) -> None:
    """One executor; the instance is its name.

    Consumes: `sbx.req.reset.any` and `sbx.req.<lane>.<executor>`, each lane with its own capacity. Produces:
    `sbx.out.<requester>`. Waits for: the executor, which bounds every command. On error: a typed status in the result; what the
    executor has no room for now is handed back to the queue. A repeated command id gets the recorded result, and a repeated
    seal the recorded state, from this executor or from its successor of the same name. On stop: no new requests; running ones
    get `DRAIN_S` to end and are answered `lost` if they do not; then every sandbox is removed. A successor answers `lost` for
    them, and their slots begin anew.
    """
    executor = await Executor.start(executor_config(context.config, context.instance))
    service = SandboxService(context, executor)
    for line in executor.status().isolation.missing:
        log.warning("not enforced on this machine", what=line)
    ended = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(service.clean_up_sealed(ended), name="cleanup")
            group.create_task(service.keep_house(ended), name="housekeeping")
            group.create_task(service.limit_drain(ended), name="drain")
            context.ready()
            await service.work()
            ended.set()
    finally:
        async with asyncio.timeout(_CLOSE_S):
            await executor.close()


def executor_config(config: Config, instance: str) -> ExecutorConfig:
    """What `config.sandbox` means for one executor: lanes, limits, and a root folder of its own."""
    settings = config.sandbox
    root = Path(settings.root) / instance if settings.root else config.run_folder().resolve() / "sandboxes" / instance
    permits = {lane: int(getattr(settings, lane.value)) for lane in lane_rules.Lane}
    sets = plan_cpus(sorted(os.sched_getaffinity(0)), permits).sets
    return ExecutorConfig(
        host=HostConfig(root=str(root), threads=sum(permits.values()) + 8),
        limits=Limits(
            memory_bytes=settings.memory_bytes,
            processes=settings.processes,
            disk_bytes=settings.disk_bytes,
            output_bytes=settings.output_bytes,
        ),
        lanes={
            lane: LaneSpec(run_permits=count, start_permits=count, queue_bound=settings.max_sandboxes, cpu_sets=sets[lane])
            for lane, count in permits.items()
        },
        max_sandboxes=settings.max_sandboxes,
    )


def capacities(settings: SandboxSettings) -> dict[Lane, int]:
    """Messages in work by lane; seals arrive on the command lane but run on the verify lane's permits."""
    return {
        "reset": settings.reset,
        "command": settings.command + settings.verify,
        "package": settings.package,
        "cleanup": settings.cleanup,
    }


@dataclass(frozen=True, kw_only=True)
class _Clock:
    """When a request was stored and when its work began, wall clock."""

    queued_ns: int
    started_ns: int


class SandboxService:
    """The executor's side of every lane."""

    def __init__(self, context: ServiceContext, executor: Executor) -> None:
        self._context = context
        self._bus = context.bus
        self._health = context.health
        self._executor = executor
        self._sealed: asyncio.Queue[str] = asyncio.Queue(maxsize=2 * context.config.sandbox.max_sandboxes)

    async def work(self) -> None:
        """Serve all lanes until the service stops; then what runs ends."""
        name = self._context.instance
        async with asyncio.TaskGroup() as group:
            for lane, capacity in capacities(self._context.config.sandbox).items():
                template = "sbxany-{lane}" if lane == "reset" else "sbx-{x}-{lane}"
                drain_s = DRAIN_S + _CUT_S
                consumer = WorkConsumer(self._bus, template, x=name, lane=lane, capacity=capacity, drain_s=drain_s)
                group.create_task(consumer.run(partial(self.handle, lane), self._context.stop), name=lane)

    async def handle(self, lane: Lane, item: Item) -> None:
        """Answer one request; one whose requester no longer waits is dropped and counted. Raises `Retry` when there is no
        room.
        """
        request = decode_any(item.data)
        if not isinstance(request, Request):
            raise CodecError(f"sbx.req.{lane} carries a {type(request).__name__}, which is no sandbox request")
        if not isinstance(request, SandboxCleanup) and request.deadline_ns < time.time_ns():
            self._health.count("expired_requests")
            return
        with span(f"sandbox.{lane}", item.headers, sandbox=request.sandbox, executor=self._context.instance):
            result = await self._answer(lane, request, _Clock(queued_ns=item.time_ns, started_ns=time.time_ns()))
        self._health.count(f"{lane}_{result.status}")
        if request.requester:
            await self._bus.publish(self._bus.subjects.sandbox_result(request.requester), result)
        if isinstance(request, SandboxSeal) and result.status == "ok":
            await self._sealed.put(request.sandbox)

    async def _answer(self, lane: Lane, request: Request, clock: _Clock) -> SandboxResult:
        if not isinstance(request, _TAKES[lane]):
            return self._failed(lane, request, clock, "refused", f"lane {lane} takes no {type(request).__name__}")
        try:
            if isinstance(request, SandboxReset):
                return await self._reset(request, clock)
            if isinstance(request, SandboxRun):
                return await self._run(lane, request, clock)
            if isinstance(request, SandboxSeal):
                return await self._seal(lane, request, clock)
            if isinstance(request, SandboxAttach):
                found = await self._executor.standing(request.sandbox)
                return self._result(lane, request, clock, state_hash=found.state_hash, last_command=found.last_command)
            if request.group:
                for sandbox in await self._executor.close_group(request.group):
                    log.warning("sandbox of a lost holder was removed", sandbox=sandbox, group=request.group)
                    self._health.count("orphans_removed")
            else:
                await self._executor.cleanup(request.sandbox)
            return self._result(lane, request, clock)
        except SandboxError as error:
            if isinstance(error, LaneBusy) or getattr(error, "retry", False):
                raise Retry(str(error), delay_s=_RETRY_S) from error
            if isinstance(error, _LOST):
                return self._failed(lane, request, clock, "lost", str(error))
            if isinstance(error, _REFUSED):
                return self._failed(lane, request, clock, "refused", str(error))
            return self._error(lane, request, clock, error)
        except OSError as error:  # this machine's trouble with one sandbox must not end the others
            return self._error(lane, request, clock, error)

    def _error(self, lane: Lane, request: Request, clock: _Clock, error: Exception) -> SandboxResult:
        log.warning("sandbox request failed", lane=lane, sandbox=request.sandbox, error=repr(error))
        return self._failed(lane, request, clock, "error", str(error))

    async def _reset(self, request: SandboxReset, clock: _Clock) -> SandboxResult:
        made = await self._executor.reset(request.sandbox, request.files, owner=request.owner)
        return self._result("reset", request, clock, state_hash=made.state_hash)

    async def _run(self, lane: Lane, request: SandboxRun, clock: _Clock) -> SandboxResult:
        done = await self._executor.run(
            request.sandbox, request.command_id, request.command, request.timeout_s, lane=lane_rules.Lane(lane)
        )
        return self._result(
            lane,
            request,
            clock,
            exit_code=done.exit_code,
            stdout=done.stdout,
            stderr=done.stderr,
            dropped_bytes=done.dropped_bytes,
            timed_out=done.timed_out,
            outcome=done.outcome.value,
            state_hash=done.state_hash_after,
        )

    async def _seal(self, lane: Lane, request: SandboxSeal, clock: _Clock) -> SandboxResult:
        async def publish(packed: PackedState) -> StateRef:
            return await state_refs.reference(
                self._bus,
                state_hash=packed.state_hash,
                archive=packed.tar,
                tar_digest=packed.tar_digest,
                inline_bytes=self._context.config.rollout.inline_state_bytes,
            )

        state = await self._executor.seal(request.sandbox, publish)
        return self._result(lane, request, clock, state_hash=state.state_hash, state=state)

    def _result(self, lane: Lane, request: Request, clock: _Clock, **fields: Any) -> SandboxResult:
        result = SandboxResult(
            command_id=request.command_id,
            sandbox=request.sandbox,
            executor=self._context.instance,
            lane=lane,
            status="ok",
            queued_ns=clock.queued_ns,
            started_ns=clock.started_ns,
            finished_ns=time.time_ns(),
        )
        return msgspec.structs.replace(result, **fields)

    def _failed(self, lane: Lane, request: Request, clock: _Clock, status: str, error: str) -> SandboxResult:
        return self._result(lane, request, clock, status=status, error=error[:2000])

    async def clean_up_sealed(self, ended: asyncio.Event) -> None:
        """Remove sandboxes whose state is out, in the order of their seals; as many at a time as the cleanup lane has
        permits.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(self._context.config.sandbox.cleanup):
                group.create_task(self._clean_up_next(ended))

    async def _clean_up_next(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            try:
                async with asyncio.timeout(0.5):
                    sandbox = await self._sealed.get()
            except TimeoutError:
                continue
            try:
                removed = await self._executor.cleanup(sandbox, "sealed")
                self._health.count("sealed_and_removed", int(removed.existed))
            except SandboxError as error:
                self._health.count("cleanup_failed")
                log.error("sealed sandbox not removed", sandbox=sandbox, error=str(error))

    async def limit_drain(self, ended: asyncio.Event) -> None:
        """Once the service stops, cut off the commands that do not end in time, so that each is answered."""
        while not ended.is_set() and not await pause(self._context.stop, 1.0):
            pass
        if not await pause(ended, DRAIN_S):
            log.warning("commands are cut off", running=sum(lane.running for lane in self._executor.status().lanes))
            self._executor.halt()

    async def keep_house(self, ended: asyncio.Event) -> None:
        """Remove sandboxes whose owners are gone, and say how full the lanes are."""
        while not await pause(ended, _HOUSEKEEPING_S):
            try:
                for sandbox in await self._executor.reap_idle():
                    log.warning("sandbox nobody used was removed", sandbox=sandbox)
                    self._health.count("idle_removed")
            except SandboxError as error:
                log.error("idle sandbox not removed", error=str(error))
            status = self._executor.status()
            self._health.set("sandboxes", status.sandboxes)
            for lane in status.lanes:
                self._health.set(f"{lane.lane.value}_running", lane.running)
                self._health.set(f"{lane.lane.value}_waiting", lane.waiting)
