"""The audit's rules: does all that a run recorded agree? Pure; logs and checkpoints in, findings out.

Each check lists every item that breaks it, by name and place, and none of them corrects anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from admission.conservation import account
from schemas.group import LOST, ReadyGroup
from schemas.lease import ordinal_of
from schemas.ledger import AbandonEntry, BatchEntry, BatchGroup, LedgerEntry, LostItem
from schemas.lineage import Lineage
from schemas.table import Stream
from services.audit import Evidence

_OF_GROUPS = (Stream.TURNS, Stream.EPISODES, Stream.READY)


@dataclass(frozen=True, slots=True)
class Finding:
    """One item that breaks a rule: its name, where it stands, and what is wrong."""

    item: str
    at: str  # `LEDGER 12`, or a path
    problem: str

    def __str__(self) -> str:
        return f"{self.item} ({self.at}): {self.problem}"


@dataclass(frozen=True, slots=True)
class Check:
    """One rule with how many items it was held against and which broke it."""

    name: str
    looked_at: int
    findings: tuple[Finding, ...]
    note: str = ""

    @property
    def holds(self) -> bool:
        return not self.findings


def audit(found: Evidence) -> list[Check]:
    """All checks, each over all that was recorded."""
    run = _Run(found)
    return [run.check(name, rule) for name, rule in _RULES.items()]


class _Run:
    """The evidence, by the names that the rules ask for."""

    def __init__(self, found: Evidence) -> None:
        self.found = found
        self.batches = {entry.step: (seq, entry) for seq, entry in found.ledger if isinstance(entry, BatchEntry)}
        self.ready = dict(found.ready)
        self.line = Lineage()
        for _, commit in found.steps:
            self.line.add(commit)
        self.taken_out = {
            entry.group: (seq, entry) for seq, entry in found.ledger if isinstance(entry, AbandonEntry) and _of_batch(entry)
        }
        self.left_out = {(c.step, left.group): left.item for _, c in found.steps for left in c.left_out()}
        self.looked_at = 0
        self.note = ""

    def check(self, name: str, rule: Callable[[_Run], Iterator[Finding]]) -> Check:
        self.looked_at, self.note = 0, ""
        findings = tuple(rule(self))
        return Check(name, self.looked_at, findings, self.note)

    def consumed(self, step: int, incarnation: int) -> list[str]:
        """The groups that the weights of an incarnation took from this step's batch: all but those that were lost out of it."""
        if step not in self.batches:
            return []
        members = [member.group for member in self.batches[step][1].groups]
        commit = self.line.commit_of(step, incarnation)
        if commit is not None:
            lost = {left.group for left in commit.left_out()}
        else:
            lost = {group for group in members if group in self.taken_out}
        return [group for group in members if group not in lost]

    def is_lost(self, step: int, group: str) -> bool:
        """Whether a group was lost out of the batch of this step."""
        return (step, group) in self.left_out or group in self.taken_out

    def on_line(self) -> Iterator[tuple[int, int, tuple[str, ...]]]:
        """Step, TRAIN sequence and groups of the committed steps that training stands on."""
        for seq, commit in self.found.steps:
            if self.line.commit_of(commit.step) == commit and self.line.on_line(commit.incarnation, commit.version):
                yield commit.step, seq, commit.groups


def _conservation(run: _Run) -> Iterator[Finding]:
    """Every leased group is consumed, quarantined, abandoned or open, once; every ordinal has its lease."""
    found = run.found
    total = account([lease for _, lease in found.leases], [entry for _, entry in found.ledger])
    run.looked_at, run.note = len(found.leases), total.line().split(";")[0]
    leases = {lease.group: seq for seq, lease in found.leases}
    ordinals = {lease.ordinal: seq for seq, lease in found.leases}
    for ordinal in range(max(ordinals, default=-1)):
        if ordinal not in ordinals:
            yield Finding(f"lease {ordinal}", "TASKS", "is lost: the ordinal has no readable lease")
    closed: dict[str, str] = {}
    for seq, entry in found.ledger:
        for group, how in _closes(entry):
            place = f"LEDGER {seq}"
            if group not in leases:
                yield Finding(group, place, f"is {how} but has no lease: lease {ordinal_of(group)} is lost or never was")
            taken_out = isinstance(entry, AbandonEntry) and closed.get(group, "").startswith(
                f"consumed by step {entry.step} at"
            )
            if group in closed and not taken_out:
                yield Finding(group, place, f"is {how}, and was {closed[group]} before")
            closed.setdefault(group, f"{how} at {place}")


