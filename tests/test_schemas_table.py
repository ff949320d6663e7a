"""The table of streams: subjects belong to one stream, permissions are least, logs that one service owns have one writer."""

from __future__ import annotations

import inspect
import re

import pytest

from schemas.lease import group_id
from schemas.sandbox import LANES
from schemas.table import (
    BLOB_SHARE,
    CONSUMERS,
    STREAMS,
    Role,
    Stream,
    Subjects,
    check_token,
    consumer_of,
    family_of,
    publish_permissions,
    readable_streams,
    spec_of,
)
from services.bus import _STREAM_BY_HEAD

SUBJECTS = Subjects("main")
PATTERNS = [(spec.stream, subject) for spec in STREAMS for subject in spec.subjects]


def matches(pattern: str, subject: str) -> bool:
    """Whether a NATS pattern matches a subject or a narrower pattern."""
    wanted, parts = pattern.split("."), subject.split(".")
    return len(wanted) == len(parts) and all(w in ("*", part) for w, part in zip(wanted, parts, strict=True))


SPELLED: dict[str, tuple[str, Stream]] = {
    "lease": (SUBJECTS.lease(7), Stream.TASKS),
    "generate": (SUBJECTS.generate("e0"), Stream.GEN),
    "generated": (SUBJECTS.generated("r0"), Stream.GEN),
    "sandbox": (SUBJECTS.sandbox("reset"), Stream.SBX),
    "sandbox_result": (SUBJECTS.sandbox_result("r0"), Stream.SBX),
    "turn": (SUBJECTS.turn("g00000001", 0, 0, 3), Stream.TURNS),
    "episode": (SUBJECTS.episode("g00000001", 0), Stream.EPISODES),
    "verdict": (SUBJECTS.verdict("g00000001", 0), Stream.EPISODES),
    "ready": (SUBJECTS.ready("g00000001"), Stream.READY),
    "graded": (SUBJECTS.graded("e00000001"), Stream.READY),
    "batch": (SUBJECTS.batch(3), Stream.LEDGER),
    "quarantine": (SUBJECTS.quarantine("g00000001"), Stream.LEDGER),
    "abandon": (SUBJECTS.abandon("g00000001"), Stream.LEDGER),
    "demand": (SUBJECTS.demand(3), Stream.TRAIN),
    "step": (SUBJECTS.step(3), Stream.TRAIN),
    "evaluation": (SUBJECTS.evaluation("step-00000"), Stream.TRAIN),
    "staged": (SUBJECTS.staged(1), Stream.POLICY),
    "anchor": (SUBJECTS.anchor(1), Stream.POLICY),
    "apply": (SUBJECTS.apply("e0"), Stream.POLICY),
    "engine_state": (SUBJECTS.engine_state("e0"), Stream.POLICY),
    "active": (SUBJECTS.active(), Stream.POLICY),
    "wanted": (SUBJECTS.wanted(), Stream.POLICY),
    "engine_heartbeat": (SUBJECTS.engine_heartbeat("e0"), Stream.REGISTRY),
    "service_heartbeat": (SUBJECTS.service_heartbeat(Role.BANK, "0"), Stream.REGISTRY),
    "dead_letter": (SUBJECTS.dead_letter(Stream.GEN, 7), Stream.DEAD),
    "lost_range": (SUBJECTS.lost_range(Stream.EPISODES, 3, 5), Stream.DEAD),
}


def test_every_subject_that_can_be_spelled_is_tried_here() -> None:
    spelling = {name for name, _ in inspect.getmembers(Subjects, inspect.isfunction) if not name.startswith("_")}
    assert spelling - {"stream", "pattern", "blob_bucket", "blob_stream"} == set(SPELLED)


@pytest.mark.parametrize("name", SPELLED)
def test_a_subject_belongs_to_exactly_one_pattern_of_its_stream(name: str) -> None:
    subject, stream = SPELLED[name]
    found = [(where, s.pattern) for where, s in PATTERNS if matches(SUBJECTS.pattern(s.pattern), subject)]
    assert [where for where, _ in found] == [stream]
    head = subject.removeprefix("hr.main.").split(".", 1)[0]
    assert _STREAM_BY_HEAD[head] is stream
    row, family = family_of(subject.removeprefix("hr.main."))
    assert (row.stream, matches(family.pattern, subject.removeprefix("hr.main."))) == (stream, True)


def test_no_two_patterns_overlap() -> None:
    for index, (_, first) in enumerate(PATTERNS):
        for _, second in PATTERNS[index + 1 :]:
            assert not matches(first.pattern, second.pattern)
            assert not matches(second.pattern, first.pattern)


def test_the_store_is_shared_out_and_not_more() -> None:
    assert {spec.stream for spec in STREAMS} == set(Stream)
    total = sum(spec.share for spec in STREAMS) + BLOB_SHARE
    assert 0.9 < total <= 1.0


