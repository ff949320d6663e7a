"""The bank's core: a group is whole when its last sibling is judged, once, in that order, however often things are told."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from admission_stage import make_episode, make_lease, make_verdict
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.joining import Bank, EpisodeFact, VerdictFact, episode_fact, verdict_fact
from schemas.arrays import Array
from schemas.codec import digest, encode
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.termination import Termination
from schemas.trajectory import Episode, VersionSpan

Fact = EpisodeFact | VerdictFact


def facts_of(
    lease: GroupLease, slot: int, seq: int, *, version: int = 0, reward: float = 1.0
) -> tuple[EpisodeFact, VerdictFact]:
    episode = make_episode(lease, slot, version=version)
    name = digest(encode(episode))
    verdict = make_verdict(episode, name, reward=reward)
    return (
        episode_fact(lease.group, slot, seq, name, episode),
        verdict_fact(lease.group, slot, seq + 1, digest(encode(verdict)), verdict),
    )


def tell(bank: Bank, fact: Fact) -> ReadyGroup | None:
    return bank.episode(fact) if isinstance(fact, EpisodeFact) else bank.verdict(fact)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[GroupLease], list[Fact]]:
    """Leases, and their facts in some order that a run could have: a verdict follows its episode, all else is free."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    leases = [make_lease(n, group_size=size, purpose=draw(st.sampled_from(["train", "eval"]))) for n, size in enumerate(sizes)]
    pairs = [facts_of(lease, slot, 1000 * lease.ordinal + 2 * slot) for lease in leases for slot in range(lease.group_size)]
    order = draw(st.permutations([index for index in range(len(pairs)) for _ in range(2)]))
    seen: set[int] = set()
    facts: list[Fact] = []
    for index in order:
        facts.append(pairs[index][index in seen])
        seen.add(index)
    return leases, facts


def run(leases: list[GroupLease], facts: list[Fact], bank: Bank | None = None) -> list[ReadyGroup]:
    bank = bank or Bank()
    for lease in leases:
        bank.lease(lease)
    return [ready for fact in facts if (ready := tell(bank, fact)) is not None]


@given(histories())
@settings(deadline=None)
def test_groups_come_out_once_in_the_order_of_their_last_judgement(history: tuple[list[GroupLease], list[Fact]]) -> None:
    leases, facts = history
    last = {lease.group: max(i for i, fact in enumerate(facts) if fact.group == lease.group) for lease in leases}
    ready = run(leases, facts)
    assert [group.group for group in ready] == sorted(last, key=last.__getitem__)
    for group in ready:
        lease = next(lease for lease in leases if lease.group == group.group)
        assert [s.slot for s in group.siblings] == list(range(lease.group_size))
        assert (group.ordinal, group.purpose, group.manifest) == (lease.ordinal, lease.purpose, lease.manifest)


@given(histories(), st.randoms(use_true_random=False), st.integers(0, 40))
@settings(deadline=None)
def test_repeats_and_restarts_change_no_byte(
    history: tuple[list[GroupLease], list[Fact]], disorder: random.Random, cut: int
) -> None:
    """Invariant 9: fold with every fact told again at some later time, and with a restart in the middle."""
    leases, facts = history
    plain = [encode(group) for group in run(leases, facts)]

    repeated: list[Fact] = []
    for fact in facts:
        repeated.append(fact)
        if disorder.random() < 0.5:
            repeated.append(disorder.choice(repeated))
    bank = Bank()
    assert [encode(group) for group in run(leases, repeated, bank)] == plain
    assert bank.counters["duplicates"] + bank.counters["settled"] == len(repeated) - len(facts)
    assert not bank.open_groups()

    first = run(leases, facts[:cut])
    again = Bank()
    for group in first:
        again.close(group.group)  # READY holds what was published before the crash
    assert [encode(group) for group in [*first, *run(leases, facts, again)]] == plain


def test_facts_of_groups_that_nobody_leased_and_of_slots_that_no_lease_has_are_counted() -> None:
    bank = Bank()
    lease = make_lease(0, group_size=1)
    episode, _ = facts_of(make_lease(9), 0, 1)
    assert bank.episode(episode) is None
    bank.lease(lease)
    stray, _ = facts_of(lease, 5, 3)
    assert bank.episode(stray) is None
    assert (bank.counters["orphans"], bank.counters["strays"]) == (1, 1)
    assert bank.missing(lease.group) == "rollouter, slots [0]"
    assert bank.open_groups() == (lease.group,)


