"""The built-in agent: the row is exactly what was fed and sampled (invariant 1), and every budget ends with its own code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.terminal.suite import SHELL
from rollouter.actions import make_parser
from rollouter.agent import MAX_TOOL_TIMEOUTS, Acted, LoopAgent, PastTurn, Played, Turn
from rollouter.chat import ChatRenderer
from rollouter.journal import acted_before, effect_of
from rollouter.rows import Ids, Row, Sampled, SampleError
from schemas.actions import Finish, InvalidAction, ToolCall
from schemas.task import Task, TaskBudget
from schemas.termination import Termination
from schemas.trajectory import VersionSpan

RENDERER = ChatRenderer(Path("examples/terminal/model"))
AGENT = LoopAgent(RENDERER, make_parser("tokens", RENDERER, (SHELL,)))
END = RENDERER.token_id("<|end|>")
BUDGET = TaskBudget()


def say(mark: str, text: str = "", *, ended: bool = True) -> list[int]:
    """The ids of one well-formed turn."""
    return [RENDERER.token_id(f"<|{mark}|>"), *RENDERER.encode_text(text), *([END] if ended else [])]


def sampled(ids: Sequence[int], turn: int) -> Sampled:
    """Ids as an engine would return them, with log-probabilities that tell turns and positions apart."""
    size = len(ids)
    half = size // 2
    spans = [VersionSpan(0, half, turn), VersionSpan(half, size, turn + 1)] if half else [VersionSpan(0, size, turn + 1)]
    return Sampled(
        ids=np.asarray(ids, dtype=np.int32),
        logprobs=-(turn + np.arange(1, size + 1, dtype=np.float32) / 1000),
        raw_logprobs=None,
        versions=tuple(spans),
        finish_reason="stop" if ids[-1] == END else "length",
        engine=f"e{turn % 2}",
    )


class ScriptedSeat:
    """Plays given turns, after those of the past; a command's outcome is looked up by its text."""

    def __init__(
        self,
        script: Sequence[Sequence[int]],
        budget: TaskBudget = BUDGET,
        context_tokens: int = 512,
        past: Sequence[PastTurn] = (),
    ) -> None:
        self.task = Task(
            task_id="t", family="f", template="t", split="train", instruction="do it", files={}, tools=(SHELL,), budget=budget
        )
        self.context_tokens = context_tokens
        self.turns: list[Turn] = []
        self.ran: list[str] = []
        self.prompts: list[Ids] = []
        self._script = script
        self._past = past

    def past(self, turn: int) -> PastTurn | None:
        return self._past[turn] if turn < len(self._past) else None

    async def sample(self, turn: int, prompt: Ids, max_tokens: int) -> Sampled:
        self.prompts.append(prompt)
        return sampled(self._script[turn][:max_tokens], turn)

    async def act(self, turn: int, call: ToolCall) -> Acted:
        command = str(call.arguments["command"])
        assert turn == (self.turns[-1].number if self.turns else len(self._past) - 1), "a turn is recorded before it acts"
        self.ran.append(command)
        return Acted(raw=b"out", text=f"said {command}", timed_out=command == "sleep 99", lane="command")

    async def record(self, turn: Turn) -> None:
        self.turns.append(turn)


async def play(seat: ScriptedSeat) -> Played:
    return await AGENT.play(seat)


async def test_a_finished_episode() -> None:
    seat = ScriptedSeat([say("shell", "ls"), say("shell", "mv a b"), say("finish", "done")])
    played = await play(seat)
    assert played.termination is Termination.AGENT_FINISH
    assert seat.ran == ["ls", "mv a b"]
    assert seat.turns[-1].action == Finish(answer="done")
    assert RENDERER.decode(played.row.ids()) == (
        "<|system|>shell(command)<|end|><|user|>do it<|end|><|assistant|><|shell|>ls<|end|>"
        "<|tool|>said ls<|end|><|assistant|><|shell|>mv a b<|end|><|tool|>said mv a b<|end|><|assistant|><|finish|>done<|end|>"
    )


