"""A recording as typed messages: the same values that the services fold, out of the file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

import msgspec

from admission.gates import GateSettings
from admission.joining import EpisodeFact, VerdictFact
from admission.outline import fact_of, lost_fact, of_outline, unpack_fact
from admission.service import gate_settings
from schemas.codec import CodecError, decode_any
from schemas.group import ReadyGroup
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, QuarantineEntry
from schemas.message import Message
from schemas.table import Stream
from schemas.trajectory import Episode, Verdict
from services.config import Config, ConfigError, check
from services.recording import DAMAGED, HOLE, OUTLINE, WIRE, Record, Recording, RecordingError


def message_of(record: Record) -> Message | None:
    """The message of a record; `None` for what is damaged or missing. Raises `RecordingError`."""
    try:
        if record.form == WIRE:
            return decode_any(record.data)
        if record.form == OUTLINE:
            return of_outline(record.data)
    except (CodecError, msgspec.DecodeError) as error:
        raise RecordingError(f"{record.subject}: what the recording holds is not readable: {error}; record it again") from error
    return None


def messages(recording: Recording, stream: Stream) -> Iterator[tuple[Record, Message]]:
    """Everything usable of one stream, in the log's order."""
    for record in recording.records(stream):
        message = message_of(record)
        if message is not None:
            yield record, message


def facts(recording: Recording) -> Iterator[EpisodeFact | VerdictFact]:
    """What the bank takes from EPISODES, in the log's order: from the bodies where they are here, else as it was kept."""
    for record in recording.records(Stream.EPISODES):
        digest = record.digest.hex()
        if record.form == OUTLINE:
            yield unpack_fact(record.subject, record.seq, digest, record.fact)
        elif record.form == WIRE:
            message = message_of(record)
            if isinstance(message, Episode | Verdict):
                yield fact_of(record.subject, record.seq, digest, message)
            else:
                yield lost_fact(record.subject, record.seq, digest)
        elif record.form == DAMAGED:
            yield lost_fact(record.subject, record.seq, digest)


def ready_groups(recording: Recording) -> Iterator[tuple[Record, ReadyGroup]]:
    """The entries of READY that stand where they belong."""
    for record, message in messages(recording, Stream.READY):
        if isinstance(message, ReadyGroup) and message.stands_on(record.subject):
            yield record, message


def ledger(recording: Recording) -> Iterator[tuple[Record, LedgerEntry]]:
    """The entries of LEDGER. Raises `RecordingError` when one is damaged or missing: nothing can be said beside a part."""
    for record in recording.records(Stream.LEDGER):
        if record.form in (DAMAGED, HOLE):
            raise RecordingError(f"{recording.path}: LEDGER {record.seq} was damaged or missing when it was recorded")
        message = message_of(record)
        if isinstance(message, BatchEntry | QuarantineEntry | AbandonEntry):
            yield record, message


def configurations(recording: Recording) -> list[Config]:
    """The configurations that the run was under, newest first; one of another build that this one refuses is left out."""
    found = []
    for text in recording.header.configs:
        try:
            found.append(check(tomllib.loads(text)))
        except (ConfigError, tomllib.TOMLDecodeError):
            continue
    return found


def known_settings(recording: Recording) -> list[GateSettings]:
    """The gates of those configurations."""
    return [gate_settings(config) for config in configurations(recording)]
