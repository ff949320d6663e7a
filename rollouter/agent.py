"""The agent seam, and the built-in agent: a loop over typed actions whose row is exactly what was sampled."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import msgspec

from rollouter.actions import ActionParser, error_text
from rollouter.chat import ChatRenderer
from rollouter.rows import Ids, Row, Sampled
from schemas.actions import Abstain, Action, Finish, InvalidAction, ToolCall
from schemas.task import Task
from schemas.termination import Termination

MAX_TOOL_TIMEOUTS = 3  # time-outs of commands after which an episode ends
OBSERVATION_ROLE = "tool"


@dataclass(frozen=True, kw_only=True)
class Acted:
    """What one action did: `raw` for the journal, `text` for the agent."""

    raw: bytes
    text: str
    refused: bool = False  # nothing ran
    timed_out: bool = False
    dropped_bytes: int = 0
    exit_code: int | None = None
    lane: str = ""  # empty: nothing was sent to the sandbox
    state_after: str = ""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn before its action is carried out, for the journal."""

    number: int
    fed: Ids  # [P] tokens that this turn added before sampling
    sampled: Sampled
    previous: Acted | None  # what the turn before did
    action: Action
    started_ns: int
    generated_ns: int


@dataclass(frozen=True, kw_only=True)
class PastTurn:
    """A turn that the journal holds: it is taken up token for token. `acted` is None for the last one, which acts again."""

    fed: Ids  # [P]
    sampled: Sampled
    action: Action
    acted: Acted | None


@dataclass(frozen=True, kw_only=True)
class Played:
    """How an agent's play ended. The terminal state is still in the sandbox."""

    termination: Termination
    row: Row
    invalid_actions: int = 0
    last: Acted | None = None  # what the last turn did


class Seat(Protocol):
    """All that an agent can do: it has no other way to engines, sandbox or bus."""

    @property
    def task(self) -> Task: ...

    @property
    def context_tokens(self) -> int:
        """Tokens that the whole row may have."""

    def past(self, turn: int) -> PastTurn | None:
        """The turn as it was played before a takeover."""

    async def sample(self, turn: int, prompt: Ids, max_tokens: int) -> Sampled:
        """The policy's continuation of `prompt` (int32 [P])."""

    async def record(self, turn: Turn) -> None:
        """Journal one turn. Before its action is carried out, and once only."""

    async def act(self, turn: int, call: ToolCall) -> Acted:
        """Run a recorded turn's tool call in the sandbox; the same turn's again gives the same result."""


class Agent(Protocol):
    """Plays one episode. What the seat raises (`SandboxLost`, `GenerationFailed`) passes through: it is not the agent's."""

    async def play(self, seat: Seat) -> Played: ...


class LoopAgent:
    """One action per turn until the agent finishes or a budget is used up.

    Consumes: the task and, per turn, sampled tokens and an observation. Produces: the row and every turn's record. Turns that
    the journal holds are taken up as they are, and the play goes on after them. An action that does not parse costs its turn,
    has no side effect, and its error is the observation. On a command's time-out the agent reads so and goes on, a bounded
    number of times. Ends: agent_finish, agent_abstain, task_budget, tool_timeout, token_truncation.
    """

    def __init__(self, renderer: ChatRenderer, parser: ActionParser) -> None:
        self._renderer = renderer
        self._parser = parser

    async def play(self, seat: Seat) -> Played:
        task, row = seat.task, Row()
        invalid = timeouts = 0
        sampled: Sampled | None = None
        acted: Acted | None = None

        def ended(how: Termination) -> Played:
            return Played(termination=how, row=row, invalid_actions=invalid, last=acted)

        for turn in range(task.budget.max_turns):
            past = seat.past(turn)
            fed = past.fed if past is not None else self._prompt(task, sampled, acted)
            room = seat.context_tokens - row.length - fed.shape[0]
            if room < 1:
                return ended(Termination.TOKEN_TRUNCATION)
            row.feed(fed)
            if past is None:
                sampled, action = await self._sample(seat, turn, fed, row, acted, room)
            else:
                sampled, action = past.sampled, past.action
            row.sampled(sampled)
            acted = past.acted if past is not None and past.acted is not None else await self._act(seat, turn, action)
            invalid += acted.refused
            timeouts += acted.timed_out
            cut_by_context = sampled.finish_reason == "length" and room < task.budget.max_action_tokens
            ending = _ending(action, timeouts, cut_by_context)
            if ending is not None:
                return ended(ending)
        return ended(Termination.TASK_BUDGET)

    def _prompt(self, task: Task, sampled: Sampled | None, acted: Acted | None) -> Ids:
        """What the next turn adds to the row: the opening, or the glue around the observation. [P]"""
        if sampled is None or acted is None:
            return self._renderer.opening(task.system_prompt, task.instruction, task.tools)
        return self._renderer.after_turn(sampled.ids, OBSERVATION_ROLE, acted.text)

    async def _sample(
        self, seat: Seat, turn: int, fed: Ids, row: Row, previous: Acted | None, room: int
    ) -> tuple[Sampled, Action]:
        """Sample, parse and journal one turn; its action is still to be carried out."""
        started = time.time_ns()
        sampled = await seat.sample(turn, row.ids(), min(seat.task.budget.max_action_tokens, room))
        generated = time.time_ns()
        action = self._parse(sampled)
        await seat.record(
            Turn(
                number=turn,
                fed=fed,
                sampled=sampled,
                previous=previous,
                action=action,
                started_ns=started,
                generated_ns=generated,
            )
        )
        return sampled, action

    def _parse(self, sampled: Sampled) -> Action:
        action = self._parser.parse(self._renderer.decode(sampled.ids), sampled.ids, sampled.finish_reason)
        try:
            msgspec.msgpack.encode(action)
        except UnicodeEncodeError:  # a lone surrogate, which JSON can spell and no message can carry
            return InvalidAction(code="malformed", message="broken text")
        return action

    async def _act(self, seat: Seat, turn: int, action: Action) -> Acted:
        if isinstance(action, ToolCall):
            return await seat.act(turn, action)
        if isinstance(action, InvalidAction):
            text = error_text(action)
            return Acted(raw=text.encode(), text=text, refused=True)
        return Acted(raw=b"", text="")


def _ending(action: Action, timeouts: int, cut_by_context: bool) -> Termination | None:
    """Whether this turn was the last one, and why."""
    if isinstance(action, Finish):
        return Termination.AGENT_FINISH
    if isinstance(action, Abstain):
        return Termination.AGENT_ABSTAIN
    if cut_by_context:
        return Termination.TOKEN_TRUNCATION
    if timeouts >= MAX_TOOL_TIMEOUTS:
        return Termination.TOOL_TIMEOUT
    return None
