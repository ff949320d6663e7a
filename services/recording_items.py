"""Which items a message tells of: the names under which the index of a recording finds it."""

from __future__ import annotations

from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry
from schemas.message import Message
from schemas.policy import ApplyOrder, EngineState, FleetVersions, WeightsManifest
from schemas.table import Stream
from schemas.training import BatchDemand, StepCommit


def step_name(step: int) -> str:
    """A step, as the index knows it."""
    return f"step:{step}"


def version_name(version: int) -> str:
    """A policy version, as the index knows it."""
    return f"version:{version}"


LATER_INCARNATIONS = "later incarnations"  # the commits of all but the first: where the line of versions forks


def items_of(stream: Stream, name: str, message: Message | None) -> list[str]:
    """The groups, steps and versions that a message tells of; `name` is its subject below `hr.<run>.`.

    A message that cannot be read tells of what its subject says.
    """
    words = name.split(".")
    if stream in (Stream.TURNS, Stream.EPISODES, Stream.READY):
        return words[1:2]
    match message:
        case GroupLease():
            return [message.group]
        case BatchEntry():
            return [step_name(message.step), *(member.group for member in message.groups)]
        case AbandonEntry():
            return [message.group] + ([step_name(message.step)] if isinstance(message.step, int) else [])
        case BatchDemand():
            return [step_name(message.step)]
        case StepCommit():
            fork = [LATER_INCARNATIONS] if message.incarnation else []
            return [step_name(message.step), version_name(message.version), *fork]
        case WeightsManifest() | ApplyOrder() | EngineState():
            return [version_name(message.version)]
        case FleetVersions():
            return [version_name(message.target)]
    return words[2:3] if stream is Stream.LEDGER else []
