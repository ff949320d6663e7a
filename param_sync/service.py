"""The parameter synchronizer: turns committed steps into published versions and walks the fleet one engine at a time."""

from __future__ import annotations

import asyncio
import time

import structlog

from param_sync import rollout_plan as plan
from param_sync.chain import BrokenChain, Need, Weights
from param_sync.published import Published, weights_of
from schemas.policy import ApplyOrder, EngineState, FleetVersions, WeightsManifest
from schemas.table import Stream
from schemas.training import StepCommit
from services.bus import Item
from services.consume import events, fold
from services.dead_letters import pass_over
from services.ownership import Ownership, owned
from services.pull import Damaged
from services.runtime import ServiceContext
from services.standing_wait import StandingWait
from services.tracing import span

log = structlog.get_logger()
_GONE_AFTER_S = 15.0
_LOOK_AGAIN_S = 5.0
_ANCHOR_AFTER = 2  # failures of an engine in a row: from what it held, then from an anchor that was there
_COUNTED = (plan.Phase.SERVING, plan.Phase.APPLYING)
_EVERYONE = 2**31  # more engines than there can be


async def serve(context: ServiceContext) -> None:
    """One run's synchronizer; a second one stands by.

    Consumes: `train.step.<s>` and the engines' heartbeats. Produces: `policy.staged.<v>` and `policy.anchor.<v>` (once each,
    after the digest was reproduced here), `policy.apply.<engine>`, `policy.active`; removes objects that nobody needs any more.
    Waits for: the ownership, by its holder's name; an engine that misses its deadline is named and passed over. On error: a
    patch that does not give the announced digest stops the service, since nothing may be published from it. On stop: the roll
    stays where it is; whoever starts next continues from the engines' states.
    """
    async with owned(context) as ownership:
        if ownership is None:
            return
        synchronizer = Synchronizer(context, ownership)
        await synchronizer.restore()
        context.ready()
        async with asyncio.TaskGroup() as group:
            group.create_task(synchronizer.follow_steps())
            group.create_task(synchronizer.follow_engines())
            group.create_task(synchronizer.roll())
        context.health.enter("draining")


