"""The rollouter on a real server with real sandboxes; only the engine is scripted, and it speaks the real protocol."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from examples.terminal.suite import suite
from rollouter import fleet
from schemas.actions import InvalidAction
from schemas.termination import Termination
from schemas.trajectory import TurnEffect
from tests.rollout_stand import (
    END,
    RENDERER,
    TASKS,
    Ask,
    ScriptedEngine,
    Words,
    configuration,
    episodes_of,
    eventually,
    lease,
    lose_sandbox,
    make_sandbox_root,
    oracle_speech,
    say,
    stand,
    turns_of,
    verdicts_of,
)

__all__ = ["make_sandbox_root"]  # a fixture


async def test_rows_hold_exactly_what_the_engines_sampled(nats_url: str, run_name: str, sandbox_root: str) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    leases = [lease(config, n, TASKS[n]) for n in range(3)]
    speech = oracle_speech({each.group: each.task_id for each in leases})
    engines = ScriptedEngine("e0", speech), ScriptedEngine("e1", speech)
    async with stand(config, *engines) as context:
        for each in leases:
            await context.bus.publish_once(context.bus.subjects.lease(each.ordinal), each)
        episodes = await episodes_of(context.bus, 12)
        verdicts = await verdicts_of(context.bus, 12)
        turns = await turns_of(context.bus)
    assert {(e.group, e.slot) for e in episodes} == {(each.group, slot) for each in leases for slot in range(4)}
    assert sum(e.turns for e in episodes) == len(turns)
    assert {(v.status, v.success, v.reward) for v in verdicts.values()} == {("graded", True, 1.0)}
    for episode in episodes:
        session = f"{episode.group}-{episode.slot}-0"
        results = [r for e in engines for r in e.answered.get(session, [])]
        results.sort(key=lambda r: -float(r.logprobs.numpy()[0]))  # type: ignore[union-attr]  # the script lowers them by turn
        ids, mask = episode.ids.numpy(), episode.mask.numpy()
        assert ids[mask].tolist() == [t for r in results for t in r.sampled_ids.numpy().tolist()]  # type: ignore[union-attr]
        expected = np.concatenate([r.logprobs.numpy() for r in results])  # type: ignore[union-attr]
        assert episode.logprobs.numpy()[mask].tolist() == expected.tolist()
        assert episode.raw_logprobs is not None
        assert episode.raw_logprobs.numpy()[mask].tolist() == (expected - 1).tolist()
        spans = [s.version for r in results for s in r.versions for _ in range(s.start, s.end)]
        assert episode.token_versions()[mask].tolist() == spans
        assert (episode.oldest_version(), episode.newest_version()) == (3, 4)
        assert episode.termination is Termination.AGENT_FINISH
        assert episode.terminal_state is not None
        assert episode.terminal_state.state_hash
        journal = sorted((t for t in turns if (t.group, t.slot) == (episode.group, episode.slot)), key=lambda t: t.turn)
        assert [t.turn for t in journal] == list(range(episode.turns))
        row = [i for t in journal for part in (t.prompt_ids, t.sampled_ids) for i in part.numpy().tolist()]
        assert row == ids.tolist()
        assert journal[-1].state_before == episode.terminal_state.state_hash  # the last action finishes
        for one, after in pairwise(journal):
            assert one.command_id.endswith(f".{one.turn}") and after.previous is not None
            assert (after.previous.lane, after.previous.state_after) == ("command", after.state_before)


async def test_every_ending_has_its_code_and_its_cost(nats_url: str, run_name: str, sandbox_root: str) -> None:
    config = configuration(
        nats_url,
        run_name,
        sandbox={"root": sandbox_root},
        policy={"max_context_tokens": 224},
        rollout={"inline_state_bytes": 0},  # so that the verifier reads every state from the object store
    )
    one = lease(config, 0, TASKS[0])
    endings = {
        0: lambda ask: [RENDERER.token_id("<|tool|>"), END],  # never an action
        1: lambda ask: say("shell", "seq 999") if ask.turn < 9 else say("finish"),  # fills its context
        2: lambda ask: say("abstain", "no"),
        3: lambda ask: say("shell", "touch made; false") if ask.turn == 0 else say("finish"),
    }
    async with stand(config, ScriptedEngine("e0", lambda ask: endings[ask.slot](ask))) as context:
        await context.bus.publish_once(context.bus.subjects.lease(0), one)
        episodes = {e.slot: e for e in await episodes_of(context.bus, 4)}
        verdicts = {slot: verdict for (_, slot), verdict in (await verdicts_of(context.bus, 4)).items()}
        turns = await turns_of(context.bus)
    assert [verdicts[slot].status for slot in range(4)] == ["graded", "censored", "graded", "graded"]
    assert [verdicts[slot].reward for slot in range(4)] == [0.0, None, 0.0, 0.0]
    budget = suite.task(TASKS[0]).budget
    never, full, abstained, finished = (episodes[slot] for slot in range(4))
    assert (never.termination, never.invalid_actions, never.turns) == (Termination.TASK_BUDGET, 8, budget.max_turns)
    assert full.termination is Termination.TOKEN_TRUNCATION
    assert full.ids.shape[0] <= 224
    assert (abstained.termination, abstained.turns) == (Termination.AGENT_ABSTAIN, 1)
    assert (finished.termination, finished.invalid_actions) == (Termination.AGENT_FINISH, 0)
    reset = {t.state_before for t in turns if t.turn == 0}
    assert len(reset) == 1  # every sibling starts from the same state
    assert all(e.terminal_state and e.terminal_state.inline is None for e in episodes.values())
    states = {slot: e.terminal_state.state_hash for slot, e in episodes.items() if e.terminal_state}
    assert states[0] == states[2] == next(iter(reset))  # an invalid action has no side effect
    assert states[3] != states[0]
    failed = next(t for t in turns if t.slot == 3 and t.turn == 1).previous
    assert failed == TurnEffect(exit_code=1, lane="command", state_after=states[3])
    refused, after = sorted((t for t in turns if t.slot == 0 and t.turn < 2), key=lambda t: t.turn)
    assert isinstance(refused.action, InvalidAction)
    assert after.previous is not None and after.previous.refused
    assert after.previous.observation.startswith(b"invalid ")


async def test_a_turn_that_an_engine_does_not_deliver_is_issued_to_another(
    nats_url: str, run_name: str, sandbox_root: str
) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root}, rollout={"generate_timeout_s": 1.0})
    troubles: list[Words] = ["refused", "error", "aborted", "damaged", None]
    bad = ScriptedEngine("e0", lambda ask: troubles.pop() if troubles else say("finish", "bad"))
    good = ScriptedEngine("e1", lambda ask: say("finish", "good"))
    async with stand(config, bad, good) as context:
        groups = 0
        while troubles or not groups:  # each group has turns for both engines
            await context.bus.publish_once(context.bus.subjects.lease(groups), lease(config, groups, TASKS[groups]))
            groups += 1
            episodes = await episodes_of(context.bus, 4 * groups)
        counters = dict(context.health.counters)
    assert [counters.get(f"turns_reissued_{kind}") for kind in ("refused", "error", "aborted", "inconsistent", "timeout")] == [
        1
    ] * 5
    assert all(e.termination is Termination.AGENT_FINISH and e.turns == 1 for e in episodes)
    assert len(bad.aborted) == 1  # the one that timed out was cancelled
    spoken = [r.request_id for e in (bad, good) for results in e.answered.values() for r in results]
    assert len(spoken) == len(set(spoken)) == 4 * groups
    assert "infra_aborts" not in counters


@pytest.mark.parametrize("silently", [False, True])
async def test_an_engine_that_fails_loses_its_turns_at_once(
    nats_url: str, run_name: str, sandbox_root: str, monkeypatch: pytest.MonkeyPatch, silently: bool
) -> None:
    monkeypatch.setattr(fleet, "STALE_S", 2.5)
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root}, rollout={"generate_timeout_s": 60.0})
    dying = ScriptedEngine("e0", lambda ask: None)
    other = ScriptedEngine("e1", lambda ask: say("finish"), phase="applying")
    async with stand(config, dying, other) as context:
        await context.bus.publish_once(context.bus.subjects.lease(0), lease(config, 0, TASKS[0]))

        async def all_asked() -> bool:
            return len(dying.asked) == 4

        await eventually("four turns at the only engine that serves", all_asked)
        assert not other.asked  # an engine in transition is avoided
        other.phase, dying.mute = "serving", silently
        if not silently:
            dying.phase = "failed"
            await dying.announce()
        episodes = await episodes_of(context.bus, 4, 10.0)
        assert context.health.counters["turns_reissued_engine_gone"] == 4
    assert {e.engines for e in episodes} == {("e1",)}


async def test_a_lost_sandbox_costs_the_slot_an_attempt_and_no_sibling(nats_url: str, run_name: str, sandbox_root: str) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    one = lease(config, 0, TASKS[0], slot_retries=1)

    async def speak(ask: Ask) -> Words:
        """Slot 0 loses its first sandbox, slot 1 every one; the loss shows at the second command."""
        if ask.turn == 1 and (ask.slot == 1 or (ask.slot == 0 and ask.attempt == 0)):
            await lose_sandbox(context.bus, ask)
            return say("shell", "ls")
        return say("shell", "pwd") if ask.turn == 0 else say("finish")

    async with stand(config, ScriptedEngine("e0", speak)) as context:
        await context.bus.publish_once(context.bus.subjects.lease(0), one)
        episodes = {e.slot: e for e in await episodes_of(context.bus, 4)}
        counters = dict(context.health.counters)
    assert [episodes[slot].attempt for slot in range(4)] == [1, 1, 0, 0]
    assert [episodes[slot].termination for slot in range(4)] == [
        Termination.AGENT_FINISH,
        Termination.INFRA_ABORT,
        Termination.AGENT_FINISH,
        Termination.AGENT_FINISH,
    ]
    aborted = episodes[1]
    assert (aborted.ids.shape, aborted.turns, aborted.versions, aborted.terminal_state) == ((0,), 0, (), None)
    assert counters["infra_aborts"] == 3


async def test_a_group_that_cannot_be_played_is_sealed_and_the_others_go_on(
    nats_url: str, run_name: str, sandbox_root: str
) -> None:
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    unknown = msgspec.structs.replace(lease(config, 0, TASKS[0], size=2), task_id="no-such-task")
    foreign = lease(config, 1, TASKS[0], size=2, manifest="ffff")
    elsewhere = lease(config, 2, TASKS[0], size=2, base_snapshot="0" * 64)
    sound = lease(config, 3, TASKS[0], size=2)
    async with stand(config, ScriptedEngine("e0", lambda ask: say("finish"))) as context:
        await context.bus.store(context.bus.subjects.lease(9), b"no message", {})
        for each in (unknown, foreign, elsewhere, sound):
            await context.bus.publish_once(context.bus.subjects.lease(each.ordinal), each)
        episodes = await episodes_of(context.bus, 8)
    assert {(e.group, e.termination) for e in episodes} == {
        (unknown.group, Termination.INFRA_ABORT),
        (foreign.group, Termination.SCHEDULER_CANCEL),
        (elsewhere.group, Termination.INFRA_ABORT),
        (sound.group, Termination.AGENT_FINISH),
    }
