"""Which faults are injected, in which order: an endless sequence that is a function of its seed alone.

When each is injected depends on the run, since a fault waits for its observed point.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from loadtests.chaos.clocks import JUMPS_S
from loadtests.chaos.points import SERVER, SERVICES, Point, point, points_of

Kind = Literal["kill", "pair", "pause", "cut", "duplicate", "torn checkpoint", "clock", "full disk"]
CutMode = Literal["cut", "delay", "hold", "deaf"]
KINDS: dict[Kind, int] = {
    "kill": 66,
    "pair": 16,
    "pause": 4,
    "cut": 8,
    "duplicate": 4,
    "torn checkpoint": 2,
    "clock": 4,
    "full disk": 1,
}
# Longer than others wait before they take over: a lease's 20 s, an engine's 10 s of silence, three heartbeats of a writer.
PAUSES_S: dict[str, float] = {
    "rollouter": 25.0,
    "engine": 14.0,
    "admission": 8.0,
    "trainer": 8.0,
    "param_sync": 8.0,
    SERVER: 6.0,
}
CUTS_S: dict[CutMode, float] = {"cut": 0.0, "delay": 4.0, "hold": 18.0, "deaf": 3.0}
DUPLICATES: tuple[tuple[str, ...], ...] = (("gen", "req"), ("sbx", "req", "command"), ("sbx", "req", "reset"))
CLOCK_S = 8.0
FULL_S = 6.0
_TORN = "trainer: a step is announced"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`point` says when. `label` is whom to hit besides (a pair) or instead (a pause, a cut); `words` what to repeat."""

    number: int
    kind: Kind
    point: Point | None = None
    label: str = ""
    seconds: float = 0.0
    mode: CutMode | None = None
    words: tuple[str, ...] = ()
    offset_s: int = 0  # of a clock that jumps

    def services(self) -> frozenset[str]:
        """Services that it hits."""
        hit = {self.point.service} if self.point is not None and self.kind in ("kill", "pair", "torn checkpoint") else set()
        return frozenset(hit | ({service_of(self.label)} if self.label else set()))


def service_of(label: str) -> str:
    """`engine-e0` → `engine`; the server is its own."""
    return label if label == SERVER else label.rsplit("-", 1)[0]


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What a run offers: all its processes, those that can be cut off, those whose clock can jump."""

    labels: Sequence[str]
    proxied: Sequence[str] = ()
    clocked: Sequence[str] = ()
    small_disk: bool = False


def faults(seed: int, ground: Ground, kinds: Mapping[Kind, int] | None = None, avoid: Collection[str] = ()) -> Iterator[Fault]:
    """`kinds`: how often each comes, as weights; `avoid`: names of points to leave out."""
    random_ = random.Random(seed)
    weights = dict(KINDS if kinds is None else kinds)
    offered: dict[Kind, bool] = {"cut": bool(ground.proxied), "clock": bool(ground.clocked), "full disk": ground.small_disk}
    weights |= {kind: 0 for kind, possible in offered.items() if not possible}
    number = 0
    while True:
        kind = random_.choices(list(weights), list(weights.values()))[0]
        fault = _fault(random_, number, kind, ground)
        if fault is not None and (fault.point is None or fault.point.name not in avoid):
            yield fault
            number += 1


def _fault(random_: random.Random, number: int, kind: Kind, ground: Ground) -> Fault | None:
    if kind == "kill":
        return Fault(number=number, kind=kind, point=_some_point(random_))
    if kind == "torn checkpoint":
        return Fault(number=number, kind=kind, point=point(_TORN))
    if kind == "duplicate":
        return Fault(number=number, kind=kind, words=random_.choice(DUPLICATES))
    if kind == "cut":
        mode = random_.choice(list(CUTS_S))
        return Fault(number=number, kind=kind, label=random_.choice(ground.proxied), seconds=CUTS_S[mode], mode=mode)
    if kind == "clock":
        label, offset_s = random_.choice(ground.clocked), random_.choice(JUMPS_S)
        return Fault(number=number, kind=kind, label=label, seconds=CLOCK_S, offset_s=offset_s)
    if kind == "full disk":
        return Fault(number=number, kind=kind, label=SERVER, seconds=FULL_S)
    if kind == "pause":
        label = random_.choice([label for label in ground.labels if service_of(label) in PAUSES_S])
        return Fault(number=number, kind=kind, label=label, seconds=PAUSES_S[service_of(label)])
    first, label = _some_point(random_), random_.choice(ground.labels)
    return None if service_of(label) == first.service else Fault(number=number, kind=kind, point=first, label=label)


def _some_point(random_: random.Random) -> Point:
    """Every service alike, then one of its points."""
    return random_.choice(points_of(random_.choice(SERVICES)))
