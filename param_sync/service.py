"""The parameter synchronizer: turns committed steps into published versions and walks the fleet one engine at a time."""

from __future__ import annotations

import asyncio
import time

import structlog

from param_sync import rollout_plan as plan
from param_sync.chain import AnchorPolicy, BrokenChain, Manifest, Weights, anchor_due, plan_chain
from param_sync.patch.codec import apply as apply_patch
from param_sync.patch.codec import encode_anchor
from param_sync.patch.errors import PatchError
from param_sync.patch.snapshot import Snapshot
from schemas.policy import ApplyOrder, EngineState, FleetVersions, WeightsManifest
from schemas.table import Stream
from schemas.training import StepCommit
from services import blobs
from services.base_weights import snapshot_of
from services.bus import IntegrityError
from services.consume import fold, read_all
from services.runtime import ServiceContext
from services.tracing import span

log = structlog.get_logger()
_GONE_AFTER_S = 15.0


async def serve(context: ServiceContext) -> None:
    """One run's synchronizer.

    Consumes: `train.step.<s>` and the engines' heartbeats. Produces: `policy.staged.<v>` and `policy.anchor.<v>`
    (once each, after
    the digest was reproduced here), `policy.apply.<engine>`, `policy.active`. Waits for: nothing without a deadline;
    an engine that
    misses its own is named and passed over. On error: a patch that does not give the announced digest stops the service, since
    nothing may be published from it. On stop: the roll stays where it is; whoever starts next continues from the
    engines' states.
    """
    synchronizer = Synchronizer(context)
    await synchronizer.restore()
    context.ready()
    async with asyncio.TaskGroup() as group:
        group.create_task(synchronizer.follow_steps())
        group.create_task(synchronizer.follow_engines())
        group.create_task(synchronizer.roll())
    context.health.enter("draining")


