"""One attempt at one slot: reset or rejoin, play, seal, and the trajectory that comes of it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass
from uuid import uuid4

import msgspec
import numpy as np

from rollouter.agent import Acted, Agent, PastTurn, Played, Turn
from rollouter.chat import observation_text
from rollouter.generation import Conversation, Generation, WeightsReplaced
from rollouter.journal import AttemptName, Journal, command_id
from rollouter.rows import Ids, Row, Sampled
from rollouter.sandbox_client import Sandbox, Sandboxes, SandboxLost
from rollouter.takeover import PastAttempt
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
    one_version: bool = False  # in-flight mode `restart`: all tokens of an episode are of one version


async def play_attempt(
    stage: Stage,
    agent: Agent,
    name: AttemptName,
    task: Task,
    journal: Journal,
    past: PastAttempt | None,
    *,
    restarts: bool = False,
) -> Episode:
    """Play one attempt, from its beginning or after what the journal holds of it, and give its sealed trajectory.

    Consumes: tokens and sandbox results. Produces: the attempt's records. On an error or a cancellation the sandbox stays where
    it is if the journal names it: whoever goes on decides about it. Raises `SandboxLost` and `GenerationFailed` (worth another
    attempt), `AttemptTaken` (another process holds the slot), `EpisodeBroken`, or with `restarts` `WeightsReplaced`.
    """
    foreign = [tool.name for tool in task.tools if tool.name != SHELL_TOOL]
    if foreign:
        raise EpisodeBroken(f"task {task.task_id} declares tool {foreign[0]!r}; this rollouter runs {SHELL_TOOL!r} only")
    started_ns = time.time_ns() if past is None else past.started_ns
    try:
        if past is None:
            box = await begin(stage, name, task)
            await journal.open(box, started_ns)
        else:
            box = await rejoin(stage, past)
            journal.rejoin(box)
        turns = () if past is None else past.turns
        played = await agent.play(SandboxSeat(stage, name, task, box, journal, turns, restarts))
        if played.last is not None and played.last.lane and not (past is not None and past.played):
            await journal.played(played.last)
        await journal.confirm()
        result = await stage.sandboxes.seal(box)
        return episode_of(name, played, box.executor, result.state, stage.rollouter, started_ns)
    except asyncio.CancelledError:
        await journal.settle()
        raise
    finally:
        stage.generation.fleet.forget(name.session())


async def begin(stage: Stage, name: AttemptName, task: Task) -> Sandbox:
    """A fresh sandbox at the task's initial state. Raises `SandboxLost` or `EpisodeBroken`."""
    owner = f"{name.lease.group}/{name.slot}/{name.attempt}"
    box = await stage.sandboxes.reset(f"{name.session()}-{uuid4().hex[:8]}", owner, task.files)
    if name.lease.base_snapshot and box.state_hash != name.lease.base_snapshot:
        await stage.sandboxes.discard(box.name, box.executor)
        raise EpisodeBroken(f"a reset of {task.task_id} gave state {box.state_hash[:24]}, not the lease's base snapshot")
    return box


async def rejoin(stage: Stage, past: PastAttempt) -> Sandbox:
    """The living sandbox of an attempt. Raises `SandboxLost` unless it stands where the journal says."""
    standing = await stage.sandboxes.attach(past.box)
    if not past.stands(standing.state_hash, standing.last_command):
        raise SandboxLost(
            f"{past.box.name} on {past.box.executor} stands at {standing.state_hash[:24]} after command "
            f"{standing.last_command or 'none'}; the journal says {past.box.state_hash[:24]} after {past.ran or 'none'}"
        )
    return past.box


class SandboxSeat:
    """The seat of one attempt; see `rollouter.agent.Seat`."""

    def __init__(
        self,
        stage: Stage,
        name: AttemptName,
        task: Task,
        box: Sandbox,
        journal: Journal,
        past: tuple[PastTurn, ...],
        restarts: bool = False,
    ) -> None:
        self.task = task
        self.context_tokens = stage.context_tokens
        self._stage = stage
        self._name = name
        self._box = box
        self._journal = journal
        self._past = past
        self._restarts = restarts
        self._versions = {(span.version, span.incarnation) for turn in past for span in turn.sampled.versions}
        self._tokens = sum(int(turn.sampled.ids.size) for turn in past)
        self._who = Conversation(session=name.session(), group=name.lease.group, name=str(name), restarts=restarts)
        self._sampling = SamplingConfig()

    def past(self, turn: int) -> PastTurn | None:
        return self._past[turn] if turn < len(self._past) else None

    async def sample(self, turn: int, prompt: Ids, max_tokens: int) -> Sampled:
        self._sampling = turn_sampling(self._name, turn, max_tokens, self._stage.stop_token_ids)
        try:
            sampled = await self._stage.generation.sample(self._who, prompt, self._sampling)
            self._tokens += int(sampled.ids.size)
            self._versions |= {(span.version, span.incarnation) for span in sampled.versions}
            if self._restarts and len(self._versions) > 1:
                raise WeightsReplaced(f"{self._name} has turns of versions {sorted(self._versions)}")
        except WeightsReplaced:
            self._stage.generation.wasted(self._tokens)
            raise
        return sampled

    async def record(self, turn: Turn) -> None:
        runs = isinstance(turn.action, ToolCall) and command_of(turn.action) is not None
        await self._journal.record(turn, command_id(self._box.name, turn.number) if runs else "", self._sampling)

    async def act(self, turn: int, call: ToolCall) -> Acted:
        command = command_of(call)
        if command is None:
            return Acted(raw=REFUSED_TEXT.encode(), text=REFUSED_TEXT, refused=True)
        await self._journal.confirm()  # a command may only run if whoever takes over would run the same one
        name, timeout_s = command_id(self._box.name, turn), self.task.budget.command_timeout_s
        return acted_of(await self._stage.sandboxes.command(self._box, name, command, timeout_s), self._stage.observation_chars)


def command_of(call: ToolCall) -> str | None:
    """The shell line of a tool call; None if it has none."""
    command = call.arguments.get(SHELL_ARGUMENT)
    return command if isinstance(command, str) else None


def acted_of(result: SandboxResult, limit_chars: int) -> Acted:
    """The observation of one command; a command that cannot be run is an error that the agent reads."""
    if result.status == "refused":
        return Acted(raw=result.error.encode(), text=REFUSED_TEXT, refused=True, lane=result.lane)
    return Acted(
        raw=result.stdout + result.stderr,
        text=observation_text(result.stdout, result.stderr, result.exit_code, result.timed_out, limit_chars),
        timed_out=result.timed_out,
        dropped_bytes=result.dropped_bytes,
        exit_code=result.exit_code,
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
