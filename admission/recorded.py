"""What a recording says, as the messages and facts that bank and admission work on."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import msgspec

from admission.background import Background
from admission.gates import GateSettings
from admission.joining import EpisodeFact, VerdictFact, episode_fact, verdict_fact
from admission.slim import SlimEpisode, SlimVerdict, decode_slim
from schemas.codec import CodecError, decode_any
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, QuarantineEntry
from schemas.message import Message
from schemas.table import Stream
from schemas.training import BatchDemand
from schemas.trajectory import Episode, Verdict
from services.config import Config, ConfigError, check
from services.recording import Form, Record, RecordingError
from services.recording_reader import RecordingReader

_MOST_REWARDS = 64


def message_of(record: Record) -> Message | None:
    """The message of a whole record; `None` for one that cannot be read, as its readers met it."""
    if record.form != Form.WHOLE:
        return None
    try:
        return decode_any(record.data)
    except CodecError:
        return None


def messages(reader: RecordingReader, stream: Stream) -> Iterator[tuple[Record, Message]]:
    """The readable whole messages of one stream, in its order."""
    for record in reader.records(stream):
        message = message_of(record)
        if message is not None:
            yield record, message


def ledger(reader: RecordingReader) -> list[tuple[int, LedgerEntry]]:
    """LEDGER. Raises `RecordingError` at an entry that cannot be read, as nothing is decided beside a partial ledger."""
    entries: list[tuple[int, LedgerEntry]] = []
    for record in reader.records(Stream.LEDGER):
        entry = message_of(record)
        if not isinstance(entry, BatchEntry | QuarantineEntry | AbandonEntry):
            raise RecordingError(f"{reader.path}: LEDGER {record.seq} ({record.name}) cannot be read; nothing follows from it")
        entries.append((record.seq, entry))
    return entries


def ready(reader: RecordingReader) -> Iterator[tuple[Record, ReadyGroup]]:
    """The entries of READY that stand under their own group's name."""
    for record, message in messages(reader, Stream.READY):
        if isinstance(message, ReadyGroup) and message.stands_on(record.name):
            yield record, message


def leases(reader: RecordingReader) -> Iterator[tuple[Record, GroupLease]]:
    """The leases."""
    for record, message in messages(reader, Stream.TASKS):
        if isinstance(message, GroupLease):
            yield record, message


def facts(reader: RecordingReader) -> Iterator[EpisodeFact | VerdictFact]:
    """EPISODES as the bank takes it, whether bodies were recorded or not."""
    for record in reader.records(Stream.EPISODES):
        fact = fact_of(record, reader.path)
        if fact is not None:
            yield fact


def fact_of(record: Record, path: str) -> EpisodeFact | VerdictFact | None:
    """What the bank makes of one record. `None` for a subject without a slot, which is no item of a group."""
    words = record.name.split(".")
    if len(words) != 3:
        return None
    kind, group = words[:2]
    slot = int(words[2]) if words[2].isdecimal() else -1
    if record.form == Form.SLIM:
        found = decode_slim(record.data, f"{path}: EPISODES {record.seq}")
        if isinstance(found, SlimEpisode | SlimVerdict):
            return found.fact
    message = message_of(record)
    if kind == "episode" and isinstance(message, Episode):
        return episode_fact(group, slot, record.seq, record.digest, message)
    if kind == "verdict" and isinstance(message, Verdict):
        return verdict_fact(group, slot, record.seq, record.digest, message)
    lost = EpisodeFact if kind == "episode" else VerdictFact
    return lost(group=group, slot=slot, seq=record.seq, digest=record.digest, readable=False)


def run_config(reader: RecordingReader) -> Config:
    """The recorded run's configuration. Raises `RecordingError` when there is none that this build reads."""
    return check(config_tree(reader))


def config_tree(reader: RecordingReader) -> dict[str, Any]:
    """The same, as a tree to put other values in."""
    try:
        tree: dict[str, Any] = tomllib.loads(reader.manifest.config)
        check(tree)
    except (tomllib.TOMLDecodeError, ConfigError) as error:
        raise RecordingError(f"{reader.path}: its configuration cannot be read: {error}") from error
    return tree


def background(reader: RecordingReader) -> Background:
    """What else decisions were made from: the server's times, and the manifests that leases carry."""
    return Background.recorded(
        ((record.time_ns, lease) for record, lease in leases(reader) if lease.purpose == "train"),
        ((record.seq, record.time_ns) for record, group in ready(reader) if group.purpose == "train"),
        ((record.seq, record.time_ns) for record, told in messages(reader, Stream.TRAIN) if isinstance(told, BatchDemand)),
    )


def gates_of(config: Config) -> GateSettings:
    """The gates as a configuration says, as admission takes them."""
    section = config.admission
    return GateSettings(
        max_lag=section.max_lag,
        versions=section.versions,
        zero_variance=section.zero_variance,
        min_rewards=section.min_rewards,
        max_span=section.max_span,
        max_age_s=section.max_age_s,
    )


@dataclass
class SettingsFound:
    """The settings that a ledger was decided under, by their hashes; `unknown` are hashes that no settings give."""

    known: list[GateSettings] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def settings_of(entries: Iterable[LedgerEntry], configured: GateSettings) -> SettingsFound:
    """A run may have been restarted under other settings; each entry carries their hash, and a batch its bound of lag.

    What the configuration does not say is looked for among all settings that it could say.
    """
    hashes: dict[str, set[int]] = {}
    lags = {configured.max_lag}
    for entry in entries:
        hashes.setdefault(entry.settings_hash, set())
        if isinstance(entry, BatchEntry):
            lags.add(entry.max_lag)
    found = SettingsFound()
    missing = set(hashes)
    for candidate in _candidates(configured, lags):
        if not missing:
            break
        if (name := candidate.hash()) in missing:
            missing.discard(name)
            found.known.append(candidate)
    found.unknown = sorted(missing)
    return found


def _candidates(configured: GateSettings, lags: set[int]) -> Iterator[GateSettings]:
    yield configured
    versions, variances = ("mixed", "homogeneous"), ("keep", "skip", "count")
    near = sorted(lags | set(range(17)))
    later = sorted({(0, 0.0), (configured.max_span, configured.max_age_s)})  # without these, and as configured
    for lag, spans, zero, rewards in product(near, versions, variances, range(1, _MOST_REWARDS + 1)):
        found = GateSettings(max_lag=lag, versions=spans, zero_variance=zero, min_rewards=rewards)  # type: ignore[arg-type]
        yield from (msgspec.structs.replace(found, max_span=span, max_age_s=age_s) for span, age_s in later)
