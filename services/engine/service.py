"""The engine service: serves generations and changes weights only to what it has verified whole."""

from __future__ import annotations

import asyncio
import time

import structlog

from param_sync.patch.errors import PatchError
from param_sync.patch.snapshot import Snapshot
from schemas.arrays import Array
from schemas.codec import CodecError, decode_any
from schemas.generation import AbortRequest, GenerateRequest, GenerateResult
from schemas.policy import ApplyOrder, EnginePhase, EngineState
from schemas.table import Stream
from services.base_weights import snapshot_of
from services.bus import BusError, Item
from services.consume import fold
from services.engine.chain_walk import Layout, Walk, layout_of, shadow_of
from services.engine.from_config import engine_from_config
from services.engine.protocol import (
    AppliedWeights,
    DrainTimeout,
    Engine,
    EngineError,
    RequestRefused,
    StagingFailed,
    WeightsRejected,
    WeightUpdate,
)
from services.health import pause
from services.runtime import ServiceContext
from services.tracing import span
from services.work import WorkConsumer

log = structlog.get_logger()
_HEARTBEAT_S = 1.0
_ABORT_HEADROOM = 16
_PROOF_TIMEOUT_S = 30.0


async def serve(context: ServiceContext) -> None:
    """One serving engine.

    Consumes: `gen.req.<engine>` and `policy.apply.<engine>`. Produces: `gen.out.<requester>`,
    `policy.engine.<engine>` after every
    confirmed change, `reg.engine.<engine>` as heartbeat. Waits for: the order that names the version of its weights; until then
    it refuses requests. On error: a request's error is its result; weights that fail verification take the engine
    out of service
    until an order from an anchor succeeds. On stop: no new requests, running generations end, then the engine is freed.
    """
    service = EngineService(context)
    await service.start()
    requests = WorkConsumer(
        context.bus, "engine-{x}", x=context.instance, capacity=context.config.engine.max_running * 2 + _ABORT_HEADROOM
    )
    ended = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(service.follow_orders(ended))
            group.create_task(service.beat(ended))
            context.ready()
            await requests.run(service.handle, context.stop)
            context.health.enter("draining")
            service.phase = "draining"
            await service.announce()
            ended.set()
    finally:
        await service.engine.stop()


