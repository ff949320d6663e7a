"""`headrace replay FILE --into URL`: publish a recording again, in its order and with its timing, and stop where asked.

Sequences are part of what messages say (READY names episodes by theirs), so the streams must be empty, and a message that does
not come to stand on its recorded sequence is counted aloud. What was recorded without its body cannot be published.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import get_args

from rich.console import Console

from admission import recorded
from admission.explain_command import clock
from admission.life import content_of
from admission.slim import Slim
from schemas.attempts import AttemptReason
from schemas.ledger import AbandonReason, BatchEntry, QuarantineReason
from schemas.message import Message
from schemas.table import Role, Stream
from services.bus import Bus
from services.config import ConfigError
from services.items import BusError
from services.provision import provision
from services.recording import RECORDED, Form, Record
from services.recording_reader import RecordingReader
from services.replay_arguments import nearest

EXIT_OK, EXIT_NOT_MET = 0, 1  # a breakpoint of which nothing was found
_NEXT = 3  # messages shown of what comes after a breakpoint
BREAKS = ("group", "step", "reason", "stream")
REASONS = tuple(dict.fromkeys([*map(str, QuarantineReason), *map(str, AbandonReason), *get_args(AttemptReason)]))
Told = tuple[Stream, Record]


@dataclass(frozen=True, slots=True)
class Break:
    """Stop before the first message of which `what` is `value`."""

    what: str
    value: str

    def hit(self, stream: Stream, record: Record, content: Message | Slim | None) -> str:
        """Why to stop here; empty: go on."""
        found = _said(stream, record, content).get(self.what, ())
        return f"{self.what}={self.value}: {stream} {record.seq} ({record.name})" if self.value in found else ""


def _said(stream: Stream, record: Record, content: Message | Slim | None) -> dict[str, tuple[str, ...]]:
    """What a message says of each thing that one can stop at."""
    words = record.name.split(".")
    groups = [str(getattr(content, "group", ""))]
    if isinstance(content, BatchEntry):
        groups += [member.group for member in content.groups]
    if stream in (Stream.TURNS, Stream.EPISODES, Stream.READY):
        groups.append(words[1])
    steps = [str(getattr(content, "step", ""))]
    reasons = [str(getattr(content, "reason", ""))]
    return {"group": tuple(groups), "step": tuple(steps), "reason": tuple(reasons), "stream": (str(stream),)}


def breaks_of(words: list[str]) -> list[Break]:
    """Breakpoints from the command line. Raises `ConfigError` saying how to write one."""
    found = []
    for word in words:
        what, _, value = word.partition("=")
        if what not in BREAKS or not value:
            raise ConfigError(f"--break {word}: write one of group=g00000042, step=7, reason=stale, stream=LEDGER")
        if what == "step" and not value.isdecimal():
            raise ConfigError(f"--break {word}: a step is a number, as in step=7")
        for kind, known in (("reason", REASONS), ("stream", tuple(map(str, RECORDED)))):
            if what == kind and value not in known:
                raise ConfigError(f"--break {word}: {value!r} is {nearest(value, known)}")
        found.append(Break(what, value))
    return found


def streams_of(text: str | None) -> tuple[Stream, ...]:
    """The streams of `--streams`, all by default. Raises `ConfigError` naming the one that is none."""
    known = tuple(map(str, RECORDED))
    words = [word.strip() for word in text.split(",") if word.strip()] if text is not None else known
    for word in words:
        if word not in known:
            raise ConfigError(f"--streams {text}: {word!r} is {nearest(word, known)}")
    if not words:
        raise ConfigError(f"--streams: names no stream; give some of {', '.join(known)}")
    return tuple(stream for stream in RECORDED if str(stream) in words)


def in_time(reader: RecordingReader, streams: tuple[Stream, ...]) -> Iterator[Told]:
    """All records by the server's time; within a stream in its order."""

    def of(stream: Stream) -> Iterator[tuple[int, int, int, Told]]:
        latest = 0
        for record in reader.records(stream):
            latest = max(latest, record.time_ns)
            yield latest, RECORDED.index(stream), record.seq, (stream, record)

    for *_, told in heapq.merge(*(of(stream) for stream in streams)):
        yield told