class Synchronizer:
    """The published chain, a verified copy of the newest weights, and the fleet."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._bus = context.bus
        settings = context.config.param_sync
        self._limits = plan.Policy(max_unavailable=settings.max_unavailable, apply_deadline_s=settings.apply_timeout_s)
        self._anchors = AnchorPolicy(every_versions=settings.anchor_every, chain_ratio=float("inf"))
        self._links: dict[str, WeightsManifest] = {}
        self._manifests: list[Manifest] = []
        self._shadow: Snapshot | None = None
        self._fleet = plan.Fleet()
        self._seen: dict[str, float] = {}
        self._orders: dict[str, str] = {}
        self._order_count = 0
        self._announced: tuple[object, ...] = ()
        self._changed = asyncio.Event()

    # -- the chain -----------------------------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Fold what was published before; publish the anchor of version 0 if nothing was. Ends with a verified copy
        of the newest."""
        for item in await read_all(self._bus, Stream.POLICY, "policy.staged.*", "policy.anchor.*"):
            self._add(item.decode(WeightsManifest))
        if not self._manifests:
            base = await asyncio.to_thread(snapshot_of, self._context.config.policy.model)
            await self._publish_anchor(base)
            self._shadow = base
        else:
            latest = max(manifest.target for manifest in self._manifests)
            self._shadow = await self._rebuild(latest)
        self._fleet = plan.published(self._fleet, _weights(self._shadow))

    async def _rebuild(self, target: Weights) -> Snapshot:
        held: Snapshot | None = None
        for manifest in plan_chain(self._manifests, target):
            for reference in self._links[manifest.name].objects:
                data = await blobs.get(self._bus, reference)
                held = await asyncio.to_thread(apply_patch, held if manifest.base is not None else None, data)
        if held is None or held.digest != target.digest:
            raise IntegrityError(f"the published chain does not lead to {target}")
        return held

    async def follow_steps(self) -> None:
        """Stage every committed version in order."""
        async for item in fold(self._bus, Stream.TRAIN, "train.step.*", stop=self._context.stop):
            if item is None:
                continue
            commit = item.decode(StepCommit)
            assert self._shadow is not None
            if (commit.incarnation, commit.version) <= (self._shadow.incarnation, self._shadow.version):
                continue
            with span("stage", item.headers, version=commit.version):
                await self._stage(commit)
            self._changed.set()

    async def _stage(self, commit: StepCommit) -> None:
        held = self._shadow
        for reference in commit.patches:
            data = await blobs.get(self._bus, reference)
            held = await asyncio.to_thread(apply_patch, held, data)
        if held is None or held.digest != commit.digest:
            raise PatchError(f"step {commit.step}: its patches do not give the committed digest {commit.digest[:12]}")
        manifest = WeightsManifest(
            run=self._bus.run,
            version=commit.version,
            incarnation=commit.incarnation,
            digest=commit.digest,
            form="patch",
            base_version=commit.version - 1,
            base_digest=commit.base_digest,
            objects=commit.patches,
            step=commit.step,
        )
        await self._bus.publish_once(self._bus.subjects.staged(commit.version), manifest)
        self._add(manifest)
        self._shadow = held
        due = anchor_due(self._anchors, self._manifests, _weights(held))
        if due is not None:
            log.info("anchor", version=held.version, reason=due)
            await self._publish_anchor(held)
        self._fleet = plan.published(self._fleet, _weights(held))
        self._context.health.set("version", held.version)
        self._context.health.set("patch_bytes", commit.patch_bytes)

    async def _publish_anchor(self, snapshot: Snapshot) -> None:
        encoded = await asyncio.to_thread(lambda: encode_anchor(snapshot).tobytes())
        reference = await blobs.put(
            self._bus, f"anchor-{snapshot.incarnation}-{snapshot.version}-{snapshot.digest[:16]}", encoded
        )
        manifest = WeightsManifest(
            run=self._bus.run,
            version=snapshot.version,
            incarnation=snapshot.incarnation,
            digest=snapshot.digest,
            form="anchor",
            objects=(reference,),
            step=snapshot.version - 1,
        )
        await self._bus.publish_once(self._bus.subjects.anchor(snapshot.version), manifest)
        self._add(manifest)

    def _add(self, manifest: WeightsManifest) -> None:
        name = f"{manifest.form}-{manifest.incarnation}-{manifest.version}"
        if name in self._links:
            return
        self._links[name] = manifest
        target = Weights(manifest.incarnation, manifest.version, manifest.digest)
        base = None if manifest.form == "anchor" else Weights(manifest.incarnation, manifest.base_version, manifest.base_digest)
        self._manifests.append(Manifest(target, base, name, sum(reference.size_bytes for reference in manifest.objects)))

    # -- the fleet -----------------------------------------------------------------------------------------------------------

    async def follow_engines(self) -> None:
        """Turn heartbeats into events of the publication plan."""
        async for item in fold(self._bus, Stream.REGISTRY, "reg.engine.*", stop=self._context.stop, latest_per_subject=True):
            if item is not None and time.time_ns() - item.time_ns < _GONE_AFTER_S * 1e9:
                self._observe(item.decode(EngineState), time.monotonic())

    def _observe(self, state: EngineState, now: float) -> None:
        self._seen[state.engine] = now
        known = self._fleet.engines.get(state.engine)
        held = Weights(state.incarnation, state.version, state.digest) if state.version >= 0 and state.digest else None
        if state.phase == "draining":
            self._fleet = plan.left(self._fleet, state.engine)
        elif known is None or (held is None and known.held is not None and state.phase == "starting"):
            self._fleet = plan.joined(self._fleet, state.engine, held if state.phase == "serving" else None, now, state.running)
        else:
            ours = bool(state.order_id) and state.order_id == self._orders.get(state.engine)
            if state.phase == "failed" and ours and known.ordered is not None:
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
            await self._announce()
            self._name_waits()
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 0.5)
            except asyncio.TimeoutError:
                continue

    async def _order(self, order: plan.Order) -> None:
        engine = self._fleet.engines[order.engine]
        try:
            chain = plan_chain(self._manifests, order.target, None if order.from_anchor else engine.held)
        except BrokenChain as error:
            log.error("no way to the target", engine=order.engine, error=str(error))
            return
        self._order_count += 1
        settings = self._context.config.param_sync
        message = ApplyOrder(
            run=self._bus.run,
            order_id=f"{order.target.version}-{time.time_ns():x}-{self._order_count}",
            engine=order.engine,
            version=order.target.version,
            incarnation=order.target.incarnation,
            digest=order.target.digest,
            links=tuple(self._links[manifest.name] for manifest in chain),
            mode=settings.mode,
            deadline_ns=time.time_ns() + int(settings.apply_timeout_s * 1e9),
        )
        self._orders[order.engine] = message.order_id
        await self._bus.publish(self._bus.subjects.apply(order.engine), message)

    async def _announce(self) -> None:
        counted = {
            name: engine.held
            for name, engine in self._fleet.engines.items()
            if engine.held is not None and engine.phase in (plan.Phase.SERVING, plan.Phase.APPLYING)
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
            await self._bus.publish(self._bus.subjects.active(), vector)
            self._announced = key

    def _name_waits(self) -> None:
        late = plan.culprits(self._fleet, self._limits)
        self._context.health.set("engines_out", len(late))
        for culprit in late:
            if culprit.phase is plan.Phase.WEDGED and culprit.since_s > time.monotonic() - 0.6:
                log.warning("engine passed over", engine=culprit.engine, reason=culprit.reason)


def _weights(snapshot: Snapshot) -> Weights:
    return Weights(snapshot.incarnation, snapshot.version, snapshot.digest)
