"""The life of one sibling: attempts, turns with engines and version spans, time in the sandbox, sealing and judgement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from admission.explain_source import Found
from admission.story import Event, GroupParts, Value
from schemas.actions import Abstain, Action, Finish, ToolCall
from schemas.attempts import AttemptEnded, AttemptOpened, AttemptPlayed, AttemptTakeover
from schemas.trajectory import Episode, TurnEffect, TurnRecord, Verdict, VersionSpan

_TEXT = 60


def slot_events(slot: int, parts: GroupParts) -> list[Event]:
    """Everything that happened in one slot, all attempts."""
    journal = sorted(parts.journal.get(slot, []), key=lambda item: item.seq)
    lane = f"slot {slot}"
    episode = parts.episodes.get(slot)
    events = [event for item in journal for event in _attempt(lane, item)]
    for attempt in sorted({_attempt_of(item) for item in journal}):
        own = [item for item in journal if _attempt_of(item) == attempt]
        sealed_ns = episode[1].sealed_ns if episode is not None and episode[1].attempt == attempt else 0
        events += _turns(lane, own, sealed_ns)
    if episode is not None:
        events.append(_sealed(lane, *episode))
        verdict = parts.verdicts.get(slot)
        if verdict is not None:
            events += _judged(lane, episode[1], *verdict)
    return events


def _attempt_of(item: Found) -> int:
    word = item.name.split(".")[3]
    return int(word) if word.isdecimal() else -1


def _attempt(lane: str, item: Found) -> Iterator[Event]:
    match item.message:
        case AttemptOpened() as opened:
            text = f"attempt {opened.attempt}: sandbox {opened.sandbox} reset on {opened.executor}"
            yield Event(at_ns=opened.started_ns or item.time_ns, until_ns=item.time_ns, lane=lane, what="reset", text=text)
        case AttemptTakeover() as taken:
            text = f"attempt {taken.attempt}: continued by rollouter {taken.rollouter} (claim {taken.claim})"
            yield Event(at_ns=item.time_ns, lane=lane, what="holder", text=text)
        case AttemptEnded() as ended:
            text = f"attempt {ended.attempt}: given up as {ended.reason}: {ended.detail}"
            yield Event(at_ns=item.time_ns, lane=lane, what="attempt", text=text, details={"reason": ended.reason})
        case _:
            return


def _turns(lane: str, journal: Sequence[Found], sealed_ns: int) -> Iterator[Event]:
    turns = [item.message for item in journal if isinstance(item.message, TurnRecord)]
    last = next((item.message.last for item in journal if isinstance(item.message, AttemptPlayed)), None)
    for place, turn in enumerate(turns):
        yield _turn(lane, turn)
        after = turns[place + 1] if place + 1 < len(turns) else None
        effect = after.previous if after is not None else last
        until = after.started_ns if after is not None else sealed_ns
        if effect is not None and effect.lane and until > turn.generated_ns:
            yield _sandbox(lane, turn, effect, until)
        elif after is None and sealed_ns > turn.generated_ns:
            wait = f"waits {(sealed_ns - turn.generated_ns) / 1e9:.3f} s for its state to be sealed"
            yield Event(at_ns=turn.generated_ns, until_ns=sealed_ns, lane=lane, what="wait", text=wait)


def _turn(lane: str, turn: TurnRecord) -> Event:
    sampled = turn.sampled_ids.shape[0] if turn.sampled_ids.shape else 0
    given = turn.prompt_ids.shape[0] if turn.prompt_ids.shape else 0
    text = f"turn {turn.turn}: {turn.engine} {spans(turn.versions)}, {given} given + {sampled} sampled, {turn.finish_reason}"
    details: dict[str, Value] = {
        "turn": turn.turn,
        "attempt": turn.attempt,
        "engine": turn.engine,
        "versions": spans(turn.versions),
        "weight_digest": turn.weight_digest,
        "prompt_tokens": given,
        "sampled_tokens": sampled,
    }
    return Event(
        at_ns=turn.started_ns,
        until_ns=turn.generated_ns,
        lane=lane,
        what="turn",
        text=f"{text}: {action_text(turn.action)}",
        details=details,
    )


def _sandbox(lane: str, turn: TurnRecord, effect: TurnEffect, until: int) -> Event:
    ended = "timed out" if effect.timed_out else "refused" if effect.refused else f"exit {effect.exit_code}"
    text = f"turn {turn.turn}: {effect.lane} lane of {turn.executor}, waiting and running, {ended}"
    details: dict[str, Value] = {"lane": effect.lane, "executor": turn.executor, "exit_code": effect.exit_code}
    return Event(at_ns=turn.generated_ns, until_ns=until, lane=lane, what="sandbox", text=text, details=details)


def _sealed(lane: str, found: Found, episode: Episode) -> Event:
    text = f"sealed: {episode.termination}, {episode.turns} turns, {episode.sampled_tokens} sampled tokens"
    details: dict[str, Value] = {"termination": str(episode.termination), "episode_seq": found.seq, "attempt": episode.attempt}
    return Event(at_ns=episode.sealed_ns or found.time_ns, lane=lane, what="sealed", text=text, details=details)


def _judged(lane: str, episode: Episode, found: Found, verdict: Verdict) -> Iterator[Event]:
    begun, done = verdict.started_ns or found.time_ns, verdict.finished_ns or found.time_ns
    if episode.sealed_ns and begun > episode.sealed_ns:
        wait = f"waits {(begun - episode.sealed_ns) / 1e9:.3f} s for the verifier"
        yield Event(at_ns=episode.sealed_ns, until_ns=begun, lane=lane, what="wait", text=wait)
    reward = "no reward" if verdict.reward is None else f"reward {verdict.reward:g}"
    parts = ", ".join(f"{name} {value:g}" for name, value in verdict.components.items())
    text = f"{verdict.status}: {reward}" + (f" ({parts})" if parts else "")
    text += f", violations {', '.join(verdict.violations)}" if verdict.violations else ""
    details: dict[str, Value] = {"status": verdict.status, "reward": verdict.reward, "verdict_seq": found.seq}
    yield Event(at_ns=begun, until_ns=done, lane=lane, what="verdict", text=text, details=details)


def spans(versions: Sequence[VersionSpan]) -> str:
    """Version spans as a person reads them: `v7`, or `v7[0:5] v8[5:12]`; an incarnation after the first is named."""
    names = [f"v{span.version}" + (f".{span.incarnation}" if span.incarnation else "") for span in versions]
    if len(set(names)) <= 1:
        return names[0] if names else "no version"
    return " ".join(f"{name}[{span.start}:{span.end}]" for name, span in zip(names, versions, strict=True))


def action_text(action: Action) -> str:
    """An action in a few words."""
    match action:
        case ToolCall():
            said = " ".join(str(value) for value in action.arguments.values()).replace("\n", " ⏎ ")
            return f"{action.name}: {said[:_TEXT]}{'…' if len(said) > _TEXT else ''}"
        case Finish():
            return "finish"
        case Abstain():
            return "abstain"
        case _:
            return f"invalid ({action.code})"
