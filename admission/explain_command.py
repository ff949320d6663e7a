"""`headrace explain`: one item's whole life, from a recording, a run that goes on, or the folder of one that has ended."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console

from admission.explain_page import page
from admission.explain_source import BusSource, RecordingSource, Source
from admission.explain_text import as_data, as_text
from admission.group_story import group_story, token_story
from admission.step_story import Advantages, is_known, step_story
from admission.story import Story
from schemas.ledger import BatchEntry
from schemas.table import Role
from services.config import Config
from services.recording import Recording, RecordingError
from services.runtime import connect
from services.stopped_run import served

_HOW = {
    "group": (r"[ge]\d+", "a group, as in g00000042"),
    "trajectory": (r"([ge]\d+)/(\d+)", "a group and a slot, as in g00000042/3"),
    "token": (r"([ge]\d+)/(\d+)/(\d+)", "a group, a slot and a position in the row, as in g00000042/3/57"),
    "step": (r"\d+", "a number, as in 7"),
}


def run_explain(options: argparse.Namespace, config: Config | None, folder: Path | None, advantages: Advantages) -> int:
    """Explain one item, on the terminal and as files where asked for. `advantages` is the trainer's credit."""
    story = asyncio.run(_story(options, config, folder, advantages))
    console = Console(highlight=False, markup=False, emoji=False)
    for line in as_text(story):
        console.print(line, soft_wrap=True)
    if options.json:
        _write(options.json, json.dumps(as_data(story), indent=1) + "\n")
    if options.html:
        _write(options.html, page(story))
    return 0


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecordingError(f"{path}: cannot be written ({error.strerror}); name a file in a folder that exists") from error


async def _story(options: argparse.Namespace, config: Config | None, folder: Path | None, advantages: Advantages) -> Story:
    name = _checked(options.what, options.name)
    async with _source(options, config, folder) as source:
        return await explain(source, options.what, name, advantages)


def _checked(what: str, name: str) -> str:
    pattern, form = _HOW[what]
    if not re.fullmatch(pattern, name):
        raise RecordingError(f"explain {what} {name!r}: name {form}")
    return name


async def explain(source: Source, what: str, name: str, advantages: Advantages) -> Story:
    """The story of one item. Raises `RecordingError` when nothing names it."""
    words = name.split("/")
    if what == "group":
        return await group_story(source, name, advantages)
    if what == "trajectory":
        return await group_story(source, words[0], advantages, int(words[1]))
    if what == "token":
        return await token_story(source, words[0], int(words[1]), int(words[2]), advantages)
    found = await source.of_step(int(name))
    if not is_known(found):
        raise RecordingError(f"step {name}: nothing here names it")
    batch = next((item.message for item in found if isinstance(item.message, BatchEntry)), None)
    ready = await source.ready([member.group for member in batch.groups] if batch is not None else [])
    return step_story(int(name), source.run, found, ready, source.config, advantages)


@asynccontextmanager
async def _source(options: argparse.Namespace, config: Config | None, folder: Path | None) -> AsyncIterator[Source]:
    if options.recording:
        with Recording(Path(options.recording)) as recording:
            yield RecordingSource(recording)
        return
    assert config is not None, "without a recording there is a configuration"
    async with served(config, folder) as reachable:
        bus = await connect(reachable, Role.OBSERVER, f"explain-{os.getpid()}")
        try:
            yield BusSource(bus, config)
        finally:
            await bus.close()
