"""Requirement R11 on the requester's side: what becomes of an episode when the weights change under it.

What engines do with a single generation in each mode is in `test_engine_conformance.py`.
"""

from __future__ import annotations

import pytest

from rollouter.groups import MAX_RESTARTS
from schemas.attempts import AttemptEnded, AttemptOpened
from schemas.codec import decode_any
from schemas.table import Stream
from services.bus import Bus
from services.consume import read_all
from tests.rollout_stand import (
    TASKS,
    Ask,
    ScriptedEngine,
    Words,
    configuration,
    episodes_of,
    lease,
    make_sandbox_root,
    say,
    stand,
    turns_of,
)

__all__ = ["make_sandbox_root"]  # a fixture

pytestmark = pytest.mark.timeout(180)
FIRST, SECOND, LAST = say("shell", "echo one > a"), say("shell", "cat a"), say("finish", "done")


async def attempts_of(bus: Bus) -> tuple[list[AttemptOpened], list[AttemptEnded]]:
    records = [decode_any(item.data) for item in await read_all(bus, Stream.TURNS)]
    return [r for r in records if isinstance(r, AttemptOpened)], [r for r in records if isinstance(r, AttemptEnded)]


async def test_a_cut_turn_begins_its_attempt_anew(nats_url: str, run_name: str, sandbox_root: str) -> None:
    """The second turn is cut: a new attempt in a new sandbox, no retry used up, and no token of the first is kept."""
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root}, param_sync={"mode": "restart"})
    engine = ScriptedEngine("e0", lambda ask: LAST, mixed=False)

    def speech(ask: Ask) -> Words:
        if ask.turn == 1 and ask.attempt == 0:
            engine.version += 1
            return "cut"
        return (FIRST, SECOND, LAST)[ask.turn]

    engine.speech = speech
    async with stand(config, engine) as context:
        await context.bus.publish_once(context.bus.subjects.lease(0), lease(config, 0, TASKS[0], size=1, slot_retries=0))
        (episode,) = await episodes_of(context.bus, 1)
        opened, ended = await attempts_of(context.bus)
        counters = context.health.counters
    assert (episode.attempt, episode.turns) == (1, 3) and {span.version for span in episode.versions} == {4}
    assert [record.reason for record in ended] == ["restarted"] and len({record.sandbox for record in opened}) == 2
    assert counters["tokens_kept"] == sum(map(len, (FIRST, SECOND, LAST))) == episode.sampled_tokens
    assert counters["tokens_wasted"] == len(FIRST) + 3
    assert "infra_aborts" not in counters


async def test_an_episode_that_meets_other_weights_between_its_turns_begins_anew(
    nats_url: str, run_name: str, sandbox_root: str
) -> None:
    """While a command ran the engine changed: the turn of the new version is not appended to those of the old one."""
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root}, param_sync={"mode": "restart"})
    engine = ScriptedEngine("e0", lambda ask: LAST, mixed=False)

    def speech(ask: Ask) -> Words:
        if ask.turn == 1 and ask.attempt == 0:
            engine.version += 1
        return (FIRST, SECOND, LAST)[ask.turn]

    engine.speech = speech
    async with stand(config, engine) as context:
        await context.bus.publish_once(context.bus.subjects.lease(0), lease(config, 0, TASKS[0], size=1, slot_retries=0))
        (episode,) = await episodes_of(context.bus, 1)
        turns = await turns_of(context.bus)
        counters = context.health.counters
    assert episode.attempt == 1 and {span.version for span in episode.versions} == {4}
    assert [(turn.attempt, turn.turn) for turn in turns] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert counters["tokens_wasted"] == len(FIRST) + len(SECOND)


async def test_restarts_have_an_end_and_then_tokens_say_their_version(nats_url: str, run_name: str, sandbox_root: str) -> None:
    """Weights that change faster than an episode ends do not keep it for ever."""
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root}, param_sync={"mode": "restart"})
    engine = ScriptedEngine("e0", lambda ask: LAST, mixed=False)

    def speech(ask: Ask) -> Words:
        engine.version += 1
        return (FIRST, LAST)[ask.turn]

    engine.speech = speech
    async with stand(config, engine) as context:
        await context.bus.publish_once(context.bus.subjects.lease(0), lease(config, 0, TASKS[0], size=1, slot_retries=0))
        (episode,) = await episodes_of(context.bus, 1)
        _, ended = await attempts_of(context.bus)
    assert episode.attempt == MAX_RESTARTS == len(ended)
    assert len({span.version for span in episode.versions}) == 2


async def test_in_other_modes_a_cut_turn_is_only_issued_again(nats_url: str, run_name: str, sandbox_root: str) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root}, param_sync={"mode": "regenerate"})
    cut: list[int] = []

    def speech(ask: Ask) -> Words:
        if ask.turn == 1 and not cut:
            cut.append(ask.turn)
            return "cut"
        return (FIRST, SECOND, LAST)[ask.turn]

    async with stand(config, ScriptedEngine("e0", speech)) as context:
        await context.bus.publish_once(context.bus.subjects.lease(0), lease(config, 0, TASKS[0], size=1, slot_retries=0))
        (episode,) = await episodes_of(context.bus, 1)
        opened, ended = await attempts_of(context.bus)
        counters = context.health.counters
    assert (episode.attempt, episode.turns, len(opened), ended) == (0, 3, 1, [])
    assert counters["tokens_wasted"] == 3 and counters["tokens_kept"] == episode.sampled_tokens
