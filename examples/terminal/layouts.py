"""Layouts: where a task's files lie and how they are named.

A template is a wording and a layout, drawn independently, so that no wording betrays a folder. Held-out layouts are new
combinations of parts that training knows one by one: a folder with an extension, and a folder with a separator, that the
family never pairs in training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

from .words import EXTENSIONS, FOLDERS, SEPARATORS, STEMS


@dataclass(frozen=True, kw_only=True)
class Layout:
    folder: str
    extension: str
    separator: str

    def stem(self, rng: random.Random, taken: set[str]) -> str:
        """A new file stem such as `plan-4`; adds it to `taken`."""
        while True:
            stem = f"{rng.choice(STEMS)}{self.separator}{rng.randrange(1, 10)}"
            if stem not in taken:
                taken.add(stem)
                return stem

    def path(self, stem: str, extension: str | None = None) -> str:
        return f"{self.folder}/{stem}.{extension or self.extension}"


def family_layouts(family: str, train: int, heldout: int) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Training and held-out layouts of one family; a pure function of its arguments."""
    rng = random.Random(f"layouts of {family}")
    combinations = [Layout(folder=f, extension=e, separator=s) for f, e, s in product(FOLDERS, EXTENSIONS, SEPARATORS)]
    rng.shuffle(combinations)
    training = combinations[:train]
    pairs = {(lay.folder, lay.extension) for lay in training} | {(lay.folder, lay.separator) for lay in training}
    fresh = [
        lay
        for lay in combinations[train:]
        if (lay.folder, lay.extension) not in pairs and (lay.folder, lay.separator) not in pairs
    ]
    return tuple(training), tuple(fresh[:heldout])
