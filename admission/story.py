"""The life of one group on a timeline: a pure function of the messages that name it.

Times are of two kinds: the server's, of when a message was stored, and those that services wrote into their messages by their
own wall clocks. On one machine they are one clock; across machines they differ by what their clocks differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from admission.explain_source import Found
from schemas.attempts import GroupClaim, GroupRelease
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, BatchGroup, LedgerEntry, QuarantineEntry
from schemas.table import Stream
from schemas.trajectory import Episode, Verdict

What = Literal[
    "lease",
    "holder",
    "reset",
    "turn",
    "sandbox",
    "attempt",
    "sealed",
    "wait",
    "verdict",
    "ready",
    "decision",
    "demand",
    "step",
    "version",
    "damage",
]
Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at `at_ns`, or went on until `until_ns` (0: a moment). `lane`: `group`, `slot 3`, `trainer`, …"""

    at_ns: int
    until_ns: int = 0
    lane: str
    what: What
    text: str
    details: dict[str, Value] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return max(0, self.until_ns - self.at_ns) / 1e9 if self.until_ns else 0.0


@dataclass
class Story:
    """What is explained, the answer in one sentence, figures, tables beside them, and the timeline."""

    kind: str
    name: str
    run: str
    answer: str
    facts: dict[str, Value] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    rows: list[dict[str, Value]] = field(default_factory=list)  # one table: the groups of a step, the siblings of a group

    def in_order(self) -> Story:
        """The timeline by time; at one moment what ended first comes first."""
        self.events.sort(key=lambda event: (event.at_ns, event.until_ns or event.at_ns))
        return self

    def lanes(self) -> list[str]:
        """Lanes in the order in which a person reads them."""
        slots = sorted({event.lane for event in self.events if event.lane.startswith("slot")}, key=lambda lane: int(lane[5:]))
        rest = sorted({event.lane for event in self.events} - {"group", *slots})
        return [*(["group"] if any(event.lane == "group" for event in self.events) else []), *slots, *rest]


@dataclass
class GroupParts:
    """The messages of one group, sorted out."""

    lease: tuple[Found, GroupLease] | None = None
    claims: list[tuple[Found, GroupClaim | GroupRelease]] = field(default_factory=list)
    journal: dict[int, list[Found]] = field(default_factory=dict)  # slot -> records of its attempts
    episodes: dict[int, tuple[Found, Episode]] = field(default_factory=dict)
    verdicts: dict[int, tuple[Found, Verdict]] = field(default_factory=dict)
    ready: tuple[Found, ReadyGroup] | None = None
    closing: tuple[Found, LedgerEntry] | None = None
    damaged: list[Found] = field(default_factory=list)

    @classmethod
    def of(cls, found: Sequence[Found]) -> GroupParts:
        parts = cls()
        for item in found:
            match item.message:
                case GroupLease() as lease:
                    parts.lease = (item, lease)
                case GroupClaim() | GroupRelease() as claim:
                    parts.claims.append((item, claim))
                case Episode() as episode:
                    parts.episodes[episode.slot] = (item, episode)
                case Verdict() as verdict:
                    parts.verdicts[verdict.slot] = (item, verdict)
                case ReadyGroup() as ready:
                    parts.ready = (item, ready)
                case BatchEntry() | QuarantineEntry() | AbandonEntry() as entry:
                    parts.closing = (item, entry)
                case None:
                    parts.damaged.append(item)
                case _ if item.stream is Stream.TURNS:
                    parts.journal.setdefault(int(item.name.split(".")[2]), []).append(item)
                case _:
                    pass
        return parts

    def member(self, group: str) -> BatchGroup | None:
        """The group's place in its batch."""
        entry = self.closing[1] if self.closing else None
        return next((m for m in entry.groups if m.group == group), None) if isinstance(entry, BatchEntry) else None

    def slots(self) -> list[int]:
        return sorted({*self.journal, *self.episodes, *self.verdicts})


