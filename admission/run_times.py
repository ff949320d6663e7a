"""The times that a recording tells of: how long groups and steps took, and what was decided about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from admission import recorded
from admission.what_if import GroupTimes, Outcome, RunTimes, StepTimes, as_recorded
from schemas.ledger import BatchEntry, LedgerEntry
from schemas.policy import FleetVersions
from schemas.table import Stream
from schemas.training import BatchDemand, Branch, StepCommit
from services.recording import RecordingError
from services.recording_reader import RecordingReader


@dataclass
class Measured:
    """Times, what did happen, and at which version each group was decided about."""

    times: RunTimes
    outcome: Outcome
    decided_at: dict[str, int] = field(default_factory=dict)


def measure(reader: RecordingReader) -> Measured:
    """Read the times out of a recording. Raises `RecordingError` for one without a committed step."""
    leased: dict[str, tuple[int, str]] = {}
    for record, lease in recorded.leases(reader):
        if lease.purpose == "train":
            leased[lease.group] = (record.time_ns, lease.family)
    whole = {group.group: (record.time_ns, group) for record, group in recorded.ready(reader) if group.purpose == "train"}
    entries = recorded.ledger(reader)
    decided_ns = {record.seq: record.time_ns for record in reader.records(Stream.LEDGER)}
    times = RunTimes(never_ready=sum(name not in whole for name in leased))
    for name, (at, _) in leased.items():
        if name in whole:
            times.groups.append(GroupTimes(whole[name][1], max(0.0, (whole[name][0] - at) / 1e9)))
    batches = {entry.step: (decided_ns[seq], entry) for seq, entry in entries if isinstance(entry, BatchEntry)}
    times.steps, times.branches = _steps(reader, batches)
    if not times.steps or not times.groups:
        raise RecordingError(f"{reader.path}: no step was committed in what it holds, so there is nothing to compare with")
    used = [batches[step.step][1] for step in times.steps]
    times.groups_per_batch = max(1, round(sum(len(batch.groups) for batch in used) / len(used)))
    families = {name: family for name, (_, family) in leased.items()}
    dropped = [(str(entry.reason), entry.family) for _, entry in entries if not isinstance(entry, BatchEntry)]
    outcome = as_recorded(times, used, dropped, families)
    return Measured(times, outcome, _decided_at([entry for _, entry in entries]))


def _decided_at(entries: list[LedgerEntry]) -> dict[str, int]:
    at: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry, BatchEntry):
            at |= {member.group: entry.version for member in entry.groups}
        elif isinstance(getattr(entry, "at_version", None), int):
            at[entry.group] = getattr(entry, "at_version", 0)
    return at


def _steps(reader: RecordingReader, batches: dict[int, tuple[int, BatchEntry]]) -> tuple[list[StepTimes], tuple[Branch, ...]]:
    """The committed steps in order; of several commits of one step, that of the newest incarnation."""
    demands: dict[int, int] = {}
    commits: dict[int, int] = {}
    branches: tuple[Branch, ...] = ()
    for record, message in recorded.messages(reader, Stream.TRAIN):
        if isinstance(message, BatchDemand):
            demands.setdefault(message.step, record.time_ns)
            branches = message.left() or branches
        elif isinstance(message, StepCommit):
            commits[message.step] = record.time_ns
    served = _served(reader)
    begun = min(demands.values(), default=0)
    steps: list[StepTimes] = []
    before = 0
    for step in sorted(commits):
        if step not in batches:
            continue
        decided, committed = batches[step][0], commits[step]
        shown = served.get(step + 1, committed)
        steps.append(
            StepTimes(
                step=step,
                demand_at_s=(demands.get(step, decided) - begun) / 1e9,
                decided_at_s=(decided - begun) / 1e9,
                committed_at_s=(committed - begun) / 1e9,
                work_s=max(0, committed - max(decided, before)) / 1e9,
                publish_s=max(0, shown - committed) / 1e9,
            )
        )
        before = committed
    return steps, branches


def _served(reader: RecordingReader) -> dict[int, int]:
    """When the whole fleet first served each version or a later one."""
    at: dict[int, int] = {}
    known = 0
    for record, message in recorded.messages(reader, Stream.POLICY):
        if isinstance(message, FleetVersions) and message.oldest > known:
            for version in range(known + 1, message.oldest + 1):
                at[version] = record.time_ns
            known = message.oldest
    return at
