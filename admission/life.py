"""One item's life, as events on a line of time: what a run's streams say of a group, in the order of a reader. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from admission.recorded import message_of
from admission.slim import Slim, SlimEpisode, SlimTurn, SlimVerdict, decode_slim, slim
from schemas.attempts import AttemptEnded, AttemptOpened, AttemptPlayed, AttemptTakeover, GroupClaim, GroupRelease
from schemas.group import ReadyGroup
from schemas.lease import GroupLease, ordinal_of
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, LostItem, QuarantineEntry
from schemas.message import Message
from schemas.table import Stream
from schemas.trajectory import Episode, TurnEffect, TurnRecord, Verdict, VersionSpan
from services.items import BusError
from services.recording import Form, Record

Told = tuple[Stream, Record]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at `at_ns`, or lasted until `until_ns`. `lane`: to whom. In a `wait` nobody works on it."""

    at_ns: int
    lane: str
    what: str
    until_ns: int = 0
    kind: Literal["work", "sandbox", "wait"] = "work"

    @property
    def seconds(self) -> float:
        return max(0, self.until_ns - self.at_ns) / 1e9 if self.until_ns else 0.0


@dataclass
class Life:
    """What is told of one item: the answer in a sentence, facts, and the events by time."""

    title: str
    answer: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def sorted(self) -> Life:
        """The same, events by time."""
        return Life(self.title, self.answer, self.facts, sorted(self.events, key=lambda e: (e.at_ns, e.until_ns)))


class Unexplained(BusError):
    """What was asked for is no item, or the streams do not tell of it; the text says how to ask."""


@dataclass
class GroupTold:
    """Everything that the streams say of one group, told apart by kind; times are the server's."""

    group: str
    lease: tuple[int, GroupLease] | None = None
    claims: list[tuple[int, GroupClaim | GroupRelease]] = field(default_factory=list)
    attempts: list[tuple[int, AttemptOpened | AttemptTakeover | AttemptEnded]] = field(default_factory=list)
    turns: list[tuple[int, SlimTurn]] = field(default_factory=list)
    played: dict[tuple[int, int], TurnEffect] = field(default_factory=dict)  # slot, attempt -> what the last command did
    episodes: dict[int, tuple[int, SlimEpisode]] = field(default_factory=dict)
    verdicts: dict[int, tuple[int, SlimVerdict]] = field(default_factory=dict)
    ready: tuple[int, int, ReadyGroup] | None = None
    decisions: list[tuple[int, int, LedgerEntry]] = field(default_factory=list)  # sequence, time, entry

    def batch(self) -> tuple[int, int, BatchEntry] | None:
        """The batch that took it, also when its step then left it out."""
        found = [(seq, at, e) for seq, at, e in self.decisions if isinstance(e, BatchEntry)]
        return found[-1] if found else None

    def taken_out(self) -> AbandonEntry | None:
        """The entry that took it out of its batch again, if one did."""
        abandoned = (e for _, _, e in self.decisions if isinstance(e, AbandonEntry) and isinstance(e.step, int))
        return next(abandoned, None)


def told_of_group(group: str, told: Iterable[Told]) -> GroupTold:
    """Pick what is this group's out of records."""
    found = GroupTold(group)
    for stream, record in told:
        if not _may_tell_of(group, stream, record.name):
            continue
        content = content_of(stream, record)
        match content:
            case GroupLease() if content.group == group:
                found.lease = (record.time_ns, content)
            case GroupClaim() | GroupRelease():
                found.claims.append((record.time_ns, content))
            case AttemptOpened() | AttemptTakeover() | AttemptEnded():
                found.attempts.append((record.time_ns, content))
            case AttemptPlayed():
                found.played[content.slot, content.attempt] = content.last
            case SlimTurn():
                found.turns.append((record.time_ns, content))
            case SlimEpisode():
                found.episodes[content.fact.slot] = (record.time_ns, content)
            case SlimVerdict():
                found.verdicts[content.fact.slot] = (record.time_ns, content)
            case ReadyGroup() if content.group == group:
                found.ready = (record.seq, record.time_ns, content)
            case BatchEntry() if any(member.group == group for member in content.groups):
                found.decisions.append((record.seq, record.time_ns, content))
            case QuarantineEntry() | AbandonEntry() if content.group == group:
                found.decisions.append((record.seq, record.time_ns, content))
    return found


def _may_tell_of(group: str, stream: Stream, name: str) -> bool:
    """By its subject alone, so that what is not looked for need not be decoded."""
    words = name.split(".")
    if stream in (Stream.TURNS, Stream.EPISODES, Stream.READY):
        return words[1:2] == [group]
    if stream is Stream.TASKS:
        return words[2:3] == [str(ordinal_of(group))]
    return words[1] == "batch" or words[2:3] == [group]


