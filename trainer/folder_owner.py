"""The last line against two trainers: which of them the checkpoint folder belongs to, by number.

A trainer that is stopped in its tracks keeps its lock and goes on one day in the middle of a write, with an ownership that it
lost meanwhile. So each trainer takes the folder under a number higher than any before it, and puts aside what the others have
half written. A writer works under a name that carries its number, and looks whether the folder is still its own right before a
checkpoint becomes visible; since the rename then needs the very folder that the next owner has put aside, there is no moment in
between. This needs atomic renames only, so it also holds where a shared file system passes no locks on.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_NUMBER = ".owner"
_PARTIAL = re.compile(r"\.partial-.*-by-(\d+)")
_ANY_PARTIAL = ".partial-*"


class FolderTaken(RuntimeError):
    """Another trainer owns the checkpoint folder by now; nothing was changed."""


def owner_of(root: Path) -> int:
    """The number of the present owner; 0 before the first."""
    try:
        return int((root / _NUMBER).read_text(encoding="ascii"))
    except FileNotFoundError:
        return 0


def take(root: Path, at_least: int) -> int:
    """Make the folder ours under a new number, which it gives, and put aside what others began. Only for the role's owner.

    `at_least` is the role's own count of owners, which the folder's may be ahead of. Raises `ValueError` if the folder's record
    of its owner is no number.
    """
    root.mkdir(parents=True, exist_ok=True)
    number = max(at_least, owner_of(root) + 1)
    aside = root / f"{_NUMBER}-{number}"
    aside.write_text(str(number), encoding="ascii")
    _sync(aside)
    aside.rename(root / _NUMBER)
    _sync(root)
    sweep(root, number)
    return number


def check(root: Path, number: int) -> None:
    """Raises `FolderTaken` when the folder has a later owner. 0 asks for nothing: the folder has one writer anyway."""
    if number and (present := owner_of(root)) > number:
        raise FolderTaken(f"{root}: its owner is number {present} by now, we are number {number}")


def partial_name(name: str, number: int) -> str:
    """The folder in which the owner of this number writes what becomes `name`."""
    return f".partial-{name}-by-{number}"


def sweep(root: Path, number: int) -> None:
    """Remove what owners up to this number (0: all) began and did not end. Renamed first: whoever still writes there fails."""
    for leftover in root.glob(_ANY_PARTIAL):
        match = _PARTIAL.fullmatch(leftover.name)
        if number and match is not None and int(match[1]) > number:
            continue
        swept = root / f".swept-{number}-{leftover.name}"
        try:
            leftover.rename(swept)
        except FileNotFoundError:  # it was just made visible, or another one sweeps
            continue
    for swept in root.glob(".swept-*"):
        shutil.rmtree(swept, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
