"""The published chain: links and their objects, a verified copy of the newest weights, and what may be removed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TypeVar

import structlog

from param_sync import anchor_wanted, merged_links
from param_sync.behind import History, is_smaller, merge_from, merged
from param_sync.chain import AnchorPolicy, BrokenChain, Manifest, Need, Weights, anchor_due, plan_chain, plan_collection
from param_sync.patch.codec import apply as apply_patch
from param_sync.patch.codec import apply_with_changes, encode_anchor, level_for
from param_sync.patch.container import decode_header
from param_sync.patch.errors import PatchError
from param_sync.patch.snapshot import Snapshot
from schemas.lineage import Lineage
from schemas.message import Message
from schemas.policy import WeightsManifest
from schemas.table import Stream
from schemas.training import ObjectRef, StepCommit
from services import blobs
from services.base_weights import snapshot_of
from services.bus import Bus, IntegrityError, Item, Unreadable
from services.config import Config
from services.consume import read_events
from services.dead_letters import pass_over
from services.health import pause
from services.ownership import Ownership
from services.pull import Damaged

log = structlog.get_logger()
M = TypeVar("M", bound=Message)
_ASK_AGAIN_S = 5.0


class Published:
    """Everything that receivers can be led along. `line`: which versions training stands on; `newest`: the shadow copy."""

    def __init__(self, bus: Bus, config: Config, ownership: Ownership) -> None:
        self.line = Lineage()
        self.newest: Snapshot
        self._bus = bus
        self._config = config
        self._ownership = ownership
        self._policy = AnchorPolicy(every_versions=config.param_sync.anchor_every, chain_ratio=config.param_sync.anchor_ratio)
        self._history = History(config.param_sync.merge_versions)
        self._tried: set[tuple[Weights, Weights]] = set()  # (from, to) of the merged patches that were made since the last step
        self._given: dict[str, tuple[str, ...]] = {}  # names of the links of each engine's last order
        self._links: dict[str, WeightsManifest] = {}
        self._manifests: list[Manifest] = []

    async def restore(self) -> None:
        """Fold what was published before; publish the anchor of version 0 if nothing was. Ends with a verified copy of the
        newest weights on the line."""
        for commit in await self._readable(Stream.TRAIN, StepCommit, "train.step.*"):
            self.line.add(commit)
        stored = await blobs.names(self._bus)
        links = await self._readable(Stream.POLICY, WeightsManifest, "policy.staged.*", "policy.anchor.*")
        for link in links:
            if all(reference.name in stored for reference in link.objects):  # else it was collected
                self._add(link)
        for link in await merged_links.found(self._bus, links, stored):
            self._add(link)
        living = [link for link in links if self.line.on_line(link.incarnation, link.version)]
        for target in sorted({Weights(link.incarnation, link.version, link.digest) for link in living}, reverse=True):
            try:
                self.newest = await self._rebuild(target)
                return
            except (BrokenChain, IntegrityError) as error:  # POLICY or the store lost a link; the steps after it come again
                self._bus.alarm("lost_links", version=target.version, incarnation=target.incarnation, reason=str(error))
        self.newest = await asyncio.to_thread(snapshot_of, self._config.policy.model)
        await self._publish_anchor(self.newest)

    async def _readable(self, stream: Stream, kind: type[M], *patterns: str) -> list[M]:
        """Every message of these subjects that can be read; the others are passed over with an alarm."""
        found: list[M] = []
        for event in await read_events(self._bus, stream, *patterns):
            try:
                if isinstance(event, Item):
                    found.append(event.decode(kind))
                elif isinstance(event, Damaged):
                    await pass_over(self._bus, event)
            except Unreadable as error:
                await pass_over(self._bus, error.item, error)
        return found

    async def stage(self, commit: StepCommit) -> None:
        """Reproduce a step's weights and publish the link to them. The first of a new incarnation comes as an anchor.

        Raises `PatchError` or `IntegrityError` when its objects do not lead to the weights that it announces.
        """
        if not self.line.began_with(commit):
            await self._stage_missing(commit)
        held = self.newest
        for reference in commit.patches:
            data = await blobs.get(self._bus, reference)
            before, (held, changes) = held, await asyncio.to_thread(apply_with_changes, held, data)
            self._history.add(before, held, changes)
        if (held.version, held.incarnation, held.digest) != (commit.version, commit.incarnation, commit.digest):
            raise PatchError(f"step {commit.step}: its patches do not give {commit.digest[:12]}, but {weights_of(held)}")
        base = self.newest
        self._tried.clear()
        if self.line.began_with(commit):
            log.warning("a new incarnation begins", version=commit.version, incarnation=commit.incarnation, step=commit.step)
            await self._publish(_link(self._bus.run, held, commit.patches, commit.step))
        else:
            await self._publish(_link(self._bus.run, held, commit.patches, commit.step, base))
        self.newest = held

    async def _stage_missing(self, commit: StepCommit) -> None:
        """Publish the links between the newest weights and those that a step starts from, where TRAIN lost their commits.

        Their patches are in the store, under the names that version and digest give.
        """
        bridge: list[tuple[ObjectRef, bytes]] = []
        version, digest = commit.version - 1, commit.base_digest
        while (version, digest) != (self.newest.version, self.newest.digest):
            name = f"patch-{self.line.maker_of(version - 1)}-{version}-{digest[:16]}"
            reference = await blobs.find(self._bus, name) if version > self.newest.version else None
            if reference is None:
                raise PatchError(f"step {commit.step} starts from {digest[:12]}, and no object {name} leads there")
            data = await blobs.get(self._bus, reference)
            header, _ = decode_header(data)
            bridge.append((reference, data))
            version, digest = header.base_version or 0, header.base_digest or ""
        for reference, data in reversed(bridge):
            base, self.newest = self.newest, await asyncio.to_thread(apply_patch, self.newest, data)
            self._bus.alarm("commit_missing", step=base.version, version=self.newest.version)
            await self._publish(_link(self._bus.run, self.newest, (reference,), base.version, base))

    async def stage_from_anchor(self, commit: StepCommit, error: Exception, stop: asyncio.Event) -> None:
        """Where a step cannot be staged: ask the trainer for an anchor of it or of a newer one, and go on from there.

        Tried again with the step itself each time, since the store may only have been slow. Returns when `stop` is raised.
        """
        self._bus.alarm("anchor_wanted", version=commit.version, incarnation=commit.incarnation, reason=str(error))
        while not stop.is_set():
            await anchor_wanted.ask(self._bus, self._ownership, commit, str(error))
            await pause(stop, _ASK_AGAIN_S)
            if (found := await anchor_wanted.answer(self._bus, commit)) is not None:
                beyond, reference, self.newest = found
                await self._publish(_link(self._bus.run, self.newest, (reference,), beyond.step))
                return
            try:
                return await self.stage(commit)
            except (PatchError, IntegrityError) as again:
                error = again

    async def publish_due_anchor(self) -> bool:
        """Publish a full snapshot of the newest weights when it is time for one; says whether it was."""
        due = anchor_due(self._policy, self._manifests, weights_of(self.newest))
        if due is None:
            return False
        log.info("anchor", version=self.newest.version, reason=due)
        await self._publish_anchor(self.newest)
        return True

    async def anchor_instead(self, target: Weights, held: Weights | None) -> tuple[WeightsManifest, ...]:
        """The way to `target` for a receiver that failed on the one from `held`, where something cannot be used: an anchor of
        the newest weights, published now if there is none. Raises `BrokenChain`.
        """
        if target != weights_of(self.newest):
            return self.way(target, held)
        name = f"anchor-{target.incarnation}-{target.version}"
        if name not in self._links:
            log.warning("anchor", version=target.version, reason="a receiver cannot use what leads there")
            await self._publish_anchor(self.newest)
        return (self._links[name],)

    async def collect(self, needs: Mapping[str, Need], *, merged_alone: bool) -> int:
        """Remove the objects that none of these engines needs, so that the store does not fill; gives the number of links.

        What an engine was ordered to take is needed until it serves it, whether or not there is a shorter way by now.
        """
        keep = self._config.param_sync.keep_anchors
        if keep == 0:
            return 0
        useless = set(plan_collection(self._manifests, weights_of(self.newest), needs.values(), keep_anchors=keep).drop)
        self._given = {e: names for e, names in self._given.items() if e in needs and needs[e].ordered is not None}
        if merged_alone:  # they come between anchors
            useless &= {name for name, link in self._links.items() if _is_merged(link)}
        useless -= {name for names in self._given.values() for name in names}
        self._manifests = [manifest for manifest in self._manifests if manifest.name not in useless]  # before any object goes
        for name in sorted(useless):
            for reference in self._links.pop(name).objects:
                await self._ownership.confirm()
                await blobs.remove(self._bus, reference.name)
        if useless:
            log.info("collected", links=len(useless), kept=len(self._manifests))
        return len(useless)

    def way(self, target: Weights, held: Weights | None) -> tuple[WeightsManifest, ...]:
        """The links from `held`, or from nothing, to `target`. Raises `BrokenChain`."""
        return tuple(self._links[manifest.name] for manifest in plan_chain(self._manifests, target, held))

    async def shortest(self, target: Weights, held: Weights | None) -> tuple[WeightsManifest, ...]:
        """As `way`, with one merged patch in place of the last links where that can be made and is smaller."""
        chain = plan_chain(self._manifests, target, held)
        newest = self.newest
        start = merge_from(chain, self._history.starts()) if target == weights_of(newest) else None
        if start is None or (start, target) in self._tried:
            return self.way(target, held)
        elements = sum(bits.data.size for bits in newest.tensors.values())
        steps, level = self._history.since(start), level_for(self._config.param_sync.patch_level, elements)
        replaced = chain[[link.base for link in chain].index(start) :]
        self._tried.add((start, target))
        try:
            data = await asyncio.to_thread(lambda: merged(steps, newest, level=level).tobytes())
            if is_smaller(len(data), replaced):
                self._add(await merged_links.store(self._bus, self._ownership, data))
        except (PatchError, IntegrityError) as error:
            log.error("no merged patch", version=target.version, base=start.version, error=str(error), then="the single ones")
        return self.way(target, held)

    def ordered(self, engine: str, links: Iterable[WeightsManifest]) -> None:
        """An engine is told to take these links: they stay until it serves what they lead to, is ordered again or is gone."""
        self._given[engine] = tuple(_key(link) for link in links)

    async def _rebuild(self, target: Weights) -> Snapshot:
        held: Snapshot | None = None
        for link in self.way(target, None):
            for reference in link.objects:
                data = await blobs.get(self._bus, reference)
                held = await asyncio.to_thread(apply_patch, held if link.form == "patch" else None, data)
        if held is None or held.digest != target.digest:
            raise IntegrityError(f"the published chain does not lead to {target}")
        return held

    async def _publish_anchor(self, snapshot: Snapshot) -> None:
        encoded = await asyncio.to_thread(lambda: encode_anchor(snapshot).tobytes())
        name = f"anchor-{snapshot.incarnation}-{snapshot.version}-{snapshot.digest[:16]}"
        reference = await blobs.put(self._bus, name, encoded)
        await self._publish(_link(self._bus.run, snapshot, (reference,), snapshot.version - 1))

    async def _publish(self, link: WeightsManifest) -> None:
        """A link, once for ever: a patch as the staged version that it leads to, an anchor beside it."""
        await self._ownership.confirm()
        spell = self._bus.subjects.anchor if link.form == "anchor" else self._bus.subjects.staged
        await self._bus.publish_once(spell(link.version, link.incarnation), link)
        self._add(link)

    def _add(self, link: WeightsManifest) -> None:
        name = _key(link)
        if name in self._links:
            return
        self._links[name] = link
        target = Weights(link.incarnation, link.version, link.digest)
        base = None if link.form == "anchor" else Weights(link.incarnation, link.base_version, link.base_digest)
        self._manifests.append(Manifest(target, base, name, sum(reference.size_bytes for reference in link.objects)))


def _is_merged(link: WeightsManifest) -> bool:
    return link.form == "patch" and link.base_version != link.version - 1


def _key(link: WeightsManifest) -> str:
    return merged_links.name_of(link) if _is_merged(link) else f"{link.form}-{link.incarnation}-{link.version}"


def weights_of(snapshot: Snapshot) -> Weights:
    """A snapshot's full name."""
    return Weights(snapshot.incarnation, snapshot.version, snapshot.digest)


def _link(
    run: str, target: Snapshot, objects: tuple[ObjectRef, ...], step: int, base: Snapshot | None = None
) -> WeightsManifest:
    """The link to `target` from `base`, or from nothing."""
    return WeightsManifest(
        run=run,
        version=target.version,
        incarnation=target.incarnation,
        digest=target.digest,
        form="anchor" if base is None else "patch",
        base_version=-1 if base is None else base.version,
        base_digest="" if base is None else base.digest,
        objects=objects,
        step=step,
    )