@dataclass
class Walk:
    """A replay's way through a recording. `store` publishes one message and gives its sequence; `None`: none does."""

    reader: RecordingReader
    streams: tuple[Stream, ...]
    breaks: list[Break]
    speed: float
    say: Callable[[str], None]
    go_on: Callable[[], bool]
    store: Callable[[Told], Awaitable[int]] | None = None
    published: int = 0
    without_body: int = 0
    elsewhere: int = 0  # on another sequence than recorded
    met: set[Break] = field(default_factory=set)

    async def run(self) -> bool:
        """To the end, or to the first breakpoint at which `go_on` says no; true when it reached the end."""
        begun, first_ns = time.monotonic(), 0
        coming = in_time(self.reader, self.streams)
        ahead: deque[Told] = deque()
        while (told := ahead.popleft() if ahead else next(coming, None)) is not None:
            first_ns = first_ns or told[1].time_ns
            if self.breaks and (why := self._why(told)):
                ahead.extend(islice(coming, max(0, _NEXT - len(ahead))))
                stopped = time.monotonic()
                self._show(why, told, ahead)
                if not self.go_on():
                    return False
                begun += time.monotonic() - stopped  # standing still is no part of the timing
            if self.store is not None:
                if self.speed > 0:
                    due = begun + (told[1].time_ns - first_ns) / 1e9 / self.speed
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._publish(told)
        return True

    async def _publish(self, told: Told) -> None:
        if told[1].form == Form.SLIM:
            self.without_body += 1
        elif self.store is not None:
            self.elsewhere += await self.store(told) != told[1].seq
            self.published += 1

    def _why(self, told: Told) -> str:
        content = content_of(*told)
        hits = {point: why for point in self.breaks if (why := point.hit(*told, content))}
        self.met.update(hits)
        return next(iter(hits.values()), "")

    def _show(self, why: str, told: Told, ahead: Iterable[Told]) -> None:
        self.say(f"stopped at {clock(told[1].time_ns)}: {why}")
        for place, (stream, record) in enumerate([told, *ahead]):
            self.say(f"  {'then' if place else 'next'}  {stream:<9} {record.seq:>8}  {record.name}")


def run_republish(reader: RecordingReader, options: argparse.Namespace) -> int:
    """Carry `--into` and `--break` out; gives the exit code. Raises `BusError` for a server with a run of this name."""
    breaks = breaks_of(options.breaks)
    if not 0 <= options.speed < math.inf:
        raise ConfigError(f"--speed {options.speed:g}: give a number from 0 on; 0: as fast as it goes")
    streams = streams_of(options.streams)
    console = Console(highlight=False, markup=False, emoji=False)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    def go_on() -> bool:
        if options.once:
            return False
        say("Enter goes on")
        return bool(sys.stdin.readline())

    walk = Walk(reader, streams, breaks, options.speed, say, go_on)
    ended = asyncio.run(_run(walk, options))
    say(f"{'the end' if ended else 'ended at a breakpoint'}: {walk.published} messages published{_left(walk)}")
    missed = [f"{point.what}={point.value}" for point in breaks if ended and point not in walk.met]
    if missed:
        say(f"no message has {', '.join(missed)}")
    return EXIT_NOT_MET if missed else EXIT_OK


async def _run(walk: Walk, options: argparse.Namespace) -> bool:
    if not options.into:
        return await walk.run()
    run = options.as_run or walk.reader.manifest.run
    bus = await Bus.connect(options.into, run, Role.OBSERVER, f"replay-{os.getpid()}")
    try:
        await provision(bus, recorded.run_config(walk.reader).nats.store_bytes)
        for stream in walk.streams:
            if await bus.last_sequence(stream):
                raise BusError(
                    f"{bus.subjects.stream(stream)} is not empty; replay into a fresh server, or under --as-run NAME"
                )

        async def store(told: Told) -> int:
            return await bus.store(bus.subjects.pattern(told[1].name), told[1].data, {})

        walk.store = store
        return await walk.run()
    finally:
        await bus.close()


def _left(walk: Walk) -> str:
    parts = [f"{walk.without_body} left out, since they were recorded without their bodies"] if walk.without_body else []
    parts += [f"{walk.elsewhere} stand on another sequence than they had"] if walk.elsewhere else []
    return "".join(f"; {part}" for part in parts)
