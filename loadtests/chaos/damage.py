"""Damage as a torn write or a rotten disk leaves it: in checkpoints, and in the blocks of a message store that is closed."""

from __future__ import annotations

from pathlib import Path

from schemas.table import Stream, Subjects


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    return sorted(path for path in (folder / "checkpoints").glob("step-*") if path.is_dir())


def tear_newest_checkpoint(folder: Path) -> tuple[str, str]:
    """Cut the largest file of the newest checkpoint in half; gives its name and what was cut, empty if there is none."""
    found = checkpoints(folder)
    if not found:
        return "", ""
    files = [path for path in found[-1].rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    size = largest.stat().st_size
    with largest.open("r+b") as file:
        file.truncate(size // 2)
    return found[-1].name, f"{largest.relative_to(folder)} cut from {size} to {size // 2} bytes"


def blocks(folder: Path, run: str, stream: Stream | None) -> list[Path]:
    """The block files of one stream in the store of a run folder, oldest first; `None`: those of the object store.

    Only for a store whose server does not run.
    """
    subjects = Subjects(run)
    name = subjects.blob_stream() if stream is None else subjects.stream(stream)
    return sorted((folder / "nats" / "store").rglob(f"streams/{name}/msgs/*.blk"), key=lambda path: int(path.stem))


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    """Flip a bit in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def truncate(path: Path, by_bytes: int) -> None:
    """Cut the end off."""
    with path.open("r+b") as file:
        file.truncate(max(0, path.stat().st_size - by_bytes))
