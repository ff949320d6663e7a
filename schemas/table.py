"""The one table of streams, subjects, consumers and permissions. Nobody else spells a subject.

Every stream keeps its items (`limits` retention, `discard new`) except the two request queues, whose items go with their ack,
and the registry, which keeps the last value of each key. A full stream refuses the publisher; nothing is dropped in silence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from schemas.sandbox import Lane


class Stream(StrEnum):
    """Stream names; on the server each is `hr_<run>_<NAME>`."""

    TASKS = "TASKS"
    GEN = "GEN"
    SBX = "SBX"
    TURNS = "TURNS"
    EPISODES = "EPISODES"
    READY = "READY"
    LEDGER = "LEDGER"
    TRAIN = "TRAIN"
    POLICY = "POLICY"
    REGISTRY = "REGISTRY"
    DEAD = "DEAD"


class Role(StrEnum):
    """Service identities."""

    SAMPLER = "sampler"
    ROLLOUTER = "rollouter"
    ENGINE = "engine"
    SANDBOX = "sandbox"
    VERIFIER = "verifier"
    BANK = "bank"
    ADMISSION = "admission"
    TRAINER = "trainer"
    PARAM_SYNC = "param_sync"
    OBSERVER = "observer"


@dataclass(frozen=True, kw_only=True)
class SubjectSpec:
    """One subject family: its pattern below `hr.<run>.` and who may publish it. `once` = at most one message per subject."""

    pattern: str
    publishers: tuple[Role, ...]
    once: bool


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """How one stream is kept. `share` is its part of the configured store size."""

    stream: Stream
    subjects: tuple[SubjectSpec, ...]
    readers: tuple[Role, ...]
    share: float
    retention: Literal["limits", "workqueue"] = "limits"
    max_age_s: float = 0.0
    max_msgs_per_subject: int = -1
    discard: Literal["new", "old"] = "new"
    deny_delete: bool = True
    storage: Literal["file"] = "file"


@dataclass(frozen=True, kw_only=True)
class ConsumerSpec:
    """A durable work consumer. `{x}` in name and filter is the instance. Acks are flow control; effects are once-only writes.

    Whoever works on a message says so every quarter of `ack_wait_s`. That time is about the worker's death and not the work's
    length: a few heartbeats, with room for some that come seconds late on a busy machine. `ack` says when: `after_publish` =
    after the downstream publishes are confirmed. `watchers` may see how far it has come.
    """

    name: str
    stream: Stream
    filter: str
    role: Role
    ack_wait_s: float
    max_ack_pending: int
    ack: Literal["after_publish"] = "after_publish"
    watchers: tuple[Role, ...] = ()


R = Role  # short for the rows below
STREAMS: tuple[StreamSpec, ...] = (
    StreamSpec(
        stream=Stream.TASKS,
        subjects=(SubjectSpec(pattern="task.lease.*", publishers=(R.SAMPLER,), once=True),),
        readers=(R.SAMPLER, R.ROLLOUTER, R.BANK, R.ADMISSION, R.OBSERVER),
        share=0.02,
    ),
    StreamSpec(
        stream=Stream.GEN,
        subjects=(
            SubjectSpec(pattern="gen.req.*", publishers=(R.ROLLOUTER,), once=False),
            SubjectSpec(pattern="gen.out.*", publishers=(R.ENGINE,), once=False),
        ),
        readers=(R.ENGINE, R.ROLLOUTER),
        share=0.06,
        retention="workqueue",
        max_age_s=1800.0,
        deny_delete=False,
    ),
    StreamSpec(
        stream=Stream.SBX,
        subjects=(
            SubjectSpec(pattern="sbx.req.*.*", publishers=(R.ROLLOUTER,), once=False),
            SubjectSpec(pattern="sbx.out.*", publishers=(R.SANDBOX,), once=False),
        ),
        readers=(R.SANDBOX, R.ROLLOUTER),
        share=0.06,
        retention="workqueue",
        max_age_s=1800.0,
        deny_delete=False,
    ),
    StreamSpec(
        stream=Stream.TURNS,
        subjects=(SubjectSpec(pattern="turn.*.*.*.*", publishers=(R.ROLLOUTER,), once=True),),
        readers=(R.ROLLOUTER, R.OBSERVER),
        share=0.22,
    ),
    StreamSpec(
        stream=Stream.EPISODES,
        subjects=(
            SubjectSpec(pattern="episode.*.*", publishers=(R.ROLLOUTER,), once=True),
            SubjectSpec(pattern="verdict.*.*", publishers=(R.VERIFIER,), once=True),
        ),
        readers=(R.ROLLOUTER, R.VERIFIER, R.BANK, R.ADMISSION, R.TRAINER, R.OBSERVER),
        share=0.28,
    ),
    StreamSpec(
        stream=Stream.READY,
        subjects=(
            SubjectSpec(pattern="ready.*", publishers=(R.BANK,), once=True),
            SubjectSpec(pattern="graded.*", publishers=(R.BANK,), once=True),
        ),
        readers=(R.BANK, R.ADMISSION, R.SAMPLER, R.TRAINER, R.OBSERVER),
        share=0.06,
    ),
    StreamSpec(
        stream=Stream.LEDGER,
        subjects=(
            SubjectSpec(pattern="ledger.batch.*", publishers=(R.ADMISSION,), once=True),
            SubjectSpec(pattern="ledger.quarantine.*", publishers=(R.ADMISSION,), once=True),
            SubjectSpec(pattern="ledger.abandon.*", publishers=(R.ADMISSION,), once=True),
        ),
        readers=(R.ADMISSION, R.TRAINER, R.SAMPLER, R.OBSERVER),
        share=0.02,
    ),
    StreamSpec(
        stream=Stream.TRAIN,
        subjects=(
            SubjectSpec(pattern="train.demand.*", publishers=(R.TRAINER,), once=True),
            SubjectSpec(pattern="train.step.*", publishers=(R.TRAINER,), once=True),
            SubjectSpec(pattern="train.eval.*", publishers=(R.SAMPLER,), once=True),
        ),
        readers=(R.TRAINER, R.ADMISSION, R.PARAM_SYNC, R.SAMPLER, R.OBSERVER),
        share=0.02,
    ),
    StreamSpec(
        stream=Stream.POLICY,
        subjects=(
            SubjectSpec(pattern="policy.staged.*", publishers=(R.PARAM_SYNC,), once=True),
            SubjectSpec(pattern="policy.anchor.*", publishers=(R.PARAM_SYNC,), once=True),
            SubjectSpec(pattern="policy.apply.*", publishers=(R.PARAM_SYNC,), once=False),
            SubjectSpec(pattern="policy.engine.*", publishers=(R.ENGINE,), once=False),
            SubjectSpec(pattern="policy.active", publishers=(R.PARAM_SYNC,), once=False),
            SubjectSpec(pattern="policy.wanted.*", publishers=(R.PARAM_SYNC,), once=False),
        ),
        readers=(R.PARAM_SYNC, R.ENGINE, R.ROLLOUTER, R.SAMPLER, R.TRAINER, R.OBSERVER),
        share=0.02,
    ),
    StreamSpec(
        stream=Stream.REGISTRY,
        subjects=(
            SubjectSpec(pattern="reg.engine.*", publishers=(R.ENGINE,), once=False),
            SubjectSpec(pattern="reg.service.*.*", publishers=tuple(Role), once=False),
        ),
        readers=tuple(Role),
        share=0.01,
        max_msgs_per_subject=1,
        discard="old",
        deny_delete=False,
    ),
    StreamSpec(
        stream=Stream.DEAD,
        subjects=(SubjectSpec(pattern="dead.*.*", publishers=tuple(r for r in Role if r is not R.OBSERVER), once=True),),
        readers=(R.OBSERVER,),
        share=0.02,
    ),
)
BLOB_SHARE = 0.2
CONSUMERS: tuple[ConsumerSpec, ...] = (
    ConsumerSpec(
        name="rollouter",
        stream=Stream.TASKS,
        filter="task.lease.*",
        role=R.ROLLOUTER,
        ack_wait_s=12.0,
        max_ack_pending=4096,
        watchers=(R.BANK,),
    ),
    ConsumerSpec(
        name="verifier",
        stream=Stream.EPISODES,
        filter="episode.*.*",
        role=R.VERIFIER,
        ack_wait_s=20.0,
        max_ack_pending=256,
        watchers=(R.BANK,),
    ),
    ConsumerSpec(
        name="engine-{x}", stream=Stream.GEN, filter="gen.req.{x}", role=R.ENGINE, ack_wait_s=15.0, max_ack_pending=4096
    ),
    ConsumerSpec(
        name="genout-{x}", stream=Stream.GEN, filter="gen.out.{x}", role=R.ROLLOUTER, ack_wait_s=15.0, max_ack_pending=4096
    ),
    ConsumerSpec(
        name="sbxany-{lane}",
        stream=Stream.SBX,
        filter="sbx.req.{lane}.any",
        role=R.SANDBOX,
        ack_wait_s=15.0,
        max_ack_pending=1024,
    ),
    ConsumerSpec(
        name="sbx-{x}-{lane}",
        stream=Stream.SBX,
        filter="sbx.req.{lane}.{x}",
        role=R.SANDBOX,
        ack_wait_s=15.0,
        max_ack_pending=1024,
    ),
    ConsumerSpec(
        name="sbxout-{x}", stream=Stream.SBX, filter="sbx.out.{x}", role=R.ROLLOUTER, ack_wait_s=15.0, max_ack_pending=4096
    ),
)

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,11}")


def check_token(field: str, value: str) -> str:
    """A part of a subject. Raises `ValueError` naming the field if it could not stand in one."""
    if not _TOKEN.fullmatch(value):
        raise ValueError(f"{field}: {value!r} cannot be part of a subject; use 1 to 64 of A-Z a-z 0-9 _ -")
    return value


def _of_incarnation(number: int, incarnation: int) -> str:
    """`7` in the first incarnation of the trainer, `7-2` in incarnation 2, so that a name that was left is never used again."""
    return f"{number}-{incarnation}" if incarnation else str(number)


class Subjects:
    """Spells every subject of one run. Raises `ValueError` for a run name that a stream name could not carry."""

    def __init__(self, run: str) -> None:
        if not _RUN.fullmatch(run):
            raise ValueError(f"run.name: {run!r} must be 1 to 12 of a-z 0-9 - and start with a letter or digit")
        self.run = run
        self.prefix = f"hr.{run}."

    def stream(self, stream: Stream) -> str:
        return f"hr_{self.run}_{stream}"

    def pattern(self, pattern: str) -> str:
        """A table pattern, in this run."""
        return self.prefix + pattern

    def blob_bucket(self) -> str:
        return f"hr-{self.run}"

    def blob_stream(self) -> str:
        return f"OBJ_{self.blob_bucket()}"

    def lease(self, ordinal: int) -> str:
        return f"{self.prefix}task.lease.{ordinal}"

    def generate(self, engine: str) -> str:
        return f"{self.prefix}gen.req.{check_token('engine', engine)}"

    def generated(self, requester: str) -> str:
        return f"{self.prefix}gen.out.{check_token('requester', requester)}"

    def sandbox(self, lane: Lane, executor: str = "any") -> str:
        return f"{self.prefix}sbx.req.{lane}.{check_token('executor', executor)}"

    def sandbox_result(self, requester: str) -> str:
        return f"{self.prefix}sbx.out.{check_token('requester', requester)}"

    def turn(self, group: str, slot: int | str, attempt: int | str, turn: int | str) -> str:
        return f"{self.prefix}turn.{group}.{slot}.{attempt}.{turn}"

    def episode(self, group: str, slot: int | str) -> str:
        return f"{self.prefix}episode.{group}.{slot}"

    def verdict(self, group: str, slot: int | str) -> str:
        return f"{self.prefix}verdict.{group}.{slot}"

    def ready(self, group: str) -> str:
        return f"{self.prefix}ready.{group}"

    def graded(self, group: str) -> str:
        return f"{self.prefix}graded.{group}"

    def batch(self, step: int) -> str:
        return f"{self.prefix}ledger.batch.{step}"

    def quarantine(self, group: str) -> str:
        return f"{self.prefix}ledger.quarantine.{group}"

    def abandon(self, group: str) -> str:
        return f"{self.prefix}ledger.abandon.{group}"

    def demand(self, step: int, incarnation: int = 0) -> str:
        return f"{self.prefix}train.demand.{_of_incarnation(step, incarnation)}"

    def step(self, step: int, incarnation: int = 0) -> str:
        return f"{self.prefix}train.step.{_of_incarnation(step, incarnation)}"

    def evaluation(self, point: str) -> str:
        return f"{self.prefix}train.eval.{check_token('eval point', point)}"

    def staged(self, version: int, incarnation: int = 0) -> str:
        return f"{self.prefix}policy.staged.{_of_incarnation(version, incarnation)}"

    def anchor(self, version: int, incarnation: int = 0) -> str:
        return f"{self.prefix}policy.anchor.{_of_incarnation(version, incarnation)}"

    def apply(self, engine: str) -> str:
        return f"{self.prefix}policy.apply.{check_token('engine', engine)}"

    def engine_state(self, engine: str) -> str:
        return f"{self.prefix}policy.engine.{check_token('engine', engine)}"

    def active(self) -> str:
        return f"{self.prefix}policy.active"

    def wanted(self) -> str:
        return f"{self.prefix}policy.wanted.anchor"

    def engine_heartbeat(self, engine: str) -> str:
        return f"{self.prefix}reg.engine.{check_token('engine', engine)}"

    def service_heartbeat(self, role: Role, instance: str) -> str:
        return f"{self.prefix}reg.service.{role}.{check_token('instance', instance)}"

    def dead_letter(self, stream: Stream, seq: int) -> str:
        return f"{self.prefix}dead.{stream}.{seq}"

    def lost_range(self, stream: Stream, first: int, last: int) -> str:
        return f"{self.prefix}dead.{stream}.lost-{first}-{last}"


def spec_of(stream: Stream) -> StreamSpec:
    return next(spec for spec in STREAMS if spec.stream is stream)


def family_of(name: str) -> tuple[StreamSpec, SubjectSpec]:
    """Stream and subject family of a subject below `hr.<run>.`. Raises `KeyError` if the table has none."""
    words = name.split(".")
    for spec in STREAMS:
        for subject in spec.subjects:
            pattern = subject.pattern.split(".")
            if len(pattern) == len(words) and all(a in ("*", b) for a, b in zip(pattern, words, strict=True)):
                return spec, subject
    raise KeyError(f"no subject {name!r} in the table")


def consumer_of(name: str) -> ConsumerSpec:
    """The consumer's row by its template name. Raises `KeyError` if the table has none."""
    for spec in CONSUMERS:
        if spec.name == name:
            return spec
    raise KeyError(f"no consumer {name!r} in the table")


def publish_permissions(role: Role, run: str) -> tuple[str, ...]:
    """Subjects that `role` may publish in `run`, from the table alone."""
    subjects = Subjects(run)
    return tuple(subjects.pattern(s.pattern) for spec in STREAMS for s in spec.subjects if role in s.publishers)


def readable_streams(role: Role) -> tuple[Stream, ...]:
    """Streams that `role` may read, from the table alone."""
    return tuple(spec.stream for spec in STREAMS if role in spec.readers)
