"""Which faults are injected, in which order: an endless sequence that is a function of its seed alone.

When each is injected depends on the run, since a fault waits for its observed point.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, Literal, TypeVar

from loadtests.chaos.clocks import JUMPS_S
from loadtests.chaos.points import OWNED, OWNER_NAME, SERVER, SERVICES, Point, point, points_of

T = TypeVar("T")
Kind = Literal["kill", "pair", "pause", "cut", "duplicate", "torn checkpoint", "corrupt patch", "clock", "full disk"]
CutMode = Literal["cut", "delay", "hold", "deaf"]
KINDS: dict[Kind, int] = {
    "kill": 62,
    "pair": 18,
    "pause": 4,
    "cut": 8,
    "duplicate": 4,
    "torn checkpoint": 2,
    "corrupt patch": 2,
    "clock": 4,
    "full disk": 1,
}
# Longer than others wait before they take over: a lease's 12 s, an engine's 10 s of silence, an owner's 3 s, a trainer's 15 s.
PAUSES_S: dict[str, float] = {
    "rollouter": 25.0,
    "engine": 14.0,
    "admission": 8.0,
    "trainer": 20.0,
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
        hit |= {"engine", "param_sync"} if self.kind == "corrupt patch" else set()
        return frozenset(hit | ({service_of(self.label)} if self.label else set()))

    def pair(self) -> tuple[str, str]:
        """Both services of a pair, the one at its point first."""
        assert self.point is not None
        return self.point.service, service_of(self.label)


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


class _Deck(Generic[T]):
    """Draws every item once before any comes again, so that nothing is left out by chance."""

    def __init__(self, random_: random.Random, items: Sequence[T]) -> None:
        self._random = random_
        self._items = tuple(items)
        self._left: list[T] = []

    def draw(self) -> T:
        if not self._left:
            self._left = self._random.sample(self._items, len(self._items))
        return self._left.pop()


class _Draws:
    """What one sequence of faults draws from. `duplicates`, `cuts` and the like are few and drawn at random."""

    def __init__(self, random_: random.Random, ground: Ground) -> None:
        self.random = random_
        self.services = _Deck(random_, SERVICES)
        self.points = {service: _Deck(random_, points_of(service)) for service in SERVICES}
        self.pairs = _Deck(random_, list(combinations(SERVICES, 2)))
        self.pauses = _Deck(random_, sorted({service_of(label) for label in ground.labels} & PAUSES_S.keys()) or [SERVER])
        self.cuts = _Deck(
            random_, [(s, m) for s in sorted({service_of(label) for label in ground.proxied}) for m in CUTS_S] or []
        )

    def point(self, service: str = "") -> Point:
        """Every service alike, then each of its points."""
        return self.points[service or self.services.draw()].draw()


def _labels_of(service: str, ground: Ground) -> list[str]:
    """Whom to name when this service is to be hit: of one that has an owner, the owner."""
    if service in OWNED:
        return [f"{service}-{OWNER_NAME}"]
    return [label for label in ground.labels if service_of(label) == service]


def faults(seed: int, ground: Ground, kinds: Mapping[Kind, int] | None = None, avoid: Collection[str] = ()) -> Iterator[Fault]:
    """`kinds`: how often each comes, as weights; `avoid`: names of points to leave out."""
    random_ = random.Random(seed)
    draws = _Draws(random_, ground)
    weights = dict(KINDS if kinds is None else kinds)
    offered: dict[Kind, bool] = {"cut": bool(ground.proxied), "clock": bool(ground.clocked), "full disk": ground.small_disk}
    weights |= {kind: 0 for kind, possible in offered.items() if not possible}
    number = 0
    while True:
        kind = random_.choices(list(weights), list(weights.values()))[0]
        fault = _fault(draws, number, kind, ground)
        if fault is not None and (fault.point is None or fault.point.name not in avoid):
            yield fault
            number += 1


def _fault(draws: _Draws, number: int, kind: Kind, ground: Ground) -> Fault | None:
    random_ = draws.random
    match kind:
        case "kill":
            return Fault(number=number, kind=kind, point=draws.point())
        case "torn checkpoint":
            return Fault(number=number, kind=kind, point=point(_TORN))
        case "corrupt patch":
            return Fault(number=number, kind=kind)
        case "duplicate":
            return Fault(number=number, kind=kind, words=random_.choice(DUPLICATES))
        case "cut":
            service, mode = draws.cuts.draw()
            proxied = (
                [f"{service}-{OWNER_NAME}"] if service in OWNED else [x for x in ground.proxied if service_of(x) == service]
            )
            return Fault(number=number, kind=kind, label=random_.choice(proxied), seconds=CUTS_S[mode], mode=mode)
        case "clock":
            label, offset_s = random_.choice(ground.clocked), random_.choice(JUMPS_S)
            return Fault(number=number, kind=kind, label=label, seconds=CLOCK_S, offset_s=offset_s)
        case "full disk":
            return Fault(number=number, kind=kind, label=SERVER, seconds=FULL_S)
        case "pause":
            service = draws.pauses.draw()
            return Fault(number=number, kind=kind, label=random_.choice(_labels_of(service, ground)), seconds=PAUSES_S[service])
        case "pair":
            first, second = random_.sample(draws.pairs.draw(), 2)
            others = _labels_of(second, ground)
            if not others:
                return None
            return Fault(number=number, kind=kind, point=draws.point(first), label=random_.choice(others))
