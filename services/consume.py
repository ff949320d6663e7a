"""Reading logs in order: folds over a whole log or some of its subjects, once or for ever, and the newest of each subject.

A reader sees every item once, whatever happens to the server. It checks each item's digest, and looks after every start of the
server whether what it has read still stands there; `services/continuity.py` says what can be missing and how that is noticed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from nats.aio.msg import Msg

from schemas.table import Stream, family_of, spec_of
from services.bus import Bus
from services.continuity import Hole, LogRewound, Standing
from services.dead_letters import pass_over, report_loss
from services.items import DIGEST_HEADER, IntegrityError, Item
from services.pull import Damaged, Inbox, Position, position_of, pull_forever, to_item

BATCH = 256
_QUIET_LOOKS = 3
Event = Item | Damaged | Hole | None


async def fold(
    bus: Bus,
    stream: Stream,
    *patterns: str,
    start: int = 1,
    stop: asyncio.Event,
    live: bool = True,
    latest_per_subject: bool = False,
) -> AsyncIterator[Item | None]:
    """Every message of a log in order, from `start`, and then (if `live`) the new ones as they come, until `stop`.

    Yields `None` each time it has caught up with the stream, so that a reader knows when its state is complete; with
    `live=False` it ends there. `patterns` are table patterns; none means the whole stream. Needs no acknowledgement: a reader
    that restarts folds again. Raises `IntegrityError` at a damaged item and at a hole in an unfiltered log, and `Rewound` when
    what it has read no longer stands there. Passed over, with the alarm, are a damaged value of a subject that takes others
    after it, and a hole in the log that a filtered reader looks into.
    """
    found = events(bus, stream, *patterns, start=start, stop=stop, live=live, latest_per_subject=latest_per_subject)
    async with aclosing(found):
        async for event in found:
            if isinstance(event, Damaged):
                if _is_once(bus, event):
                    raise IntegrityError(event.reason)
                await pass_over(bus, event)
            elif not isinstance(event, Hole):
                yield event
            elif not patterns and not latest_per_subject:
                raise IntegrityError(str(event))


def _is_once(bus: Bus, damaged: Damaged) -> bool:
    """Whether nothing else can ever stand where this does."""
    _, family = family_of(damaged.item.subject.removeprefix(bus.subjects.prefix))
    return family.once


async def events(
    bus: Bus,
    stream: Stream,
    *patterns: str,
    start: int = 1,
    stop: asyncio.Event,
    live: bool = True,
    latest_per_subject: bool = False,
    bodies: bool = True,
    batch: int = BATCH,
) -> AsyncGenerator[Event, None]:
    """As `fold`, with damage as data: a damaged item comes as `Damaged`, missing sequences as `Hole`, each said aloud once.

    A reader of the whole log gets a hole where it is; a filtered one gets those that the server tells of before the items, and
    the others when it has caught up. Without `bodies`, items have no bytes and the digest that they declare. Raises `Rewound`.
    """
    reader = _Reader(bus, stream, patterns, start, latest_per_subject, bodies)
    caught_up = False
    while not stop.is_set():
        await reader.look()
        await reader.create()
        for hole in reader.holes_here():
            yield hole
        if reader.is_at_end() and not caught_up:
            caught_up = True
            yield None
            if not live:
                return
        inbox = await Inbox.open(bus)
        messages = pull_forever(bus, reader.name, reader.consumer, inbox, stop, batch)
        try:
            async with aclosing(messages):
                async for message in messages:
                    if message is None:
                        if not await reader.is_stuck():
                            continue
                        await reader.find_unreadable()
                    else:
                        position = position_of(message)
                        if not reader.follows(position):
                            break  # something was sent to us that never came: it is read again, from where we stand
                        if reader.has_passed(position):
                            continue
                        await reader.pass_to(position)
                        for hole in reader.holes_here():
                            yield hole
                        yield reader.item(message, position)
                    if reader.is_at_end():
                        for hole in reader.holes_here():
                            yield hole
                        caught_up = True
                        yield None
                        if not live:
                            return
        finally:
            await inbox.close()


async def read_all(bus: Bus, stream: Stream, *patterns: str, start: int = 1) -> list[Item]:
    """Everything stored up to now."""
    return [
        item async for item in fold(bus, stream, *patterns, start=start, stop=asyncio.Event(), live=False) if item is not None
    ]


async def read_events(
    bus: Bus, stream: Stream, *patterns: str, start: int = 1, bodies: bool = True
) -> list[Item | Damaged | Hole]:
    """Everything stored up to now, with what is damaged or missing."""
    found = events(bus, stream, *patterns, start=start, stop=asyncio.Event(), live=False, bodies=bodies, batch=4 * BATCH)
    return [event async for event in found if event is not None]


async def read_latest(bus: Bus, stream: Stream, *patterns: str) -> list[Item]:
    """The newest item of each subject, up to now."""
    stop = asyncio.Event()
    items = fold(bus, stream, *patterns, stop=stop, live=False, latest_per_subject=True)
    return [item async for item in items if item is not None]


class _Reader:
    """One reader's place in a log, and its consumer on the server, which is made anew whenever the server forgets it."""

    def __init__(self, bus: Bus, stream: Stream, patterns: tuple[str, ...], start: int, latest: bool, bodies: bool) -> None:
        self.name = bus.subjects.stream(stream)
        self.consumer = ""
        self._bus = bus
        self._stream = stream
        self._patterns = patterns
        self._filters = [bus.subjects.pattern(pattern) for pattern in patterns]
        self._latest = latest
        self._bodies = bodies
        self._is_log = spec_of(stream).deny_delete and not latest
        self._standing = Standing(stream, max(1, start))
        self._holes: list[Hole] = []  # that the reader was not given yet
        self._pending = 0  # messages still to come, by the server's count
        self._sent = 0  # messages of this consumer that have come
        self._quiet = 0

    async def look(self) -> None:
        """Note what the server says is missing. Raises `Rewound` when something that was read is gone."""
        if not self._is_log:
            return
        try:
            holes = self._standing.look(await self._bus.stream_state(self._stream))
            await self._look_at_anchor()
        except LogRewound as error:
            await report_loss(self._bus, error.hole)
            raise
        await self._note(holes)

    def holes_here(self) -> list[Hole]:
        """The holes to tell of now: those before the item that was reached, at the end all, to a filtered reader at once."""
        at = self._standing.at
        told = [hole for hole in self._holes if self._patterns or self.is_at_end() or hole.first <= at]
        self._holes = [hole for hole in self._holes if hole not in told]
        return told

    async def _look_at_anchor(self) -> None:
        """A log that was cut short may have grown again meanwhile: is the last item that was read still the same?"""
        anchor = self._standing.anchor
        if anchor and await self._bus.stored_ns(self._stream, {"seq": anchor}) != self._standing.anchor_ns:
            self._standing.look(await self._bus.stream_state(self._stream))  # it may have been cut short since
            raise LogRewound(Hole(self._stream, anchor, anchor, "truncated"))

    async def create(self) -> None:
        """An ephemeral consumer from here on, under a name of ours: a permission can then tell it from a durable one."""
        name = f"fold-{secrets.token_hex(8)}"
        config: dict[str, Any] = {
            "name": name,
            "ack_policy": "none",
            "deliver_policy": "last_per_subject" if self._latest else "by_start_sequence",
            "inactive_threshold": 60_000_000_000,
            "mem_storage": True,
            "num_replicas": 1,
            "max_waiting": 8,
            "headers_only": not self._bodies,
        }
        if self._latest or self._filters:
            config["filter_subjects"] = self._filters or [">"]
        if not self._latest:
            config["opt_start_seq"] = self._standing.at + 1
        reply = await self._bus.request(f"CONSUMER.CREATE.{self.name}.{name}", {"stream_name": self.name, "config": config})
        self.consumer, self._pending = reply["name"], int(reply.get("num_pending", 0))
        self._sent = 0

    def is_at_end(self) -> bool:
        return self._pending == 0

    def follows(self, position: Position) -> bool:
        """Whether this is the next message that the server sent. A gap in its count was lost on the way, not in the store."""
        self._sent += 1
        return position.consumer_seq == self._sent

    def has_passed(self, position: Position) -> bool:
        return position.seq <= self._standing.at and not self._latest

    async def pass_to(self, position: Position) -> None:
        """Go on to an item."""
        self._pending, self._quiet = position.pending, 0
        if self._is_log and not self._patterns:
            await self._note(self._standing.end_at(position.seq - 1))
        self._standing.pass_to(position.seq, position.time_ns)
        if self._is_log:
            self._bus.saw(self._stream, position.seq)

    def item(self, message: Msg, position: Position) -> Item | Damaged:
        """What was delivered."""
        if self._bodies:
            return to_item(self.name, message, position)
        headers = dict(message.headers or {})
        return Item(self.name, message.subject, position.seq, position.time_ns, b"", headers.get(DIGEST_HEADER, ""), headers)

    async def is_stuck(self) -> bool:
        """Whether the server has our pull, counts messages for it, and cannot read any of them."""
        self._quiet += 1
        if self.is_at_end() or (self._latest and self._quiet < _QUIET_LOOKS):
            return False
        for pattern in [] if self._latest else self._filters or [">"]:
            ahead = {"seq": self._standing.at + 1, "next_by_subj": pattern}
            if await self._bus.stored_ns(self._stream, ahead) is not None:
                return False
        self._pending = 0
        return True

    async def find_unreadable(self) -> None:
        """Note which sequences the server passes over."""
        if not self._is_log:
            self._bus.alarm("unreadable", stream=str(self._stream))
        elif self._patterns:  # only a reader of everything can tell
            found = await read_events(self._bus, self._stream, start=self._standing.start, bodies=False)
            await self._note([event for event in found if isinstance(event, Hole) and event.how == "unreadable"])
        else:
            await self._note(self._standing.end_at((await self._bus.stream_state(self._stream)).last_seq))

    async def _note(self, holes: list[Hole]) -> None:
        for hole in holes:
            await report_loss(self._bus, hole)
        self._holes += holes
