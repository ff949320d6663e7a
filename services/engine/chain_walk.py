"""From the weights that an engine holds to those that an order names: fetched, decoded and verified while it serves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

from param_sync.patch.codec import apply_with_changes
from param_sync.patch.snapshot import Snapshot
from schemas.policy import ApplyOrder, WeightsManifest
from services.blobs import get as fetch
from services.bus import Bus, IntegrityError
from services.engine.changes import Index, between
from services.engine.protocol import WeightUpdate


@dataclass
class Walk:
    """Where a walk along the links has come to, and which positions were written on the way, by tensor."""

    at: Snapshot | None
    touched: dict[str, list[Index]] = field(default_factory=dict)
    everything: bool = False  # an anchor was read, so no list of positions is complete any more

    async def step(self, bus: Bus, link: WeightsManifest) -> None:
        """Follow one link. Raises `PatchError` or `IntegrityError`, `BusError` where the store does not answer."""
        if self.at is not None and self.at.digest == link.digest and link.form == "anchor":
            self.at = named(self.at, link.version, link.incarnation)
            return
        for reference in link.objects:
            data = await fetch(bus, reference)
            base = self.at if link.form == "patch" else None
            self.at, changes = await asyncio.to_thread(apply_with_changes, base, data)
            self.everything |= base is None
            for name, change in changes.items():
                if change.index is not None:
                    self.touched.setdefault(name, []).append(change.index)


async def walk(bus: Bus, order: ApplyOrder, held: Snapshot | None) -> Walk:
    """Follow an order's links, from wherever on them `held` stands. Raises as `Walk.step`, and where they lead elsewhere."""
    links = order.links
    for number, link in enumerate(links):
        if held is not None and (held.digest, held.version, held.incarnation) == (link.digest, link.version, link.incarnation):
            links = order.links[number + 1 :]  # an order from before the last one came through
    way = Walk(held)
    for link in links:
        await way.step(bus, link)
    at = way.at
    if at is None or (at.digest, at.version, at.incarnation) != (order.digest, order.version, order.incarnation):
        raise IntegrityError(
            f"order {order.order_id}: its links lead to {'nothing' if at is None else at.digest[:12]}, "
            f"announced is {order.digest[:12]} (version {order.version})"
        )
    return way


def update_of(way: Walk, held: Snapshot | None) -> WeightUpdate:
    """What an engine that holds `held`, or nothing that it could vouch for, needs to get to where the walk ended."""
    target = way.at
    if target is None:
        raise IntegrityError("a walk that came nowhere is no update")
    before = held.entries if held is not None else {}
    changed = [name for name, entry in target.entries.items() if before.get(name) != entry]
    changes = None
    if held is not None and {n: e[:2] for n, e in before.items()} == {n: e[:2] for n, e in target.entries.items()}:
        touched = {name: [] if way.everything else way.touched.get(name, []) for name in changed}
        changes = partial(between, held.tensors, target.tensors, touched)
    return WeightUpdate(
        version=target.version,
        incarnation=target.incarnation,
        digest=target.digest,
        load=lambda: iter([(name, target.tensors[name].data, target.tensors[name].shape) for name in changed]),
        base_digest=held.digest if held is not None else "",
        changes=changes,
    )


def named(weights: Snapshot, version: int, incarnation: int) -> Snapshot:
    """The same bits under another name."""
    return Snapshot(version, incarnation, weights.tensors, weights.entries, weights.digest)