def answer_of(group: str, parts: GroupParts) -> str:
    """What became of a group and why, in one sentence."""
    if parts.closing is not None:
        entry = parts.closing[1]
        if isinstance(entry, BatchEntry):
            member = parts.member(group)
            lag = f"with lag {member.lag} of at most {entry.max_lag}" if member else ""
            return f"{group} was trained on: it entered step {entry.step} {lag}, which made version {entry.version + 1}"
        if isinstance(entry, QuarantineEntry):
            return f"{group} was dropped: quarantined as {entry.reason} at version {entry.at_version}, because: {entry.detail}"
        return f"{group} was dropped: abandoned as {entry.reason}, because: {entry.detail}"
    if parts.ready is not None:
        return f"{group} is ready and open: it waits for admission; no ledger entry names it yet"
    if parts.lease is None:
        return f"{group} is not known here"
    size = parts.lease[1].group_size
    sealed = [slot for slot in range(size) if slot in parts.episodes]
    judged = [slot for slot in range(size) if slot in parts.verdicts]
    return f"{group} is open: {len(sealed)} of {size} siblings are sealed, {len(judged)} judged"


def group_events(group: str, parts: GroupParts) -> list[Event]:
    """What happened to the group as a whole, up to the decision."""
    events: list[Event] = []
    if parts.lease is not None:
        found, lease = parts.lease
        text = f"leased: {lease.task_id} ({lease.family}), {lease.group_size} siblings, at version {lease.leased_at_version}"
        drawn: dict[str, Value] = {"stream": lease.stream, "propensity": lease.propensity, "manifest": lease.manifest}
        events.append(_at(found, "lease", f"{text}, drawn as {lease.stream} with propensity {lease.propensity:.4g}", drawn))
    holders = [claim.rollouter for _, claim in parts.claims if isinstance(claim, GroupClaim)]
    for found, claim in parts.claims:
        if isinstance(claim, GroupClaim):
            over = f", taken over from {holders[claim.number - 1]}" if 0 < claim.number < len(holders) else ""
            text = f"held by rollouter {claim.rollouter} (claim {claim.number}){over}"
        else:
            text = f"handed back by rollouter {claim.rollouter} (claim {claim.number}): {claim.reason}"
        events.append(_at(found, "holder", text, {"rollouter": claim.rollouter, "claim": claim.number}))
    if parts.ready is not None:
        found, ready = parts.ready
        last = max(ready.siblings, key=lambda s: max(s.episode_seq, s.verdict_seq), default=None)
        text = f"whole: the last sibling was slot {last.slot if last else '?'}; READY {found.seq}"
        events.append(_at(found, "ready", text, {"ready_seq": found.seq}))
        if parts.closing is not None:
            until = parts.closing[0].time_ns
            wait = f"waits in the bank for {max(0, until - found.time_ns) / 1e9:.3f} s"
            events.append(Event(at_ns=found.time_ns, until_ns=until, lane="group", what="wait", text=wait))
    if parts.closing is not None:
        events.append(_decision(group, *parts.closing, parts))
    for item in parts.damaged:
        events.append(_at(item, "damage", f"{item.stream} {item.seq} ({item.name}) cannot be used: {item.damage}", {}))
    return events


def _decision(group: str, found: Found, entry: LedgerEntry, parts: GroupParts) -> Event:
    details: dict[str, Value] = {"ledger_seq": found.seq, "settings_hash": entry.settings_hash}
    if isinstance(entry, BatchEntry):
        member = parts.member(group)
        numbers = (
            f"lag {member.lag} = version {entry.version} - oldest sampled {member.oldest_version}, bound {entry.max_lag};"
            f" newest sampled {member.newest_version}"
            if member
            else ""
        )
        details |= {"step": entry.step, "version": entry.version, "lag": member.lag if member else None}
        return _at(found, "decision", f"admitted to step {entry.step}: {numbers}", details)
    details |= {"reason": str(entry.reason), "detail": entry.detail}
    if isinstance(entry, QuarantineEntry):
        details |= {"at_version": entry.at_version, "lag": entry.lag, "oldest_version": entry.oldest_version}
        numbers = f"version {entry.at_version}, oldest sampled {entry.oldest_version}, lag {entry.lag}"
        return _at(found, "decision", f"quarantined as {entry.reason}: {entry.detail} ({numbers})", details)
    return _at(found, "decision", f"abandoned as {entry.reason}: {entry.detail}", details)


def _at(found: Found, what: What, text: str, details: dict[str, Value]) -> Event:
    return Event(at_ns=found.time_ns, lane="group", what=what, text=text, details=details)
