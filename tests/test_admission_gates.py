"""The gates: each refuses for its own reason, K is exact at its boundary, and censored is not failed."""

from __future__ import annotations

import msgspec
import pytest
from admission_stage import make_ready, with_siblings
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from admission.gates import Abandon, Decision, Eligible, GateSettings, Quarantine, judge
from schemas.group import IncarnationSpan, ReadyGroup
from schemas.ledger import AbandonReason, QuarantineReason
from schemas.manifest import PolicyManifest
from schemas.termination import Termination
from schemas.training import Branch

SETTINGS = GateSettings(max_lag=2)


def reason_of(decision: Decision) -> str:
    return "eligible" if isinstance(decision, Eligible) else str(decision.reason)


@given(st.integers(0, 50), st.integers(0, 8), st.integers(0, 60))
@examples(deadline=None)
def test_lag_k_is_in_and_k_plus_one_is_out(version: int, max_lag: int, oldest: int) -> None:
    """Invariant 7."""
    decision = judge(make_ready(oldest=oldest), version, (), GateSettings(max_lag=max_lag))
    lag = version - oldest
    if lag < 0:
        assert reason_of(decision) == QuarantineReason.INCARNATION
    elif lag <= max_lag:
        assert decision == Eligible(lag)
    else:
        assert reason_of(decision) == QuarantineReason.STALE


def test_lag_counts_from_the_oldest_token_of_any_sibling() -> None:
    group = with_siblings(make_ready(oldest=7), 1, oldest_version=4, newest_version=7)
    assert judge(group, 7, (), GateSettings(max_lag=3)) == Eligible(3)
    assert reason_of(judge(group, 7, (), GateSettings(max_lag=2))) == "stale"
    assert reason_of(judge(group, 7, (), GateSettings(max_lag=3, versions="homogeneous"))) == "mixed_versions"


def test_a_sibling_without_tokens_has_no_version_and_no_lag() -> None:
    group = with_siblings(make_ready(oldest=5), 0, sampled_tokens=0, oldest_version=-1, newest_version=-1)
    assert judge(group, 5, (), GateSettings(max_lag=0)) == Eligible(0)


