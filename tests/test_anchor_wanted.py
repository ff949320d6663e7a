"""A synchronizer that starts beside a damaged patch, with no anchor beyond it, gets one from the living trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from admission_stage import Stage
from conftest import eventually
from trainer_stand import Sampled, commits, configuration, reached, trainer, write_ledger

import param_sync.service
import services.engine.service
from param_sync.anchor_wanted import candidates
from schemas.lineage import Lineage
from schemas.policy import EngineState
from schemas.table import Role
from schemas.training import StepCommit
from services import blobs
from services.bus import Bus

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


def commit(step: int, incarnation: int = 0) -> StepCommit:
    return StepCommit(
        run="t",
        step=step,
        version=step + 1,
        incarnation=incarnation,
        digest=f"{incarnation}-{step + 1}",
        base_digest="",
        groups=(),
        rows=0,
        trained_tokens=0,
        optimizer_steps=1,
        patches=(),
        patch_bytes=0,
        metrics={},
        ledger_seq=0,
    )


def test_an_anchor_of_a_living_version_from_there_on_is_an_answer() -> None:
    made = [*(commit(step) for step in range(5)), commit(3, 1), commit(4, 1)]
    line = Lineage()
    for each in made:
        line.add(each)
    found = [(c.incarnation, c.version) for c in candidates(made, line, commit(2))]
    assert found == [(1, 5), (1, 4), (0, 3)]  # versions 4 and 5 of incarnation 0 are a dead branch's


async def spoil(stage: Stage, bus: Bus, name: str) -> None:
    """Other bytes under the name."""
    collector = await stage.bus(Role.PARAM_SYNC, "spoiler")
    await blobs.remove(collector, name)
    await blobs.put(bus, name, b"these are other bytes")


async def test_it_comes_while_the_trainer_waits_and_after_all_steps(tmp_path: Path, nats_url: str, run_name: str) -> None:
    """Two ranks at ZeRO 3 meet for it, once in front of a batch that does not come, once when all is done."""
    config = configuration(tmp_path, run_name, nats_url, ranks=2, zero_stage=3)
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.TRAINER)
        sampler = await stage.bus(Role.ROLLOUTER)
        synchronizer = await stage.start(Role.PARAM_SYNC, param_sync.service.serve, "first")
        sampled = Sampled(sampler)
        with trainer(config, tmp_path / "trainer.log") as running:
            for steps, damaged in ((range(3), 1), (range(3, 6), 4)):
                if steps[0]:  # the synchronizer has seen none of these
                    await synchronizer.stop()
                await write_ledger(sampler, sampled, steps)
                await reached(bus, steps[-1], trainer=running)
                if not steps[0]:
                    await synchronizer.stop()
                made = await commits(bus)
                await spoil(stage, bus, made[damaged].patches[0].name)
                last = made[-1]
                name = f"anchor-0-{last.version}-{last.digest[:16]}"
                assert name not in await blobs.names(bus)
                synchronizer = await stage.start(Role.PARAM_SYNC, param_sync.service.serve, f"from-{damaged}")
                await eventually(lambda at=last: bus.last(bus.subjects.anchor(at.version)), within_s=90, what=running.tail())
                assert running.said("anchor on demand") and name in await blobs.names(bus)
            await stage.start(Role.ENGINE, services.engine.service.serve, "e0")

            async def there() -> bool:
                item = await bus.last(bus.subjects.engine_heartbeat("e0"))
                state = None if item is None else item.decode(EngineState)
                return state is not None and (state.phase, state.digest) == ("serving", made[-1].digest)

            await eventually(there, within_s=90)
            running.terminate()
            assert await running.ended() == 0, running.tail()
