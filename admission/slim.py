"""What a recording keeps of turns, episodes and verdicts without their bodies: what the bank decides from, and their times.

An episode's facts are made by the bank's own function from the whole message when it is recorded, so that the bank, replayed
over a recording without bodies, is given the same.
"""

from __future__ import annotations

import msgspec
import numpy as np

from admission.joining import EpisodeFact, VerdictFact, episode_fact, verdict_fact
from schemas.actions import Abstain, Action, Finish, InvalidAction, ToolCall
from schemas.arrays import ArrayError
from schemas.message import Message
from schemas.trajectory import Episode, TurnRecord, Verdict, VersionSpan
from services.items import Item
from services.recording import RecordingError

_DETAIL_CHARS = 200


class SlimEpisode(msgspec.Struct, frozen=True, kw_only=True, tag="episode"):
    """A sealed trajectory. `sampled`: runs `[start, end)` of positions that were sampled."""

    fact: EpisodeFact
    attempt: int
    seed: int
    invalid_actions: int
    engines: tuple[str, ...]
    executor: str
    rollouter: str
    started_ns: int
    sealed_ns: int
    sampled: tuple[tuple[int, int], ...]
    turn_starts: tuple[int, ...]
    versions: tuple[VersionSpan, ...]


class SlimVerdict(msgspec.Struct, frozen=True, kw_only=True, tag="verdict"):
    """A verdict."""

    fact: VerdictFact
    violations: tuple[str, ...]
    detail: str
    verifier: str
    started_ns: int
    finished_ns: int


class SlimEffect(msgspec.Struct, frozen=True, array_like=True):
    """What a turn's command did."""

    lane: str
    exit_code: int | None
    timed_out: bool
    refused: bool


class SlimTurn(msgspec.Struct, frozen=True, kw_only=True, tag="turn"):
    """One turn. `previous` is what the turn before did."""

    group: str
    slot: int
    attempt: int
    turn: int
    prompt_tokens: int
    sampled_tokens: int
    versions: tuple[VersionSpan, ...]
    engine: str
    finish_reason: str
    action: str
    executor: str
    has_command: bool
    previous: SlimEffect | None
    started_ns: int
    generated_ns: int


Slim = SlimEpisode | SlimVerdict | SlimTurn
_decoder: msgspec.msgpack.Decoder[Slim] = msgspec.msgpack.Decoder(Slim)
_encoder = msgspec.msgpack.Encoder()


def slim_bytes(item: Item, message: Message) -> bytes | None:
    """What stands in the message's place; `None` for messages that are always kept whole."""
    if not isinstance(message, Episode | Verdict | TurnRecord):
        return None
    return _encoder.encode(slim(message, *_place(item), item.seq, item.digest))


def slim(message: Episode | Verdict | TurnRecord, group: str, slot: int, seq: int, digest: str) -> Slim:
    """The message without its body, from where it stands."""
    match message:
        case Episode():
            return _episode(message, group, slot, seq, digest)
        case Verdict():
            return _verdict(message, group, slot, seq, digest)
        case TurnRecord():
            return _turn(message)


def decode_slim(data: bytes, where: str) -> Slim:
    """Raises `RecordingError` naming the place when the bytes are none."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordingError(f"{where}: {error}") from error


def _place(item: Item) -> tuple[str, int]:
    """Group and slot, as the subject says them."""
    words = item.subject.split(".")
    return words[3], int(words[4]) if words[4].isdecimal() else -1


def _episode(episode: Episode, group: str, slot: int, seq: int, digest: str) -> SlimEpisode:
    try:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], episode.mask.numpy("mask").astype(np.int8), [0]]))).tolist()
        turn_starts = tuple(episode.turn_starts.numpy("turn_starts").tolist())
    except ArrayError:
        edges, turn_starts = [], ()
    return SlimEpisode(
        fact=episode_fact(group, slot, seq, digest, episode),
        attempt=episode.attempt,
        seed=episode.seed,
        invalid_actions=episode.invalid_actions,
        engines=episode.engines,
        executor=episode.executor,
        rollouter=episode.rollouter,
        started_ns=episode.started_ns,
        sealed_ns=episode.sealed_ns,
        sampled=tuple(zip(edges[::2], edges[1::2], strict=True)),
        turn_starts=turn_starts,
        versions=episode.versions,
    )


def _verdict(verdict: Verdict, group: str, slot: int, seq: int, digest: str) -> SlimVerdict:
    return SlimVerdict(
        fact=verdict_fact(group, slot, seq, digest, verdict),
        violations=verdict.violations,
        detail=verdict.detail[:_DETAIL_CHARS],
        verifier=verdict.verifier,
        started_ns=verdict.started_ns,
        finished_ns=verdict.finished_ns,
    )


def _turn(turn: TurnRecord) -> SlimTurn:
    before = turn.previous
    return SlimTurn(
        group=turn.group,
        slot=turn.slot,
        attempt=turn.attempt,
        turn=turn.turn,
        prompt_tokens=_length(turn.prompt_ids.shape),
        sampled_tokens=_length(turn.sampled_ids.shape),
        versions=turn.versions,
        engine=turn.engine,
        finish_reason=turn.finish_reason,
        action=_action(turn.action),
        executor=turn.executor,
        has_command=bool(turn.command_id),
        previous=None if before is None else SlimEffect(before.lane, before.exit_code, before.timed_out, before.refused),
        started_ns=turn.started_ns,
        generated_ns=turn.generated_ns,
    )


def _length(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 0


def _action(action: Action) -> str:
    match action:
        case ToolCall():
            return f"call {action.name}"
        case Finish():
            return "finish"
        case Abstain():
            return "abstain"
        case InvalidAction():
            return f"invalid ({action.code})"