def _closes(entry: LedgerEntry) -> list[tuple[str, str]]:
    if isinstance(entry, BatchEntry):
        return [(member.group, f"consumed by step {entry.step}") for member in entry.groups]
    return [(entry.group, f"closed ({entry.reason})")]


def _trained_once(run: _Run) -> Iterator[Finding]:
    """A group is in at most one committed step of the line."""
    steps: dict[str, int] = {}
    for step, seq, groups in run.on_line():
        run.looked_at += 1
        for group in groups:
            if group in steps:
                yield Finding(group, f"TRAIN {seq}", f"entered step {step}, and step {steps[group]} before")
            steps.setdefault(group, step)


def _steps_follow_ledger(run: _Run) -> Iterator[Finding]:
    """A committed step consumed exactly the groups of its batch, and no step is missing."""
    for seq, commit in run.found.steps:
        run.looked_at += 1
        name = f"step {commit.step}" + (f" of incarnation {commit.incarnation}" if commit.incarnation else "")
        if commit.step not in run.batches:
            yield Finding(name, f"TRAIN {seq}", "is committed, and LEDGER has no batch for it")
            continue
        at, batch = run.batches[commit.step]
        expected = tuple(member.group for member in batch.groups)
        if not commit.stands_on(expected):
            yield Finding(name, f"TRAIN {seq}", f"consumed {commit.groups}, its batch at LEDGER {at} names {expected}")
        if commit.ledger_seq and commit.ledger_seq != at:
            yield Finding(name, f"TRAIN {seq}", f"names LEDGER {commit.ledger_seq}, its batch is at LEDGER {at}")
    committed = {step for step, _, _ in run.on_line()}
    for step in range(max(committed, default=-1)):
        if step not in committed:
            yield Finding(f"step {step}", "TRAIN", "is not committed, though later ones are")
    for step in range(max(run.batches, default=-1)):
        if step not in run.batches:
            yield Finding(f"batch {step}", "LEDGER", "is missing, though later ones are there")


def _checkpoints(run: _Run) -> Iterator[Finding]:
    """Every checkpoint is intact, and consumed exactly the ledger's batches up to its step."""
    digests = {(c.incarnation, c.version): c.digest for _, c in run.found.steps}
    for fact in run.found.checkpoints:
        run.looked_at += 1
        if fact.damage:
            yield Finding("checkpoint", fact.path, fact.damage)
            continue
        prefix = [group for step in range(fact.step + 1) for group in run.consumed(step, fact.incarnation)]
        if list(fact.consumed) != prefix:
            wrong = next((g for g, e in zip(fact.consumed, prefix, strict=False) if g != e), f"{len(fact.consumed)} groups")
            yield Finding("checkpoint", fact.path, f"consumed other groups than batches 0 to {fact.step} name, from {wrong} on")
        at = run.batches[fact.step][0] if fact.step in run.batches else 0
        if fact.ledger_position != at:
            yield Finding("checkpoint", fact.path, f"stands at LEDGER {fact.ledger_position}, batch {fact.step} is at {at}")
        published = digests.get((fact.incarnation, fact.version))
        if published is not None and published != fact.digest:
            yield Finding("checkpoint", fact.path, f"has digest {fact.digest[:12]}, its step was published as {published[:12]}")


