"""Whole runs of real parts under faults: nothing is lost or counted twice, and where it is promised not a bit is different."""

from __future__ import annotations

import pytest

from loadtests.chaos.settings import DETERMINISTIC, FLOWING
from tests.faults.ordeal import STEPS, Ordeal, cut, go_through, kill, pause, repeated, spoiled_patch, torn, undisturbed_run

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]
# None of these loses an attempt at an episode, so the run must come out as if nothing had happened.
HARMLESS = (
    kill("bank: the last verdict is in, the group is not ready", besides="verifier-0"),  # which has not acknowledged it
    kill("admission: a batch is demanded, none is decided"),
    kill("param_sync: a version is staged, not every engine has it"),
    kill("nats-server: a batch is on its way"),
    kill("trainer: a batch is decided, it is not trained on"),
    torn("trainer: a step is announced"),
)
# These may cost an attempt, which is then sampled anew: another run, with the same promises.
COSTLY = (
    kill("sampler: a lease is out"),
    kill("rollouter: a turn is journalled"),
    kill("engine: a request is in flight"),
    kill("sandbox: a command is in flight"),
    kill("verifier: an episode is sealed, it has no verdict"),
    cut("verifier-0", "deaf"),
    repeated("sbx", "req", "command"),
    kill("trainer: a batch is decided, it is not trained on", besides="nats-server"),
    pause("rollouter-0", 25.0),
    pause("param_sync-owner", 8.0),  # beyond its lease: it wakes up when another one owns the role
    spoiled_patch(),
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ordeal:
    return undisturbed_run(tmp_path_factory)


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Ordeal:
    return go_through(tmp_path_factory.mktemp("harmless"), DETERMINISTIC, HARMLESS, steps=STEPS)


@pytest.fixture(scope="module")
def costly(tmp_path_factory: pytest.TempPathFactory) -> Ordeal:
    folder = tmp_path_factory.mktemp("costly")
    return go_through(folder, FLOWING, COSTLY, steps=STEPS, doubles=("rollouter", "param_sync"), cuts=("verifier-0",))


def holds(ordeal: Ordeal, faults: int) -> None:
    assert not ordeal.missed, f"never met their points: {[fault.point for fault in ordeal.missed]}"
    assert len({record.point for record in ordeal.records}) == faults
    assert not ordeal.unrecovered()
    assert not ordeal.findings.violations, f"{ordeal.findings.account}\n" + "\n".join(ordeal.findings.violations)
    assert ordeal.findings.steps >= STEPS
    assert not ordeal.left, "\n".join(ordeal.left)
    assert ordeal.code == 0


def test_every_service_killed_once_loses_and_doubles_nothing(harmless: Ordeal) -> None:
    """Invariants 3, 4, 9: each of bank, admission, param_sync, verifier, nats-server and the trainer, a torn checkpoint too."""
    holds(harmless, len(HARMLESS))


def test_faults_that_cost_an_attempt_lose_and_double_nothing(costly: Ordeal) -> None:
    """Invariants 3, 4, 9, 10: sampler, rollouter, engine, sandbox, a pair, lost acknowledgements, a request that comes twice, a
    rollouter and an owner that were stopped for longer than their leases live, and a patch that is damaged.
    """
    holds(costly, len(COSTLY))


def test_a_checkpoint_names_every_group_that_is_in_its_weights(undisturbed: Ordeal) -> None:
    """Step, consumed groups, output version and digest are one record."""
    assert undisturbed.code == 0
    assert not undisturbed.findings.violations, "\n".join(undisturbed.findings.violations)
    assert not undisturbed.left, "\n".join(undisturbed.left)


def test_a_run_comes_out_bit_for_bit_as_if_nothing_had_happened(undisturbed: Ordeal, harmless: Ordeal) -> None:
    """Invariants 4, 5, 12: the same episodes and, after each step, the same weights as without faults."""
    both = sorted(undisturbed.tokens.keys() & harmless.tokens.keys())
    assert len(both) >= STEPS
    for name in both:
        assert harmless.tokens[name] == undisturbed.tokens[name], f"{name}: other attempt or other tokens"
    common = min(len(undisturbed.digests), len(harmless.digests))
    assert common >= STEPS
    assert harmless.digests[:common] == undisturbed.digests[:common]
    assert len(set(undisturbed.digests)) > STEPS // 2, "training moves the weights"


def test_a_trainer_that_dies_before_it_announces_its_step_announces_it_later(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Invariant 4: what a checkpoint holds was committed, so its step and its version must not be missing afterwards."""
    fault = kill("trainer: a checkpoint is there, its step not announced")
    ordeal = go_through(tmp_path_factory.mktemp("unannounced"), DETERMINISTIC, (fault,), steps=4)
    assert not ordeal.missed
    assert not ordeal.findings.violations, "\n".join(ordeal.findings.violations)
    assert not ordeal.unrecovered()