def test_nothing_is_dropped_in_silence() -> None:
    """Invariant 3: every log refuses its publisher when full; only the registry's last values may give way."""
    for spec in STREAMS:
        if spec.stream is Stream.REGISTRY:
            assert (spec.discard, spec.max_msgs_per_subject) == ("old", 1)
        else:
            assert (spec.discard, spec.max_msgs_per_subject) == ("new", -1)
        if spec.retention == "limits" and spec.stream is not Stream.REGISTRY:
            assert spec.deny_delete
            assert not spec.max_age_s


ONE_WRITER = {
    Role.SAMPLER: {"task.lease.*", "train.eval.*"},
    Role.VERIFIER: {"verdict.*.*"},
    Role.BANK: {"ready.*", "graded.*"},
    Role.ADMISSION: {"ledger.batch.*", "ledger.quarantine.*", "ledger.abandon.*"},
    Role.TRAINER: {"train.demand.*", "train.step.*"},
    Role.PARAM_SYNC: {"policy.staged.*", "policy.anchor.*", "policy.apply.*", "policy.active", "policy.wanted.*"},
    Role.ROLLOUTER: {"gen.req.*", "sbx.req.*.*", "turn.*.*.*.*", "episode.*.*"},
    Role.ENGINE: {"gen.out.*", "policy.engine.*", "reg.engine.*"},
    Role.SANDBOX: {"sbx.out.*"},
    Role.OBSERVER: set(),
}


@pytest.mark.parametrize("role", list(Role))
def test_a_role_may_publish_its_own_subjects_and_no_others(role: Role) -> None:
    """Invariant 8: neither the agent's side nor a sandbox can write a verdict, a ready group or the ledger."""
    expected = {SUBJECTS.pattern(p) for p in ONE_WRITER[role]} | {SUBJECTS.pattern("reg.service.*.*")}
    if role is not Role.OBSERVER:
        expected.add(SUBJECTS.pattern("dead.*.*"))  # whoever meets a message that nobody can use
    assert set(publish_permissions(role, "main")) == expected


def test_what_means_once_for_ever_is_written_once_by_one_role() -> None:
    """Invariant 4."""
    for _, subject in PATTERNS:
        if subject.once and subject.pattern != "dead.*.*":
            assert len(subject.publishers) == 1, subject.pattern
    once = {subject.pattern for _, subject in PATTERNS if subject.once}
    assert {
        "task.lease.*",
        "episode.*.*",
        "verdict.*.*",
        "ready.*",
        "ledger.batch.*",
        "train.step.*",
        "policy.staged.*",
    } <= once


def test_a_role_reads_no_more_than_it_needs() -> None:
    assert readable_streams(Role.SANDBOX) == (Stream.SBX, Stream.REGISTRY)
    assert readable_streams(Role.VERIFIER) == (Stream.EPISODES, Stream.REGISTRY)
    assert Stream.LEDGER not in readable_streams(Role.ROLLOUTER)
    assert set(readable_streams(Role.OBSERVER)) == set(Stream) - {Stream.GEN, Stream.SBX}


@pytest.mark.parametrize("consumer", CONSUMERS, ids=lambda spec: spec.name)
def test_a_consumer_reads_one_subject_family_of_a_stream_that_its_role_may_read(consumer) -> None:
    assert consumer.role in spec_of(consumer.stream).readers
    filtered = consumer.filter.format(x="e0", lane="reset")
    assert any(matches(s.pattern, filtered) for s in spec_of(consumer.stream).subjects)
    assert consumer.ack_wait_s >= 10
    assert consumer_of(consumer.name) is consumer


def test_lanes_are_parts_of_subjects() -> None:
    assert {SUBJECTS.sandbox(lane, "x0") for lane in LANES} == {f"hr.main.sbx.req.{lane}.x0" for lane in LANES}


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "a" * 65, "ä"])
def test_a_name_that_could_break_a_subject_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape("engine: ")):
        check_token("engine", name)
    with pytest.raises(ValueError, match=r"engine: .* cannot be part of a subject"):
        SUBJECTS.generate(name)


@pytest.mark.parametrize("run", ["", "Main", "-a", "a.b", "a" * 13])
def test_a_run_name_that_no_stream_could_carry_is_refused(run: str) -> None:
    with pytest.raises(ValueError, match=r"run\.name"):
        Subjects(run)


def test_group_ids_sort_by_ordinal_and_say_their_purpose() -> None:
    assert (group_id("train", 42), group_id("eval", 7)) == ("g00000042", "e00000007")
    assert sorted(group_id("train", n) for n in (10, 9, 100)) == [group_id("train", n) for n in (9, 10, 100)]
    with pytest.raises(KeyError, match="no consumer"):
        consumer_of("nobody")
    with pytest.raises(KeyError, match="no subject"):
        family_of("task.lease.1.2")
