"""Explaining: what became of a group, a trajectory, a step or a token, and why. Pure; records in, a `Life` out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from admission.explain_step import About, StepTold, ready_of, step_events, step_life, told_step
from admission.gradient_mass import MassRule, gradient_mass
from admission.life import (
    Event,
    GroupTold,
    Life,
    Unexplained,
    attempt_events,
    episode_events,
    holder_events,
    lost,
    spans,
    told_of_group,
    turn_events,
    version,
)
from admission.slim import SlimEpisode
from schemas.group import ReadyGroup
from schemas.ledger import AbandonEntry, BatchEntry, LostItem, QuarantineEntry
from schemas.table import Stream

What = Literal["group", "trajectory", "step", "token"]
WHATS: tuple[What, ...] = ("group", "trajectory", "step", "token")
OF_GROUP = (Stream.TASKS, Stream.TURNS, Stream.EPISODES, Stream.READY, Stream.LEDGER)


@dataclass(frozen=True, slots=True)
class Question:
    """One item. `number` is a trajectory's slot or a step; `position` a token's, in its trajectory's row."""

    what: What
    group: str = ""
    number: int = -1
    position: int = -1


_FORMS = {
    "group": "group g00000042",
    "trajectory": "trajectory g00000042/3",
    "step": "step 7",
    "token": "token g00000042/3@17",
}


def question(what: str, words: Iterable[str]) -> Question:
    """What the command line asks. Raises `Unexplained` saying how to write it."""
    parts = [part for part in re.split(r"[/@:\s]+", " ".join(words)) if part]
    match what, parts:
        case "group", [group]:
            return Question("group", group)
        case "trajectory", [group, slot] if slot.isdecimal():
            return Question("trajectory", group, int(slot))
        case "step", [step] if step.isdecimal():
            return Question("step", number=int(step))
        case "token", [group, slot, position] if slot.isdecimal() and position.isdecimal():
            return Question("token", group, int(slot), int(position))
    known = _FORMS.get(what)
    hint = f"write `headrace explain {known}`" if known else f"explain one of {', '.join(_FORMS)}"
    raise Unexplained(f"{what} {' '.join(words)}: {hint}")


def explain(asked: Question, about: About, mass: MassRule | None = None) -> Life:
    """Answer. `about` gives the records that tell of items by their names; it may give others with them. With a `mass` rule it
    is said how much of its step's gradient a group carried.

    Raises `Unexplained` when nothing tells of the item.
    """
    if asked.what == "step":
        return step_life(asked.number, about, mass)
    told = told_of_group(asked.group, about([asked.group], OF_GROUP))
    if told.lease is None and told.ready is None and not told.episodes and not told.turns:
        raise Unexplained(f"group {asked.group}: nothing tells of it; groups are named like g00000042")
    batch = told.batch()
    step = told_step(batch[2].step, about) if batch is not None else None
    share = _mass_of(told, step, about, mass)
    if asked.what == "group":
        return _group(told, step, share)
    if asked.number not in told.episodes and not any(turn.slot == asked.number for _, turn in told.turns):
        known = sorted(set(told.episodes) | {turn.slot for _, turn in told.turns})
        raise Unexplained(f"trajectory {asked.group}/{asked.number}: nothing tells of it; the group has slots {known}")
    if asked.what == "trajectory":
        return _trajectory(told, step, asked.number, share)
    return _token(told, step, asked.number, asked.position, share)


def _mass_of(told: GroupTold, step: StepTold | None, about: About, mass: MassRule | None) -> dict[str, Any]:
    """The group's share of its step's gradient, as a fact; empty where it entered none."""
    commit = step.commit() if step is not None else None
    if mass is None or commit is None or told.group not in commit.groups:
        return {}
    trained = [group for _, group in ready_of(commit.groups, about).values()]
    if len(trained) < len(commit.groups):
        return {"gradient_mass": "not known: the ready entry of a group of the step is not there"}
    shares = gradient_mass(trained, mass)
    return {"gradient_mass": shares[told.group], "gradient_mass_by": str(mass)} if shares else {}