def content_of(stream: Stream, record: Record) -> Message | Slim | None:
    """A record's message; turns, episodes and verdicts without their bodies, whether these were recorded or not."""
    if record.form == Form.SLIM:
        return decode_slim(record.data, f"{stream} {record.seq}")
    message = message_of(record)
    if isinstance(message, Episode | Verdict | TurnRecord):
        words = record.name.split(".")
        slot = int(words[2]) if words[2].isdecimal() else -1
        return slim(message, words[1], slot, record.seq, record.digest)
    return message


def spans(versions: Iterable[VersionSpan]) -> str:
    """`version 3` or `versions 3 (12 tokens), 4 (5 tokens)`."""
    listed = list(versions)
    names = [f"{v.version}" + (f" of incarnation {v.incarnation}" if v.incarnation else "") for v in listed]
    if len(listed) == 1:
        return f"version {names[0]}"
    parts = ", ".join(f"{name} ({v.end - v.start} tokens)" for name, v in zip(names, listed, strict=True))
    return f"versions {parts}" if listed else "no version"


def holder_events(told: GroupTold) -> Iterator[Event]:
    """Who held the group, and every change."""
    before = ""
    for at, claim in told.claims:
        if isinstance(claim, GroupClaim):
            own = claim.number > 0 and claim.rollouter == before
            how = "is leased by" if claim.number == 0 else f"is taken {'up again' if own else 'over'} (claim {claim.number}) by"
            yield Event(at, "holder", f"{how} rollouter {claim.rollouter}{', which had lost it' if own else ''}")
            before = claim.rollouter
        else:
            before = ""
            yield Event(at, "holder", f"is handed back by rollouter {claim.rollouter}: {claim.reason}")


def attempt_events(told: GroupTold) -> Iterator[Event]:
    """Sandboxes and attempts."""
    for at, record in told.attempts:
        lane = f"slot {record.slot}"
        if isinstance(record, AttemptOpened):
            yield Event(at, lane, f"attempt {record.attempt} opens a sandbox on {record.executor}", at)
        elif isinstance(record, AttemptTakeover):
            yield Event(at, lane, f"attempt {record.attempt} is continued by rollouter {record.rollouter}")
        else:
            yield Event(at, lane, f"attempt {record.attempt} ends: {record.reason}{_tail(record.detail)}")


def turn_events(told: GroupTold) -> Iterator[Event]:
    """Every turn: generation on its engine, then its command until the next turn begins."""
    ordered = sorted(told.turns, key=lambda held: (held[1].slot, held[1].attempt, held[1].turn))
    for place, (at, turn) in enumerate(ordered):
        lane = f"slot {turn.slot}"
        made = f"turn {turn.turn}: {turn.sampled_tokens} tokens by {turn.engine or '?'}, {spans(turn.versions)}; {turn.action}"
        yield Event(turn.started_ns or at, lane, made, turn.generated_ns or at)
        after = ordered[place + 1][1] if place + 1 < len(ordered) else None
        same = after is not None and (after.slot, after.attempt) == (turn.slot, turn.attempt)
        sealed = told.episodes.get(turn.slot)
        end = after.started_ns if after is not None and same else sealed[1].sealed_ns if sealed is not None else 0
        if turn.has_command and end > at:
            effect = after.previous if after is not None and same else told.played.get((turn.slot, turn.attempt))
            yield Event(at, lane, f"turn {turn.turn}: command in {turn.executor}{_outcome(effect)}", end, kind="sandbox")


def _outcome(effect: Any) -> str:
    if effect is None:
        return ""
    how = "timed out" if effect.timed_out else "refused" if effect.refused else f"exit {effect.exit_code}"
    return f", lane {effect.lane or 'none'}, {how}"


def episode_events(told: GroupTold) -> Iterator[Event]:
    """Sealing and judging of each sibling."""
    for slot, (at, episode) in sorted(told.episodes.items()):
        fact = episode.fact
        yield Event(at, f"slot {slot}", f"is sealed: {fact.termination}, {fact.turns} turns, {fact.sampled_tokens} tokens")
        if slot in told.verdicts:
            judged_at, verdict = told.verdicts[slot]
            begun = verdict.started_ns
            if begun > at:
                yield Event(at, f"slot {slot}", "waits for the verifier", begun, kind="wait")
            yield Event(begun or judged_at, f"slot {slot}", _verdict(verdict), judged_at)


def _verdict(verdict: SlimVerdict) -> str:
    fact = verdict.fact
    reward = "no reward" if fact.reward is None else f"reward {fact.reward:g}"
    broke = f", violations {', '.join(verdict.violations)}" if verdict.violations else ""
    return f"is judged: {fact.status}, {reward}{broke}{_tail(verdict.detail)}"


def _tail(detail: str) -> str:
    return f": {detail}" if detail else ""


def version(number: int, incarnation: int) -> str:
    """A version by its name."""
    return f"version {number}" + (f" of incarnation {incarnation}" if incarnation else "")


def lost(item: LostItem) -> str:
    """A lost item by its place."""
    return f"{item.stream} {item.seq}" + (f" ({item.digest[:12]})" if item.digest else "")
