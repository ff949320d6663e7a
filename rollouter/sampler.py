"""The sampler's core: whether another group may be leased now, which one, and if not, for whom it waits.

A training group is leased while both hold:

- open groups < the bound: leased and not yet consumed, quarantined or abandoned, at every instant;
- consumed + open < (oldest version in rotation + 1) * groups per batch + window, and < max_steps * groups per batch.

The window is at most K batches (`rollouter/window.py`). That keeps a group from being leased that could only be used staler
than K; with K = 0 it is exactly the synchronous trainer's schedule. Inside, it follows the trainer's pace, so generation slows
down before anything ages out.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollouter.curriculum import UNIFORM, CurriculumSettings, Outcomes, draw, seed_for, streams_of
from rollouter.evaluation import EvalBook, EvalSettings, Point, current_point, plan
from rollouter.window import EngineLoad, FlowBook, WindowSettings
from schemas.group import ReadyGroup
from schemas.lease import GroupLease, Purpose, TaskStream, ordinal_of
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, QuarantineReason
from schemas.policy import EngineState, FleetVersions
from schemas.task import Split
from schemas.training import EvalResult, StepCommit


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """Everything that the sampler's decisions depend on besides the streams."""

    run: str
    seed: int
    eval_seed: int
    max_groups: int
    max_lag: int
    groups_per_batch: int
    max_steps: int
    group_size: int
    pool: tuple[str, ...]
    evaluation: EvalSettings
    curriculum: CurriculumSettings = UNIFORM
    adapt: bool = False  # the window; else always K batches

    def window(self) -> WindowSettings:
        """What the window depends on."""
        return WindowSettings(batch=self.groups_per_batch, max_lag=self.max_lag, adapt=self.adapt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next lease, but for what the suite knows of its task."""

    ordinal: int
    purpose: Purpose
    task_id: str
    split: Split
    group_size: int
    seed: int
    stream: TaskStream
    propensity: float
    eval_point: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to lease: what must happen first, and whose turn it is."""

    what: str
    culprit: str


class SamplerState:
    """The fold over TASKS, LEDGER, READY, TRAIN and POLICY; they may arrive in any relative order, and items may come again."""

    def __init__(self) -> None:
        self.next_ordinal = 0
        self.highest_closed = -1  # ordinal of a group that the ledger names
        self.leased = 0
        self.consumed = 0
        self.turned_away = 0
        self.committed_steps = 0
        self.serving = -1
        self.fleet: FleetVersions | None = None
        self.book = EvalBook()
        self.observed: dict[str, Outcomes] = {}
        self.flow = FlowBook()
        self._engines: dict[str, EngineState] = {}
        self._open: dict[str, None] = {}
        self._closed_ahead: set[str] = set()  # closed by the ledger before their lease was folded
        self._ledger_seq = 0
        self._ready_seq = 0

    def lease(self, lease: GroupLease, time_ns: int = 0) -> None:
        """A group was leased, by this sampler or before it started. A repeat only tells when it was stored."""
        if lease.purpose == "eval" and time_ns:
            self.book.lease_stored(lease.eval_point, time_ns)
        if lease.ordinal < self.next_ordinal:
            return
        self.next_ordinal = lease.ordinal + 1
        if lease.purpose == "eval":
            self.book.lease(lease)
            return
        self.leased += 1
        if lease.group in self._closed_ahead:
            self._closed_ahead.remove(lease.group)
        else:
            self._open[lease.group] = None

    def lost_lease(self, ordinal: int) -> None:
        """What stands under this ordinal cannot be used, and nothing else can ever stand there: it names no group."""
        self.next_ordinal = max(self.next_ordinal, ordinal + 1)

    def entry(self, seq: int, entry: LedgerEntry, time_ns: int = 0) -> None:
        """The ledger closed something."""
        if seq <= self._ledger_seq:
            return
        self._ledger_seq = seq
        if isinstance(entry, BatchEntry):
            self.consumed += len(entry.groups)
            for member in entry.groups:
                self._close(member.group)
            self.flow.batch(seq, time_ns, tuple(member.group for member in entry.groups), entry.demand_seq)
        elif isinstance(entry, AbandonEntry) and isinstance(entry.step, int):
            self.consumed -= 1  # lost out of a batch, whose step is taken without it: none is leased in its place
        else:
            self.turned_away += 1
            self._close(entry.group)
            self.flow.turned_away(seq, entry.group, stale=entry.reason == QuarantineReason.STALE)

    def whole(self, seq: int, group: ReadyGroup, time_ns: int = 0) -> None:
        """A group is whole: an evaluation group is graded; a training group tells how its task went."""
        if seq <= self._ready_seq:
            return
        self._ready_seq = seq
        if group.purpose == "eval":
            self.book.graded(group, time_ns)
            return
        self.flow.ready(group.group, time_ns)
        before = self.observed.get(group.task_id, Outcomes())
        self.observed[group.task_id] = Outcomes(
            before.attempts + sum(s.status == "graded" for s in group.siblings),
            before.successes + sum(s.status == "graded" and bool(s.success) for s in group.siblings),
            before.untrusted + sum(s.status in ("verifier_error", "tampered") for s in group.siblings),
        )

    def demand(self, seq: int, time_ns: int) -> None:
        """The trainer asked for a batch."""
        self.flow.demanded(seq, time_ns)

    def engine(self, state: EngineState) -> None:
        """An engine's heartbeat."""
        self._engines[state.engine] = state

    def load(self) -> EngineLoad:
        """Of the engines in rotation, as they said last."""
        names = [name for name, version in self.fleet.engines.items() if version >= 0] if self.fleet else []
        engines = [self._engines[name] for name in names if name in self._engines]
        return EngineLoad(
            running=sum(engine.running for engine in engines),
            waiting=sum(engine.waiting for engine in engines),
            places=sum(engine.max_running for engine in engines),
        )

    def step(self, commit: StepCommit) -> None:
        """The trainer committed a step."""
        self.committed_steps = max(self.committed_steps, commit.step + 1)

    def result(self, result: EvalResult) -> None:
        """An evaluation's result is published."""
        self.book.result(result.point)

    def active(self, fleet: FleetVersions) -> None:
        """The fleet's version vector changed."""
        self.fleet = fleet
        self.serving = fleet.oldest

    def open_groups(self) -> tuple[str, ...]:
        """Open training groups, oldest lease first."""
        return tuple(self._open)

    def promised(self) -> int:
        """Training groups that are consumed or may still be."""
        return self.leased - self.turned_away

    def _close(self, group: str) -> None:
        self.highest_closed = max(self.highest_closed, ordinal_of(group))
        if group in self._open:
            del self._open[group]
        else:
            self._closed_ahead.add(group)


def next_action(state: SamplerState, settings: SamplerSettings) -> Plan | EvalResult | Wait:
    """What to do now: publish a finished evaluation, lease one group, or wait for somebody."""
    if state.serving < 0:
        return Wait("an engine that serves a verified version", "param_sync and the engines")
    evaluation = settings.evaluation
    point = current_point(evaluation, state.book, state.committed_steps, state.serving)
    wait = None
    if point is not None:
        action = _evaluate(state, settings, point)
        if not isinstance(action, Wait) or point.kind != "interim":
            return action
        wait = action
    if evaluation.evaluate_only:
        return Wait("the end of the run", "the supervisor; the evaluation is published")
    return _train(state, settings) or wait or Wait("the end of the run", "the supervisor; all groups are leased")


def _evaluate(state: SamplerState, settings: SamplerSettings, point: Point) -> Plan | EvalResult | Wait:
    groups = plan(point, settings.evaluation)
    leased = state.book.leased(point.name)
    room = settings.max_groups if point.kind != "interim" else max(1, settings.max_groups // 2)
    if leased < len(groups):
        if state.book.in_flight() >= room:
            return Wait(f"evaluation {point.name}: room for another group", "rollouter, verifier, bank")
        group = groups[leased]
        return Plan(
            ordinal=state.next_ordinal,
            purpose="eval",
            task_id=group.task_id,
            split=group.split,
            group_size=group.size,
            seed=seed_for("eval", settings.seed, settings.eval_seed, point.name, group.index),
            stream="evaluation",
            propensity=1.0,
            eval_point=point.name,
        )
    result = state.book.score(settings.run, point, len(groups))
    return result or Wait(f"evaluation {point.name}: its last groups", "rollouter, verifier, bank")


def _train(state: SamplerState, settings: SamplerSettings) -> Plan | Wait | None:
    """A training lease, or for whom it waits; `None` when the remaining steps need no further group."""
    batch = settings.groups_per_batch
    if settings.max_steps and state.promised() >= settings.max_steps * batch:
        if state.committed_steps < settings.max_steps:
            return Wait(f"the commit of step {settings.max_steps - 1}", "rollouter, verifier, bank, admission, trainer")
        if settings.evaluation.at_end and state.serving < settings.max_steps:
            return Wait(f"version {settings.max_steps} in rotation", "param_sync and the engines")
        return None
    window = state.flow.window(settings.window(), state.load())
    if state.promised() >= (state.serving + 1) * batch + window.ahead:
        most = window.ahead >= settings.window().most
        why = f"K = {settings.max_lag}" if most else f"{window.ahead} groups ahead: {window.why}"
        return Wait(f"a version above {state.serving} in rotation ({why})", "trainer, param_sync and the engines")
    if len(state.open_groups()) >= settings.max_groups:
        return Wait(f"room in the window of {settings.max_groups}", f"the oldest open group {state.open_groups()[0]}")
    drawn = draw(
        settings.seed,
        state.next_ordinal,
        streams_of(settings.pool, state.observed, settings.curriculum),
        settings.curriculum,
    )
    return Plan(
        ordinal=state.next_ordinal,
        purpose="train",
        task_id=drawn.task_id,
        split="train",
        group_size=settings.group_size,
        seed=seed_for("train", settings.seed, state.next_ordinal),
        stream=drawn.stream,
        propensity=drawn.propensity,
    )
