"""Plausible wrong commands: one word taken for another of its kind, or two names the wrong way round.

They make a warm-started policy unsure where it would otherwise always answer the same, so that siblings of a group differ
and there is something to learn from.
"""

from __future__ import annotations

import random
import re

from .words import ARCHIVES, EXTENSIONS, FIELDS, FOLDERS, KEYS, NUMBERS, STEMS, VALUES

_FOLDER_WORDS = tuple(sorted({word for folder in FOLDERS for word in folder.split("/")}))
_KINDS: tuple[tuple[str, ...], ...] = (
    STEMS, VALUES, KEYS, FIELDS, ARCHIVES, EXTENSIONS, _FOLDER_WORDS, tuple("123456789"), ("u", "r"),
    tuple(str(number) for number in NUMBERS),
)  # fmt: skip
_TOKEN = re.compile(r"[A-Za-z]+|[0-9]+")
_SWAPS = (
    re.compile(r"(?P<head>mv )(?P<a>\S+)(?P<mid> )(?P<b>\S+)(?P<tail>)"),
    re.compile(r"(?P<head>.*s/)(?P<a>[^/]+)(?P<mid>/)(?P<b>[^/]+)(?P<tail>/.*)"),
    re.compile(r"(?P<head>cut .* )(?P<a>\S+)(?P<mid> > )(?P<b>\S+)(?P<tail>)"),
)
SWAP_SHARE = 0.25


def mistaken(command: str, rng: random.Random) -> str:
    """The command with one plausible error; never the command itself."""
    if rng.random() < SWAP_SHARE:
        for pattern in _SWAPS:
            if (match := pattern.fullmatch(command)) and match["a"] != match["b"]:
                return "".join((match["head"], match["b"], match["mid"], match["a"], match["tail"]))
    candidates = [
        (match, kind) for match in _TOKEN.finditer(command) for kind in _KINDS if match.group() in kind
    ]  # every command names at least one file, so there is always a candidate
    match, kind = rng.choice(candidates)
    other = rng.choice([word for word in kind if word != match.group()])
    return command[: match.start()] + other + command[match.end() :]
