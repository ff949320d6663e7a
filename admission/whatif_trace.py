"""What a replay under other settings starts from: the recorded service times of every group and every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from admission.recorded import ledger, messages, ready_groups
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import BatchEntry, LedgerEntry
from schemas.lineage import Lineage
from schemas.policy import FleetVersions
from schemas.table import Stream
from schemas.training import BatchDemand, StepCommit
from schemas.trajectory import TurnRecord
from services.recording import Recording, RecordingError

Turns = tuple[tuple[float, float], ...]  # (begin, end) of the turns of one sibling, in seconds from the lease


@dataclass(slots=True)
class GroupTrace:
    """One training group as it was played: `seconds` from its lease until it was ready; times in seconds of the recording."""

    group: str
    family: str
    stream: str
    leased_s: float
    seconds: float
    ready: ReadyGroup
    turns: tuple[Turns, ...]

    def first_and_last(self) -> tuple[float, float]:
        """When its sampling began and ended, from the lease."""
        begins, ends = [t[0][0] for t in self.turns if t], [t[-1][1] for t in self.turns if t]
        return (min(begins), max(ends)) if begins else (0.0, self.seconds)


@dataclass(slots=True)
class StepTrace:
    """One committed step: seconds of the recording."""

    step: int
    demand_s: float
    batch_s: float
    commit_s: float
    groups: int
    lags: tuple[int, ...]
    own_s: float  # by the trainer's own monotonic clock, training and publishing; 0: it did not say


@dataclass
class Trace:
    """A recorded run in numbers. `sync_s`: from a commit until the whole fleet serves what came out. `busy`: groups that were
    played at a time when most were (95 % of the time no more)."""

    groups: list[GroupTrace] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)
    entries: list[tuple[int, LedgerEntry]] = field(default_factory=list)
    demands: dict[int, BatchDemand] = field(default_factory=dict)  # by TRAIN sequence
    leased: Counter[tuple[str, str]] = field(default_factory=Counter)  # (family, stream)
    strata: dict[str, tuple[str, str]] = field(default_factory=dict)
    sync_s: float = 0.0
    busy: float = 1.0
    has_turns: bool = False

    def step_seconds(self) -> list[float]:
        """What each step took, by the trainer's own clock; where it does not say, from its batch to its commit."""
        out, before = [], float("-inf")
        for step in self.steps:
            out.append(step.own_s or max(0.0, step.commit_s - max(step.batch_s, before)))
            before = step.commit_s
        return out


def trace_of(recording: Recording) -> Trace:
    """Read a recording. Raises `RecordingError` when it holds no committed step or no ready group."""
    out = Trace()
    leases = {
        message.group: (record.time_ns, message)
        for record, message in messages(recording, Stream.TASKS)
        if isinstance(message, GroupLease) and message.purpose == "train"
    }
    if not leases:
        raise RecordingError(f"{recording.path}: holds no lease of a training group, so there is nothing to replay")
    zero = min(time_ns for time_ns, _ in leases.values())
    out.strata = {group: (lease.family, lease.stream) for group, (_, lease) in leases.items()}
    out.leased = Counter(out.strata.values())
    turns = _turns(recording, {group: time_ns for group, (time_ns, _) in leases.items()})
    out.has_turns = bool(turns)
    for record, ready in ready_groups(recording):
        if ready.purpose == "train" and ready.group in leases:
            time_ns, lease = leases[ready.group]
            played = turns.get(ready.group, {})
            begun = (time_ns - zero) / 1e9
            seconds = max(0.0, (record.time_ns - time_ns) / 1e9)
            # a rollouter's clock that jumped may name a time after the group was whole, by the server's
            slots = tuple(
                tuple((min(begin, seconds), min(end, seconds)) for begin, end in played.get(s.slot, ()))
                for s in sorted(ready.siblings, key=lambda s: s.slot)
            )
            out.groups.append(GroupTrace(ready.group, lease.family, lease.stream, begun, seconds, ready, slots))
    out.groups.sort(key=lambda group: group.leased_s)
    _steps(recording, out, zero)
    if not out.groups or not out.steps:
        raise RecordingError(f"{recording.path}: holds no ready group or no committed step, so there is nothing to replay")
    out.busy = _busy(out.groups)
    return out


def _turns(recording: Recording, leased_ns: dict[str, int]) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """Group -> slot -> turns of its last attempt."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    newest: dict[tuple[str, int], int] = {}
    for _, message in messages(recording, Stream.TURNS):
        if not isinstance(message, TurnRecord) or message.group not in leased_ns:
            continue
        key, zero = (message.group, message.slot), leased_ns[message.group]
        of_slot = found.setdefault(message.group, {}).setdefault(message.slot, [])
        if message.attempt > newest.get(key, -1):
            newest[key] = message.attempt
            of_slot.clear()
        if message.attempt == newest[key]:
            begin = max(0.0, (message.started_ns - zero) / 1e9)
            of_slot.append((begin, max(begin, (message.generated_ns - zero) / 1e9)))
    return found


def _steps(recording: Recording, out: Trace, zero: int) -> None:
    batches: dict[int, tuple[float, BatchEntry]] = {}
    for record, entry in ledger(recording):
        out.entries.append((record.time_ns, entry))
        if isinstance(entry, BatchEntry):
            batches[entry.step] = ((record.time_ns - zero) / 1e9, entry)
    asked: dict[int, float] = {}
    commits: dict[int, float] = {}
    own: dict[int, float] = {}
    line = Lineage()
    for record, message in messages(recording, Stream.TRAIN):
        if isinstance(message, BatchDemand):
            out.demands[record.seq] = message
            asked.setdefault(message.step, (record.time_ns - zero) / 1e9)
        elif isinstance(message, StepCommit) and line.add(message):
            commits[message.step] = (record.time_ns - zero) / 1e9
            own[message.step] = message.train_s + message.publish_s
    for step, commit_s in sorted(commits.items()):
        if step in batches:
            batch_s, entry = batches[step]
            lags = tuple(member.lag for member in entry.groups)
            out.steps.append(StepTrace(step, asked.get(step, batch_s), batch_s, commit_s, len(lags), lags, own[step]))
    out.sync_s = _sync(recording, {step + 1: commit_s for step, commit_s in commits.items()}, zero)


def _sync(recording: Recording, made: dict[int, float], zero: int) -> float:
    """Median seconds from a version's commit until every engine serves it or a later one."""
    served: dict[int, float] = {}
    for record, message in messages(recording, Stream.POLICY):
        if isinstance(message, FleetVersions):
            served.setdefault(message.oldest, (record.time_ns - zero) / 1e9)
    delays = [served[version] - made[version] for version in served if version in made and served[version] >= made[version]]
    return median(delays) if delays else 0.0


def _busy(groups: Sequence[GroupTrace]) -> float:
    """The number of groups in play that is exceeded 5 % of the time."""
    changes = sorted([(g.leased_s, 1) for g in groups] + [(g.leased_s + g.seconds, -1) for g in groups])
    spent: Counter[int] = Counter()
    now, at = 0, changes[0][0]
    for time_s, change in changes:
        spent[now] += time_s - at  # type: ignore[assignment]
        now, at = now + change, time_s
    total, seen = sum(spent.values()), 0.0
    for count in sorted(spent):
        seen += spent[count]
        if seen >= 0.95 * total:
            return max(1.0, float(count))
    return 1.0
