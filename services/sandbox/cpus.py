"""Which CPUs each lane's run slots use: a pure, deterministic plan.

With four CPUs or more the lanes' sets do not overlap, and within a lane no two slots share a CPU as long as there are CPUs
enough. With fewer, overlap cannot be avoided; then package-heavy work is kept on the last CPU, so that it can never take all of
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from services.sandbox.lane_rules import Lane, LaneSpec

PACKAGE_CAP = 16
_SHARES = {Lane.COMMAND: 4, Lane.VERIFY: 1, Lane.PACKAGE: 2}  # reset and cleanup need little and take the first CPU
_DISJOINT_FROM = 4


class CpuPlan(msgspec.Struct, frozen=True, kw_only=True):
    """CPU sets by lane and slot, and in words what is shared."""

    blocks: dict[Lane, tuple[int, ...]]  # all CPUs of a lane
    sets: dict[Lane, tuple[tuple[int, ...], ...]]  # of slot k: element k
    note: str


def plan_cpus(cpus: Sequence[int], run_permits: Mapping[Lane, int]) -> CpuPlan:
    """Divide `cpus` among the lanes, and each lane's part among its run slots."""
    blocks = lane_blocks(cpus)
    sets = {lane: _slots(blocks[lane], run_permits[lane]) for lane in Lane}
    notes = []
    if len(cpus) < _DISJOINT_FROM:
        notes.append(f"{len(cpus)} CPUs: lanes share them; package-heavy work stays on CPU {blocks[Lane.PACKAGE][-1]}")
    crowded = [lane.value for lane in (Lane.COMMAND, Lane.PACKAGE, Lane.VERIFY) if run_permits[lane] > len(blocks[lane])]
    if crowded:
        notes.append(f"slots of lane {', '.join(crowded)} share CPUs, since it has more run permits than CPUs")
    return CpuPlan(blocks=blocks, sets=sets, note="; ".join(notes) or "no two slots share a CPU")


def lane_blocks(cpus: Sequence[int]) -> dict[Lane, tuple[int, ...]]:
    """The CPUs of each lane. Raises `ValueError` if there is none."""
    ordered = tuple(sorted(cpus))
    if not ordered:
        raise ValueError("cpus: at least one is needed")
    if len(ordered) < _DISJOINT_FROM:
        return {**dict.fromkeys(Lane, ordered), Lane.PACKAGE: ordered[-1:]}
    blocks = dict.fromkeys((Lane.RESET, Lane.CLEANUP), ordered[:1])
    rest, shares = ordered[1:], sum(_SHARES.values())
    for lane, share in _SHARES.items():
        count = len(rest) if lane is Lane.PACKAGE else max(1, (len(ordered) - 1) * share // shares)
        blocks[lane], rest = rest[:count], rest[count:]
    return blocks


def default_lanes(cpus: Sequence[int], *, package_cap: int = PACKAGE_CAP, queue_bound: int = 256) -> dict[Lane, LaneSpec]:
    """Lanes for a host with these CPUs: one command per CPU of its lane, package-heavy work capped."""
    blocks = lane_blocks(cpus)
    permits = {lane: len(block) for lane, block in blocks.items()}
    permits[Lane.PACKAGE] = min(package_cap, permits[Lane.PACKAGE])
    permits[Lane.RESET] = permits[Lane.CLEANUP] = 2
    sets = plan_cpus(cpus, permits).sets
    return {
        lane: LaneSpec(run_permits=permits[lane], start_permits=permits[lane], queue_bound=queue_bound, cpu_sets=sets[lane])
        for lane in Lane
    }


def _slots(block: tuple[int, ...], permits: int) -> tuple[tuple[int, ...], ...]:
    if permits > len(block):
        return tuple((block[slot % len(block)],) for slot in range(permits))
    bounds = [len(block) * slot // permits for slot in range(permits + 1)]
    return tuple(block[start:end] for start, end in itertools.pairwise(bounds))