GOOD = make_ready(oldest=1, newest=2)
CASES: dict[str, tuple[ReadyGroup, GateSettings, str]] = {
    "good": (GOOD, SETTINGS, "eligible"),
    "tampered": (with_siblings(GOOD, 0, status="tampered"), SETTINGS, "tampered"),
    "verifier error": (with_siblings(GOOD, 0, status="verifier_error", reward=None), SETTINGS, "verifier_error"),
    "a missing sibling": (msgspec.structs.replace(GOOD, siblings=GOOD.siblings[:1]), SETTINGS, "incomplete"),
    "a sibling twice": (msgspec.structs.replace(GOOD, siblings=(GOOD.siblings[0],) * 2), SETTINGS, "incomplete"),
    "no token at all": (
        with_siblings(with_siblings(GOOD, 0, sampled_tokens=0), 1, sampled_tokens=0),
        SETTINGS,
        "incomplete",
    ),
    "log-probs": (with_siblings(GOOD, 1, finite=False), SETTINGS, "logprobs"),
    "a sibling of another manifest": (with_siblings(GOOD, 1, manifest="m1"), SETTINGS, "manifest"),
    "a group of another manifest": (GOOD, GateSettings(max_lag=2, manifest="m1"), "manifest"),
    "the future": (with_siblings(GOOD, 1, newest_version=4), SETTINGS, "incarnation"),
    "mixed": (GOOD, GateSettings(max_lag=2, versions="homogeneous"), "mixed_versions"),
    "too wide a span": (with_siblings(GOOD, 0, newest_version=3), GateSettings(max_lag=2, max_span=1), "version_span"),
    "a span at its bound": (GOOD, GateSettings(max_lag=2, max_span=1), "eligible"),
    "stale": (GOOD, GateSettings(max_lag=1), "stale"),
    "too few rewards": (
        with_siblings(GOOD, 0, termination=Termination.TOKEN_TRUNCATION, status="censored", reward=None),
        SETTINGS,
        "too_few_rewards",
    ),
    "no variance, kept": (with_siblings(GOOD, 0, reward=1.0), SETTINGS, "eligible"),
    "no variance, counted": (
        with_siblings(GOOD, 0, reward=1.0),
        GateSettings(max_lag=2, zero_variance="count"),
        "eligible",
    ),
    "no variance, skipped": (
        with_siblings(GOOD, 0, reward=1.0),
        GateSettings(max_lag=2, zero_variance="skip"),
        "zero_variance",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_gate_names_its_reason(name: str) -> None:
    group, settings, expected = CASES[name]
    decision = judge(group, 3, (), settings)
    assert reason_of(decision) == expected
    assert isinstance(decision, Eligible) or decision.detail


@pytest.mark.parametrize("code", [Termination.INFRA_ABORT, Termination.SCHEDULER_CANCEL])
def test_lost_infrastructure_abandons_and_is_never_a_reward(code: Termination) -> None:
    group = with_siblings(GOOD, 1, termination=code, status="censored", reward=None)
    decision = judge(group, 3, (), SETTINGS)
    assert isinstance(decision, Abandon)
    assert decision.reason is AbandonReason.INFRA_ABORT
    assert "slot 1" in decision.detail


MANIFEST = PolicyManifest(
    model="m",
    base_digest="b0",
    tokenizer_sha256="t0",
    template_sha256="c0",
    system_prompt_sha256="s0",
    tool_schemas_sha256="o0",
    parser="tokens",
    max_turns=8,
    max_action_tokens=48,
    max_context_tokens=512,
    sampling="temperature=1.0 top_p=1.0 top_k=0",
)
DRIFTS = {
    "tokenizer_sha256": "t1",
    "template_sha256": "c1",
    "tool_schemas_sha256": "o1",
    "parser": "json_tool_call",
    "sampling": "temperature=0.7 top_p=1.0 top_k=0",
    "max_turns": 9,
    "max_context_tokens": 1024,
}


@pytest.mark.parametrize("field", DRIFTS)
def test_drift_between_rollout_and_trainer_is_refused_by_the_name_of_the_field(field: str) -> None:
    trainers = msgspec.structs.replace(MANIFEST, **{field: DRIFTS[field]})
    name = MANIFEST.hash()
    group = with_siblings(with_siblings(msgspec.structs.replace(GOOD, manifest=name), 0, manifest=name), 1, manifest=name)
    known = {name: MANIFEST}
    decision = judge(group, 3, (), SETTINGS, trained_under=trainers, known=known)
    assert isinstance(decision, Quarantine)
    assert decision.reason is QuarantineReason.MANIFEST
    there, here = getattr(MANIFEST, field), DRIFTS[field]
    differs = f"; {field}: {there!r}, here {here!r}"
    assert decision.detail == f"leased under {name}, the trainer works under {trainers.hash()}{differs}"
    assert reason_of(judge(group, 3, (), SETTINGS, trained_under=MANIFEST, known=known)) == "eligible"
    unknown = judge(group, 3, (), SETTINGS, trained_under=trainers)
    assert isinstance(unknown, Quarantine)
    assert unknown.detail == f"leased under {name}, the trainer works under {trainers.hash()}", "without the body, the hashes"


def test_censored_siblings_are_not_zeros() -> None:
    """Invariant 6: one censored sibling leaves one reward; it is neither a zero nor part of the variance."""
    group = with_siblings(GOOD, 0, termination=Termination.TOOL_TIMEOUT, status="censored", reward=None)
    assert judge(group, 3, (), GateSettings(max_lag=2, min_rewards=1)) == Eligible(2, flat=True)
    skipping = GateSettings(max_lag=2, min_rewards=1, zero_variance="skip")
    assert reason_of(judge(group, 3, (), skipping)) == "zero_variance"


BRANCHES = (Branch(1, 4), Branch(2, 2))  # incarnation 1 left at version 4; incarnation 2 went further back and left both at 2


@pytest.mark.parametrize(
    ("incarnation", "newest", "branches", "reason"),
    [
        (0, 4, BRANCHES[:1], "eligible"),  # shared: the branch begins after it
        (0, 5, BRANCHES[:1], "dead_branch"),
        (1, 5, BRANCHES[:1], "eligible"),
        (1, 6, BRANCHES[:1], "eligible"),
        (0, 2, BRANCHES, "eligible"),
        (0, 3, BRANCHES, "dead_branch"),
        (1, 5, BRANCHES, "dead_branch"),
        (2, 3, BRANCHES, "eligible"),
        (0, 6, (), "eligible"),
        (0, 7, (), "incarnation"),  # newer than the trainer's, and of no branch that it knows
    ],
)
def test_what_a_dead_branch_sampled_is_turned_away_and_what_is_shared_is_not(
    incarnation: int, newest: int, branches: tuple[Branch, ...], reason: str
) -> None:
    """Invariants 5 and 7: after a new incarnation the same number can name other weights."""
    group = make_ready(oldest=2, newest=2)
    group = with_siblings(group, 1, incarnation=incarnation, newest_version=newest)
    assert reason_of(judge(group, 6, branches, GateSettings(max_lag=4))) == reason


def test_an_episode_over_a_change_of_incarnations_is_judged_by_each() -> None:
    """Version 2 is shared and version 5 is of the living incarnation; version 3 of incarnation 0 was left."""
    living = with_siblings(GOOD, 1, newest_version=5, incarnations=(IncarnationSpan(0, 2), IncarnationSpan(1, 5)))
    dead = with_siblings(GOOD, 1, newest_version=5, incarnations=(IncarnationSpan(0, 3), IncarnationSpan(1, 5)))
    branches = (Branch(1, 2),)
    assert judge(living, 5, branches, GateSettings(max_lag=4)) == Eligible(4)
    decision = judge(dead, 5, branches, GateSettings(max_lag=4))
    assert reason_of(decision) == "dead_branch"
    assert isinstance(decision, Quarantine)
    assert decision.detail == "slot 1: version 3 of incarnation 0, left at 2"


def test_settings_that_knew_nothing_of_later_ones_keep_their_hash() -> None:
    """Old ledgers replay: these two hashes stand in ledgers that were written before the span and the age limit."""
    assert SETTINGS.hash() == "ce6f7182b44e010c"
    old = GateSettings(max_lag=1, versions="homogeneous", zero_variance="skip", min_rewards=1, manifest="m")
    assert old.hash() == "dec7d020c7b3f133"
    later = [GateSettings(max_lag=2, max_span=1), GateSettings(max_lag=2, max_age_s=0.5), GateSettings(max_lag=2, max_span=2)]
    assert len({SETTINGS.hash(), *(settings.hash() for settings in later)}) == 4


def test_a_settings_hash_names_the_settings() -> None:
    assert SETTINGS.hash() == GateSettings(max_lag=2).hash()
    others = [GateSettings(max_lag=3), GateSettings(max_lag=2, min_rewards=1), GateSettings(max_lag=2, manifest="m")]
    assert len({SETTINGS.hash(), *(other.hash() for other in others)}) == 4
    assert isinstance(judge(GOOD, 9, (), SETTINGS), Quarantine)