class Synchronizer:
    """The published chain and the fleet that is led along it."""

    def __init__(self, context: ServiceContext, ownership: Ownership) -> None:
        self._context = context
        self._ownership = ownership
        self._bus = context.bus
        settings = context.config.param_sync
        out = _EVERYONE if settings.max_unavailable == "all" else settings.max_unavailable
        self._limits = plan.Policy(max_unavailable=out, apply_deadline_s=settings.apply_timeout_s)
        self._chain = Published(context.bus, context.config, ownership)
        self._fleet = plan.Fleet()
        self._seen: dict[str, float] = {}
        self._serving: set[str] = set()  # by their own word
        self._orders: dict[str, str] = {}
        self._order_count = 0
        self._announced: tuple[object, ...] = ()
        self._told = ""  # digest of the vector that we announced last
        self._looked_s = 0.0
        self._passed_over: set[str] = set()
        self._waits: dict[str, StandingWait] = {}
        self._changed = asyncio.Event()

    async def restore(self) -> None:
        """Continue from what was published before, or publish version 0."""
        await self._chain.restore()
        self._fleet = plan.published(self._fleet, weights_of(self._chain.newest))

    async def follow_steps(self) -> None:
        """Stage every committed version in order. What a dead branch committed is passed over; a new incarnation's versions
        are newer than all of the branch that it left."""
        async for event in events(self._bus, Stream.TRAIN, "train.step.*", stop=self._context.stop):
            if isinstance(event, Damaged):
                await pass_over(self._bus, event)
            if not isinstance(event, Item):
                continue
            item, commit = event, event.decode(StepCommit)
            newest = self._chain.newest
            known = (commit.incarnation, commit.version) <= (newest.incarnation, newest.version)
            if not self._chain.line.add(commit) or known:
                continue
            with span("stage", item.headers, version=commit.version):
                await self._stage(commit)
            self._changed.set()

    async def _stage(self, commit: StepCommit) -> None:
        await self._chain.stage(commit)
        anchored = await self._chain.publish_due_anchor()
        self._fleet = plan.published(self._fleet, weights_of(self._chain.newest))
        self._context.health.set("version", commit.version)
        self._context.health.set("incarnation", commit.incarnation)
        self._context.health.set("patch_bytes", commit.patch_bytes)
        if anchored:
            needs = [Need(engine.held, engine.ordered) for engine in self._fleet.engines.values()]
            self._context.health.count("links_collected", await self._chain.collect(needs))

    # -- the fleet -----------------------------------------------------------------------------------------------------------

    async def follow_engines(self) -> None:
        """Turn heartbeats into events of the publication plan."""
        async for item in fold(self._bus, Stream.REGISTRY, "reg.engine.*", stop=self._context.stop, latest_per_subject=True):
            if item is not None and time.time_ns() - item.time_ns < _GONE_AFTER_S * 1e9:
                self._observe(item.decode(EngineState), time.monotonic())

    def _observe(self, state: EngineState, now: float) -> None:
        self._seen[state.engine] = now
        (self._serving.add if state.phase in ("serving", "applying") else self._serving.discard)(state.engine)
        known = self._fleet.engines.get(state.engine)
        held = Weights(state.incarnation, state.version, state.digest) if state.version >= 0 and state.digest else None
        if state.phase == "draining":
            self._fleet = plan.left(self._fleet, state.engine)
        elif known is None and state.version >= 0 and state.phase in ("applying", "failed"):
            self._fleet = plan.adopted(self._fleet, state.engine, held, now, state.running)
        elif known is None or (held is None and known.held is not None and state.phase == "starting"):
            self._fleet = plan.joined(self._fleet, state.engine, held if state.phase == "serving" else None, now, state.running)
        else:
            ours = bool(state.order_id) and state.order_id == self._orders.get(state.engine)
            given_up = state.phase == "failed" or (state.phase == "serving" and state.error != "")  # it may serve on as it was
            if given_up and ours and known.ordered is not None:
                log.warning("engine failed", engine=state.engine, error=state.error)
                self._fleet = plan.failed(self._fleet, state.engine, known.ordered, state.error, now)
            elif state.phase == "serving" and held is not None:
                if known.phase is plan.Phase.WEDGED and known.held != held:
                    self._fleet = plan.joined(self._fleet, state.engine, held, now, state.running)
                self._fleet = plan.applied(self._fleet, state.engine, held, now)
            self._fleet = plan.loaded(self._fleet, state.engine, float(state.running + state.waiting))
        self._changed.set()

    async def roll(self) -> None:
        """Give the orders that the plan allows, and tell the fleet's version vector after every change."""
        while not self._context.stop.is_set():
            now = time.monotonic()
            for name in [name for name, seen in self._seen.items() if now - seen > _GONE_AFTER_S]:
                log.warning("engine silent", engine=name, for_s=_GONE_AFTER_S)
                self._fleet = plan.left(self._fleet, name)
                del self._seen[name]
            self._fleet, orders = plan.advance(self._fleet, self._limits, now)
            for order in orders:
                await self._order(order)
            await self._look_again(now)
            await self._announce()
            self._name_waits()
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 0.5)
            except asyncio.TimeoutError:
                continue

    async def _order(self, order: plan.Order) -> None:
        engine = self._fleet.engines[order.engine]
        links = await self._links(order, engine)
        if links is None:
            return
        await self._ownership.confirm()
        self._order_count += 1
        settings = self._context.config.param_sync
        message = ApplyOrder(
            run=self._bus.run,
            order_id=f"{order.target.incarnation}-{order.target.version}-{time.time_ns():x}-{self._order_count}",
            engine=order.engine,
            version=order.target.version,
            incarnation=order.target.incarnation,
            digest=order.target.digest,
            links=links,
            mode=settings.mode,
            grace_s=settings.grace_s,
            deadline_ns=time.time_ns() + int(settings.apply_timeout_s * 1e9),
        )
        self._orders[order.engine] = message.order_id
        await self._bus.publish(self._bus.subjects.apply(order.engine), message)

    async def _links(self, order: plan.Order, engine: plan.Engine) -> tuple[WeightsManifest, ...] | None:
        """The way to the target; None when there is none, and the order counts as failed. What did not lead there twice, or
        leads nowhere, is left aside for a new anchor."""
        held = None if order.from_anchor else engine.held
        try:
            if engine.failures < _ANCHOR_AFTER:
                try:
                    return self._chain.way(order.target, held)
                except BrokenChain as error:
                    log.warning("no way along the chain", engine=order.engine, error=str(error))
            return await self._chain.anchor_instead(order.target, held)
        except BrokenChain as error:
            log.error("no way to the target", engine=order.engine, error=str(error))
            self._fleet = plan.failed(self._fleet, order.engine, order.target, str(error), time.monotonic())
        return None

    async def _look_again(self, now: float) -> None:
        """An owner before us may have had a vector on its way all the time, and it came after ours: tell ours again."""
        if not self._told or now - self._looked_s < _LOOK_AGAIN_S:
            return
        self._looked_s = now
        held = await self._bus.last(self._bus.subjects.active())
        if held is not None and held.digest != self._told:
            log.warning("another vector stands where ours was", seq=held.seq)
            self._announced = ()

    async def _announce(self) -> None:
        """Tell which version every engine serves. One on a dead branch counts as serving none until it has moved, so does one
        that is passed over; one that failed to bring new weights as far as its own counts with the old ones."""
        counted = {
            name: engine.held
            for name, engine in self._fleet.engines.items()
            if engine.held is not None
            and (engine.phase in _COUNTED or (engine.phase is plan.Phase.FAILED and name in self._serving))
            and self._chain.line.on_line(engine.held.incarnation, engine.held.version)
        }
        engines = {name: -1 if name not in counted else counted[name].version for name in sorted(self._fleet.engines)}
        target = self._fleet.target
        held = sorted(counted.values())
        vector = FleetVersions(
            run=self._bus.run,
            target=-1 if target is None else target.version,
            incarnation=0 if target is None else target.incarnation,
            engines=engines,
            oldest=held[0].version if held else -1,
            newest=held[-1].version if held else -1,
        )
        if (key := (vector.target, vector.incarnation, tuple(engines.items()))) != self._announced:
            await self._ownership.confirm()
            self._told = (await self._bus.publish(self._bus.subjects.active(), vector)).digest
            self._announced = key

    def _name_waits(self) -> None:
        """Who is out, since when, and until when it is waited for; whoever is passed over is named once."""
        out = {culprit.engine: culprit for culprit in plan.culprits(self._fleet, self._limits)}
        passed_over = {name for name, culprit in out.items() if culprit.phase is plan.Phase.WEDGED}
        self._context.health.set("engines_out", len(out))
        self._context.health.set("engines_passed_over", len(passed_over))
        for name in passed_over - self._passed_over:
            log.warning("engine passed over", engine=name, reason=out[name].reason)
        self._passed_over = passed_over
        for name in (out.keys() | self._waits.keys()) - passed_over:
            wait = self._waits.setdefault(name, StandingWait(self._context.health, self._limits.apply_deadline_s))
            if name in out:
                wait.on(f"weights {self._fleet.target} on", f"engine {name}", "it is passed over")
        for name in [name for name in self._waits if name not in out or name in passed_over]:
            self._waits.pop(name).over()