def _group(told: GroupTold, step: StepTold | None, share: dict[str, Any]) -> Life:
    life = Life(f"group {told.group}", answer=_fate(told, step), facts=_group_facts(told) | share)
    if told.lease is not None:
        at, lease = told.lease
        life.events.append(Event(at, "sampler", f"leases task {lease.task_id} at version {lease.leased_at_version}"))
        if told.claims and told.claims[0][0] > at:
            life.events.append(Event(at, "holder", "waits for a rollouter", told.claims[0][0], kind="wait"))
    life.events += [*holder_events(told), *attempt_events(told), *turn_events(told), *episode_events(told)]
    life.events += _decision_events(told)
    if step is not None:
        life.events += step_events(step)
    life.facts["waits_s"] = _waits(life.events)
    return life.sorted()


def _group_facts(told: GroupTold) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if told.lease is not None:
        lease = told.lease[1]
        facts |= {"task": lease.task_id, "family": lease.family, "purpose": lease.purpose, "siblings": lease.group_size}
        facts |= {"stream": lease.stream, "propensity": lease.propensity, "manifest": lease.manifest}
    if told.ready is not None:
        group = told.ready[2]
        facts |= {"versions": [group.oldest_version(), group.newest_version()], "rewards": list(group.rewards())}
        facts["sampled_tokens"] = sum(s.sampled_tokens for s in group.siblings)
    return facts


def _decision_events(told: GroupTold) -> list[Event]:
    events = []
    decided_ns = told.decisions[0][1] if told.decisions else 0
    if told.ready is not None:
        seq, at, group = told.ready
        events.append(
            Event(at, "bank", f"is whole (READY {seq}), versions {group.oldest_version()} to {group.newest_version()}")
        )
        if decided_ns > at:
            events.append(Event(at, "bank", "waits in the bank for a demand that takes it", decided_ns, kind="wait"))
    for seq, at, entry in told.decisions:
        if isinstance(entry, BatchEntry):
            member = next(m for m in entry.groups if m.group == told.group)
            events.append(
                Event(
                    at,
                    "admission",
                    f"admits it to batch {entry.step}: lag {member.lag} = version {entry.version} - oldest "
                    f"{member.oldest_version}, bound {entry.max_lag}, settings {entry.settings_hash} (LEDGER {seq})",
                )
            )
        elif isinstance(entry, AbandonEntry) and isinstance(entry.step, int):
            numbers = _numbers(entry)
            said = f"abandons it, which takes it out of batch {entry.step}: {entry.reason}: {entry.detail}{numbers}"
            events.append(Event(at, "admission", f"{said} (LEDGER {seq})"))
        else:
            way = "quarantines" if isinstance(entry, QuarantineEntry) else "abandons"
            events.append(Event(at, "admission", f"{way} it: {entry.reason}: {entry.detail}{_numbers(entry)} (LEDGER {seq})"))
    return events


def _numbers(entry: QuarantineEntry | AbandonEntry) -> str:
    if isinstance(entry, AbandonEntry):
        return f"; settings {entry.settings_hash}"
    reward = "none" if entry.mean_reward is None else f"{entry.mean_reward:g}"
    return (
        f"; at version {entry.at_version}, oldest {entry.oldest_version}, lag {entry.lag}, mean reward {reward}, "
        f"settings {entry.settings_hash}"
    )


def _fate(told: GroupTold, step: StepTold | None) -> str:
    """What became of the group, in one sentence."""
    batch, out = told.batch(), told.taken_out()
    item = step.left_out(told.group) if step is not None else None
    if out is not None and isinstance(out.lost, LostItem):
        return f"{told.group} was taken out of step {out.step}: item lost: {lost(out.lost)}; it is abandoned: {out.detail}"
    if item is not None and batch is not None:
        return f"{told.group} was taken out of step {batch[2].step}: item lost: {lost(item)}; no ledger entry abandons it yet"
    dropped = [entry for _, _, entry in told.decisions if not isinstance(entry, BatchEntry)]
    if dropped:
        entry = dropped[-1]
        way = "quarantined" if isinstance(entry, QuarantineEntry) else "abandoned"
        return f"{told.group} was {way} because {entry.reason}: {entry.detail}"
    if batch is not None:
        lag = next(m.lag for m in batch[2].groups if m.group == told.group)
        commit = step.commit() if step is not None else None
        made = f", which made {version(commit.version, commit.incarnation)}" if commit else ", which is not committed yet"
        return f"{told.group} was trained on in step {batch[2].step} with lag {lag}{made}"
    if told.ready is not None:
        group = told.ready[2]
        return f"{told.group} is graded, for evaluation {group.eval_point}" if group.purpose == "eval" else _waiting(group)
    return f"{told.group} is open: {_missing(told)}"


