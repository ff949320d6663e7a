"""The account of what was not trained on: every group once, under what it was, from the streams alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from admission_stage import items, make_lease, make_ready, with_siblings
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from recorded_run import BATCH, STEPS, configuration, finished
from test_progress import batch, quarantine

from admission.conservation import account
from admission.report import lines, report
from admission.report_command import run_report
from schemas.codec import decode_any
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, AbandonReason, QuarantineEntry, QuarantineReason
from schemas.table import Stream
from services.cli import parser
from services.fates import Fates, bias, length_bucket, reward_bucket
from services.series import Series

SECOND = 1_000_000_000


def lease(ordinal: int, family: str) -> GroupLease:
    return make_lease(ordinal, family=family)


def name(ordinal: int) -> str:
    return f"g{ordinal:08d}"


def a_run() -> Fates:
    """Six leases of two families; 0 and 1 trained, 2 stale, 3 abandoned unready, 4 lost out of the batch, 5 open and ready."""
    fates = Fates()
    for ordinal in range(6):
        fates.add(lease(ordinal, "copy" if ordinal < 3 else "move"), (ordinal + 1) * SECOND)
    for ordinal in (0, 1, 2, 4, 5):
        group = make_ready(ordinal, family="copy" if ordinal < 3 else "move")
        group = with_siblings(group, 0, sampled_tokens=100, reward=1.0 if ordinal == 2 else 0.0)
        fates.add(group, (10 + ordinal) * SECOND)
    stale = msgspec.structs.replace(quarantine(name(2)), family="copy", lag=3)
    fates.add(stale, 20 * SECOND)
    fates.add(batch(3, (0, 2, 1), (name(0), name(1), name(4))), 21 * SECOND)
    gone = AbandonEntry(
        run="r", group=name(3), ready_seq=0, reason=AbandonReason.INFRA_ABORT, detail="", family="move", settings_hash="s"
    )
    fates.add(gone, 22 * SECOND)
    lost = msgspec.structs.replace(gone, group=name(4), ready_seq=9, reason=AbandonReason.LOST_ITEM, step=3)
    fates.add(lost, 23 * SECOND)
    return fates


def test_everything_not_trained_on_is_counted_under_all_that_it_was() -> None:
    told = report(a_run(), "r", 40 * SECOND)
    assert told["groups"] == {"leased": 6, "trained": 2, "not_trained": 3, "open": 1, "ready": 1}
    assert told["not_trained"]["by_reason"] == {"infra_abort": 1, "lost_item": 1, "stale": 1}
    found = {row["reason"]: row for row in told["not_trained"]["all"]}
    assert found["stale"] == {
        "reason": "stale",
        "family": "copy",
        "length": "32-63",
        "reward": "1",
        "lag": "3",
        "groups": 1,
    }
    assert (found["infra_abort"]["length"], found["infra_abort"]["reward"], found["infra_abort"]["lag"]) == ("unknown",) * 3
    assert (found["lost_item"]["reward"], found["lost_item"]["lag"]) == ("0.5-0.75", "unknown")
    assert told["not_trained"]["by_family"] == {"copy": {"stale": 1}, "move": {"infra_abort": 1, "lost_item": 1}}
    assert told["lag"] == {0: 1, 2: 1}, "the lost one was not trained on"


def test_the_mix_says_how_far_the_trained_are_from_the_leased() -> None:
    told = report(a_run(), "r", 40 * SECOND)
    family = told["mix"]["family"]
    assert family["bias"] == pytest.approx(0.5), "half were leased of each family, and only one was trained on"
    assert family["values"]["move"] == {"leased": 3, "trained": 0, "leased_share": 0.5, "trained_share": 0.0}
    assert told["mix"]["reward"]["values"]["1"]["whole"] == 1


def test_queue_ages_and_high_water_marks() -> None:
    queue = report(a_run(), "r", 40 * SECOND)["queue"]
    assert queue["ready_to_batch_s"]["max"] == 11  # group 0: ready at 10 s, decided at 21 s
    assert queue["lease_to_ready_s"]["mean"] == pytest.approx(9)
    assert queue["ready_to_refusal_s"]["p50"] == 8
    assert queue["oldest_open"] == {"group": name(5), "age_s": 34}
    assert queue["oldest_ready"] == {"group": name(5), "age_s": 25}
    assert queue["most_ready"] == {"groups": 5, "at_ns": 15 * SECOND}
    assert queue["most_open"] == {"groups": 6, "at_ns": 6 * SECOND}


def test_a_steps_row_has_what_was_given_up_since_the_one_before() -> None:
    fates = a_run()
    row = fates.row([name(0), name(1)], 20 * SECOND, 22 * SECOND)
    assert [one["reason"] for one in row["untrained"]] == ["infra_abort"]
    assert row["bank_wait_s"] == {"mean": pytest.approx(10.5), "max": 11}
    assert row["bank_depth_max"] == 4
    assert row["mix_bias"] == pytest.approx(abs(2 / 3 - 1 / 2)), "the loss out of the batch came later"


def test_the_report_is_readable_without_any_group() -> None:
    told = report(Fates(), "r", SECOND)
    assert told["mix"]["family"]["bias"] is None
    assert "  none" in lines(told)


@pytest.mark.parametrize(("tokens", "label"), [(0, "0"), (1, "1-1"), (2, "2-3"), (63.5, "32-63"), (64, "64-127")])
def test_length_buckets(tokens: float, label: str) -> None:
    assert length_bucket(tokens) == label


@pytest.mark.parametrize(
    ("reward", "label"), [(None, "none"), (0.0, "0"), (0.1, "0-0.25"), (0.75, "0.75-1"), (1.0, "1"), (-1.0, "<0"), (2.0, ">1")]
)
def test_reward_buckets(reward: float | None, label: str) -> None:
    assert reward_bucket(reward) == label


@given(st.dictionaries(st.text(max_size=3), st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
@examples(deadline=None)
def test_the_bias_is_a_distance_of_shares(mix: dict[str, tuple[int, int]]) -> None:
    found = bias(mix)
    if found is not None:
        assert -1e-9 <= found <= 1 + 1e-9
        assert bias({key: (b, a) for key, (a, b) in mix.items()}) == pytest.approx(found)
        assert bias({key: (a, 3 * a) for key, (a, _) in mix.items()}) in (None, pytest.approx(0))


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=20),
    st.tuples(st.integers(-1, 60), st.integers(-1, 90)),
)
@examples(deadline=None)
def test_the_high_water_mark_is_the_highest_of_all_moments(stays: list[tuple[int, int]], span: tuple[int, int]) -> None:
    come, gone = Series(), Series()
    for at in sorted(begin for begin, _ in stays):
        come.add(at)
    for at in sorted(begin + length for begin, length in stays):
        gone.add(at)
    after, until = min(span), max(span)
    expected = max(sum(b <= t for b, _ in stays) - sum(b + length <= t for b, length in stays) for t in range(after, until + 1))
    found, at = come.most(gone, after, until)
    assert found >= expected
    assert after <= at <= until


@pytest.mark.timeout(240)
async def test_the_report_of_a_real_run_agrees_with_the_account(
    nats_url: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Invariant 3: the report's parts add up to what conservation says, reason by reason."""
    config = configuration(run_name, nats_url)
    async with finished(nats_url, config) as bus:
        out = tmp_path / "report.json"
        assert await run_report(config, None, str(out)) == 0
        leases = [item.decode(GroupLease) for item in await items(bus, Stream.TASKS)]
        entries = [decode_any(item.data) for item in await items(bus, Stream.LEDGER)]
    told, final = json.loads(out.read_text()), account(leases, entries)
    assert final.holds
    assert told["groups"]["leased"] == final.leased
    assert told["groups"]["trained"] == final.consumed == STEPS * BATCH
    assert told["groups"]["open"] == len(final.open)
    assert told["not_trained"]["by_reason"] == {**final.quarantined, **final.abandoned}
    assert told["not_trained"]["by_reason"], "the test wants refused groups"
    lags = Counter(str(entry.lag) for entry in entries if isinstance(entry, QuarantineEntry))
    counted = {lag: sum(by.values()) for lag, by in told["not_trained"]["by_lag"].items() if lag != "unknown"}
    assert counted == lags
    said = capsys.readouterr().out
    assert f"run {run_name}: {final.leased} leased = {final.consumed} trained" in said
    assert "trained against leased, by family: bias" in said


def test_the_command_line_knows_the_report() -> None:
    options = parser().parse_args(["report", "--run-folder", "runs/x", "--json", "-"])
    assert (options.run_folder, options.json) == ("runs/x", "-")


@pytest.mark.parametrize("reason", [*QuarantineReason, *AbandonReason])
def test_every_reason_has_its_place_in_account_and_report(reason: QuarantineReason | AbandonReason) -> None:
    if isinstance(reason, QuarantineReason):
        entry = msgspec.structs.replace(quarantine(name(0)), reason=reason)
    else:
        entry = AbandonEntry(run="r", group=name(0), ready_seq=0, reason=reason, detail="", family="f", settings_hash="s")
    fates = Fates()
    fates.add(lease(0, "f"), 1)
    fates.add(entry, 2)
    assert report(fates, "r", 3)["not_trained"]["by_reason"] == {str(reason): 1}
    found = account([lease(0, "f")], [entry])
    assert found.holds
    assert {**found.quarantined, **found.abandoned} == {str(reason): 1}
