"""What a service says about itself: lifecycle, what it waits for, counters. Producer: every service
(`reg.service.<name>.<id>`)."""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.message import Message

Lifecycle = Literal["starting", "ready", "draining", "stopped"]
ALARM = "alarm_"  # counters of damage and loss that the service met, by kind
SEEN = "seen_"  # counters that say up to which sequence the service knows a log to reach, by stream


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """An open wait and its culprit (invariant 11)."""

    what: str
    culprit: str
    since_ns: int
    deadline_ns: int
    at_deadline: str


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Published every few seconds; `headrace status` prints it."""

    run: str
    service: str
    instance: str
    host: str
    pid: int
    phase: Lifecycle
    waits: tuple[Wait, ...] = ()
    counters: dict[str, float] = {}  # noqa: RUF012 (msgspec copies it)
    loop_lag_s: float = 0.0
    started_ns: int = 0
    at_ns: int = 0