def _versions(run: _Run) -> Iterator[Finding]:
    """A version has one digest, every step starts from the digest before it, and what is published is what was committed."""
    digests: dict[tuple[int, int], tuple[str, str]] = {}

    def named(incarnation: int, version: int, digest: str, place: str) -> Iterator[Finding]:
        known, where = digests.setdefault((incarnation, version), (digest, place))
        if known != digest:
            name = f"version {version}" + (f" of incarnation {incarnation}" if incarnation else "")
            yield Finding(name, place, f"has digest {digest[:12]}, and {known[:12]} at {where}")

    for seq, commit in run.found.steps:
        run.looked_at += 1
        yield from named(commit.incarnation, commit.version, commit.digest, f"TRAIN {seq}")
    for seq, manifest in run.found.manifests:
        run.looked_at += 1
        yield from named(manifest.incarnation, manifest.version, manifest.digest, f"POLICY {seq}")
        if manifest.form == "patch":
            yield from named(manifest.incarnation, manifest.base_version, manifest.base_digest, f"POLICY {seq}")
    line = Lineage()
    for seq, commit in run.found.steps:
        before = line.commit_of(commit.step - 1) if commit.step else None
        line.add(commit)
        base = digests.get((0, 0)) if commit.step == 0 else None
        expected = base[0] if base is not None else before.digest if before is not None else None
        if expected is not None and commit.base_digest != expected:
            problem = f"starts from digest {commit.base_digest[:12]}, version {commit.step} has {expected[:12]}"
            yield Finding(f"step {commit.step}", f"TRAIN {seq}", problem)


def _lag(run: _Run) -> Iterator[Finding]:
    """No group was handed over staler than the bound, counted from its own tokens."""
    for at, batch in run.batches.values():
        for member in batch.groups:
            run.looked_at += 1
            group = run.ready.get(member.ready_seq)
            lag = member.lag
            if group is not None and group.group == member.group:
                lag = batch.version - group.oldest_version()
                if lag != member.lag:
                    yield Finding(member.group, f"LEDGER {at}", f"is entered with lag {member.lag}, its tokens have lag {lag}")
            if lag > batch.max_lag:
                yield Finding(member.group, f"LEDGER {at}", f"entered step {batch.step} with lag {lag} > {batch.max_lag}")


def _siblings(run: _Run) -> Iterator[Finding]:
    """Everything that a trained group was made of is still there, byte for byte as READY names it."""
    for at, batch in run.batches.values():
        for member in batch.groups:
            if run.is_lost(batch.step, member.group):
                continue
            run.looked_at += 1
            group = run.ready.get(member.ready_seq)
            if group is None or group.group != member.group:
                yield Finding(member.group, f"LEDGER {at}", f"its ready entry is not at READY {member.ready_seq}")
            else:
                yield from _whole(run, member, group)


def _left_out(run: _Run) -> Iterator[Finding]:
    """What a step left out of its batch was an item of that batch, is trained nowhere, and is abandoned for that very loss."""
    decided_under = max((e.demand_seq for _, e in run.found.ledger if isinstance(e.demand_seq, int)), default=0)
    living = {group: step for step, _, groups in run.on_line() for group in groups}
    for seq, commit in run.found.steps:
        run.looked_at += 1
        for left in commit.left_out():
            place = f"TRAIN {seq}"
            if why := _not_of_batch(run, commit.step, left.group, left.item):
                yield Finding(left.group, place, f"is left out of step {commit.step}, but {why}")
            if left.group in living:
                yield Finding(left.group, place, f"is left out of step {commit.step} and trained in step {living[left.group]}")
            if left.group not in run.taken_out and seq < decided_under:  # else admission has not come to it yet
                yield Finding(left.group, place, f"is left out of step {commit.step}, and LEDGER does not abandon it")
    steps = {commit.step for _, commit in run.found.steps}
    for at, entry in run.taken_out.values():
        run.looked_at += 1
        step, item = entry.step, entry.lost
        if not isinstance(step, int) or not isinstance(item, LostItem):
            yield Finding(entry.group, f"LEDGER {at}", "is taken out of a batch without a lost item")
        elif step in steps and run.left_out.get((step, entry.group)) != item:
            yield Finding(entry.group, f"LEDGER {at}", f"is taken out of batch {step} for {item}, which no commit of it names")
        elif step not in steps and (why := _not_of_batch(run, step, entry.group, item) or _still_there(run, item)):
            yield Finding(entry.group, f"LEDGER {at}", f"is taken out of batch {step}, which has no commit, but {why}")


