"""`headrace dead-letters`: list what could not be used, show one in full, give one to its subject again where that helps."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from schemas.codec import CodecError, decode_any
from schemas.dead_letter import DeadLetter, DeadReason, LostRange
from schemas.table import Role, Stream, SubjectSpec, family_of
from services.bus import Bus
from services.config import Config
from services.consume import read_events
from services.identity import run_keys
from services.items import DIGEST_HEADER, BusError, Item
from services.pull import Damaged
from services.runtime import connect
from services.stopped_run import has_ended, served

_SHOWN_BYTES = 512


class CannotRedrive(BusError):
    """A letter that cannot be given to its subject again; the text says why, and what happens instead."""


async def show_list(config: Config, folder: Path | None) -> int:
    """Print one line for each dead letter and each hole, oldest first."""
    table = Table("seq", "refused", "why", "of", "bytes", "by", "detail", title="dead letters", title_justify="left")
    async with _looking(config, folder) as bus:
        for event in await read_events(bus, Stream.DEAD):
            if not isinstance(event, Item | Damaged):
                continue
            item = event.item if isinstance(event, Damaged) else event
            table.add_row(str(item.seq), *_row(bus, item))
    console = Console(highlight=False, emoji=False)
    console.print(table if table.row_count else "no dead letters")
    return 0


def _row(bus: Bus, item: Item) -> tuple[str, ...]:
    try:
        record = decode_any(item.data)
    except CodecError as error:
        return (_when(item.time_ns), "unreadable", item.subject.removeprefix(bus.subjects.prefix), "-", "-", str(error))
    if isinstance(record, DeadLetter):
        subject = record.subject.removeprefix(bus.subjects.prefix)
        of = f"{record.stream} {record.seq}: {subject}"
        return (_when(record.refused_ns), str(record.reason), of, str(record.size_bytes), record.refused_by, record.detail[:80])
    if isinstance(record, LostRange):
        of = f"{record.stream} {record.first_seq} to {record.last_seq}"
        return (_when(record.noticed_ns), "lost", of, "-", record.noticed_by, record.how)
    return (_when(item.time_ns), "unreadable", item.subject, "-", "-", "it is no dead letter")


async def show_one(config: Config, folder: Path | None, seq: int) -> int:
    """Print everything that one letter says, and its body as far as it can be read."""
    async with _looking(config, folder) as bus:
        record = decode_any((await bus.get(Stream.DEAD, seq)).data)
    console = Console(highlight=False, emoji=False, markup=False)
    for name in record.__struct_fields__:
        if name not in ("v", "body"):
            value = getattr(record, name)
            text = _when(value) if name.endswith("_ns") and value else str(value)
            console.print(f"{name:>16}  {text}", soft_wrap=True)
    if isinstance(record, DeadLetter):
        _print_body(console, record)
    return 0


def _print_body(console: Console, letter: DeadLetter) -> None:
    cut = "" if letter.is_whole() else f", the first {len(letter.body)} of {letter.size_bytes} bytes"
    try:
        console.print(f"{'message':>16}  {decode_any(letter.body)}"[:4000], soft_wrap=True)
    except CodecError as error:
        console.print(f"{'body':>16}  {letter.body[:_SHOWN_BYTES]!r}{cut}; {error}", soft_wrap=True)


async def redrive(config: Config, folder: Path | None, seq: int) -> int:
    """Publish a letter's original bytes to its subject again. Raises `CannotRedrive`."""
    if folder is not None and has_ended(folder):
        raise CannotRedrive(f"the run in {folder} has ended; nobody would take the message")
    bus = await connect(config, Role.OBSERVER, f"dead-letters-{os.getpid()}")
    try:
        letter = (await bus.get(Stream.DEAD, seq)).decode(DeadLetter)
    finally:
        await bus.close()
    spec = redrivable(letter, bus.subjects.prefix)
    role = spec.publishers[0]
    if folder is not None and run_keys(folder).is_dir():  # the key of whoever may publish there
        own = {"nkey_seed_file": "", "nkey_folder": str(run_keys(folder))}
        config = config.model_copy(update={"nats": config.nats.model_copy(update=own)})
    bus = await connect(config, role, f"redrive-{os.getpid()}")
    try:
        kept = {key: value for key, value in letter.headers.items() if key != DIGEST_HEADER and not key.startswith("Nats-")}
        stored = await bus.store(letter.subject, letter.body, kept)
    finally:
        await bus.close()
    print(f"{letter.subject} has it again, at {letter.stream} {stored}; if it is refused again, that is another dead letter")
    return 0


def redrivable(letter: DeadLetter, prefix: str) -> SubjectSpec:
    """The subject family that a letter may go back to. Raises `CannotRedrive` with the reason and what happens instead."""
    name = letter.subject.removeprefix(prefix)
    try:
        row, spec = family_of(name)
    except KeyError as error:
        raise CannotRedrive(f"{name} is no subject of the table") from error
    if letter.reason is DeadReason.DIGEST_MISMATCH:
        raise CannotRedrive(
            f"dead letter of {name}: its bytes are not those that were sent ({letter.declared_digest[:12]}); to publish them"
            " would make the damage look whole. Its publisher must send it again"
        )
    if spec.once:
        raise CannotRedrive(
            f"dead letter of {name}: that subject may hold one message for ever, and holds this one; {_instead(name)}"
        )
    if row.retention != "workqueue":
        raise CannotRedrive(
            f"dead letter of {name}: {row.stream} is no request queue; its publisher writes the next value itself"
        )
    if not letter.is_whole():
        kept = f"only {len(letter.body)} of its {letter.size_bytes} bytes were kept"
        raise CannotRedrive(f"dead letter of {name}: {kept}; its requester asks again")
    return spec


def _instead(name: str) -> str:
    """What the run does about a once-only subject that holds something unusable."""
    kind, words = name.split(".", 1)[0], name.split(".")
    if kind in ("episode", "verdict", "ready"):
        return f"group {words[1]} is abandoned as lost_item, and another one is leased in its place"
    if kind == "graded":
        return f"the attempts of evaluation group {words[1]} count as censored"
    if kind == "task":
        return f"ordinal {words[-1]} names no group; the next ordinal is leased"
    if kind == "turn":
        return f"the attempt is given up, and slot {words[2]} of {words[1]} is played under the next attempt's name"
    return "the service that owns the log stops and names it"


@asynccontextmanager
async def _looking(config: Config, folder: Path | None) -> AsyncIterator[Bus]:
    async with served(config, folder) as reachable:
        bus = await connect(reachable, Role.OBSERVER, f"dead-letters-{os.getpid()}")
        try:
            yield bus
        finally:
            await bus.close()


def _when(time_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns / 1e9))
