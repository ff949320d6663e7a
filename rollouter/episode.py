"""One attempt at one slot: reset, play, seal, and the trajectory that comes of it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from uuid import uuid4

import msgspec
import numpy as np

from rollouter.agent import Acted, Agent, Played, Turn
from rollouter.chat import observation_text
from rollouter.generation import Conversation, Generation
from rollouter.journal import AttemptName, Journal, command_id
from rollouter.rows import Ids, Row, Sampled
from rollouter.sandbox_client import Sandbox, Sandboxes
from schemas.actions import ToolCall
from schemas.arrays import Array
from schemas.sandbox import SandboxResult
from schemas.task import Task
from schemas.termination import Termination
from schemas.trajectory import Episode, SamplingConfig, StateRef
from services.bus import Bus

SHELL_TOOL, SHELL_ARGUMENT = "shell", "command"
REFUSED_TEXT = "invalid refused: it cannot be run"


class EpisodeBroken(Exception):
    """This episode cannot be played at all, however often it is tried; the text names what is wrong with its data."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What every episode of this process plays on."""

    bus: Bus
    generation: Generation
    sandboxes: Sandboxes
    stop_token_ids: tuple[int, ...]
    context_tokens: int
    observation_chars: int
    rollouter: str


async def play_attempt(stage: Stage, agent: Agent, name: AttemptName, task: Task) -> Episode:
    """Play one attempt and give its sealed trajectory; the caller publishes it.

    Consumes: tokens and sandbox results. Produces: the attempt's turns. Whatever happens, the sandbox is sealed or discarded.
    Raises `SandboxLost` and `GenerationFailed` (worth another attempt), `AttemptTaken` (another process works on this group),
    or `EpisodeBroken`.
    """
    started_ns = time.time_ns()
    foreign = [tool.name for tool in task.tools if tool.name != SHELL_TOOL]
    if foreign:
        raise EpisodeBroken(f"task {task.task_id} declares tool {foreign[0]!r}; this rollouter runs {SHELL_TOOL!r} only")
    box_name = f"{name.session()}-{uuid4().hex[:8]}"
    owner = f"{name.lease.group}/{name.slot}/{name.attempt}"
    box: Sandbox | None = None
    sealed = False
    try:
        box = await stage.sandboxes.reset(box_name, owner, task.files)
        if name.lease.base_snapshot and box.state_hash != name.lease.base_snapshot:
            raise EpisodeBroken(f"a reset of {task.task_id} gave state {box.state_hash[:24]}, not the lease's base snapshot")
        async with Journal(stage.bus, name, box.executor, box.state_hash) as journal:
            played = await agent.play(SandboxSeat(stage, name, task, box, journal))
            result = await stage.sandboxes.seal(box)
            sealed = True
            await journal.confirm()
        return episode_of(name, played, box.executor, result.state, stage.rollouter, started_ns)
    finally:
        stage.generation.fleet.forget(name.session())
        if box is not None and not sealed:
            await stage.sandboxes.discard(box.name, box.executor)


class SandboxSeat:
    """The seat of one attempt; see `rollouter.agent.Seat`."""

    def __init__(self, stage: Stage, name: AttemptName, task: Task, box: Sandbox, journal: Journal) -> None:
        self.task = task
        self.context_tokens = stage.context_tokens
        self._stage = stage
        self._name = name
        self._box = box
        self._journal = journal
        self._who = Conversation(session=name.session(), group=name.lease.group)
        self._sampling = SamplingConfig()

    async def sample(self, turn: int, prompt: Ids, max_tokens: int) -> Sampled:
        self._sampling = turn_sampling(self._name, turn, max_tokens, self._stage.stop_token_ids)
        return await self._stage.generation.sample(self._who, prompt, self._sampling)

    async def act(self, turn: int, call: ToolCall) -> Acted:
        command, name = call.arguments.get(SHELL_ARGUMENT), command_id(self._box.name, turn)
        if not isinstance(command, str):
            return Acted(raw=REFUSED_TEXT.encode(), text=REFUSED_TEXT, refused=True)
        result = await self._stage.sandboxes.command(self._box, name, command, self.task.budget.command_timeout_s)
        return acted_of(result, name, self._stage.observation_chars)

    async def record(self, turn: Turn) -> None:
        await self._journal.record(turn, self._sampling)


def acted_of(result: SandboxResult, name: str, limit_chars: int) -> Acted:
    """The observation of one command; a command that cannot be run is an error that the agent reads."""
    if result.status == "refused":
        return Acted(raw=result.error.encode(), text=REFUSED_TEXT, refused=True, command_id=name, lane=result.lane)
    return Acted(
        raw=result.stdout + result.stderr,
        text=observation_text(result.stdout, result.stderr, result.exit_code, result.timed_out, limit_chars),
        timed_out=result.timed_out,
        dropped_bytes=result.dropped_bytes,
        exit_code=result.exit_code,
        command_id=name,
        lane=result.lane,
        state_after=result.state_hash,
    )


def turn_sampling(name: AttemptName, turn: int, max_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingConfig:
    """The lease's sampler for one turn; every turn of every attempt gets a seed of its own out of the lease's."""
    base = name.lease.sampling
    text = f"{name.lease.seed}/{base.seed or 0}/{name.slot}/{name.attempt}/{turn}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
    stops = base.stop_token_ids or stop_token_ids
    return msgspec.structs.replace(base, max_tokens=max_tokens, stop_token_ids=stops, seed=seed)


def episode_of(
    name: AttemptName, played: Played, executor: str, state: StateRef | None, rollouter: str, started_ns: int
) -> Episode:
    """The sealed trajectory. Raises `ArrayError` or `ValueError` unless ids, mask, log-probs and versions line up."""
    lease, row = name.lease, played.row
    raw, mask = row.raw_logprobs(), row.mask()
    return Episode(
        run=lease.run,
        group=lease.group,
        slot=name.slot,
        attempt=name.attempt,
        task_id=lease.task_id,
        family=lease.family,
        template=lease.template,
        purpose=lease.purpose,
        seed=lease.seed,
        environment=lease.environment,
        base_snapshot=lease.base_snapshot,
        manifest=lease.manifest,
        termination=played.termination,
        ids=Array.of(row.ids()),
        mask=Array.of(mask),
        logprobs=Array.of(row.logprobs()),
        raw_logprobs=None if raw is None else Array.of(raw),
        versions=tuple(row.versions),
        turn_starts=Array.of(np.asarray(row.turn_starts, dtype=np.int32)),
        turns=row.turns,
        invalid_actions=played.invalid_actions,
        sampled_tokens=int(mask.sum()),
        engines=tuple(row.engines),
        executor=executor,
        terminal_state=state,
        started_ns=started_ns,
        sealed_ns=time.time_ns(),
        rollouter=rollouter,
    ).checked()


def aborted_episode(name: AttemptName, termination: Termination, rollouter: str, started_ns: int) -> Episode:
    """The sealed trajectory of a slot that was given up: it has no row, since none of its tokens may be trained on."""
    return episode_of(name, Played(termination=termination, row=Row()), "", None, rollouter, started_ns)