async def test_an_invalid_action_costs_a_turn_and_touches_nothing() -> None:
    seat = ScriptedSeat([RENDERER.encode_text("hello"), [RENDERER.token_id("<|user|>"), END], say("finish")])
    played = await play(seat)
    assert (played.termination, played.invalid_actions, played.row.turns) == (Termination.AGENT_FINISH, 2, 3)
    assert seat.ran == []
    first = seat.turns[0]
    assert isinstance(first.action, InvalidAction)
    did = seat.turns[1].previous
    assert did is not None and did.refused
    assert did.text.startswith("invalid unterminated")
    assert "invalid unterminated" in RENDERER.decode(seat.prompts[1])  # the agent reads it


async def test_turns_are_a_task_budget() -> None:
    seat = ScriptedSeat([say("shell", "ls")] * 9, TaskBudget(max_turns=3))
    played = await play(seat)
    assert (played.termination, played.row.turns, len(seat.ran)) == (Termination.TASK_BUDGET, 3, 3)
    assert played.row.ids()[-1] == END  # nothing is fed after the last sampled token


async def test_a_full_context_is_a_token_truncation() -> None:
    opening = RENDERER.opening("", "do it", (SHELL,)).shape[0]
    action = say("shell", "ls")
    seat = ScriptedSeat([action] * 3, context_tokens=opening + len(action) + 3)
    played = await play(seat)
    assert (played.termination, played.row.turns) == (Termination.TOKEN_TRUNCATION, 1)
    assert played.row.length <= seat.context_tokens

    cut = ScriptedSeat([say("shell", "ls -l a b c d")], context_tokens=opening + 3)
    played = await play(cut)
    assert (played.termination, played.row.length, cut.ran) == (Termination.TOKEN_TRUNCATION, opening + 3, [])

    played = await play(ScriptedSeat([], context_tokens=opening))
    assert (played.termination, played.row.length) == (Termination.TOKEN_TRUNCATION, 0)


async def test_an_action_may_use_its_budget_and_no_more() -> None:
    seat = ScriptedSeat([say("shell", "echo a b c d e f"), say("finish")], TaskBudget(max_action_tokens=4))
    played = await play(seat)
    assert played.invalid_actions == 1
    assert seat.turns[0].sampled.ids.shape == (4,)
    assert seat.turns[0].action == InvalidAction(code="unterminated", message="no end")


async def test_timeouts_are_bounded() -> None:
    seat = ScriptedSeat([say("shell", "sleep 99")] * 8)
    played = await play(seat)
    assert (played.termination, len(seat.ran)) == (Termination.TOOL_TIMEOUT, MAX_TOOL_TIMEOUTS)
    once = ScriptedSeat([say("shell", "sleep 99"), say("finish")])
    assert (await play(once)).termination is Termination.AGENT_FINISH


any_turn = st.one_of(
    st.lists(st.integers(0, RENDERER.vocab_size - 1), min_size=1, max_size=20),
    st.sampled_from(["ls", "cat a", "sleep 99"]).map(lambda command: say("shell", command)),
    st.just(say("finish", "x")),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(any_turn, min_size=8, max_size=8), st.integers(20, 200))
async def test_the_row_is_token_exact_whatever_is_sampled(script: list[list[int]], context: int) -> None:
    seat = ScriptedSeat(script, context_tokens=context)
    row = (await play(seat)).row
    ids, mask, logprobs = row.ids(), row.mask(), row.logprobs()
    turns = [turn.sampled for turn in seat.turns]
    assert row.length == ids.shape[0] == mask.shape[0] == logprobs.shape[0] <= context
    assert ids[mask].tolist() == [token for turn in turns for token in turn.ids.tolist()]
    assert logprobs[mask].tolist() == [value for turn in turns for value in turn.logprobs.tolist()]
    assert not logprobs[~mask].any()
    assert ids.tolist() == [t for turn in seat.turns for part in (turn.fed, turn.sampled.ids) for t in part.tolist()]
    for start, turn, prompt in zip(row.turn_starts, turns, seat.prompts, strict=True):
        assert ids[start : start + turn.ids.shape[0]].tolist() == turn.ids.tolist()
        assert prompt.tolist() == ids[:start].tolist()  # what the engine saw is what is trained on
    versions = np.full(row.length, -1)
    for span in row.versions:
        versions[span.start : span.end] = span.version
    expected = [s.version for turn in turns for s in turn.versions for _ in range(s.start, s.end)]
    assert versions[mask].tolist() == expected
    assert (versions[~mask] == -1).all()


