"""The verifier service: one verdict for every sealed episode, from a clean sandbox under its own identity."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from schemas.codec import CodecError
from schemas.task import GraderSpec, Task, TaskSuite
from schemas.termination import is_censored
from schemas.trajectory import Episode, StateRef, Verdict
from services import state_refs
from services.config import Config
from services.health import pause
from services.items import IntegrityError, Item, OnceConflict
from services.runtime import ServiceContext
from services.sandbox.box import state_limits
from services.sandbox.command import Limits, SandboxError
from services.sandbox.host import HostConfig
from services.suites import resolve_suite
from services.tracing import span
from services.verifier.grading import GradeOutcome, GradingCut, TerminalState, Verifier, VerifierConfig
from services.work import Refused, Retry, WorkConsumer

log = structlog.get_logger()
MAX_TROUBLES = 5  # times that grading one episode may fail on this host before it is an error of the verifier
_RETRY_S = 2.0
DRAIN_S = 15.0  # given to running gradings
_CUT_S = 5.0  # for those that are cut off to be handed back
_HOUSEKEEPING_S = 2.0
_CLOSE_S = 30.0
_GRADING_SLACK_S = 330.0  # the lane's longest wait and the sandbox's own start and end


async def serve(context: ServiceContext) -> None:
    """One verifier; any number may run.

    Consumes: `episode.*.*`. Produces: `verdict.<group>.<slot>`, once. Waits for: the grader, which its own time-out bounds.
    On error: what is wrong with an episode's own data is a `verifier_error` verdict with the reason, never a reward; trouble of
    this host hands the episode back, a bounded number of times. On stop: no new episodes; running gradings get `DRAIN_S` to
    end, then they are cut off and their episodes handed back.
    """
    suite = resolve_suite(context.config.tasks.suite)
    verifier = await Verifier.start(verifier_config(context.config, context.instance))
    for line in verifier.isolation.missing:
        log.warning("not enforced on this machine", what=line)
    service = VerifierService(context, suite, verifier)
    capacity = context.config.verifier.concurrency
    episodes = WorkConsumer(context.bus, "verifier", capacity=capacity, drain_s=DRAIN_S + _CUT_S)
    ended = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(service.keep_house(ended), name="housekeeping")
            group.create_task(service.limit_drain(ended), name="drain")
            context.ready()
            await episodes.run(service.handle, context.stop)
            ended.set()
    finally:
        async with asyncio.timeout(_CLOSE_S):
            await verifier.close()


def verifier_config(config: Config, instance: str) -> VerifierConfig:
    """A root of its own, and room for every state that a sandbox can seal."""
    settings, name = config.sandbox, f"verifier-{instance}"
    root = Path(settings.root) / name if settings.root else config.run_folder().resolve() / "sandboxes" / name
    limits = Limits(memory_bytes=settings.memory_bytes, processes=settings.processes, disk_bytes=settings.disk_bytes)
    return VerifierConfig(
        host=HostConfig(root=str(root), threads=config.verifier.concurrency + 4),
        concurrency=config.verifier.concurrency,
        limits=limits,
        state=state_limits(limits),
    )


class VerifierService:
    """Verdicts for episodes; the grading itself knows nothing of the bus."""

    def __init__(self, context: ServiceContext, suite: TaskSuite, verifier: Verifier) -> None:
        self._context = context
        self._bus = context.bus
        self._health = context.health
        self._suite = suite
        self._verifier = verifier
        self._troubles: dict[str, int] = {}  # subject -> failures of this host

    async def handle(self, item: Item) -> None:
        """Judge one episode and publish its verdict. Raises `Retry` on trouble that is not the episode's."""
        if not item.subject.rpartition(".")[2].isdecimal():
            raise Refused(f"{item.subject} names no slot")
        started_ns = time.time_ns()
        try:
            with span("grade", item.headers, subject=item.subject):
                outcome = await self._outcome(item)
        except GradingCut as error:
            raise Retry(f"{item.subject}: {error}", delay_s=0.0) from error
        except (SandboxError, OSError, TimeoutError) as error:
            outcome = self._trouble(item.subject, error)
        self._troubles.pop(item.subject, None)
        await self._publish(item, outcome, started_ns)

    async def _outcome(self, item: Item) -> GradeOutcome:
        try:
            episode = item.decode(Episode).checked()
        except (CodecError, ValueError) as error:
            return _error(f"the episode is not readable: {error}")
        if is_censored(episode.termination):
            state_hash = episode.terminal_state.state_hash if episode.terminal_state else ""
            return GradeOutcome(
                status="censored", state_hash=state_hash, detail=f"ended by {episode.termination}: it has no reward"
            )
        if episode.terminal_state is None:
            return _error(f"the episode ended by {episode.termination} but has no terminal state")
        try:
            task, grader = self._task_and_grader(episode.task_id)
            terminal = await self._terminal(episode.terminal_state)
        except (_NoTask, IntegrityError) as error:
            return _error(str(error))
        counts = {
            "turns": float(episode.turns),
            "invalid_actions": float(episode.invalid_actions),
            "sampled_tokens": float(episode.sampled_tokens),
        }
        limit_s = grader.timeout_s + _GRADING_SLACK_S
        with self._health.waiting(f"the grading of {item.subject}", f"grader of {task.task_id}", limit_s, "it is handed back"):
            async with asyncio.timeout(limit_s):
                return await self._verifier.grade(terminal, grader, task, termination=episode.termination, counts=counts)

    def _task_and_grader(self, task_id: str) -> tuple[Task, GraderSpec]:
        """Raises `_NoTask` with the suite's reason."""
        try:
            return self._suite.task(task_id), self._suite.grader(task_id)
        except Exception as error:  # a suite is foreign code; its failure concerns the episodes of this task alone
            log.error("the suite has no grader", task=task_id, exc_info=error)
            raise _NoTask(f"the suite gives no grader for {task_id}: {error!r}") from error

    async def _terminal(self, state: StateRef) -> TerminalState:
        """The sealed archive. Raises `IntegrityError` if it stays unreadable."""
        for attempt in range(MAX_TROUBLES):
            try:
                archive = await state_refs.load(self._bus, state)
                return TerminalState(state_hash=state.state_hash, tar_digest=state.tar_digest, archive=archive)
            except IntegrityError as error:
                if state.inline is not None or attempt == MAX_TROUBLES - 1:
                    raise
                log.warning("terminal state not readable yet", digest=state.tar_digest[:12], error=str(error))
                await asyncio.sleep(_RETRY_S)
        raise IntegrityError(f"state {state.tar_digest[:12]} is not readable")

    def _trouble(self, subject: str, error: Exception) -> GradeOutcome:
        """Raises `Retry`, or gives the outcome of an episode that this host failed to grade too often."""
        failures = self._troubles[subject] = self._troubles.get(subject, 0) + 1
        self._health.count("troubles")
        if failures < MAX_TROUBLES:
            raise Retry(f"{subject}: {error!r}", delay_s=_RETRY_S * failures) from error
        return _error(f"this host failed {failures} times to grade it: {error!r}")

    async def _publish(self, item: Item, outcome: GradeOutcome, started_ns: int) -> None:
        group, slot = item.subject.split(".")[-2:]
        verdict = Verdict(
            run=self._bus.run,
            group=group,
            slot=int(slot),
            episode_digest=item.digest,
            status=outcome.status,
            success=outcome.success,
            reward=outcome.reward,
            components=outcome.components,
            violations=outcome.violations or outcome.tampering,
            state_hash=outcome.state_hash,
            detail=outcome.detail,
            verifier=self._context.instance,
            started_ns=started_ns,
            finished_ns=time.time_ns(),
        )
        try:
            await self._bus.publish_once(self._bus.subjects.verdict(group, slot), verdict)
        except OnceConflict:  # an earlier delivery was judged; a verdict is given once, and this one differs in its times only
            self._health.count("judged_before")
            return
        self._health.count(f"verdict_{outcome.status}")
        self._health.count("successes", int(bool(outcome.success)))
        if outcome.status in ("verifier_error", "tampered"):
            log.warning(outcome.status, subject=item.subject, detail=outcome.detail)

    async def limit_drain(self, ended: asyncio.Event) -> None:
        """Once the service stops, bound the time that running gradings may take."""
        while not ended.is_set() and not await pause(self._context.stop, 1.0):
            pass
        if not await pause(ended, DRAIN_S):
            log.warning("gradings are cut off", running=self._verifier.status().running)
            self._verifier.halt()

    async def keep_house(self, ended: asyncio.Event) -> None:
        """Say how busy the graders are."""
        while not await pause(ended, _HOUSEKEEPING_S):
            status = self._verifier.status()
            self._health.set("grading_running", status.running)
            self._health.set("grading_waiting", status.waiting)


class _NoTask(Exception):
    """The suite gives no task or grader for an episode."""


def _error(detail: str) -> GradeOutcome:
    return GradeOutcome(status="verifier_error", detail=detail[:2000])
