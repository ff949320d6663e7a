"""Which files take a receiver from the weights it holds, or from nothing, to a version; when to cut an anchor; what to delete.

Pure: manifests in, decisions out. A chain always starts at the receiver's own verified weights or at a retained anchor, and
every link states the digest it starts from, so a chain cannot be replayed on another base.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Weights:
    """The full name of one set of weights. Ordered by incarnation, then version."""

    incarnation: int
    version: int
    digest: str

    def __str__(self) -> str:
        return f"version {self.version} of incarnation {self.incarnation} ({self.digest[:12]})"


@dataclass(frozen=True, slots=True)
class Manifest:
    """One retained file. `base` None: an anchor; else a patch within one incarnation, over one or several versions."""

    target: Weights
    base: Weights | None
    name: str
    """Object name in the store."""
    nbytes: int

    def __post_init__(self) -> None:
        if self.base is not None and not (
            self.base.incarnation == self.target.incarnation and self.base.version < self.target.version
        ):
            raise ChainError(
                f"{self.name}: a patch leads forward within one incarnation, not from {self.base} to {self.target}"
            )
        if self.nbytes < 0:
            raise ChainError(f"{self.name}: nbytes is {self.nbytes}; a length must not be negative")


class ChainError(ValueError):
    """The retained files contradict each other or a rule."""


class VersionReused(ChainError):
    """Two sets of weights carry the same version. A trainer that cannot reproduce its bits starts a new incarnation."""


class BrokenChain(ChainError):
    """Nothing retained leads from the receiver, or from any anchor, to the target."""

    def __init__(self, target: Weights, missing: Weights, needed_by: str | None) -> None:
        use = f"which {needed_by!r} starts from" if needed_by else "the target itself"
        super().__init__(f"no chain to {target}: no retained anchor or patch produces {missing}, {use}; publish an anchor")
        self.target = target
        self.missing = missing
        self.needed_by = needed_by


def check_names(manifests: Iterable[Manifest]) -> None:
    """Raises `VersionReused` when one version stands for two digests (invariant 5)."""
    digests: dict[tuple[int, int], str] = {}
    for manifest in manifests:
        for weights in (manifest.target, manifest.base):
            if weights is None:
                continue
            known = digests.setdefault((weights.incarnation, weights.version), weights.digest)
            if known != weights.digest:
                raise VersionReused(f"{manifest.name}: {weights} is also known with digest {known[:12]}")


def plan_chain(
    manifests: Collection[Manifest],
    target: Weights,
    held: Weights | None = None,
    *,
    without: Collection[str] = (),
    link_cost_bytes: int = 0,
) -> tuple[Manifest, ...]:
    """The cheapest links to apply in order: bytes, plus `link_cost_bytes` for each link's decoding and verification.

    Empty when `held` is the target. `without` names files known to be lost or corrupt. Equal costs go to the chain with fewer
    links, then by name, so that the plan is a function of its inputs. Raises `BrokenChain` naming what is missing, and
    `VersionReused`.
    """
    check_names(manifests)
    if held == target:
        return ()
    usable = list({m.name: m for m in manifests if m.name not in without}.values())
    leaving: dict[Weights | None, list[Manifest]] = {}
    for manifest in usable:
        leaving.setdefault(manifest.base, []).append(manifest)
    queue: list[tuple[int, int, tuple[str, ...], tuple[Manifest, ...]]] = [(0, 0, (), ())]
    for anchor in leaving.get(None, []):
        heapq.heappush(queue, (anchor.nbytes + link_cost_bytes, 1, (anchor.name,), (anchor,)))
    done: set[Weights] = set()
    while queue:
        cost, links, names, chain = heapq.heappop(queue)
        here = chain[-1].target if chain else held
        if here == target:
            return chain
        if here is None or here in done:
            continue
        done.add(here)
        for link in leaving.get(here, []):
            step = cost + link.nbytes + link_cost_bytes
            heapq.heappush(queue, (step, links + 1, (*names, link.name), (*chain, link)))
    raise _broken(usable, target)


def _broken(usable: Iterable[Manifest], target: Weights) -> BrokenChain:
    """Walk back from the target to the newest weights that nothing produces."""
    patches = [m for m in usable if m.base is not None]
    missing, needed_by = target, None
    back: dict[Weights, str | None] = {target: None}
    frontier = [target]
    roots: list[tuple[Weights, str | None]] = []
    while frontier:
        at = frontier.pop()
        entering = [m for m in patches if m.target == at]
        if not entering:
            roots.append((at, back[at]))
        for manifest in entering:
            if manifest.base is not None and manifest.base not in back:
                back[manifest.base] = manifest.name
                frontier.append(manifest.base)
    if roots:
        missing, needed_by = max(roots, key=lambda root: root[0])
    return BrokenChain(target, missing, needed_by)


@dataclass(frozen=True, slots=True)
class AnchorPolicy:
    """When a full snapshot is worth its bytes. An anchor equals some 100 to 200 sparse patches, so: rarely."""

    every_versions: int = 150
    chain_ratio: float = 1.0
    """Also when the patches since the last anchor weigh more than this multiple of it."""


def anchor_due(policy: AnchorPolicy, manifests: Iterable[Manifest], latest: Weights, *, requested: bool = False) -> str | None:
    """Why an anchor of `latest` should be cut now, or None. `requested`: a receiver has no chain."""
    own = [m for m in manifests if m.target.incarnation == latest.incarnation]
    anchors = [m for m in own if m.base is None]
    if not anchors:
        return f"incarnation {latest.incarnation} has no anchor"
    last = max(anchors, key=lambda m: m.target.version)
    if last.target.version >= latest.version:
        return None
    if requested:
        return "a receiver asked for one"
    age = latest.version - last.target.version
    if age >= policy.every_versions:
        return f"the last one is {age} versions old, the limit is {policy.every_versions}"
    since = sum(m.nbytes for m in own if m.base is not None and m.base.version >= last.target.version)
    if since > policy.chain_ratio * last.nbytes:
        return f"patches since then weigh {since} bytes, the limit is {policy.chain_ratio:g} x {last.nbytes}"
    return None


@dataclass(frozen=True, slots=True)
class Need:
    """A receiver that is known: what it holds, and what it was ordered to (None: the latest)."""

    held: Weights | None
    ordered: Weights | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """Files to keep and files that may be deleted, by name, sorted."""

    keep: tuple[str, ...]
    drop: tuple[str, ...]


def plan_collection(
    manifests: Collection[Manifest],
    latest: Weights,
    needs: Iterable[Need],
    *,
    pinned: Iterable[Weights] = (),
    keep_anchors: int = 2,
    link_cost_bytes: int = 0,
) -> Retention:
    """What may be deleted without making any known receiver's way longer.

    Kept: for every receiver its cheapest chain to what it was ordered to and on to `latest`, and its chain from an anchor
    should its own weights be lost; the chain of a late joiner; the chain of every `pinned` version; and the newest
    `keep_anchors` anchors of the current incarnation, each with its chain to `latest`, by single versions as well as by merged
    patches, so that one corrupt file is not the end. Nothing newer than `latest` is touched. While some wanted version has no
    chain from an anchor, nothing is dropped.
    """
    keep = {m.name for m in manifests if m.target > latest}
    wanted: list[tuple[Weights | None, Weights]] = [(None, latest), *((None, weights) for weights in pinned)]
    for need in needs:
        goal = latest if need.ordered is None else need.ordered
        wanted += [(need.held, goal), (None, goal), (need.held, latest), (goal, latest)]
    anchors = [m for m in manifests if m.base is None and m.target.incarnation == latest.incarnation and m.target <= latest]
    newest = sorted(anchors, key=lambda m: m.target.version, reverse=True)[:keep_anchors]
    keep |= {m.name for m in newest}
    wanted += [(m.target, latest) for m in newest]
    for held, goal in wanted:
        try:
            keep |= {m.name for m in plan_chain(manifests, goal, held, link_cost_bytes=link_cost_bytes)}
        except BrokenChain:
            if held is None:
                return Retention(tuple(sorted(m.name for m in manifests)), ())
    merged = {m.name for m in manifests if m.base is not None and m.target.version > m.base.version + 1}
    for anchor in newest:
        with suppress(BrokenChain):
            keep |= {m.name for m in plan_chain(manifests, latest, anchor.target, without=merged)}
    return Retention(tuple(sorted(keep)), tuple(sorted(m.name for m in manifests if m.name not in keep)))