def test_a_verdict_on_other_bytes_is_no_verdict() -> None:
    """Invariant 8: what was judged must be what was sealed; otherwise the group ends as a verifier error, without a reward."""
    lease = make_lease(0, group_size=1)
    episode, verdict = facts_of(lease, 0, 1)
    bank = Bank()
    bank.lease(lease)
    bank.episode(episode)
    assert bank.missing(lease.group) == "verifier, slots [0]"
    (sibling,) = bank.verdict(VerdictFact(**{**fields(verdict), "episode_digest": "another"})).siblings
    assert (sibling.status, sibling.reward, sibling.success) == ("verifier_error", None, None)
    assert bank.counters["mismatched"] == 1


def fields(fact: VerdictFact) -> dict[str, object]:
    return {name: getattr(fact, name) for name in VerdictFact.__slots__}


def test_bytes_that_are_no_episode_still_end_their_group() -> None:
    lease = make_lease(0, group_size=2)
    bank = Bank()
    bank.lease(lease)
    for fact in facts_of(lease, 0, 1):
        assert tell(bank, fact) is None
    ready = bank.episode(EpisodeFact(group=lease.group, slot=1, seq=9, digest="x", readable=False))
    assert ready is not None
    assert ready.siblings[1].status == "lost_episode"
    assert not ready.siblings[1].finite
    assert (ready.siblings[1].episode_seq, ready.siblings[1].verdict_seq) == (9, 0)


LEASE = make_lease(0, group_size=1)
GOOD = make_episode(LEASE, 0)


@pytest.mark.parametrize(
    "broken",
    [
        msgspec.structs.replace(GOOD, logprobs=Array.of(np.array([0, 0, np.nan, -1, -1], dtype=np.float32))),
        msgspec.structs.replace(GOOD, logprobs=Array.of(np.array([0, 0, -1], dtype=np.float32))),
        msgspec.structs.replace(GOOD, logprobs=Array.of(np.array([0, 0, 0.5, -1, -1], dtype=np.float32))),
        msgspec.structs.replace(GOOD, versions=(VersionSpan(2, 4, 0),)),
        msgspec.structs.replace(GOOD, mask=Array("bool", (5,), b"\0\0\1")),
        msgspec.structs.replace(GOOD, ids=Array.of(np.array([1, 2, 3, -4, 5], dtype=np.int32))),
    ],
    ids=["nan", "short", "positive", "no-version", "lying-shape", "negative-id"],
)
def test_misaligned_or_missing_log_probs_are_seen(broken: Episode) -> None:
    """Invariant 2, at the bank's door."""
    assert episode_fact(LEASE.group, 0, 1, "d", GOOD).finite
    assert not episode_fact(LEASE.group, 0, 1, "d", broken).finite


def test_facts_count_versions_over_all_spans_and_tokens_by_mask() -> None:
    spans = (VersionSpan(2, 3, 4, 1), VersionSpan(3, 5, 6, 2))
    fact = episode_fact(LEASE.group, 0, 7, "d", msgspec.structs.replace(GOOD, versions=spans, sampled_tokens=99))
    assert (fact.oldest_version, fact.newest_version, fact.incarnation) == (4, 6, 1)
    assert (fact.sampled_tokens, fact.total_tokens, fact.seq) == (3, 5, 7)


@pytest.mark.parametrize("termination", list(Termination))
def test_every_termination_reaches_admission_with_its_own_code(termination: Termination) -> None:
    """Invariant 6."""
    bank = Bank()
    bank.lease(LEASE)
    episode = make_episode(LEASE, 0, termination=termination)
    bank.episode(episode_fact(LEASE.group, 0, 1, "d", episode))
    ready = bank.verdict(verdict_fact(LEASE.group, 0, 2, "v", make_verdict(episode, "d", reward=0.25)))
    assert ready is not None
    assert ready.siblings[0].termination is termination
    assert (ready.siblings[0].reward is None) == (ready.siblings[0].status == "censored")
