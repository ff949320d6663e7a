"""Stories of a group, of one of its trajectories, and of one token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from admission.explain_source import Found, Source
from admission.slot_story import slot_events, spans
from admission.step_story import Advantages, StepParts, gradient_mass
from admission.story import GroupParts, Story, Value, answer_of, group_events
from schemas.group import ReadyGroup
from schemas.ledger import BatchEntry
from schemas.trajectory import Episode, TurnRecord
from services.recording import RecordingError


async def group_story(source: Source, group: str, advantages: Advantages, slot: int | None = None) -> Story:
    """A group's whole life, or that of its sibling `slot`. Raises `RecordingError` when nothing names it."""
    parts = await _parts(source, group)
    kind, name = ("group", group) if slot is None else ("trajectory", f"{group}/{slot}")
    if slot is not None and slot not in parts.slots():
        raise RecordingError(f"{name}: {group} has slots {parts.slots()} here")
    story = Story(kind, name, source.run, answer_of(group, parts))
    story.facts |= _facts(parts)
    story.events += group_events(group, parts)
    for each in parts.slots() if slot is None else [slot]:
        story.events += slot_events(each, parts)
    await _step(source, group, parts, story, advantages)
    story.rows = [_row(each, parts) for each in parts.slots() if slot in (None, each)]
    return story.in_order()


async def token_story(source: Source, group: str, slot: int, position: int, advantages: Advantages) -> Story:
    """Which engine and which version produced the token at `position` of an episode's row. Raises `RecordingError`."""
    parts = await _parts(source, group)
    if slot not in parts.episodes:
        raise RecordingError(f"{group}/{slot}: no sealed episode is here; slots {sorted(parts.episodes)} have one")
    episode = parts.episodes[slot][1]
    length = episode.ids.shape[0]
    if not 0 <= position < length:
        raise RecordingError(f"{group}/{slot}/{position}: the row has positions 0 to {length - 1}")
    story = await group_story(source, group, advantages, slot)
    turns = _turns_of(parts, slot, episode)
    starts = episode.turn_starts.numpy("turn_starts")
    number = int(np.searchsorted(starts, position, side="right")) - 1
    turn = turns.get(number)
    sampled = turn.sampled_ids.shape[0] if turn is not None else 0
    span = next((span for span in episode.versions if span.start <= position < span.end), None)
    story.kind, story.name = "token", f"{group}/{slot}/{position}"
    if turn is None or not starts[number] <= position < starts[number] + sampled or span is None:
        of = f"the prompt of turn {number + 1}" if number + 1 in turns or number < 0 else f"what followed turn {number}"
        story.answer = f"token {position} of {group}/{slot} was not sampled: it belongs to {of}; {story.answer}"
        story.facts = {"sampled": False, "position": position, **_value(episode, position)}
        return story
    version = f"{span.version}" + (f" of incarnation {span.incarnation}" if span.incarnation else "")
    story.answer = (
        f"token {position} of {group}/{slot} was sampled by engine {turn.engine} under version {version},"
        f" as token {position - int(starts[number])} of turn {number}; {story.answer}"
    )
    story.facts = {
        "sampled": True,
        "position": position,
        "engine": turn.engine,
        "version": span.version,
        "incarnation": span.incarnation,
        "turn": number,
        "weight digest": turn.weight_digest,
        "turn's versions": spans(turn.versions),
        **_value(episode, position),
    }
    made = await source.of_step(span.version - 1) if span.version > 0 else []
    commit = StepParts.of(made).commit
    if commit is not None:
        story.facts["version made by"] = f"step {commit[1].step}, digest {commit[1].digest}"
    return story


def _turns_of(parts: GroupParts, slot: int, episode: Episode) -> dict[int, TurnRecord]:
    """The turns of the attempt that was sealed, by number."""
    found = [item.message for item in parts.journal.get(slot, [])]
    return {turn.turn: turn for turn in found if isinstance(turn, TurnRecord) and turn.attempt == episode.attempt}


def _value(episode: Episode, position: int) -> dict[str, Value]:
    """Token id and log-probability, where the bodies are here."""
    if not episode.ids.data:
        return {}
    logprob = float(episode.logprobs.numpy("logprobs")[position])
    return {"token id": int(episode.ids.numpy("ids")[position]), "log-probability": round(logprob, 6)}


async def _parts(source: Source, group: str) -> GroupParts:
    found: Sequence[Found] = await source.of_group(group)
    if not found:
        raise RecordingError(f"{group}: nothing here names it; a training group is written like g00000042")
    return GroupParts.of(found)


async def _step(source: Source, group: str, parts: GroupParts, story: Story, advantages: Advantages) -> None:
    """The step that the group entered, its share of the gradient, and the version that came out."""
    entry = parts.closing[1] if parts.closing is not None else None
    if not isinstance(entry, BatchEntry):
        return
    step = StepParts.of(await source.of_step(entry.step))
    story.events += step.events()
    story.facts["step"] = entry.step
    if step.commit is not None:
        story.facts["made version"] = step.commit[1].version
    if source.config is None:
        return
    ready = await source.ready([member.group for member in entry.groups])
    groups = [item.message for item in ready if isinstance(item.message, ReadyGroup)]
    if len(groups) == len(entry.groups):
        share = gradient_mass(groups, source.config, advantages)[group]
        trainer = source.config.trainer
        story.facts["gradient mass"] = round(share, 4)
        story.facts["of"] = f"sum |weight * advantage| of step {entry.step}, {trainer.credit}, {trainer.reduction}, unclipped"


def _facts(parts: GroupParts) -> dict[str, Value]:
    facts: dict[str, Value] = {}
    if parts.lease is not None:
        lease = parts.lease[1]
        facts |= {"task": lease.task_id, "family": lease.family, "stream": lease.stream, "purpose": lease.purpose}
    if parts.ready is not None:
        ready = parts.ready[1]
        facts["versions"] = f"{ready.oldest_version()} to {ready.newest_version()}"
        facts["rewards"] = " ".join("-" if reward is None else f"{reward:g}" for reward in ready.rewards())
    return facts


def _row(slot: int, parts: GroupParts) -> dict[str, Value]:
    row: dict[str, Value] = {"slot": slot}
    if slot in parts.episodes:
        episode = parts.episodes[slot][1]
        row |= {
            "ended": str(episode.termination),
            "turns": episode.turns,
            "tokens": episode.sampled_tokens,
            "versions": spans(episode.versions),
            "engines": " ".join(episode.engines),
            "attempt": episode.attempt,
        }
    if slot in parts.verdicts:
        verdict = parts.verdicts[slot][1]
        row |= {"verdict": verdict.status, "reward": verdict.reward}
    return row
