"""Who holds a group: numbered claims on TURNS, each written once before its holder touches anything.

The lease's redelivery says who may begin; claims say it for ever, also after a server's restart. The newest claim holds. One
that was neither released nor followed by the group's end was lost with its holder; too many of those make a group poisonous.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import structlog

from schemas.attempts import GroupClaim, GroupRelease
from schemas.codec import CodecError
from schemas.table import Stream
from services.bus import Bus
from services.consume import events, read_events
from services.continuity import Hole
from services.items import BusError, Item, OnceConflict
from services.pull import Damaged

log = structlog.get_logger()
_RELEASE_S = 3.0
_WORD, _TAKEN, _RELEASED = "claim", "taken", "released"


class NotClaimed(Exception):
    """The group cannot be claimed now: another process has just done so, or the wait for its turn was too long."""


@dataclass(frozen=True, kw_only=True)
class PastClaims:
    """The claims on a group so far."""

    number: int  # of the newest
    newest: GroupClaim | None  # none: it is damaged
    lost: int  # holders that ended without a word

    def holder(self) -> str:
        return "somebody" if self.newest is None else self.newest.rollouter

    def age_s(self) -> float:
        """Seconds since the last holder took the group, by the clocks of two machines."""
        return 0.0 if self.newest is None else (time.time_ns() - self.newest.at_ns) / 1e9


class Claims:
    """Writes this process's claims. Produces: `turn.<group>.claim.<n>.<taken or released>`."""

    def __init__(self, bus: Bus, rollouter: str) -> None:
        self._bus = bus
        self._rollouter = rollouter

    async def first(self, group: str, delivery: str = "") -> bool:
        """Claim a group that nobody has touched, in one write. False if somebody has. `delivery`: of its lease."""
        try:
            await self._take(group, 0, delivery)
        except NotClaimed:
            return False
        return True

    async def past(self, group: str) -> PastClaims:
        """The claims on a group that somebody has touched. A claim counts by its subject, whether it can be read or not."""
        taken: dict[int, GroupClaim | None] = {}
        released: set[int] = set()
        for event in await read_events(self._bus, Stream.TURNS, f"turn.{group}.{_WORD}.*.*"):
            if isinstance(event, Hole):
                continue
            item = event.item if isinstance(event, Damaged) else event
            number, word = int(item.subject.split(".")[-2]), item.subject.split(".")[-1]
            if word == _RELEASED:
                released.add(number)
            else:
                taken[number] = _readable(event)
        newest = max(taken, default=0)
        return PastClaims(number=newest, newest=taken.get(newest), lost=len(taken.keys() - released))

    async def next(self, group: str, past: PastClaims, delivery: str = "") -> int:
        """Claim the group after its last holder. Raises `NotClaimed`."""
        await self._take(group, past.number + 1, delivery)
        return past.number + 1

    async def release(self, group: str, number: int, reason: str) -> None:
        """Say that the holder lives and gives the group back. If the word is lost, the holder counts as lost."""
        record = GroupRelease(
            run=self._bus.run, group=group, number=number, rollouter=self._rollouter, reason=reason, at_ns=time.time_ns()
        )
        try:
            async with asyncio.timeout(_RELEASE_S):
                await self._bus.publish_once(self._bus.subjects.turn(group, _WORD, number, _RELEASED), record)
        except (BusError, TimeoutError) as error:
            log.warning("release not delivered", group=group, claim=number, error=repr(error))

    async def _take(self, group: str, number: int, delivery: str) -> None:
        record = GroupClaim(
            run=self._bus.run, group=group, number=number, rollouter=self._rollouter, at_ns=time.time_ns(), delivery=delivery
        )
        try:
            await self._bus.publish_once(self._bus.subjects.turn(group, _WORD, number, _TAKEN), record)
        except OnceConflict as error:
            raise NotClaimed(str(error)) from error


async def deliveries_of_earlier_lives(bus: Bus, instance: str, present: str) -> list[str]:
    """Where to acknowledge the leases that earlier processes of this instance held last, as far as claims tell.

    Most of them belong to groups that were finished since; a word about those changes nothing. `present` is this process.
    """
    newest: dict[str, tuple[int, GroupClaim | None]] = {}
    async for event in events(bus, Stream.TURNS, f"turn.*.{_WORD}.*.{_TAKEN}", stop=asyncio.Event(), live=False):
        if event is None or isinstance(event, Hole):
            continue
        item = event.item if isinstance(event, Damaged) else event
        group, number = item.subject.split(".")[-4], int(item.subject.split(".")[-2])
        if number >= newest.get(group, (-1, None))[0]:
            newest[group] = (number, _readable(event))
    claims = [claim for _, claim in newest.values() if claim is not None and claim.delivery]
    return [c.delivery for c in claims if c.rollouter.rpartition("-")[0] == instance and c.rollouter != present]


def _readable(event: Item | Damaged) -> GroupClaim | None:
    if isinstance(event, Damaged):
        return None
    try:
        return event.decode(GroupClaim)
    except CodecError:
        return None
