"""The parts of the fault harness by themselves: schedules from a seed, tables from records, mutations that still fit."""

from __future__ import annotations

import os
from itertools import combinations, islice
from pathlib import Path

import pytest

from loadtests.chaos.audit_run import Audit
from loadtests.chaos.checks import check_line, line_of
from loadtests.chaos.observer_key import admitted
from loadtests.chaos.points import POINTS, SERVER, SERVICES
from loadtests.chaos.processes import Process, carrying
from loadtests.chaos.report import alone, hits, summary, targets
from loadtests.chaos.schedule import Fault, Ground, faults, service_of
from schemas.permissions import IDENTITIES
from schemas.training import StepCommit
from services.server_accounts import accounts
from tests.faults.mutations import MUTATIONS, Mutation

LABELS = (
    *("admission-0", "admission-1", "bank-0", "engine-e0", "engine-e1", SERVER, "param_sync-0", "rollouter-0", "rollouter-1"),
    *("sampler-0", "sandbox-x0", "trainer-0", "verifier-0"),
)
GROUND = Ground(labels=LABELS, proxied=("rollouter-1",), clocked=("bank-0",))


def some(seed: int, count: int = 400, **options: object) -> list[Fault]:
    return list(islice(faults(seed, GROUND, **options), count))  # type: ignore[arg-type]


def test_a_schedule_is_a_function_of_its_seed_and_hits_every_service_at_every_point() -> None:
    assert some(1) == some(1)
    assert some(1) != some(2)
    met = {fault.point for fault in some(1, 3000) if fault.point is not None}
    assert met == set(POINTS)
    assert {service for fault in some(1, 3000) for service in fault.services()} == set(SERVICES)


def test_pairs_are_drawn_from_every_two_services_the_server_among_them() -> None:
    pairs = [frozenset(fault.pair()) for fault in some(1, 400, kinds={"pair": 1})]
    every = {frozenset(pair) for pair in combinations(SERVICES, 2)}
    assert set(pairs[: len(every)]) == every, "each comes before any comes again"
    assert {frozenset((SERVER, service)) for service in SERVICES if service != SERVER} <= set(pairs)
    orders = {fault.pair() for fault in some(1, 400, kinds={"pair": 1})}
    assert ("trainer", SERVER) in orders and (SERVER, "trainer") in orders


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
    out: dict[str, object] = {
        "kind": "kill",
        "service": service,
        "at_s": at_s,
        "until_s": until_s,
        "started_s": 0.5,
        "ready_s": None,
    }
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


def test_what_was_hit_is_counted() -> None:
    records = [
        record("bank", 0.0, 2.0, fault=0, at_service="bank", point="p"),
        record("bank", 3.0, 4.0, fault=1, at_service="bank", point="p", kind="pair"),
        record("nats-server", 3.0, 4.0, fault=1, at_service="bank", point="p", kind="pair"),
        record("engine", 5.0, 6.0, fault=2, at_service="engine", point="stopped", kind="pause"),
    ]
    counted = hits(records, [("bank", "nats-server")])
    assert counted["kinds"] == {"kill": 1, "pair": 1, "pause": 1}
    assert counted["killed"] == {"bank": 2, "nats-server": 1}
    assert counted["points"] == {"bank: p": 2}
    assert counted["pairs"] == {"bank + nats-server": 1}


def test_what_loads_a_model_has_its_own_start_up_in_its_target() -> None:
    assert targets({"engine-e0": 3.0, "engine-e1": 4.0, "bank-0": 1.0})["engine"] == 9.0
    assert targets({})["param_sync"] == 15.0 and "trainer" not in targets({})


def commit(step: int, incarnation: int = 0, base: str = "", groups: tuple[str, ...] = ()) -> StepCommit:
    """A step whose digest is its name."""
    return StepCommit(
        run="r",
        step=step,
        version=step + 1,
        incarnation=incarnation,
        digest=f"d{step}-{incarnation}",
        base_digest=base or (f"d{step - 1}-{incarnation}" if step else "base"),
        groups=groups or (f"g{step}",),
        rows=1,
        trained_tokens=1,
        optimizer_steps=1,
        patches=(),
        patch_bytes=0,
        metrics={},
        ledger_seq=step + 1,
        wait_s=0.0,
        train_s=0.0,
        publish_s=0.0,
        finished_ns=0,
    )


def test_the_line_leaves_a_branch_where_the_next_incarnation_begins() -> None:
    """Steps 2 and 3 came out otherwise after a crash; a late word of the older incarnation counts for nothing."""
    commits = [commit(0), commit(1), commit(2), commit(3), commit(2, 1, base="d1-0"), commit(4), commit(3, 1)]
    line = line_of(commits)
    assert [(each.step, each.incarnation) for each in line] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert check_line(line, 4) == []
    assert check_line(line_of([*commits, commit(4, 1, groups=("g1",))]), 4) == ["g1 is in more than one committed step"]
    assert "starts from" in check_line(line_of([commit(0), commit(1, base="other")]), 2)[0]
    assert "without a gap" in check_line(line_of([commit(0), commit(2, base="d0-0")]), 2)[0]


def test_only_checkpoints_that_we_tore_are_forgiven_to_an_audit() -> None:
    torn = ("checkpoints", "/run/checkpoints/step-00000004")
    assert Audit(0, "").problems() == []
    assert Audit(1, "said", [torn]).problems(["step-00000004"]) == []
    assert "said" in Audit(1, "said", [torn]).problems(["step-00000009"])[0]
    assert Audit(1, "said", [torn, ("a group is trained once", "TRAIN 9")]).problems(["step-00000004"])
    assert Audit(2, "said").problems(["step-00000004"]) and Audit(1, "said").problems()


def test_the_observers_key_goes_into_the_account_of_the_streams_alone() -> None:
    keys = {identity: f"U{identity}" for identity in IDENTITIES}
    text = accounts("r", keys, {})
    changed = admitted(text, "r", "UOBSERVERKEY")
    assert changed.count("UOBSERVERKEY") == 1
    assert changed.index("UOBSERVERKEY") < changed.index("Uadmin")
    with pytest.raises(ValueError, match="hr_other"):
        admitted(text, "other", "UOBSERVERKEY")


def test_no_process_is_taken_for_one_of_a_run_that_it_does_not_belong_to() -> None:
    assert carrying("no such token", "/no/such/folder") == []
    ourselves = Process.of(os.getpid())
    assert ourselves is not None and ourselves.alive() and not ourselves.carries("no such token")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_deliberate_bug_can_still_be_made(mutation: Mutation) -> None:
    """Whether its test notices is what `python -m tests.faults.mutants` tries."""
    root = Path(__file__).resolve().parents[2]
    assert mutation.edit.fits(root), f"{mutation.edit.file} does not hold the text exactly once"
    assert mutation.edit.old != mutation.edit.new
    assert (root / mutation.test.split("::")[0]).is_file()
