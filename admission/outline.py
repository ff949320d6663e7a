"""Messages without their bodies: what a recording keeps of a turn, an episode and a verdict when bodies are left out.

Arrays keep dtype and shape and lose their bytes, except an episode's `turn_starts`; observations, sealed states and long action
arguments go; everything else stays as it was. What the bank takes from a body (`admission/joining.py`) is kept beside, so that
its decisions can be repeated without it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from admission.joining import EpisodeFact, VerdictFact, episode_fact, verdict_fact
from schemas.actions import Action, ToolCall
from schemas.arrays import Array
from schemas.attempts import AttemptPlayed
from schemas.codec import AnyMessage
from schemas.message import Message
from schemas.trajectory import Episode, TurnEffect, TurnRecord, Verdict

_TEXT_CHARS = 160  # of each argument of an action
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def has_body(message: Message) -> bool:
    """Whether a recording without bodies keeps only the outline of this message."""
    return isinstance(message, TurnRecord | AttemptPlayed | Episode | Verdict)


def outline(message: Message) -> bytes:
    """The message without its body, as plain msgpack; it is no wire message."""
    changes: dict[str, Any] = {}
    for field in message.__struct_fields__:
        value = getattr(message, field)
        if isinstance(value, Array) and field != "turn_starts":
            changes[field] = Array(value.dtype, value.shape, b"")
        elif isinstance(value, TurnEffect):
            changes[field] = _effect(value)
    if isinstance(message, TurnRecord):
        changes["action"] = _action(message.action)
        changes["raw_logprobs"] = None
    elif isinstance(message, Episode):
        changes["raw_logprobs"] = None
        if message.terminal_state is not None:
            changes["terminal_state"] = msgspec.structs.replace(message.terminal_state, inline=None)
    return _encoder.encode(msgspec.structs.replace(message, **changes))


def of_outline(data: bytes) -> Message:
    """The message of an outline; its arrays say their shape and hold nothing. Raises `msgspec.DecodeError`."""
    return _decoder.decode(data)


def _effect(effect: TurnEffect) -> TurnEffect:
    dropped = effect.observation_dropped_bytes + len(effect.observation)
    return msgspec.structs.replace(effect, observation=b"", observation_dropped_bytes=dropped)


def _action(action: Action) -> Action:
    if not isinstance(action, ToolCall):
        return action
    short = {
        name: value[:_TEXT_CHARS] + "…" if isinstance(value, str) and len(value) > _TEXT_CHARS else value
        for name, value in action.arguments.items()
    }
    return msgspec.structs.replace(action, arguments=short)


def fact_of(subject: str, seq: int, digest: str, message: Episode | Verdict) -> EpisodeFact | VerdictFact:
    """What the bank takes from an item of EPISODES; `subject` below `hr.<run>.` says whose it should be."""
    _, group, slot_text = subject.split(".")
    slot = int(slot_text) if slot_text.isdecimal() else -1
    if isinstance(message, Episode):
        return episode_fact(group, slot, seq, digest, message)
    return verdict_fact(group, slot, seq, digest, message)


def lost_fact(subject: str, seq: int, digest: str) -> EpisodeFact | VerdictFact:
    """What the bank takes from an item of EPISODES that cannot be read."""
    kind, group, slot_text = subject.split(".")
    slot = int(slot_text) if slot_text.isdecimal() else -1
    if kind == "episode":
        return EpisodeFact(group=group, slot=slot, seq=seq, digest=digest, readable=False)
    return VerdictFact(group=group, slot=slot, seq=seq, digest=digest, readable=False)


def pack_fact(fact: EpisodeFact | VerdictFact) -> bytes:
    """Without what the record says itself: group, slot, sequence and digest."""
    fields = {
        name: value
        for name in fact.__dataclass_fields__
        if name not in ("group", "slot", "seq", "digest") and (value := getattr(fact, name)) is not msgspec.UNSET
    }
    return _encoder.encode(fields)


def unpack_fact(subject: str, seq: int, digest: str, packed: bytes) -> EpisodeFact | VerdictFact:
    """The fact of a recorded item. Raises `msgspec.DecodeError`."""
    kind, group, slot = subject.split(".")
    fields = msgspec.msgpack.decode(packed)
    fields.update(group=group, slot=int(slot) if slot.isdecimal() else -1, seq=seq, digest=digest)
    if kind == "episode":
        return msgspec.convert(fields, EpisodeFact)
    return msgspec.convert(fields, VerdictFact)
