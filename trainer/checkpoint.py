"""A checkpoint is one atomic directory: there whole, or not there.

Layout: `<root>/step-00000012/commit.msgpack` beside `state/…` (whatever the trainer wrote). It is written aside, every file and
folder is fsynced, and one rename makes it visible. The commit record names step, version, consumed groups and ledger position
together with the size and digest of every file, so a torn or rotten checkpoint is found when it is read, and named.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

_COMMIT = "commit.msgpack"
_NAME = re.compile(r"step-(\d{8})")
_CHUNK_BYTES = 4 * 2**20
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used; the text names the path and the rule."""


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """A file of the checkpoint: `[path relative to it, bytes, xxh3-128]`."""

    path: str
    size_bytes: int
    digest: str


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint stands for, in one record."""

    step: int  # the last step whose update is in the weights
    version: int  # the policy version that these weights are
    incarnation: int  # of the trainer
    digest: str  # of the served bfloat16 weights
    consumed_group_ids: tuple[str, ...]
    ledger_position: int  # stream sequence of the last consumed ledger entry
    config_hash: str
    ranks: int = 1
    written_ns: int = 0  # wall clock
    format: int = FORMAT
    files: tuple[FileRecord, ...] = ()  # filled in when it is committed


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    commit: bytes
    digest: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose every byte was verified."""

    path: Path
    commit: Commit

    @property
    def state(self) -> Path:
        """The folder that `DeepSpeedTrainer.load_state` takes."""
        return self.path / "state"


@dataclass(frozen=True, slots=True)
class Damage:
    """A checkpoint that must not be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest intact checkpoint (None: there is none) and the newer ones that were passed over."""

    checkpoint: Checkpoint | None
    damaged: tuple[Damage, ...]


def prepare(root: str | Path, step: int) -> Path:
    """An empty folder beside the checkpoints to write step `step` into; leftovers of interrupted writes are removed.

    There is one writer per root. With several ranks one of them prepares and all write below `state/`.
    """
    base = Path(root)
    base.mkdir(parents=True, exist_ok=True)
    for leftover in base.glob(".partial-*"):
        shutil.rmtree(leftover)
    aside = base / f".partial-{name_of(step)}"
    (aside / "state").mkdir(parents=True)
    return aside


def commit(root: str | Path, aside: Path, record: Commit) -> Checkpoint:
    """Seal the files under `aside` with `record` and make them the checkpoint of its step.

    Order: fsync the files, write and fsync the record, fsync the folders, rename, fsync the root. A crash at any instruction
    leaves the older checkpoints and at most an invisible partial folder. Raises `CheckpointError` when an intact checkpoint of
    this step exists already; a damaged one is replaced.
    """
    base = Path(root)
    target = base / name_of(record.step)
    if target.exists():
        if isinstance(verify(target), Checkpoint):
            raise CheckpointError(f"{target}: already committed and intact; a committed step is never written again")
        shutil.rmtree(target)
    files = tuple(_record(aside, path) for path in sorted(p for p in aside.rglob("*") if p.is_file()))
    full = msgspec.structs.replace(record, files=files)
    body = msgspec.msgpack.encode(full)
    sealed = msgspec.msgpack.encode(_Sealed(body, xxhash.xxh3_128_hexdigest(body)))
    (aside / _COMMIT).write_bytes(sealed)
    for path in (*(aside / file.path for file in files), aside / _COMMIT):
        _sync(path)
    for folder in (*(p for p in aside.rglob("*") if p.is_dir()), aside):
        _sync(folder)
    aside.rename(target)
    _sync(base)
    return Checkpoint(target, full)


def verify(path: str | Path) -> Checkpoint | Damage:
    """Read a checkpoint and check every byte of it against its record."""
    folder = Path(path)
    try:
        sealed = msgspec.msgpack.decode((folder / _COMMIT).read_bytes(), type=_Sealed)
    except FileNotFoundError:
        return Damage(folder, f"{_COMMIT} is missing")
    except (msgspec.DecodeError, OSError) as failure:
        return Damage(folder, f"{_COMMIT} cannot be read: {failure}")
    if xxhash.xxh3_128_hexdigest(sealed.commit) != sealed.digest:
        return Damage(folder, f"{_COMMIT} does not match its own digest")
    try:
        record = msgspec.msgpack.decode(sealed.commit, type=Commit)
    except msgspec.DecodeError as failure:
        return Damage(folder, f"{_COMMIT} cannot be decoded: {failure}")
    if record.format != FORMAT:
        return Damage(folder, f"format {record.format} is not the known {FORMAT}")
    if folder.name != name_of(record.step):
        return Damage(folder, f"it records step {record.step}, but its name says otherwise")
    for file in record.files:
        place = folder / file.path
        if not place.is_file():
            return Damage(folder, f"{file.path} is missing")
        if place.stat().st_size != file.size_bytes:
            return Damage(folder, f"{file.path} has {place.stat().st_size} bytes, recorded {file.size_bytes}")
        if _digest(place) != file.digest:
            return Damage(folder, f"{file.path} does not match its digest")
    return Checkpoint(folder, record)


def latest(root: str | Path) -> Latest:
    """The newest intact checkpoint under `root`; every newer one that is damaged is named, never silently skipped."""
    damaged: list[Damage] = []
    for folder in reversed(_folders(Path(root))):
        found = verify(folder)
        if isinstance(found, Checkpoint):
            return Latest(found, tuple(damaged))
        damaged.append(found)
    return Latest(None, tuple(damaged))


def prune(root: str | Path, keep: int) -> tuple[Path, ...]:
    """Remove all but the newest `keep` checkpoints; returns what was removed, oldest first.

    A folder loses its record first, so that an interrupted removal cannot look like a checkpoint.
    Raises `CheckpointError` for `keep` below 1.
    """
    if keep < 1:
        raise CheckpointError(f"keep: {keep} must be at least 1")
    old = _folders(Path(root))[:-keep]
    for folder in old:
        (folder / _COMMIT).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return tuple(old)


def name_of(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders by step, oldest first."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))


def _record(aside: Path, path: Path) -> FileRecord:
    return FileRecord(path.relative_to(aside).as_posix(), path.stat().st_size, _digest(path))


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            state.update(chunk)
    return str(state.hexdigest())


def _sync(path: Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
