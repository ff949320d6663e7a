"""The parts of the fault harness by themselves: schedules from a seed, tables from records, mutations that still fit."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest

from loadtests.chaos.points import POINTS, SERVER, SERVICES
from loadtests.chaos.processes import Process, carrying
from loadtests.chaos.report import alone, summary
from loadtests.chaos.schedule import Fault, Ground, faults, service_of
from tests.faults.mutations import MUTATIONS, Mutation

LABELS = ("admission-0", "bank-0", "engine-e0", "engine-e1", SERVER, "rollouter-0", "rollouter-1", "trainer-0")
GROUND = Ground(labels=LABELS, proxied=("rollouter-1",), clocked=("bank-0",))


def some(seed: int, count: int = 400, **options: object) -> list[Fault]:
    return list(islice(faults(seed, GROUND, **options), count))  # type: ignore[arg-type]


def test_a_schedule_is_a_function_of_its_seed_and_hits_every_service_at_every_point() -> None:
    assert some(1) == some(1)
    assert some(1) != some(2)
    met = {fault.point for fault in some(1, 3000) if fault.point is not None}
    assert met == set(POINTS)
    assert {service for fault in some(1, 3000) for service in fault.services()} == set(SERVICES)


def test_a_schedule_hits_only_what_it_may() -> None:
    for fault in some(3):
        if fault.kind == "cut":
            assert fault.label == "rollouter-1"
        if fault.kind == "pair":
            assert fault.point is not None and service_of(fault.label) != fault.point.service
    name = POINTS[0].name
    assert all(fault.point is None or fault.point.name != name for fault in some(4, avoid=[name]))
    assert {fault.kind for fault in some(5, kinds={"kill": 1, "pause": 1, "full disk": 1})} == {"kill", "pause"}


def record(service: str, at_s: float, until_s: float, **changes: object) -> dict[str, object]:
    out: dict[str, object] = {"kind": "kill", "service": service, "at_s": at_s, "until_s": until_s, "started_s": 0.5}
    return out | {"unit_s": until_s - at_s, "whole_s": None} | changes


def test_a_table_counts_what_recovered_and_tells_faults_that_were_alone() -> None:
    records = [
        record("bank", 0.0, 2.0),
        record("bank", 10.0, 14.0),
        record("trainer", 12.0, 20.0),
        record("trainer", 30.0, 210.0, unit_s=None),
        record("sandbox", 40.0, 41.0, kind="cut"),
    ]
    assert [alone(each, records) for each in records] == [True, False, False, False, False]
    rows = {row["service"]: row for row in summary(records)}
    assert set(rows) == {"bank", "trainer"}
    assert (rows["bank"]["killed"], rows["bank"]["unit_median_s"], rows["bank"]["unit_max_alone_s"]) == (2, 3.0, 2.0)
    assert (rows["trainer"]["killed"], rows["trainer"]["recovered"]) == (2, 1)


def test_no_process_is_taken_for_one_of_a_run_that_it_does_not_belong_to() -> None:
    assert carrying("no such token", "/no/such/folder") == []
    ourselves = Process.of(os.getpid())
    assert ourselves is not None and ourselves.alive() and not ourselves.carries("no such token")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_deliberate_bug_can_still_be_made(mutation: Mutation) -> None:
    """Whether its test notices is what `python -m tests.faults.mutants` tries."""
    root = Path(__file__).resolve().parents[2]
    edit = mutation.edit_for(root)
    assert edit.old != edit.new
    assert (root / mutation.test.split("::")[0]).is_file()
