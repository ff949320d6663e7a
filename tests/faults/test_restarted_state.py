"""What services keep is a fold over streams: one that restarts knows of every group again, in the middle of it too."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import admission.bank_service
import admission.service
from schemas.lease import GroupLease
from schemas.ledger import BatchEntry
from schemas.table import Role, Stream
from schemas.training import BatchDemand
from services.bus import Bus
from services.config import Config, check
from services.items import Item
from services.work import WorkConsumer
from tests.admission_stage import Stage, connected, items, make_episode, make_lease, make_verdict
from tests.conftest import eventually

pytestmark = pytest.mark.timeout(180)
BATCH = 2


def configuration(run: str, url: str) -> Config:
    return check(
        {
            "run": {"name": run},
            "nats": {"url": url},
            "rollout": {"group_size": 2},
            "engine": {"kind": "simulated"},
            "admission": {"groups_per_batch": BATCH, "min_rewards": 1},
            "telemetry": {"heartbeat_s": 0.3},
        }
    )


async def judged(bus: Bus, lease: GroupLease, slot: int, version: int = 0) -> None:
    """One sibling is sealed and judged."""
    episode = make_episode(lease, slot, version=version)
    stored = await bus.publish_once(bus.subjects.episode(lease.group, slot), episode)
    await bus.publish_once(bus.subjects.verdict(lease.group, slot), make_verdict(episode, stored.digest, reward=float(slot)))


async def test_a_bank_that_restarts_between_siblings_completes_the_group(nats_url: str, run_name: str) -> None:
    """Invariant 3. A cursor into EPISODES would skip the sibling that came before the restart."""
    async with Stage(nats_url, configuration(run_name, nats_url)) as stage:
        bus = await stage.bus(Role.OBSERVER)
        lease = make_lease(0)
        await bus.publish_once(bus.subjects.lease(0), lease)
        first = await stage.start(Role.BANK, admission.bank_service.serve)
        await judged(bus, lease, 0)
        await eventually(lambda: first.context.health.counters.get("open_groups") == 1, within_s=30)
        await first.kill()
        await stage.start(Role.BANK, admission.bank_service.serve)
        await judged(bus, lease, 1)
        await eventually(lambda: items(bus, Stream.READY, f"ready.{lease.group}"), within_s=20, what="the group is whole")


async def test_an_admission_that_restarts_knows_what_it_has_closed(nats_url: str, run_name: str) -> None:
    """Invariants 3 and 4. Counts that were only in memory would close a group again or wait for ever."""
    async with Stage(nats_url, configuration(run_name, nats_url)) as stage:
        bus = await stage.bus(Role.OBSERVER)
        await stage.start(Role.BANK, admission.bank_service.serve)

        async def batch(step: int, ordinals: range) -> list[str]:
            """The step's batch, once these groups were whole, one after another, and it was demanded."""
            for ordinal in ordinals:
                lease = make_lease(ordinal)
                await bus.publish_once(bus.subjects.lease(ordinal), lease)
                for slot in range(2):
                    await judged(bus, lease, slot, step)
                await eventually(lambda group=lease.group: items(bus, Stream.READY, f"ready.{group}"), within_s=20)
            demand = BatchDemand(run=run_name, step=step, version=step, incarnation=0, groups=BATCH)
            await bus.publish_once(bus.subjects.demand(step), demand)
            found = await eventually(
                lambda: items(bus, Stream.LEDGER, f"ledger.batch.{step}"), within_s=30, what=f"batch {step}"
            )
            return [member.group for member in found[0].decode(BatchEntry).groups]

        first = await stage.start(Role.ADMISSION, admission.service.serve)
        before = await batch(0, range(3))
        await first.kill()
        await stage.start(Role.ADMISSION, admission.service.serve, "1")
        after = await batch(1, range(3, 4))
        assert before == [make_lease(ordinal).group for ordinal in (0, 1)]
        assert after == [make_lease(ordinal).group for ordinal in (2, 3)], "the group that was left over comes first"


async def test_a_message_in_work_is_not_given_to_another(nats_url: str, run_name: str) -> None:
    """Work that takes longer than the consumer waits for an acknowledgement is kept by heartbeats."""
    async with connected(nats_url, run_name, Role.ROLLOUTER) as bus:
        await bus.publish_once(bus.subjects.lease(0), make_lease(0))
        begun: list[str] = []

        def working(name: str) -> WorkConsumer:
            consumer = WorkConsumer(bus, "rollouter", capacity=1, drain_s=5.0)
            consumer.spec = replace(consumer.spec, ack_wait_s=1.5)

            async def work(_: Item) -> None:
                begun.append(name)
                await asyncio.sleep(6.0)

            tasks.append(asyncio.create_task(consumer.run(work, stop)))
            return consumer

        tasks: list[asyncio.Task[None]] = []
        stop = asyncio.Event()
        consumers = [working(name) for name in ("a", "b")]
        await eventually(lambda: sum(consumer.done for consumer in consumers) == 1, within_s=40)
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
        assert len(begun) == 1, f"it was begun by {begun}"
