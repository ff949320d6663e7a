"""The verifier service: one verdict per episode, and no reward that nobody earned."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from rollouter.agent import Played
from rollouter.episode import aborted_episode, episode_of
from rollouter.journal import AttemptName
from rollouter.rows import Row
from schemas.table import Role
from schemas.termination import CENSORED, Termination
from schemas.trajectory import Episode, StateRef
from services.config import Config
from services.verifier import service as verifier_service
from tests.rollout_stand import TASKS, configuration, context_of, lease, make_sandbox_root, serving, verdicts_of

__all__ = ["make_sandbox_root"]  # a fixture
STATE = StateRef(state_hash="0" * 64, tar_digest="1" * 64, size_bytes=3, inline=b"tar")
MISSING = StateRef(state_hash="0" * 64, tar_digest="2" * 64, size_bytes=3)


def episode(config: Config, slot: int, termination: Termination, state: StateRef | None, task_id: str = TASKS[0]) -> Episode:
    name = AttemptName(lease=lease(config, 0, TASKS[0]), slot=slot, attempt=0)
    row = Row()
    row.feed(np.asarray([1, 2, 3], dtype=np.int32))
    sealed = episode_of(name, Played(termination=termination, row=row), "x0", state, "r0", 0)
    return msgspec.structs.replace(sealed, task_id=task_id)


async def test_only_a_grader_that_judged_gives_a_reward(
    nats_url: str, run_name: str, sandbox_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_service, "_RETRY_S", 0.01)
    config = configuration(nats_url, run_name, sandbox={"root": sandbox_root})
    finished = Termination.AGENT_FINISH
    broken = {
        10: (episode(config, 10, finished, None), "no terminal state"),
        11: (episode(config, 11, finished, MISSING), "not in the store"),
        12: (episode(config, 12, finished, STATE), "do not match"),
        13: (episode(config, 13, finished, STATE, "no-such-task"), "no grader"),
    }
    async with (
        context_of(config, Role.ROLLOUTER, "r0") as rollouter,
        serving(config, Role.VERIFIER, "v0", verifier_service.serve) as context,
    ):
        bus = rollouter.bus
        for slot, code in enumerate(sorted(CENSORED)):
            await bus.publish_once(bus.subjects.episode("g00000000", slot), episode(config, slot, code, STATE))
        for slot, (each, _) in broken.items():
            await bus.publish_once(bus.subjects.episode("g00000000", slot), each)
        await bus.store(bus.subjects.episode("g00000000", 14), b"no message", {})
        aborted = aborted_episode(
            AttemptName(lease=lease(config, 0, TASKS[0]), slot=15, attempt=0), Termination.INFRA_ABORT, "r0", 0
        )
        await bus.publish_once(bus.subjects.episode("g00000000", 15), aborted)
        verdicts = {slot: verdict for (_, slot), verdict in (await verdicts_of(bus, len(CENSORED) + 6)).items()}
        assert context.health.counters["verdict_verifier_error"] == 5
    assert {verdicts[slot].status for slot in (*range(len(CENSORED)), 15)} == {"censored"}
    for slot, (_, reason) in {**broken, 14: (None, "not readable")}.items():
        assert verdicts[slot].status == "verifier_error"
        assert reason in verdicts[slot].detail
    assert {(v.reward, v.success) for v in verdicts.values()} == {(None, None)}
