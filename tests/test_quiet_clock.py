"""The load tests' clock: never backward, never ahead of the real one, and without what threads wait for a processor."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator

import pytest

from loadtests import quiet_clock

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this system does not count run-queue time"),
]


def spin(until: float) -> None:
    while time.monotonic() < until:
        sum(range(1000))


@pytest.fixture(name="crowd")
def make_crowd() -> Iterator[None]:
    """More programs than processors, for a few seconds."""
    context = multiprocessing.get_context("spawn")
    count = 2 * (os.cpu_count() or 1)
    crowd = [context.Process(target=spin, args=(time.monotonic() + 4.0,)) for _ in range(count)]
    for process in crowd:
        process.start()
    yield
    for process in crowd:
        process.join(60)


def test_time_in_the_run_queue_does_not_count(crowd: None) -> None:
    clock = quiet_clock.QuietClock()
    began, real, last = clock(), time.monotonic(), clock()
    while time.monotonic() - real < 3.0:
        now = clock()
        assert now >= last
        last = now
        sum(range(2000))
    shown, passed = clock() - began, time.monotonic() - real
    assert shown <= passed + quiet_clock.LOOK_EVERY_S
    assert clock.queued_s > 0
    assert abs(passed - shown - clock.queued_s) <= 2 * quiet_clock.LOOK_EVERY_S + 0.05 * passed


def test_a_loop_goes_by_it_and_its_timers_fire() -> None:
    async def sleeping() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        began, real = loop.time(), time.monotonic()
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert quiet_clock.queued_s() >= 0
        return loop.time() - began, time.monotonic() - real

    with asyncio.Runner(loop_factory=quiet_clock.runner()) as runner:
        shown, passed = runner.run(sleeping())
    assert shown + 1e-6 >= 0.2 and shown <= passed + quiet_clock.LOOK_EVERY_S
