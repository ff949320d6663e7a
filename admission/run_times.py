"""The times that a recording tells of: how long groups and steps took, and what was decided about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from admission import recorded
from admission.life import content_of
from admission.slim import SlimTurn
from admission.what_if import Decided, GroupTimes, Outcome, RunTimes, StepTimes, as_recorded
from admission.what_if_strata import Stratum, stratum_of, thirds
from admission.what_if_turns import Turns
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, LostItem, QuarantineEntry
from schemas.policy import FleetVersions
from schemas.table import Stream
from schemas.training import BatchDemand, StepCommit
from services.recording import RecordingError
from services.recording_reader import RecordingReader


@dataclass
class Measured:
    """Times, what did happen, what each group was decided from, and the groups that the store lost something of."""

    times: RunTimes
    outcome: Outcome
    decided: dict[str, Decided] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()


def measure(reader: RecordingReader) -> Measured:
    """Read the times out of a recording. Raises `RecordingError` for one without a committed step."""
    leased: dict[str, tuple[int, str]] = {}
    for record, lease in recorded.leases(reader):
        if lease.purpose == "train":
            leased[lease.group] = (record.time_ns, lease.family)
    whole = {group.group: (record.time_ns, group) for record, group in recorded.ready(reader) if group.purpose == "train"}
    turns = _turns(reader, {name: at for name, (at, _) in leased.items()})
    entries = recorded.ledger(reader)
    decided_ns = {record.seq: record.time_ns for record in reader.records(Stream.LEDGER)}
    times = RunTimes(never_ready=sum(name not in whole for name in leased))
    for name, (at, _) in leased.items():
        if name in whole:
            ready_s = max(0.0, (whole[name][0] - at) / 1e9)
            times.groups.append(GroupTimes(whole[name][1], ready_s, _by_slot(turns.get(name, {}), ready_s)))
    times.thirds = thirds([held.group for held in times.groups])
    batches = {entry.step: (decided_ns[seq], entry) for seq, entry in entries if isinstance(entry, BatchEntry)}
    demands, times.steps = _steps(reader, batches)
    if not times.steps or not times.groups:
        raise RecordingError(f"{reader.path}: no step was committed in what it holds, so there is nothing to compare with")
    used = [batches[step.step][1] for step in times.steps]
    times.groups_per_batch = max(1, round(sum(len(batch.groups) for batch in used) / len(used)))
    strata = {name: Stratum(family) for name, (_, family) in leased.items()}
    strata |= {held.group.group: stratum_of(held.group, times.thirds) for held in times.groups}
    closed = [entry for _, entry in entries if not isinstance(entry, BatchEntry)]
    dropped = [(str(entry.reason), strata.get(entry.group, Stratum(entry.family))) for entry in closed]
    lost = frozenset(e.group for e in closed if isinstance(e, AbandonEntry) and isinstance(e.lost, LostItem))
    outcome = as_recorded(times, used, dropped, strata, lost)
    return Measured(times, outcome, _decided([entry for _, entry in entries], demands), lost)


def _decided(entries: list[LedgerEntry], demands: dict[int, BatchDemand]) -> dict[str, Decided]:
    """Of each group what its first decision was made from; being taken out of a batch is none by the gates."""
    found: dict[str, Decided] = {}
    for entry in entries:
        asked = demands.get(entry.demand_seq) if isinstance(entry.demand_seq, int) else None
        branches = asked.left() if asked is not None else ()
        if isinstance(entry, BatchEntry):
            found |= {member.group: Decided(entry.version, branches) for member in entry.groups}
        elif isinstance(entry, QuarantineEntry):
            found[entry.group] = Decided(entry.at_version, branches)
        elif asked is not None:
            found[entry.group] = Decided(asked.version, branches)
    return found


def _turns(reader: RecordingReader, leased_ns: dict[str, int]) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """Group → slot → turns of the last attempt, in seconds from the lease, by the rollouter's clock."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    newest: dict[tuple[str, int], int] = {}
    for record in reader.records(Stream.TURNS):
        words = record.name.split(".")
        turn = content_of(Stream.TURNS, record) if words[-1].isdecimal() and words[1] in leased_ns else None
        if not isinstance(turn, SlimTurn):
            continue
        key, begun = (turn.group, turn.slot), leased_ns[turn.group]
        of_slot = found.setdefault(turn.group, {}).setdefault(turn.slot, [])
        if turn.attempt > newest.setdefault(key, turn.attempt):
            newest[key] = turn.attempt
            of_slot.clear()
        if turn.attempt == newest[key]:
            of_slot.append(((turn.started_ns - begun) / 1e9, (turn.generated_ns - begun) / 1e9))
    return found


def _by_slot(played: dict[int, list[tuple[float, float]]], ready_s: float) -> tuple[Turns, ...]:
    """In order, within the group's own time: a rollouter's clock may differ from the server's."""
    if not played:
        return ()
    out = []
    for slot in range(max(played) + 1):
        at, turns = 0.0, []
        for begin, end in sorted(played.get(slot, [])):
            begin = min(max(begin, at), ready_s)
            at = min(max(end, begin), ready_s)
            turns.append((begin, at))
        out.append(tuple(turns))
    return tuple(out)


def _steps(
    reader: RecordingReader, batches: dict[int, tuple[int, BatchEntry]]
) -> tuple[dict[int, BatchDemand], list[StepTimes]]:
    """The demands by their sequence, and the committed steps in order.

    Of several commits of one step that of the newest incarnation counts. A step takes as long as the trainer measured; where it
    did not say, from its batch to its commit.
    """
    asked: dict[int, BatchDemand] = {}
    demands: dict[int, int] = {}
    commits: dict[int, int] = {}
    own_s: dict[int, float] = {}
    for record, message in recorded.messages(reader, Stream.TRAIN):
        if isinstance(message, BatchDemand):
            asked[record.seq] = message
            demands.setdefault(message.step, record.time_ns)
        elif isinstance(message, StepCommit):
            commits[message.step] = record.time_ns
            own_s[message.step] = message.train_s + message.publish_s
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
                work_s=own_s[step] or max(0, committed - max(decided, before)) / 1e9,
                publish_s=max(0, shown - committed) / 1e9,
            )
        )
        before = max(before, committed)
    return asked, steps


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