@settings(deadline=None, max_examples=200)
@given(st.lists(any_turn, min_size=8, max_size=8), st.integers(20, 200), st.integers(0, 8))
async def test_a_play_goes_on_after_any_of_its_turns(script: list[list[int]], context: int, cut: int) -> None:
    """Taken up from its records, a play ends as it would have; only the last command is asked for again."""
    seat = ScriptedSeat(script, context_tokens=context)
    whole = await play(seat)
    kept = seat.turns[:cut]
    effects = [turn.previous for turn in kept[1:]]
    past = [
        PastTurn(
            fed=turn.fed,
            sampled=turn.sampled,
            action=turn.action,
            acted=None if effect is None else acted_before(effect_of(effect)),
        )
        for turn, effect in zip(kept, [*effects, None], strict=False)
    ]
    later = ScriptedSeat(script, context_tokens=context, past=past)
    continued = await play(later)
    assert (continued.termination, continued.invalid_actions) == (whole.termination, whole.invalid_actions)
    assert _parts(continued.row) == _parts(whole.row)
    assert [turn.number for turn in later.turns] == [turn.number for turn in seat.turns[cut:]]
    known = sum(isinstance(turn.action, ToolCall) for turn in kept[:-1])
    assert later.ran == seat.ran[known:]


def _parts(row: Row) -> list[object]:
    return [row.ids().tolist(), row.mask().tolist(), row.logprobs().tolist(), row.turn_starts, row.versions, row.engines]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ids": np.zeros(0, dtype=np.int32)}, "sampled_ids"),
        ({"logprobs": np.asarray([-1, np.nan], dtype=np.float32)}, "logprobs"),
        ({"logprobs": np.asarray([-1, -9999], dtype=np.float32)}, "logprobs"),
        ({"logprobs": np.asarray([-1], dtype=np.float32)}, "logprobs"),
        ({"raw_logprobs": np.asarray([-1, np.inf], dtype=np.float32)}, "raw_logprobs"),
        ({"versions": ()}, "versions"),
        ({"versions": (VersionSpan(0, 1, 3),)}, "versions"),
        ({"versions": (VersionSpan(0, 1, 3), VersionSpan(0, 2, 3))}, "versions"),
        ({"versions": (VersionSpan(0, 2, -1),)}, "versions"),
    ],
)
def test_an_answer_that_does_not_line_up_is_refused(change: dict[str, object], named: str) -> None:
    whole: dict[str, object] = {
        "ids": np.asarray([4, 5], dtype=np.int32),
        "logprobs": np.asarray([-0.5, -0.1], dtype=np.float32),
        "raw_logprobs": None,
        "versions": (VersionSpan(0, 2, 3),),
        "finish_reason": "stop",
    }
    Sampled(**whole).checked()  # type: ignore[arg-type]
    with pytest.raises(SampleError, match=named):
        Sampled(**{**whole, **change}).checked()  # type: ignore[arg-type]


def test_raw_logprobs_stand_only_where_every_turn_has_them() -> None:
    row = Row()
    row.feed(np.asarray([1, 2], dtype=np.int32))
    turn = sampled([7, END], 0)
    row.sampled(Sampled(**{**{f: getattr(turn, f) for f in turn.__dataclass_fields__}, "raw_logprobs": turn.logprobs - 1}))
    raw = row.raw_logprobs()
    assert raw is not None
    assert raw.tolist() == [0.0, 0.0, *(turn.logprobs - 1).tolist()]
    row.sampled(turn)
    assert row.raw_logprobs() is None
