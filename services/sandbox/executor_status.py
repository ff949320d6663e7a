"""What an executor says of itself and of its clean-ups."""

from __future__ import annotations

import msgspec

from services.sandbox.isolation import Isolation
from services.sandbox.lanes import LaneStatus
from services.sandbox.reaper import Reaped


class CleanupResult(msgspec.Struct, frozen=True, kw_only=True):
    """The sandbox is confirmed to be gone; `existed` is false if it was so before."""

    sandbox_id: str
    existed: bool


class ExecutorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """For metrics, and for whoever asks what is being waited for."""

    sandboxes: int
    max_sandboxes: int
    sealed: int
    lost: int
    lanes: tuple[LaneStatus, ...]
    isolation: Isolation
    reaped_at_start: Reaped