def _waiting(group: ReadyGroup) -> str:
    return f"{group.group} is ready and waits for a demand; its oldest version is {group.oldest_version()}"


def _missing(told: GroupTold) -> str:
    if told.lease is None:
        return "its lease is not among what was recorded"
    slots = range(told.lease[1].group_size)
    if running := [slot for slot in slots if slot not in told.episodes]:
        holder = told.claims[-1][1].rollouter if told.claims else "nobody yet"
        return f"slots {running} are not sealed; held by {holder}"
    unjudged = [slot for slot in slots if slot not in told.verdicts]
    return f"slots {unjudged} are not judged" if unjudged else "all siblings are judged, and the bank has not written it"


def _waits(events: Iterable[Event]) -> dict[str, float]:
    waits: dict[str, float] = {}
    for event in events:
        if event.kind == "wait":
            waits[event.what] = round(max(waits.get(event.what, 0.0), event.seconds), 6)
    return waits


def _trajectory(told: GroupTold, step: StepTold | None, slot: int, share: dict[str, Any]) -> Life:
    whole = _group(told, step, share)
    lanes = {lane for event in whole.events if (lane := event.lane).startswith("slot ")} - {f"slot {slot}"}
    life = Life(
        f"trajectory {told.group}/{slot}",
        facts=_trajectory_facts(told, slot) | {f"group_{name}": value for name, value in share.items()},
    )
    life.events = [event for event in whole.events if event.lane not in lanes]
    life.facts["waits_s"] = _waits(life.events)
    held = told.episodes.get(slot)
    ended = f"ended as {held[1].fact.termination}" if held is not None else "is not sealed"
    life.answer = f"{told.group}/{slot} {ended}; {whole.answer}"
    return life


def _trajectory_facts(told: GroupTold, slot: int) -> dict[str, Any]:
    held = told.episodes.get(slot)
    if held is None:
        return {}
    episode, fact = held[1], held[1].fact
    facts: dict[str, Any] = {
        "task": fact.task_id,
        "termination": str(fact.termination),
        "attempt": episode.attempt,
        "turns": fact.turns,
        "invalid_actions": episode.invalid_actions,
        "tokens": fact.total_tokens,
        "sampled_tokens": fact.sampled_tokens,
        "versions": spans(episode.versions),
        "engines": list(episode.engines),
        "executor": episode.executor,
        "rollouter": episode.rollouter,
        "episode": f"EPISODES {fact.seq}, {fact.digest[:12]}",
    }
    if slot in told.verdicts:
        verdict = told.verdicts[slot][1].fact
        facts |= {"status": verdict.status, "reward": verdict.reward, "success": verdict.success}
    return facts


def _token(told: GroupTold, step: StepTold | None, slot: int, position: int, share: dict[str, Any]) -> Life:
    held = told.episodes.get(slot)
    name = f"token {told.group}/{slot}@{position}"
    if held is None:
        raise Unexplained(f"{name}: the trajectory is not sealed, so it has no row yet")
    episode = held[1]
    if position >= episode.fact.total_tokens:
        raise Unexplained(f"{name}: the trajectory has positions 0 to {episode.fact.total_tokens - 1}")
    life = _trajectory(told, step, slot, share)
    life.title = name
    if not any(start <= position < end for start, end in episode.sampled):
        life.answer = f"position {position} was not sampled: it is prompt or observation, and no gradient enters it"
        return life
    span = next((v for v in episode.versions if v.start <= position < v.end), None)
    number, offset = _turn_of(episode, position)
    turn = next((t for _, t in told.turns if (t.slot, t.attempt, t.turn) == (slot, episode.attempt, number)), None)
    engine = turn.engine if turn is not None else ", ".join(episode.engines)
    under = "version ?" if span is None else version(span.version, span.incarnation)
    life.answer = f"position {position} is token {offset} of turn {number}, sampled by engine {engine or '?'} under {under}"
    life.facts = {
        "engine": engine,
        "version": None if span is None else span.version,
        "turn": number,
        "offset": offset,
    } | life.facts
    life.events = [e for e in life.events if not e.lane.startswith("slot ") or e.what.startswith(f"turn {number}:")]
    return life


def _turn_of(episode: SlimEpisode, position: int) -> tuple[int, int]:
    """Number of the turn that sampled a position, and the token's place in it."""
    number = max((i for i, start in enumerate(episode.turn_starts) if start <= position), default=0)
    start = episode.turn_starts[number] if episode.turn_starts else 0
    return number, position - start
