"""The age limit: what was leased too long ago goes first, by the server's times alone, and a replay gives it again."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest
from admission_stage import Stage, items, make_commit, make_episode, make_lease, make_ready, make_verdict, with_siblings
from conftest import eventually
from hypothesis import given, settings
from hypothesis import strategies as st

import admission.bank_service
import admission.service
from admission.assembly import Assembly, decide
from admission.background import Background
from admission.gates import GateSettings
from admission.record_command import record_run
from admission.replay import replay
from admission.verify import verify_admission
from rollouter.manifest import policy_manifest
from rollouter.suites import resolve_suite
from schemas.codec import decode_any, encode
from schemas.lease import GroupLease
from schemas.ledger import BatchEntry, LedgerEntry, QuarantineEntry
from schemas.manifest import PolicyManifest
from schemas.table import Role, Stream
from schemas.training import BatchDemand
from services.config import Config, check
from services.recorder import Range
from services.recording_reader import RecordingReader

SECOND = 1_000_000_000
AGED = GateSettings(max_lag=9, min_rewards=1, max_age_s=10)
Timed = tuple[int, int]  # ordinal, seconds


def demand_at(step: int, groups: int) -> BatchDemand:
    return BatchDemand(run="t", step=step, version=step, incarnation=0, groups=groups)


def drain(state: Assembly, ledger: list[tuple[int, LedgerEntry]], under: GateSettings) -> None:
    while entries := decide(state, under):
        for entry in entries:
            ledger.append((len(ledger) + 1, entry))
            state.entry(*ledger[-1])


def batches(ledger: list[tuple[int, LedgerEntry]]) -> list[list[int]]:
    return [[int(m.group[1:]) for m in entry.groups] for _, entry in ledger if isinstance(entry, BatchEntry)]


def state_of(leased: list[Timed], ready: list[Timed]) -> Assembly:
    state = Assembly()
    for ordinal, at_s in leased:
        state.lease(make_lease(ordinal), at_s * SECOND)
    for seq, (ordinal, at_s) in enumerate(ready, 1):
        state.ready(seq, make_ready(ordinal), at_s * SECOND)
    return state


LEASED = [(0, 1), (1, 2), (2, 20), (3, 21), (4, 22)]
READY = [(2, 30), (3, 31), (1, 32), (0, 33), (4, 34)]


def test_past_the_limit_the_oldest_lease_goes_first_and_the_rest_in_completion_order() -> None:
    state, ledger = state_of(LEASED, READY), list[tuple[int, LedgerEntry]]()
    state.demand(1, demand_at(0, 3), 35 * SECOND)
    state.background.is_known_until(36 * SECOND)
    drain(state, ledger, msgspec.structs.replace(AGED, max_age_s=30))
    assert batches(ledger) == [[0, 1, 2]]
    (_, batch) = ledger[-1]
    assert isinstance(batch, BatchEntry)
    assert [member.aged_ns for member in batch.groups] == [34 * SECOND, 33 * SECOND, msgspec.UNSET]
    assert batch.ready_high_water == 5, "the order follows from all that was ready at the demand"
    assert state.counters["taken_for_age"] == 2


def test_without_the_limit_nothing_changes_and_no_time_is_looked_at() -> None:
    state, ledger = state_of(LEASED, READY), list[tuple[int, LedgerEntry]]()
    state.demand(1, demand_at(0, 3), 35 * SECOND)
    drain(state, ledger, msgspec.structs.replace(AGED, max_age_s=0.0))
    assert batches(ledger) == [[2, 3, 1]]
    assert b"aged_ns" not in encode(ledger[-1][1])


def test_nothing_is_decided_before_all_is_known_that_was_ready_at_the_demand() -> None:
    state = state_of(LEASED, READY[:3])
    state.demand(1, demand_at(0, 2), 33 * SECOND)
    assert not decide(state, AGED), "an older one may be on its way"
    state.background.is_known_until(33 * SECOND)
    assert not decide(state, AGED), "also one that is stored at that very time"
    state.ready(4, make_ready(0), 33 * SECOND)
    state.background.is_known_until(33 * SECOND + 1)
    ledger: list[tuple[int, LedgerEntry]] = []
    drain(state, ledger, msgspec.structs.replace(AGED, max_age_s=30))
    assert batches(ledger) == [[0, 1]]


def test_what_became_ready_after_the_demand_does_not_overtake_for_its_age() -> None:
    state, ledger = state_of(LEASED, READY), list[tuple[int, LedgerEntry]]()
    state.demand(1, demand_at(0, 3), 32 * SECOND)
    state.background.is_known_until(60 * SECOND)
    drain(state, ledger, AGED)
    assert batches(ledger) == [[1, 2, 3]], "group 0 was not ready yet"


def test_an_aged_group_passes_the_gates_like_any_other() -> None:
    state, ledger = Assembly(), list[tuple[int, LedgerEntry]]()
    for ordinal in range(3):
        state.lease(make_lease(ordinal), SECOND)
        state.ready(ordinal + 1, with_siblings(make_ready(ordinal), 0, finite=ordinal != 0), 2 * SECOND)
    state.demand(1, demand_at(0, 2), 60 * SECOND)
    state.background.is_known_until(61 * SECOND)
    drain(state, ledger, AGED)
    (_, refused), (_, batch) = ledger
    assert isinstance(refused, QuarantineEntry)
    assert (refused.group, refused.reason) == ("g00000000", "logprobs")
    assert isinstance(batch, BatchEntry)


@given(
    durations=st.lists(st.integers(0, 40), min_size=1, max_size=24),
    demands=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), max_size=6),
    limit=st.integers(1, 30),
    disorder=st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_a_decision_is_the_same_however_the_logs_arrive_and_comes_out_again(
    durations: list[int], demands: list[tuple[int, int]], limit: int, disorder: random.Random
) -> None:
    """Invariant 9 with times: live with any interleaving, and a replay that has the whole logs."""
    under = msgspec.structs.replace(AGED, max_age_s=float(limit))
    leased = [(ordinal, ordinal + 1) for ordinal in range(len(durations))]
    finished = sorted((at_s + durations[ordinal], ordinal) for ordinal, at_s in leased)
    ready = [(seq, make_ready(ordinal), at_s * SECOND) for seq, (at_s, ordinal) in enumerate(finished, 1)]
    asked = [(n + 1, demand_at(n, groups), at * SECOND) for n, (at, groups) in enumerate(sorted(demands))]
    ledgers = []
    for ordered in (True, False):
        state, ledger = Assembly(), list[tuple[int, LedgerEntry]]()
        for ordinal, at_s in leased:
            state.lease(make_lease(ordinal), at_s * SECOND)
        left_ready, left_asked = list(ready), list(asked)
        while left_ready or left_asked:
            if left_ready and (not left_asked or (disorder.random() < 0.5 and not ordered)):
                state.ready(*left_ready.pop(0))
            else:
                state.demand(*left_asked.pop(0))
            state.background.is_known_until(left_ready[0][2] if left_ready else 1 << 62)
            if disorder.random() < 0.5:
                drain(state, ledger, under)
        drain(state, ledger, under)
        ledgers.append(ledger)
    assert [encode(entry) for _, entry in ledgers[0]] == [encode(entry) for _, entry in ledgers[1]]
    known = Background.recorded(
        ((at_s * SECOND, make_lease(ordinal)) for ordinal, at_s in leased),
        ((seq, at_ns) for seq, _, at_ns in ready),
        ((seq, at_ns) for seq, _, at_ns in asked),
    )
    pairs = [(seq, group) for seq, group, _ in ready], [(seq, demand) for seq, demand, _ in asked]
    assert replay(*pairs, ledgers[0], under, background=known) is None


def configuration(run: str, url: str) -> Config:
    return check(
        {
            "run": {"name": run},
            "nats": {"url": url, "store_bytes": 256 * 2**20},
            "rollout": {"group_size": 2},
            "engine": {"kind": "simulated"},
            "admission": {
                "groups_per_batch": 2,
                "max_lag": 4,
                "min_rewards": 1,
                "max_age_s": 0.4,
                "max_span": 1,
                "zero_variance": "count",
            },
            "telemetry": {"heartbeat_s": 0.3},
        }
    )


@pytest.mark.timeout(120)
async def test_real_services_age_by_the_servers_times_and_the_recording_decides_the_same(
    nats_url: str, run_name: str, tmp_path: Path
) -> None:
    """Invariant 9: an old lease overtakes, a wide span and a manifest that drifted are named, and all of it replays."""
    config = configuration(run_name, nats_url)
    manifest = policy_manifest(config, resolve_suite(config.tasks.suite))
    other = msgspec.structs.replace(manifest, sampling="temperature=0.5 top_p=1.0 top_k=0")
    async with Stage(nats_url, config) as stage:
        bus = await stage.bus(Role.OBSERVER)
        await stage.start(Role.BANK, admission.bank_service.serve)
        service = await stage.start(Role.ADMISSION, admission.service.serve)

        async def lease(ordinal: int, under: PolicyManifest = manifest) -> GroupLease:
            made = make_lease(ordinal, manifest=under.hash(), policy=under)
            await bus.publish_once(bus.subjects.lease(ordinal), made)
            return made

        async def finish(
            made: GroupLease, versions: tuple[int, int] = (1, 1), rewards: tuple[float, float] = (0.0, 1.0)
        ) -> None:
            for slot in range(2):
                episode = make_episode(made, slot, version=versions[slot])
                stored = await bus.publish_once(bus.subjects.episode(made.group, slot), episode)
                verdict = make_verdict(episode, stored.digest, reward=rewards[slot])
                await bus.publish_once(bus.subjects.verdict(made.group, slot), verdict)
            await eventually(lambda: items(bus, Stream.READY, f"ready.{made.group}"), within_s=60)

        async def batch(step: int) -> BatchEntry:
            demand = BatchDemand(run=run_name, step=step, version=3, incarnation=0, groups=2, policy=manifest)
            await bus.publish_once(bus.subjects.demand(step), demand)
            (item,) = await eventually(lambda: items(bus, Stream.LEDGER, f"ledger.batch.{step}"), within_s=60)
            decided = item.decode(BatchEntry)
            await bus.publish_once(bus.subjects.step(step), make_commit(decided))
            return decided

        old = await lease(0)
        await asyncio.sleep(1.0)
        for ordinal in (1, 2):
            await finish(await lease(ordinal))
        await finish(await lease(3), versions=(1, 3))
        await finish(await lease(4, other))
        await finish(old, rewards=(1.0, 1.0))
        first = await batch(0)
        assert first.groups[0].group == old.group, "it became ready last, and was leased first"
        assert isinstance(first.groups[0].aged_ns, int)
        assert first.groups[0].aged_ns > 0.4 * SECOND
        assert first.groups[0].zero_variance is True
        assert first.ready_high_water == 5
        await finish(await lease(5))
        await batch(1)
        entries = [decode_any(item.data) for item in await items(bus, Stream.LEDGER)]
        refused = {entry.group: entry for entry in entries if isinstance(entry, QuarantineEntry)}
        assert {group: str(entry.reason) for group, entry in refused.items()} == {
            "g00000003": "version_span",
            "g00000004": "manifest",
        }
        assert "; sampling: 'temperature=0.5 top_p=1.0 top_k=0', here 'temperature=1.0" in refused["g00000004"].detail
        counters = service.context.health.counters
        await eventually(lambda: counters.get("quarantined_version_span"), within_s=30)
        assert (counters["quarantined_manifest"], counters["zero_variance_trained"]) == (1, 1)
        assert counters["taken_for_age"] >= 1

    path = tmp_path / "recording"
    await record_run(config, None, path, Range(), bodies=False)
    with RecordingReader(path) as reader:
        checked = verify_admission(reader)
        assert checked.difference is None
        assert not checked.unknown_settings
        assert checked.entries == len(entries)
