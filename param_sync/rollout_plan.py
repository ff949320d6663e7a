"""Progressive publication as a pure state machine: which engine switches next, and to what.

Engines fetch and verify in the background while they serve; an order is the permission to switch. Events and the time come
in, a new `Fleet` and orders go out; no clock, no I/O. Rules, in this order:

1. An engine is ordered only forward (by incarnation, then version), and always straight to the newest target.
2. At most `max_unavailable` engines that had been serving are out at a time. Newcomers never served and do not count.
3. A failed engine is ordered at once, from the anchor, and counts as out until it is back or passed over.
4. Whoever misses its deadline, or fails too often, is wedged: named, passed over, and no longer waited for or counted. A late
   confirmation or a restart brings it back, and who failed gets one more try with each new version.
5. Among those that may go: the oldest weights first (else a busy engine starves under quick versions), then the least load.
6. An engine that claims the target's version with other bits does not serve: it is emptied and rebuilt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from param_sync.chain import VersionReused, Weights


class Phase(StrEnum):
    """Where an engine is. Only `serving` takes traffic."""

    EMPTY = "empty"
    SERVING = "serving"
    APPLYING = "applying"
    FAILED = "failed"
    WEDGED = "wedged"


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits of a publication. Times in seconds."""

    max_unavailable: int = 1
    apply_deadline_s: float = 120.0
    """From order to verified digest."""
    rebuild_deadline_s: float = 600.0
    """The same for an order from the anchor."""
    max_attempts: int = 3
    """Failures in a row after which an engine is passed over."""
    retry_s: float = 5.0
    """Pause before the second attempt; it doubles with each further one."""

    def __post_init__(self) -> None:
        if self.max_unavailable < 1 or self.max_attempts < 1:
            raise ValueError(f"max_unavailable {self.max_unavailable} and max_attempts {self.max_attempts} must be at least 1")


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine as the synchronizer knows it."""

    name: str
    phase: Phase
    held: Weights | None
    """The last weights it verified whole."""
    since_s: float
    """Monotonic time at which the phase began."""
    ordered: Weights | None = None
    from_anchor: bool = False
    capacity: bool = False
    """It had been serving when it went out, so it counts as unavailable."""
    failures: int = 0
    load: float = 0.0
    """Turns in flight or any other measure that orders engines."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """Permission for one engine to switch to `target`; `from_anchor`: discard what it holds."""

    engine: str
    target: Weights
    from_anchor: bool


@dataclass(frozen=True, slots=True)
class Culprit:
    """Whom the publication waits for, or has given up waiting for."""

    engine: str
    phase: Phase
    since_s: float
    deadline_s: float | None
    """When it is passed over (monotonic); None: it already is, or nothing was ordered yet."""
    reason: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """All engines and the newest published weights."""

    target: Weights | None = None
    engines: Mapping[str, Engine] = field(default_factory=lambda: MappingProxyType({}))

    def _with(self, engine: Engine) -> Fleet:
        return replace(self, engines=MappingProxyType({**self.engines, engine.name: engine}))


def published(fleet: Fleet, target: Weights) -> Fleet:
    """A new version to go to. An older one is ignored; the same one with other bits raises `VersionReused`."""
    now = fleet.target
    if now is not None and _at(target) <= _at(now):
        if _at(target) == _at(now) and target.digest != now.digest:
            raise VersionReused(f"{target} is already published with digest {now.digest[:12]}")
        return fleet
    again = {
        name: replace(e, phase=Phase.FAILED, failures=e.failures - 1)
        for name, e in fleet.engines.items()
        if e.phase is Phase.WEDGED and e.ordered is None  # it failed, it is not silent
    }
    return replace(fleet, target=target, engines=MappingProxyType({**fleet.engines, **again}))


def joined(fleet: Fleet, engine: str, held: Weights | None, now_s: float, load: float = 0.0) -> Fleet:
    """An engine appeared or restarted, with verified weights or none. Whatever was ordered before is void."""
    return fleet._with(Engine(engine, Phase.EMPTY if held is None else Phase.SERVING, held, now_s, load=load))


def adopted(fleet: Fleet, engine: str, held: Weights | None, now_s: float, load: float = 0.0) -> Fleet:
    """An engine that had been serving is out on an order of an owner before us: it counts, and goes first.

    What it held is where its way begins, also when it has gone on along it by the time that the new order arrives.
    """
    return fleet._with(Engine(engine, Phase.EMPTY, held, now_s, load=load, capacity=True))


def left(fleet: Fleet, engine: str) -> Fleet:
    """An engine is gone for good."""
    return replace(fleet, engines=MappingProxyType({name: e for name, e in fleet.engines.items() if name != engine}))


def loaded(fleet: Fleet, engine: str, load: float) -> Fleet:
    """An engine reported its load. An unknown one is ignored until it joins."""
    known = fleet.engines.get(engine)
    return fleet if known is None else fleet._with(replace(known, load=load))


def applied(fleet: Fleet, engine: str, weights: Weights, now_s: float) -> Fleet:
    """An engine reports that it verified `weights` whole and serves them. Repeated and overtaken reports change nothing.

    A digest other than the ordered one is a failure: the version moves on a confirmed digest only.
    """
    known = fleet.engines.get(engine)
    if known is None or (known.held is not None and _at(weights) < _at(known.held)):
        return fleet
    if known.ordered is None or _at(weights) != _at(known.ordered):
        return fleet
    if weights.digest != known.ordered.digest:
        return failed(fleet, engine, known.ordered, f"it confirmed digest {weights.digest[:12]}", now_s)
    return fleet._with(Engine(engine, Phase.SERVING, weights, now_s, load=known.load))


def failed(fleet: Fleet, engine: str, weights: Weights, reason: str, now_s: float) -> Fleet:
    """An engine could not apply what it was ordered to and is out of rotation. Reports about other orders are ignored."""
    known = fleet.engines.get(engine)
    if known is None or known.ordered is None or _at(weights) != _at(known.ordered):
        return fleet
    return fleet._with(
        replace(known, phase=Phase.FAILED, ordered=None, since_s=now_s, failures=known.failures + 1, reason=reason)
    )


def advance(fleet: Fleet, policy: Policy, now_s: float) -> tuple[Fleet, tuple[Order, ...]]:
    """Pass over whoever is late, then give the orders that the rules allow now. Call after every event and at `wake_at`."""
    for engine in fleet.engines.values():
        late = deadline_of(engine, policy)
        if engine.phase is Phase.APPLYING and late is not None and now_s >= late:
            reason = f"no answer to the order for {engine.ordered} within {now_s - engine.since_s:g} s"
            fleet = fleet._with(replace(engine, phase=Phase.WEDGED, capacity=False, since_s=now_s, reason=reason))
        elif engine.phase is Phase.SERVING and _impostor(engine, fleet.target):
            reason = f"it serves {engine.held}, published is {fleet.target}"
            fleet = fleet._with(replace(engine, phase=Phase.EMPTY, held=None, since_s=now_s, reason=reason))
        elif engine.phase is Phase.FAILED and engine.failures >= policy.max_attempts:
            reason = f"failed {engine.failures} times, last: {engine.reason}"
            fleet = fleet._with(replace(engine, phase=Phase.WEDGED, capacity=False, since_s=now_s, reason=reason))
    if fleet.target is None:
        return fleet, ()
    orders: list[Order] = []
    room = policy.max_unavailable - unavailable(fleet)
    for engine in sorted(fleet.engines.values(), key=_urgency):
        if engine.phase is Phase.SERVING and _behind(engine, fleet.target):
            if room <= 0:
                continue
            room -= 1
        elif not (engine.phase is Phase.EMPTY or (engine.phase is Phase.FAILED and now_s >= _retry_at(engine, policy))):
            continue
        order = Order(engine.name, fleet.target, engine.phase is Phase.FAILED or engine.held is None)
        orders.append(order)
        capacity = engine.phase is Phase.SERVING or engine.capacity
        fleet = fleet._with(
            replace(
                engine,
                phase=Phase.APPLYING,
                ordered=fleet.target,
                from_anchor=order.from_anchor,
                capacity=capacity,
                since_s=now_s,
            )
        )
    return fleet, tuple(orders)


def unavailable(fleet: Fleet) -> int:
    """Engines out of rotation that had been serving and are still waited for."""
    return sum(e.capacity and e.phase in (Phase.APPLYING, Phase.FAILED, Phase.EMPTY) for e in fleet.engines.values())


def settled(fleet: Fleet) -> bool:
    """Every engine serves the target, or is wedged and named."""
    return all(
        e.phase is Phase.WEDGED or (e.phase is Phase.SERVING and (fleet.target is None or not _behind(e, fleet.target)))
        for e in fleet.engines.values()
    )


def versions(fleet: Fleet) -> tuple[Weights, Weights] | None:
    """(oldest, newest) weights among the engines that serve; None when none does."""
    serving = [e.held for e in fleet.engines.values() if e.phase is Phase.SERVING and e.held is not None]
    return (min(serving), max(serving)) if serving else None


def culprits(fleet: Fleet, policy: Policy) -> tuple[Culprit, ...]:
    """Everyone who is out, longest first: for the log, the status and the operator."""
    out = [e for e in fleet.engines.values() if e.phase is not Phase.SERVING]
    return tuple(
        Culprit(e.name, e.phase, e.since_s, deadline_of(e, policy), e.reason)
        for e in sorted(out, key=lambda e: (e.since_s, e.name))
    )


def wake_at(fleet: Fleet, policy: Policy) -> float | None:
    """The next moment (monotonic) at which `advance` may decide something without an event; None: never."""
    times = [t for e in fleet.engines.values() if (t := deadline_of(e, policy)) is not None]
    times += [_retry_at(e, policy) for e in fleet.engines.values() if e.phase is Phase.FAILED]
    return min(times, default=None)


def deadline_of(engine: Engine, policy: Policy) -> float | None:
    """When an applying engine is passed over; None in other phases."""
    if engine.phase is not Phase.APPLYING:
        return None
    return engine.since_s + (policy.rebuild_deadline_s if engine.from_anchor else policy.apply_deadline_s)


def _at(weights: Weights) -> tuple[int, int]:
    return weights.incarnation, weights.version


def _behind(engine: Engine, target: Weights) -> bool:
    return engine.held is None or _at(engine.held) < _at(target)


def _impostor(engine: Engine, target: Weights | None) -> bool:
    """The target's version, but other bits."""
    held = engine.held
    return held is not None and target is not None and _at(held) == _at(target) and held.digest != target.digest


def _retry_at(engine: Engine, policy: Policy) -> float:
    return engine.since_s + (0.0 if engine.failures <= 1 else policy.retry_s * 2.0 ** (engine.failures - 2))


def _urgency(engine: Engine) -> tuple[tuple[int, int], float, str]:
    return _at(engine.held) if engine.held is not None else (-1, -1), engine.load, engine.name
