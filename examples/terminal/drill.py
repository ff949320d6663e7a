"""The copy drill: prompts whose answer is a literal copy of names in the prompt or in an observation.

A tiny policy that only sees real tasks guesses names from what is frequent. Copying drawn words teaches it to look.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .words import ARCHIVES, EXTENSIONS, FIELDS, FOLDERS, KEYS, SEPARATORS, STEMS, VALUES

_WORDS = (*STEMS, *VALUES, *KEYS, *FIELDS, *ARCHIVES, *EXTENSIONS)


@dataclass(frozen=True, kw_only=True)
class Drill:
    instruction: str
    look: tuple[str, str] | None  # a first command and what it prints, where the copy is from an observation
    command: str


def _name(rng: random.Random) -> str:
    shape = rng.random()
    if shape < 0.5:
        separator = rng.choice(SEPARATORS)
        path = f"{rng.choice(_WORDS)}{separator}{rng.randrange(10)}.{rng.choice(EXTENSIONS)}"
        return f"{rng.choice(FOLDERS)}/{path}" if rng.random() < 0.7 else path
    if shape < 0.9:
        return rng.choice(_WORDS)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randrange(2, 6)))


def drill(rng: random.Random) -> Drill:
    names = " ".join(_name(rng) for _ in range(rng.randrange(1, 5)))
    if rng.random() < 0.3:
        path = _name(rng)
        return Drill(instruction=f"say what {path} says", look=(f"cat {path}", names), command=f"echo {names}")
    return Drill(instruction=f"say {names}", look=None, command=f"echo {names}")
