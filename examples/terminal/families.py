"""The ten task families: each turns a layout and a random generator into one case.

A case knows everything about an instance: its files, the words that fill the wording, the oracle's commands with the output
that each one prints, and the goal. Outputs are declared here and checked against real runs by the tests, so that thousands
of demonstrations can be written without running a shell.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .layouts import Layout
from .wordings import SORT_PHRASES
from .words import ARCHIVES, CELL_SEPARATORS, FIELDS, KEYS, NUMBERS, ORDINALS, VALUES


@dataclass(frozen=True, kw_only=True)
class Case:
    slots: Mapping[str, str]  # what fills the wording
    files: Mapping[str, str]  # initial state
    goal: Mapping[str, str | None]  # path -> final content, None for a file that must be gone; `.json` compares as values
    oracle: tuple[str, ...]
    outputs: tuple[str, ...]  # what each oracle command prints, without the final line break


Build = Callable[[Layout, random.Random, bool], Case]


def _lines(rng: random.Random, words: list[str], count: int = 4) -> list[str]:
    return [" ".join(rng.choice(words) for _ in range(2)) for _ in range(count)]


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def _bystanders(layout: Layout, rng: random.Random, taken: set[str], words: list[str], count: int = 2) -> dict[str, str]:
    """Files that no task asks to change; they catch commands that reach too far."""
    return {layout.path(layout.stem(rng, taken)): _text(_lines(rng, words)) for _ in range(count)}


def rename(layout: Layout, rng: random.Random, heldout: bool) -> Case:
    taken: set[str] = set()
    src, dst = layout.path(layout.stem(rng, taken)), layout.path(layout.stem(rng, taken))
    words = list(VALUES)
    content = _text(_lines(rng, words))
    return Case(
        slots={"src": src, "dst": dst},
        files={src: content, **_bystanders(layout, rng, taken, words)},
        goal={src: None, dst: content},
        oracle=(f"mv {src} {dst}",),
        outputs=("",),
    )


def archive(layout: Layout, rng: random.Random, heldout: bool) -> Case:
    taken: set[str] = set()
    stem, note = layout.stem(rng, taken), layout.stem(rng, taken)
    src, folder, value = layout.path(stem), rng.choice(ARCHIVES), rng.choice(VALUES)
    log = f"{folder}/{note}.{layout.extension}"
    words = list(VALUES)
    content = _text(_lines(rng, words))
    return Case(
        slots={"src": src, "folder": folder, "value": value, "log": log},
        files={src: content, **_bystanders(layout, rng, taken, words)},
        goal={src: None, f"{folder}/{stem}.{layout.extension}": content, log: value + "\n"},
        oracle=(f"mkdir {folder}", f"mv {src} {folder}", f"echo {value} > {log}"),
        outputs=("", "", ""),
    )


def replace(layout: Layout, rng: random.Random, heldout: bool) -> Case:
    taken: set[str] = set()
    src = layout.path(layout.stem(rng, taken))
    old, new, *others = rng.sample(VALUES, 6)
    lines = _lines(rng, others, 3)
    lines.insert(rng.randrange(4), f"{old} {rng.choice(others)} {old}")  # twice on one line: a lone `s/a/b/` is not enough
    content = _text(lines)
    return Case(
        slots={"src": src, "old": old, "new": new},
        files={src: content, **_bystanders(layout, rng, taken, [old, *others])},
        goal={src: content.replace(old, new)},
        oracle=(f"sed -i s/{old}/{new}/g {src}",),
        outputs=("",),
    )


def drop(layout: Layout, rng: random.Random, heldout: bool) -> Case:
    taken: set[str] = set()
    src = layout.path(layout.stem(rng, taken))
    value, *others = rng.sample(VALUES, 6)
    kept = _lines(rng, others)
    lines = list(kept)
    for _ in range(2):
        lines.insert(rng.randrange(len(lines) + 1), f"{rng.choice(others)} {value}")
    return Case(
        slots={"src": src, "value": value},
        files={src: _text(lines), **_bystanders(layout, rng, taken, [value, *others])},
        goal={src: _text(kept)},
        oracle=(f"sed -i /{value}/d {src}",),
        outputs=("",),
    )


def hunt(layout: Layout, rng: random.Random, heldout: bool) -> Case:
    taken: set[str] = set()
    value, *others = rng.sample(VALUES, 6)
    files = _bystanders(layout, rng, taken, others, count=3)
    culprit = layout.path(layout.stem(rng, taken))
    files[culprit] = _text([*_lines(rng, others, 3), f"{rng.choice(others)} {value}"])
    return Case(
        slots={"dir": layout.folder, "value": value},
        files=files,
        goal={culprit: None},
        oracle=(f"grep -l {value} {layout.folder}/*", f"rm {culprit}"),
        outputs=(culprit, ""),
    )


def json_value(layout: Layout, rng: random.Random, heldout: bool) -> Case:
    taken: set[str] = set()
    src, other = (layout.path(layout.stem(rng, taken), "json") for _ in range(2))
    keys = rng.sample(KEYS, 4)
    key, twin = rng.sample(keys, 2)
    values = {name: rng.choice(NUMBERS) for name in keys}
    values[twin] = values[key]  # a bare `s/old/new/` would change this one too
    new = rng.choice([number for number in NUMBERS if number != values[key]])
    before = json.dumps(values, indent=2) + "\n"
    line = next(line for line in before.splitlines() if f'"{key}"' in line)
    return Case(
        slots={"src": src, "key": key, "new": str(new)},
        files={src: before, other: before},
        goal={src: json.dumps({**values, key: new}, indent=2) + "\n"},
        oracle=(f"grep {key} {src}", f"sed -i /{key}/s/{values[key]}/{new}/ {src}"),
        outputs=(line, ""),
    )


def schema(layout: Layout, rng: random.Random, heldout: bool) -> Case:
    taken: set[str] = set()
    src, rules, other = (layout.path(layout.stem(rng, taken), "json") for _ in range(3))
    old, new, *fields = rng.sample(FIELDS, 4)
    record = {name: rng.choice(VALUES) for name in [old, *fields]}
    before = json.dumps(record, indent=2) + "\n"
    required = json.dumps({"required": [new]})
    return Case(
        slots={"src": src, "schema": rules, "old": old},
        files={src: before, rules: required + "\n", other: before},
        goal={src: before.replace(f'"{old}"', f'"{new}"')},
        oracle=(f"cat {rules}", f"sed -i s/{old}/{new}/ {src}"),
        outputs=(required, ""),
    )


def column(layout: Layout, rng: random.Random, heldout: bool) -> Case:
    taken: set[str] = set()
    src, dst = layout.path(layout.stem(rng, taken)), layout.path(layout.stem(rng, taken))
    words = list(VALUES)
    cell, number = rng.choice(CELL_SEPARATORS), rng.randrange(3)
    rows = [rng.sample(FIELDS, 3), *(rng.sample(VALUES, 3) for _ in range(3))]
    return Case(
        slots={"src": src, "dst": dst, "nth": ORDINALS[number], "n": str(number + 1)},
        files={src: _text([cell.join(row) for row in rows]), **_bystanders(layout, rng, taken, words)},
        goal={dst: _text([row[number] for row in rows])},
        oracle=(f"head -n 1 {src}", f"cut -d '{cell}' -f {number + 1} {src} > {dst}"),
        outputs=(cell.join(rows[0]), ""),
    )


def sort(layout: Layout, rng: random.Random, heldout: bool) -> Case:
    taken: set[str] = set()
    src = layout.path(layout.stem(rng, taken))
    option = rng.choice(sorted(SORT_PHRASES))
    phrases = SORT_PHRASES[option].heldout if heldout else SORT_PHRASES[option].train
    words = rng.sample(VALUES, 5)
    lines = [*words, words[0], words[2]]
    while lines in (sorted(lines), sorted(lines, reverse=True)):
        rng.shuffle(lines)
    result = sorted(set(lines)) if option == "-u" else sorted(lines, reverse=True)
    return Case(
        slots={"src": src, "how": rng.choice(phrases)},
        files={src: _text(lines), **_bystanders(layout, rng, taken, words)},
        goal={src: _text(result)},
        oracle=(f"sort {option} -o {src} {src}",),
        outputs=("",),
    )


def cli(layout: Layout, rng: random.Random, heldout: bool) -> Case:
    taken: set[str] = set()
    tool, right, wrong = (layout.stem(rng, taken) for _ in range(3))
    script, dst = layout.path(tool, "sh"), layout.path(right)
    words = list(VALUES)
    command = rng.choice(("wc -l", "sort", "head -n 2"))
    before, after = (f"{command} {layout.path(stem)}" for stem in (wrong, right))
    return Case(
        slots={"script": script, "dst": dst},
        files={script: before + "\n", dst: _text(_lines(rng, words)), **_bystanders(layout, rng, taken, words, count=1)},
        goal={script: after + "\n"},
        oracle=(f"cat {script}", f"sed -i s/{wrong}/{right}/ {script}"),
        outputs=(before, ""),
    )


FAMILIES: dict[str, Build] = {
    "rename": rename,
    "archive": archive,
    "replace": replace,
    "drop": drop,
    "hunt": hunt,
    "json": json_value,
    "schema": schema,
    "column": column,
    "sort": sort,
    "cli": cli,
}
