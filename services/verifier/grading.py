"""Grades sealed terminal states, each in a clean sandbox of its own that the agent has never been in.

The grader sees the state read-only at /state (and under its old name /work), its own files read-only at /tests, and nothing
else. A censored episode is not graded; a state that was made to fool its grader is not graded either; and whatever goes wrong
with the grader itself is an error of the verifier. Only a grader that ran to its end and reported gives a reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from schemas.task import GraderSpec, Task
from schemas.termination import Termination, is_censored
from services.sandbox import state
from services.sandbox.cgroups import Cgroup
from services.sandbox.command import Bind, CommandRefused, CommandResult, CommandSpec, Limits, Outcome, SandboxError
from services.sandbox.cpus import plan_cpus
from services.sandbox.errands import Errands
from services.sandbox.host import Host, HostConfig, open_folder
from services.sandbox.isolation import Isolation
from services.sandbox.lane_rules import Lane, LaneSpec
from services.sandbox.lanes import Lanes, LaneStatus, Permit
from services.sandbox.tar import Entry, StateLimits, StateRefused
from services.verifier.report import ReportError, read_report
from services.verifier.reward import RewardRule, reward_of, reward_vector
from services.verifier.tamper import TamperPolicy, find_tampering

T = TypeVar("T")
Status = Literal["graded", "censored", "verifier_error", "tampered"]
_DETAIL_CHARS = 600


class GradingCut(SandboxError):
    """The verifier stops and nothing was judged; another one judges the same episode."""

    code = "grading_cut"
    retry = True


class TerminalState(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed state as it came: what its sandbox said about it, and the archive itself."""

    state_hash: str
    tar_digest: str
    archive: bytes


class VerifierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One verifier. Its root is its own, never a sandbox executor's."""

    host: HostConfig
    concurrency: int = 4  # gradings at the same time
    queue_bound: int = 1024
    limits: Limits = Limits()  # of a grader; its disk is that of the state
    state: StateLimits = StateLimits()
    rule: RewardRule = RewardRule()
    tamper: TamperPolicy = TamperPolicy()


class GradeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a verdict that come from grading. `reward` is None exactly when the episode has none."""

    status: Status
    success: bool | None = None
    reward: float | None = None
    components: dict[str, float] = {}
    violations: tuple[str, ...] = ()
    tampering: tuple[str, ...] = ()
    state_hash: str = ""
    detail: str = ""
    grader_wall_s: float = 0.0
    grader_cpu_s: float = 0.0


class Verifier:
    """Belongs to one event loop; gradings run side by side up to the bound."""

    def __init__(self, config: VerifierConfig, host: Host) -> None:
        self._config, self._host = config, host
        cpus = plan_cpus(sorted(os.sched_getaffinity(0)), dict.fromkeys(Lane, config.concurrency)).sets[Lane.COMMAND]
        spec = LaneSpec(
            run_permits=config.concurrency, start_permits=config.concurrency, queue_bound=config.queue_bound, cpu_sets=cpus
        )
        self._lanes = Lanes({Lane.VERIFY: spec})
        self._numbers = itertools.count()
        self._errands = Errands()
        self._groups: dict[int, Cgroup | None] = {}
        self._graders: set[asyncio.Task[CommandResult]] = set()
        self._halted = False

    @classmethod
    async def start(cls, config: VerifierConfig) -> Verifier:
        """Raises `RootInUse` or `HostUnusable`."""
        return cls(config, await asyncio.to_thread(Host.open, config.host))

    @property
    def isolation(self) -> Isolation:
        return self._host.isolation

    def status(self) -> LaneStatus:
        return self._lanes.status()[0]

    async def grade(
        self,
        terminal: TerminalState | None,
        grader: GraderSpec,
        task: Task,
        *,
        termination: Termination,
        counts: Mapping[str, float] | None = None,
    ) -> GradeOutcome:
        """Judge one episode. `counts` (turns, tool calls …) go into the vector as they are.

        Raises `LaneBusy`, `SetupFailed` and `GradingCut`: then nothing was judged and the same request may be made again.
        """
        if is_censored(termination):
            state_hash = terminal.state_hash if terminal else ""
            return GradeOutcome(status="censored", state_hash=state_hash, detail=f"ended by {termination}: it has no reward")
        if terminal is None:
            return GradeOutcome(status="verifier_error", detail=f"the episode ended by {termination} but has no terminal state")
        return await self._errands.finish(self._grade(terminal, grader, task, counts or {}), f"grade {task.task_id}")

    async def _grade(
        self, terminal: TerminalState, grader: GraderSpec, task: Task, counts: Mapping[str, float]
    ) -> GradeOutcome:
        async with self._lanes.permit(Lane.VERIFY, task.task_id) as permit:
            entries, signs = await self._thread(lambda: self._inspect(terminal, grader, task))
            vector = {"entries": float(len(entries)), "bytes": float(sum(entry.size for entry in entries)), **counts}
            if signs:
                return GradeOutcome(
                    status="tampered",
                    components=reward_vector({}, (), vector, tampered=True),
                    tampering=signs,
                    state_hash=terminal.state_hash,
                    detail="; ".join(signs)[:_DETAIL_CHARS],
                )
            try:
                result = await self._run(terminal.archive, grader, permit)
            except (CommandRefused, StateRefused) as error:
                return GradeOutcome(status="verifier_error", state_hash=terminal.state_hash, detail=f"grader: {error}")
            return self._judge(result, terminal.state_hash, vector)

    def halt(self) -> None:
        """Start no grader any more and kill those that run. Idempotent."""
        self._halted = True
        for grader in self._graders:
            grader.cancel()

    async def close(self) -> None:
        """Waits for the gradings that are under way. Idempotent."""
        await self._errands.drain()
        await asyncio.to_thread(self._host.close)

    def _inspect(self, terminal: TerminalState, grader: GraderSpec, task: Task) -> tuple[list[Entry], tuple[str, ...]]:
        """The state's entries, and the signs that it is not what it should be."""
        if terminal.state_hash.startswith(state.REFUSED):
            return [], (f"the state could not be sealed: {terminal.state_hash.removeprefix(state.REFUSED)}",)
        if hashlib.sha256(terminal.archive).hexdigest() != terminal.tar_digest:
            return [], ("the archive does not have its digest",)
        try:
            state_hash, entries = state.archive_hash(terminal.archive, self._config.state)
        except StateRefused as refusal:
            return [], (f"{refusal.code}: {refusal}",)
        if state_hash != terminal.state_hash:
            return entries, (f"the archive holds the state {state_hash}, not the one that was sealed",)
        signs = find_tampering(
            entries,
            task_files=task.files,
            instruction=task.instruction,
            grader_files=grader.files,
            policy=self._config.tamper,
        )
        return entries, signs

    async def _run(self, archive: bytes, grader: GraderSpec, permit: Permit) -> CommandResult:
        number = next(self._numbers)
        folder = self._host.path("scratch", f"grading-{number}")
        group, bounds = self._group(permit.slot), self._config.state
        limits = msgspec.structs.replace(
            self._config.limits, disk_bytes=2 * bounds.max_total_bytes, max_files=2 * bounds.max_entries + 16
        )
        spec = CommandSpec(
            command_id=f"grading-{number}",
            argv=tuple(grader.command),
            binds=(Bind(source=f"{folder}/state", target="/state"), Bind(source=f"{folder}/tests", target="/tests")),
            symlinks=(("/state", "/work"),),
            cwd="/tests",
            timeout_s=grader.timeout_s,
            limits=limits,
            cpus=permit.cpus,
            uid=self._host.uid(permit.slot),
        )
        try:
            await self._thread(lambda: self._lay_out(folder, archive, grader, permit.slot, limits))
            if group is not None:
                group.apply(limits, permit.cpus)
            return await self._until_halted(self._host.run(spec, group=group, on_started=permit.started))
        finally:
            await self._thread(lambda: self._host.drop_folder(folder))

    async def _until_halted(self, grading: Coroutine[Any, Any, CommandResult]) -> CommandResult:
        """Raises `GradingCut` when the verifier is halted, once the grader is gone."""
        grader = asyncio.create_task(grading)
        self._graders.add(grader)
        if self._halted:
            grader.cancel()
        await asyncio.wait({grader})
        self._graders.discard(grader)
        if grader.cancelled():
            raise GradingCut("the verifier stops")
        return grader.result()

    def _group(self, slot: int) -> Cgroup | None:
        if slot not in self._groups:
            self._groups[slot] = self._host.group(f"grading-{slot}")
        return self._groups[slot]

    def _lay_out(self, folder: str, archive: bytes, grader: GraderSpec, slot: int, limits: Limits) -> None:
        uid = self._host.uid(slot)
        self._host.make_folder(folder, slot, limits)
        for name in ("state", "tests"):
            open_folder(f"{folder}/{name}")
        state.unpack(archive, f"{folder}/state", self._config.state, uid=uid, gid=uid)
        for entry, content in state.entries_of(grader.files, self._config.state):
            state.place(f"{folder}/tests", entry, content, uid=uid, gid=uid)

    def _judge(self, result: CommandResult, state_hash: str, counts: Mapping[str, float]) -> GradeOutcome:
        """From how the grader ended to an outcome."""
        try:
            if result.outcome is not Outcome.EXITED or result.exit_code != 0:
                raise ReportError(f"the grader ended as {result.outcome} with exit code {result.exit_code}")
            report = read_report(result.stdout)
        except ReportError as error:
            errors = result.stderr.decode(errors="replace").strip()[-_DETAIL_CHARS:]
            return GradeOutcome(
                status="verifier_error",
                state_hash=state_hash,
                detail=f"{error}; {errors}"[: 2 * _DETAIL_CHARS],
                grader_wall_s=result.wall_s,
                grader_cpu_s=result.cpu_s,
            )
        return GradeOutcome(
            status="graded",
            success=report.success,
            reward=reward_of(report.success, report.violations, self._config.rule),
            components=reward_vector(report.components, report.violations, counts, tampered=False),
            violations=tuple(report.violations),
            state_hash=state_hash,
            grader_wall_s=result.wall_s,
            grader_cpu_s=result.cpu_s,
        )

    async def _thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._host.pool, work)