def _of_batch(entry: AbandonEntry) -> bool:
    return isinstance(entry.step, int)


def _not_of_batch(run: _Run, step: int, group: str, item: LostItem) -> str:
    """Why the item is none of a group in the batch of this step; empty when it is."""
    members = {m.group: m.ready_seq for m in run.batches[step][1].groups} if step in run.batches else {}
    if group not in members:
        return f"batch {step} does not name it"
    if item.stream == Stream.READY:
        return "" if item.seq == members[group] else f"its ready entry is READY {members[group]}, not {item.seq}"
    ready = run.ready.get(members[group])
    if ready is None:
        return ""  # its ready entry is gone as well, and with it what it named
    named = {(s.episode_seq, s.episode_digest) for s in ready.siblings}
    return "" if (item.seq, item.digest) in named else f"READY {members[group]} does not name EPISODES {item.seq}"


def _still_there(run: _Run, item: LostItem) -> str:
    there = item.seq in run.ready if item.stream == Stream.READY else run.found.episodes.get(item.seq) == item.digest
    return f"{item.stream} {item.seq} holds the item" if there else ""


def _whole(run: _Run, member: BatchGroup, group: ReadyGroup) -> Iterator[Finding]:
    place = f"READY {member.ready_seq}"
    if sorted(s.slot for s in group.siblings) != list(range(group.group_size)):
        yield Finding(group.group, place, f"has slots {[s.slot for s in group.siblings]} of {group.group_size}")
    for s in group.siblings:
        for what, seq, digest in (("episode", s.episode_seq, s.episode_digest), ("verdict", s.verdict_seq, s.verdict_digest)):
            if s.status in LOST or run.found.episodes.get(seq) != digest:
                stands = run.found.episodes.get(seq, "nothing readable")[:16]
                yield Finding(
                    f"{what} of {group.group}, slot {s.slot}", f"EPISODES {seq}", f"is not {digest[:12]}, {stands} stands there"
                )


def _whole_logs(run: _Run) -> Iterator[Finding]:
    """No sequence of a log is missing."""
    run.looked_at = sum(run.found.messages.values())
    for hole in run.found.holes:
        yield Finding(f"{hole.last - hole.first + 1} message(s)", f"{hole.stream} {hole.first} to {hole.last}", str(hole))


def _usable(run: _Run) -> Iterator[Finding]:
    """Every message can be used; one of a group's may be a dead letter, since that costs its group alone."""
    kept = {(letter.stream, letter.seq) for _, letter in run.found.letters}
    run.looked_at = sum(run.found.messages.values())
    handled = [bad for bad in run.found.unusable if bad.stream in _OF_GROUPS and (str(bad.stream), bad.seq) in kept]
    for bad in run.found.unusable:
        if bad not in handled:
            yield Finding(bad.subject, f"{bad.stream} {bad.seq}", bad.why)
    run.note = f"{len(handled)} are dead letters" if handled else ""


_RULES: dict[str, Callable[[_Run], Iterator[Finding]]] = {
    "groups are conserved": _conservation,
    "a group is trained once": _trained_once,
    "steps follow the ledger": _steps_follow_ledger,
    "checkpoints": _checkpoints,
    "a version is one set of weights": _versions,
    "lag is within its bound": _lag,
    "trained groups are whole": _siblings,
    "lost groups are left out": _left_out,
    "logs have no holes": _whole_logs,
    "messages can be used": _usable,
}
