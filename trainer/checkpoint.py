"""A checkpoint is one atomic directory: there whole, or not there.

Layout: `<root>/step-00000012/commit.msgpack` beside `state/…` (whatever the trainer wrote). It is written aside, every file and
folder is fsynced, and one rename makes it visible. The commit record names step, version, consumed groups and ledger position
together with the size and digest of every file, so a torn or rotten checkpoint is found when it is read, and named. It also
carries the announcement of its step, so that a crash before the announcement does not leave a step that nobody can publish.

`owner` is the writer's number in `trainer.folder_owner`, which keeps two writers apart; 0 stands for a folder with one writer.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from trainer import folder_owner

_COMMIT = "commit.msgpack"
_REPLACED = ".replaced"
_NAME = re.compile(r"step-(\d{8})(?:-(\d+))?")
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
    announcement: bytes = b""  # wire bytes of the step's `StepCommit`; it is published after the checkpoint is there


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    commit: bytes
    digest: str


class NotWritten(CheckpointError):
    """The disk did not take a checkpoint; the older ones are as they were, and it may be tried again."""


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
    """The newest checkpoint that can be used (None: there is none) and the newer ones that were passed over."""

    checkpoint: Checkpoint | None
    damaged: tuple[Damage, ...]


def prepare(root: str | Path, step: int, incarnation: int = 0, *, owner: int = 0) -> Path:
    """An empty folder beside the checkpoints to write step `step` into; leftovers of interrupted writes are removed.

    With several ranks one of them prepares and all write below `state/`. Raises `FolderTaken`.
    """
    base = Path(root)
    base.mkdir(parents=True, exist_ok=True)
    folder_owner.check(base, owner)
    folder_owner.sweep(base, owner)
    aside = aside_of(base, step, incarnation, owner=owner)
    (aside / "state").mkdir(parents=True)
    return aside


def aside_of(root: str | Path, step: int, incarnation: int = 0, *, owner: int = 0) -> Path:
    """Where `prepare` makes the folder."""
    return Path(root) / folder_owner.partial_name(name_of(step, incarnation), owner)


def commit(root: str | Path, aside: Path, record: Commit, *, owner: int = 0) -> Checkpoint:
    """Seal the files under `aside` with `record` and make them the checkpoint of its step.

    Order: fsync the files, write and fsync the record, fsync the folders, rename, fsync the root. A crash at any instruction
    leaves the older checkpoints and at most an invisible partial folder. Raises `CheckpointError` when an intact checkpoint of
    these weights by as many ranks exists already, and `FolderTaken`. One that is damaged, that other ranks wrote, or that holds
    weights which were never announced, is replaced.
    """
    base = Path(root)
    target = base / name_of(record.step, record.incarnation)
    folder_owner.check(base, owner)
    if target.exists():
        found = verify(target)
        if isinstance(found, Checkpoint) and (found.commit.digest, found.commit.ranks) == (record.digest, record.ranks):
            raise CheckpointError(f"{target}: already committed and intact; a committed step is never written again")
    files = tuple(_record(aside, path) for path in sorted(p for p in aside.rglob("*") if p.is_file()))
    full = msgspec.structs.replace(record, files=files)
    body = msgspec.msgpack.encode(full)
    sealed = msgspec.msgpack.encode(_Sealed(body, xxhash.xxh3_128_hexdigest(body)))
    (aside / _COMMIT).write_bytes(sealed)
    for path in (*(aside / file.path for file in files), aside / _COMMIT):
        _sync(path)
    for folder in (*(p for p in aside.rglob("*") if p.is_dir()), aside):
        _sync(folder)
    folder_owner.check(base, owner)
    if target.exists():  # into ours: both renames fail once the next owner has put our folder aside
        target.rename(aside / _REPLACED)
    aside.rename(target)
    _sync(base)
    shutil.rmtree(target / _REPLACED, ignore_errors=True)
    return Checkpoint(target, full)


def verify(path: str | Path) -> Checkpoint | Damage:
    """Read a checkpoint and check every byte of it against its record."""
    folder = Path(path)
    record = read(folder)
    if isinstance(record, Damage):
        return record
    for file in record.files:
        place = folder / file.path
        if not place.is_file():
            return Damage(folder, f"{file.path} is missing")
        if place.stat().st_size != file.size_bytes:
            return Damage(folder, f"{file.path} has {place.stat().st_size} bytes, recorded {file.size_bytes}")
        if _digest(place) != file.digest:
            return Damage(folder, f"{file.path} does not match its digest")
    return Checkpoint(folder, record)


def read(folder: Path) -> Commit | Damage:
    """A checkpoint's record alone, checked against its own digest; the files that it names are not looked at."""
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
    if folder.name != name_of(record.step, record.incarnation):
        return Damage(folder, f"it records step {record.step} of incarnation {record.incarnation}, but its name says otherwise")
    return record


def latest(root: str | Path, refuse: Callable[[Commit], str] = lambda record: "") -> Latest:
    """The newest intact checkpoint under `root` that `refuse` has nothing against (it gives the reason, or an empty text).

    Every newer one is named with the reason why it was passed over, never silently skipped.
    """
    passed_over: list[Damage] = []
    for folder in reversed(_folders(Path(root))):
        record = read(folder)
        reason = "" if isinstance(record, Damage) else refuse(record)
        found = Damage(folder, reason) if reason else verify(folder)
        if isinstance(found, Checkpoint):
            return Latest(found, tuple(passed_over))
        passed_over.append(found)
    return Latest(None, tuple(passed_over))


def prune(root: str | Path, keep: int, *, owner: int = 0) -> tuple[Path, ...]:
    """Remove all but the newest `keep` checkpoints; returns what was removed, oldest first.

    When none of those is intact, the newest intact one of the older ones stays as well, so that the last good checkpoint is
    never removed. A folder loses its record first, so that an interrupted removal cannot look like a checkpoint.
    Raises `CheckpointError` for `keep` below 1, and `FolderTaken`.
    """
    if keep < 1:
        raise CheckpointError(f"keep: {keep} must be at least 1")
    folders = _folders(Path(root))
    newest, old = folders[-keep:], folders[:-keep]
    if old and not any(isinstance(verify(folder), Checkpoint) for folder in reversed(newest)):
        last_good = next((folder for folder in reversed(old) if isinstance(verify(folder), Checkpoint)), None)
        old = [folder for folder in old if folder != last_good]
    folder_owner.check(Path(root), owner)
    for folder in old:
        (folder / _COMMIT).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return tuple(old)


def name_of(step: int, incarnation: int = 0) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:08d}-{incarnation}" if incarnation else f"step-{step:08d}"


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders by incarnation and step, oldest first."""
    if not root.is_dir():
        return []
    named = [(path, match) for path in root.iterdir() if path.is_dir() and (match := _NAME.fullmatch(path.name))]
    return [path for path, match in sorted(named, key=lambda item: (int(item[1][2] or 0), int(item[1][1])))]


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