class EngineService:
    """One engine, the shadow of its verified weights, and what it says of itself."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._bus = context.bus
        self.name = context.instance
        self.engine: Engine = engine_from_config(context.config, context.instance)
        self.phase: EnginePhase = "starting"
        self._version = -1
        self._incarnation = 0
        self._shadow: Snapshot | None = None  # what the engine holds, verified; None after a rejected change
        self._layout: Layout = {}
        self._answering: set[str] = set()
        self._order_id = ""
        self._error = ""
        self._receipt: AppliedWeights | None = None  # of the last switch

    async def start(self) -> None:
        """Load the checkpoint and prove that the engine holds exactly its bits."""
        folder = self._context.config.policy.model
        self._shadow = await asyncio.to_thread(lambda: shadow_of(snapshot_of(folder)))
        self._layout = layout_of(self._shadow)
        await self.engine.start()
        held, wanted = self.engine.weights.digest, self._shadow.digest
        if held != wanted:
            raise EngineError(f"the engine holds digest {held[:12]} after loading a checkpoint of digest {wanted[:12]}")
        log.info("engine started", build=self.engine.build, digest=held[:12])
        await self.announce()

    # -- generation ----------------------------------------------------------------------------------------------------------

    async def handle(self, item: Item) -> None:
        """One request or abort. Every request is answered exactly once by this engine, with tokens or with the
        reason why not."""
        message = decode_any(item.data)
        if isinstance(message, AbortRequest):
            await self.engine.abort(message.request_id)
            return
        if not isinstance(message, GenerateRequest):
            raise CodecError(f"gen.req carries a {type(message).__name__}; only generate and abort requests belong there")
        if message.deadline_ns and time.time_ns() > message.deadline_ns:
            self._context.health.count("expired_requests")
            return
        if message.request_id in self._answering:  # delivered again, since the first delivery takes long; it will be answered
            self._context.health.count("repeated_requests")
            return
        self._answering.add(message.request_id)
        try:
            with span("generate", item.headers, engine=self.name, request=message.request_id):
                result = await self._generate(message)
        finally:
            self._answering.discard(message.request_id)
        await self._bus.publish(self._bus.subjects.generated(message.requester), result)
        if result.status == "error":
            await self._prove_alive()

    async def _prove_alive(self) -> None:
        """After an unexplained error: an engine that can no longer read its own weights is dead, and so is this process."""
        try:
            await asyncio.wait_for(self.engine.weight_digest(), _PROOF_TIMEOUT_S)
        except (EngineError, asyncio.TimeoutError) as error:
            raise EngineError(f"engine {self.name} died: {error!r}") from error

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        started = time.time_ns()
        if self.phase not in ("serving", "applying") or self._version < 0:
            return self._failed(request, "refused", f"engine {self.name} is {self.phase}", started)
        try:
            out = await self.engine.generate(
                request.request_id, request.prompt_ids.of_kind("prompt_ids", "int32", 1), request.sampling, request.session
            )
        except RequestRefused as error:
            return self._failed(request, "refused", str(error), started)
        except EngineError as error:
            log.warning("generation failed", request=request.request_id, error=str(error))
            return self._failed(request, "error", str(error), started)
        self._context.health.count("generations")
        self._context.health.count("generated_tokens", len(out.ids))
        self._context.health.count("discarded_tokens", out.discarded_tokens)
        return GenerateResult(
            request_id=request.request_id,
            engine=self.name,
            generator=self.engine.build,
            status="aborted" if out.finish_reason == "abort" else "ok",
            sampled_ids=Array.of(out.ids),
            logprobs=Array.of(out.logprobs),
            raw_logprobs=None if out.raw_logprobs is None else Array.of(out.raw_logprobs),
            versions=out.versions,
            weight_digest=out.weight_digest,
            finish_reason=out.finish_reason,
            stop_reason=out.stop_reason,
            cached_prompt_tokens=out.cached_prompt_tokens,
            discarded_tokens=out.discarded_tokens,
            started_ns=started,
            finished_ns=time.time_ns(),
        )

    def _failed(self, request: GenerateRequest, status: str, error: str, started: int) -> GenerateResult:
        return GenerateResult(
            request_id=request.request_id,
            engine=self.name,
            generator=self.engine.build,
            status="refused" if status == "refused" else "error",
            error=error,
            started_ns=started,
            finished_ns=time.time_ns(),
        )

    # -- weights -------------------------------------------------------------------------------------------------------------

    async def follow_orders(self, stop: asyncio.Event) -> None:
        """Take param_sync's orders one after another; only the newest one counts when several have piled up."""
        async for item in fold(self._bus, Stream.POLICY, f"policy.apply.{self.name}", stop=stop, latest_per_subject=True):
            if item is None:
                continue
            try:
                order = item.decode(ApplyOrder)
            except CodecError as error:
                log.error("unreadable order", subject=item.subject, seq=item.seq, error=str(error))
                continue
            await self._obey(order)

    async def _obey(self, order: ApplyOrder) -> None:
        """Carry one order out, or say why not. What could not be brought as far as the weights leaves the old ones serving."""
        if self.phase == "serving" and self._outranks(order):
            return
        was, self._order_id, self._error = self.phase, order.order_id, ""
        if was != "serving":
            self.phase = "applying"  # what it failed at before is over
        way = Walk(self._shadow)
        try:
            await way.follow(self._bus, order)
            update = way.update(self._layout)
            await self.engine.stage(update)
            self.phase = "applying"
            await self.announce()
            await self._switch(update, way, order)
        except (DrainTimeout, StagingFailed, PatchError, BusError) as error:
            self._error = f"{type(error).__name__}: {error}"
            intact = self.engine.weights.serviceable
            self._shadow = await asyncio.to_thread(way.back) if intact else None
            self.phase = was if intact and was == "serving" else "failed"
            log.warning("weights not changed", version=order.version, error=self._error, phase=self.phase)
        except WeightsRejected as error:
            self._shadow = None
            self.phase, self._error = "failed", f"{type(error).__name__}: {error}"
            log.error("weights rejected", version=order.version, error=str(error))
        await self.announce()

    def _outranks(self, order: ApplyOrder) -> bool:
        """Whether what is served is the order's weights or newer. A new incarnation is newer than all that it left."""
        held = (self._incarnation, self._version)
        wanted = (order.incarnation, order.version)
        same_bits = self._shadow is not None and self._shadow.digest == order.digest
        return held > wanted or (held == wanted and same_bits)

    async def _switch(self, update: WeightUpdate, way: Walk, order: ApplyOrder) -> None:
        """Let the engine write, prove and serve. Raises `WeightsRejected` or `DrainTimeout`."""
        with span("apply", None, engine=self.name, version=order.version):
            receipt = await self.engine.apply(update, order.mode, order.grace_s)
        self._shadow = way.arrived()
        self._version, self._incarnation = order.version, order.incarnation
        self._error, self.phase, self._receipt = "", "serving", receipt
        health = self._context.health
        health.count("weight_switches")
        health.count(f"weight_switches_{receipt.path}")
        health.count("weights_paused_s", receipt.closed_s)
        health.count("weights_frozen_s", receipt.frozen_s)
        log.info(
            "serving",
            version=order.version,
            incarnation=order.incarnation,
            digest=order.digest[:12],
            path=receipt.path,
            tensors=receipt.tensors,
            staged_s=round(receipt.stage_s, 4),
            paused_s=round(receipt.closed_s, 4),
            frozen_s=round(receipt.frozen_s, 4),
        )

    # -- what it says --------------------------------------------------------------------------------------------------------

    async def announce(self) -> None:
        """A confirmed change, on POLICY for the record and in the registry for the routers."""
        state = await self.state()
        await self._bus.publish(self._bus.subjects.engine_state(self.name), state)
        await self._bus.publish(self._bus.subjects.engine_heartbeat(self.name), state)

    async def beat(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._bus.publish(self._bus.subjects.engine_heartbeat(self.name), await self.state())
            await pause(stop, _HEARTBEAT_S)

    def _path(self) -> str:
        """How new weights come: as changed elements, or whole, and why."""
        if self.phase == "starting":
            return ""
        reason = self.engine.capabilities.whole_tensors
        return f"whole tensors: {reason}" if reason else "changed elements"

    async def state(self) -> EngineState:
        load = await self.engine.load()
        return EngineState(
            run=self._bus.run,
            engine=self.name,
            generator=self.engine.build,
            phase=self.phase,
            version=self._version,
            incarnation=self._incarnation,
            digest=self._shadow.digest if self._shadow is not None else "",
            running=load.running,
            waiting=load.waiting,
            max_running=self._context.config.engine.max_running,
            order_id=self._order_id,
            error=self._error,
            paused_s=self._receipt.closed_s if self._receipt is not None else 0.0,
            frozen_s=self._receipt.frozen_s if self._receipt is not None else 0.0,
            paused_total_s=self._context.health.counters.get("weights_paused_s", 0.0),
            weight_path=self._path(),
            discarded_tokens=int(self._context.health.counters.get("discarded_tokens", 0)),
            prefix_hit_tokens=load.prefix_hits,
            prefix_query_tokens=load.prefix_queries,
            generated_tokens=load.generated_tokens,
            at_ns=time.time_ns(),
        )
