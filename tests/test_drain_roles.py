"""SIGTERM on each service alone, in a run that flows: exit code 0, everything acknowledged or handed back. A second one is a
hard stop that loses nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from schemas.table import Role
from services.registry import SERVE
from services.runtime import EXIT_CLEAN, EXIT_HARD
from tests.conftest import eventually
from tests.drain_stand import Floor, running_floor
from tests.press_stand import check_record, left_to_time_outs, picture

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

# A grader has a wall-clock limit of its own, which other work on the machine can make it exceed: kept, with the reason.
REASONS = frozenset({"stale", "verifier_error"})


@pytest.fixture(scope="module")
def floor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Floor]:
    with running_floor(tmp_path_factory.mktemp("floor")) as floor:
        yield floor


@pytest.mark.parametrize("role", SERVE, ids=str)
async def test_one_sigterm_drains_and_a_second_stops_hard(floor: Floor, role: Role) -> None:
    service = floor.services[role]
    async with floor.bus() as bus:
        await floor.flows(bus)
        service.signal(signal.SIGTERM)
        assert await service.ended() == EXIT_CLEAN, service.tail()
        assert await left_to_time_outs(bus, role) == [], service.tail()
        assert (await floor.last_beat(bus, role)).phase == "stopped"
        service.start()
        await service.says("ready")
        await floor.flows(bus)
        with floor.silent_server():  # nothing can be drained now
            service.signal(signal.SIGTERM)
            await service.says("draining")
            service.signal(signal.SIGTERM)
            assert await service.ended() == EXIT_HARD, service.tail()
        service.start()
        await service.says("ready")
        await floor.flows(bus)
        check_record(await picture(bus), reasons=REASONS)


async def test_a_killed_rollouter_leaves_what_a_drained_one_does_not(floor: Floor) -> None:
    """That the look at deliveries sees one that belongs to nobody."""
    service = floor.services[Role.ROLLOUTER]
    async with floor.bus() as bus:
        await floor.flows(bus)
        assert service.process is not None

        async def stopped_at_work() -> bool:
            service.signal(signal.SIGSTOP)
            if await left_to_time_outs(bus, Role.ROLLOUTER):
                return True
            service.signal(signal.SIGCONT)
            return False

        await eventually(stopped_at_work, within_s=60, what="it holds a lease in the moment it is stopped")
        service.signal(signal.SIGKILL)
        await service.ended()
        assert await left_to_time_outs(bus, Role.ROLLOUTER)
        service.start()
        await floor.flows(bus)
