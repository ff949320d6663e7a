"""A workspace's state as data: what it is, its hash, and its way into and out of a deterministic archive.

A state is the set of names below a folder with their types, modes (executable or not) and contents. Owners, times, hard links
and extended attributes are no part of it. Nothing here follows a symbolic link, opens a fifo or trusts a size that it was told.
Directories are read when no process of the sandbox lives, so what is read stands still; if it does not, that is an error.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

import msgspec

from services.sandbox import tar
from services.sandbox.tar import DEFAULT_LIMITS, Entry, Kind, StateLimits, StateRefused

REFUSED = "refused:"  # prefix of the `state_hash` of a workspace that has none; the rest says why
_CHUNK_BYTES = 1 << 20
_HASH_VERSION = b"headrace-state-1\n"
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class PackedState(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed state. `refused` is empty, or says why the state cannot be carried; then the archive is empty too."""

    state_hash: str
    tar: bytes
    tar_digest: str  # SHA-256 of `tar`
    entries: int = 0
    content_bytes: int = 0
    special: tuple[str, ...] = ()  # fifos, sockets and devices: recorded in hash and archive
    refused: str = ""


class Entropy(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay from a snapshot does not control, so that nobody takes a file snapshot for a whole one."""

    clock: str = "host"
    random: str = "kernel"
    python_hash_seed: int = 0
    processes: str = "none"  # every command's processes end with it, so there are none to snapshot


class SnapshotManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Names one stored state for ever: the id is derived from all other fields."""

    snapshot_id: str
    parent: str = ""
    environment: str = ""  # version of the environment that the state belongs to
    state_hash: str
    tar_digest: str
    size_bytes: int
    entropy: Entropy = Entropy()


def snapshot_manifest(state: PackedState, *, parent: str = "", environment: str = "") -> SnapshotManifest:
    """The manifest of a packed state; equal states with equal parents get equal ids."""
    draft = SnapshotManifest(
        snapshot_id="",
        parent=parent,
        environment=environment,
        state_hash=state.state_hash,
        tar_digest=state.tar_digest,
        size_bytes=len(state.tar),
    )
    digest = hashlib.sha256(msgspec.json.encode(draft)).hexdigest()
    return msgspec.structs.replace(draft, snapshot_id=f"snap-{digest[:40]}")


def hash_files(files: Mapping[str, bytes], limits: StateLimits = DEFAULT_LIMITS) -> str:
    """The state hash of a task's initial files, without touching a disk. Raises `StateRefused`."""
    entries = entries_of(files, limits)
    digest = hashlib.sha256(_HASH_VERSION)
    for entry, content in entries:
        digest.update(_record(entry))
        digest.update(content)
    return digest.hexdigest()


def entries_of(files: Mapping[str, bytes], limits: StateLimits = DEFAULT_LIMITS) -> list[tuple[Entry, bytes]]:
    """Files and the folders that they imply, in order. Raises `StateRefused` naming the path that is not admissible."""
    named = {os.fsencode(path): content for path, content in files.items()}
    folders: set[bytes] = set()
    for path in named:
        check_path(path, limits)
        parent = path.rpartition(b"/")[0]
        while parent and parent not in folders:
            folders.add(parent)
            parent = parent.rpartition(b"/")[0]
    if clash := folders & named.keys():
        raise StateRefused("path", f"files: {sorted(clash)[0]!r} is named as a file and as a folder")
    entries = [(Entry(path=path, kind=Kind.FOLDER), b"") for path in folders]
    entries += [(Entry(path=path, kind=Kind.FILE, size=len(content)), content) for path, content in named.items()]
    _check_caps((entry for entry, _ in entries), limits)
    return sorted(entries, key=lambda pair: pair[0].path)


def scan(folder: str, limits: StateLimits = DEFAULT_LIMITS) -> list[Entry]:
    """Every name below `folder`, in order. Raises `StateRefused` as soon as a limit is passed."""
    found: list[Entry] = []
    total = 0
    pending = [b""]
    while pending:
        inside = pending.pop()
        with _listing(folder, inside) as items:
            for item in items:
                entry = _entry(inside + b"/" + item.name if inside else item.name, item)
                check_path(entry.path, limits)
                total += entry.size
                if len(found) >= limits.max_entries or entry.size > limits.max_file_bytes or total > limits.max_total_bytes:
                    raise StateRefused("over_cap", f"state: {len(found) + 1} entries of {total} bytes so far break {limits}")
                if len(entry.target) > limits.max_path_bytes:
                    raise StateRefused("over_cap", f"state: the target of link {entry.path!r} is too long")
                found.append(entry)
                if entry.kind is Kind.FOLDER:
                    pending.append(entry.path)
    found.sort(key=lambda entry: entry.path)
    return found


def hash_folder(folder: str, limits: StateLimits = DEFAULT_LIMITS) -> str:
    """The state hash of a folder; equal for equal states. Streams, so its memory does not grow with the files."""
    digest = hashlib.sha256(_HASH_VERSION)
    for entry in scan(folder, limits):
        digest.update(_record(entry))
        if entry.kind is Kind.FILE:
            _content(folder, entry, digest.update)
    return digest.hexdigest()


def hash_or_refusal(folder: str, limits: StateLimits = DEFAULT_LIMITS) -> str:
    """The state hash, or `refused:<code>: why`, for a workspace that an agent may have made too large to carry."""
    try:
        return hash_folder(folder, limits)
    except StateRefused as refusal:
        return f"{REFUSED}{refusal.code}: {refusal}"


def pack(folder: str, limits: StateLimits = DEFAULT_LIMITS) -> PackedState:
    """Seal a folder. Raises `StateRefused` if it does not fit the limits."""
    digest = hashlib.sha256(_HASH_VERSION)
    contents: list[tuple[Entry, bytes]] = []
    for entry in scan(folder, limits):
        digest.update(_record(entry))
        parts: list[bytes] = []
        if entry.kind is Kind.FILE:
            _content(folder, entry, parts.append)
        content = b"".join(parts)
        digest.update(content)
        contents.append((entry, content))
    archive = tar.write(contents)
    return PackedState(
        state_hash=digest.hexdigest(),
        tar=archive,
        tar_digest=hashlib.sha256(archive).hexdigest(),
        entries=len(contents),
        content_bytes=sum(entry.size for entry, _ in contents),
        special=tuple(os.fsdecode(entry.path) for entry, _ in contents if entry.kind is Kind.SPECIAL),
    )


def pack_or_refusal(folder: str, limits: StateLimits = DEFAULT_LIMITS) -> PackedState:
    """Seal a folder, or say in the sealed state why it cannot be carried, so that the episode has an ending either way."""
    try:
        return pack(folder, limits)
    except StateRefused as refusal:
        empty = tar.write(())
        reason = f"{refusal.code}: {refusal}"
        return PackedState(state_hash=REFUSED + reason, tar=empty, tar_digest=hashlib.sha256(empty).hexdigest(), refused=reason)


def unpack(archive: bytes, folder: str, limits: StateLimits = DEFAULT_LIMITS, *, uid: int = -1, gid: int = -1) -> str:
    """Write an archive's state into an empty folder that nobody else writes; returns its state hash.

    Raises `StateRefused`, perhaps after a part was written. Every parent is a folder that this very archive made, so no link
    can lead a later entry elsewhere; special files are refused.
    """
    digest = hashlib.sha256(_HASH_VERSION)
    for entry, content in tar.read(archive, limits):
        place(folder, entry, content, uid=uid, gid=gid)
        digest.update(_record(entry))
        digest.update(content)
    return digest.hexdigest()


def archive_hash(archive: bytes, limits: StateLimits = DEFAULT_LIMITS) -> tuple[str, list[Entry]]:
    """State hash and entries of an archive, without writing anything. Raises `StateRefused`."""
    digest = hashlib.sha256(_HASH_VERSION)
    entries: list[Entry] = []
    for entry, content in tar.read(archive, limits):
        digest.update(_record(entry))
        digest.update(content)
        entries.append(entry)
    return digest.hexdigest(), entries


def place(folder: str, entry: Entry, content: bytes | memoryview, *, uid: int = -1, gid: int = -1) -> None:
    """Create one entry whose parents were created by the same caller. Raises `StateRefused` for a special file."""
    path = os.path.join(os.fsencode(folder), entry.path)
    if entry.kind is Kind.FOLDER:
        os.mkdir(path, 0o755)
        os.chmod(path, 0o755)
    elif entry.kind is Kind.LINK:
        os.symlink(entry.target, path)
    elif entry.kind is Kind.FILE:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(handle, left) :]
            os.fchmod(handle, 0o755 if entry.executable else 0o644)
        finally:
            os.close(handle)
    else:
        raise StateRefused("special", f"state: {entry.path!r} is a fifo, socket or device and is not recreated")
    if uid >= 0:
        os.chown(path, uid, gid, follow_symlinks=False)


def check_path(path: bytes, limits: StateLimits) -> None:
    """Raises `StateRefused` unless the path is relative, plain and within the limits."""
    tar.check_path(path, limits)


def _check_caps(entries: Iterable[Entry], limits: StateLimits) -> None:
    count, total = 0, 0
    for entry in entries:
        count, total = count + 1, total + entry.size
        if count > limits.max_entries or entry.size > limits.max_file_bytes or total > limits.max_total_bytes:
            raise StateRefused("over_cap", f"files: {count} entries of {total} bytes break {limits}")


def _record(entry: Entry) -> bytes:
    """What of an entry goes into the hash before its content; every variable part carries its length."""
    mode = b"x" if entry.executable else b"-"
    head = b"%s %s %d %d %d\n" % (entry.kind.value.encode(), mode, len(entry.path), len(entry.target), entry.size)
    return head + entry.path + entry.target


def _listing(root: str, inside: bytes) -> AbstractContextManager[Iterator[os.DirEntry[bytes]]]:
    folder = os.path.join(os.fsencode(root), inside) if inside else os.fsencode(root)
    try:
        return os.scandir(folder)
    except PermissionError:
        os.chmod(folder, 0o700)  # its owner shut it; modes of folders are no part of a state
        return os.scandir(folder)
    except OSError as error:
        raise _unreadable(inside, error) from error


def _entry(path: bytes, item: os.DirEntry[bytes]) -> Entry:
    status = item.stat(follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        return Entry(path=path, kind=Kind.FOLDER)
    if stat.S_ISREG(status.st_mode):
        return Entry(path=path, kind=Kind.FILE, executable=bool(status.st_mode & 0o111), size=status.st_size)
    if stat.S_ISLNK(status.st_mode):
        return Entry(path=path, kind=Kind.LINK, target=os.readlink(item.path))
    return Entry(path=path, kind=Kind.SPECIAL)


def _content(folder: str, entry: Entry, sink: Callable[[bytes], object]) -> None:
    """Feed exactly `entry.size` bytes to `sink`. Raises `StateRefused` if the file is another than the one scanned."""
    path = os.path.join(os.fsencode(folder), entry.path)
    try:
        handle = _open(path)
    except OSError as error:
        raise _unreadable(entry.path, error) from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
            raise StateRefused("unreadable", f"state: {entry.path!r} changed while it was read")
        left = entry.size
        while left:
            chunk = os.read(handle, min(left, _CHUNK_BYTES))
            if not chunk:
                raise StateRefused("unreadable", f"state: {entry.path!r} became shorter while it was read")
            sink(chunk)
            left -= len(chunk)
    finally:
        os.close(handle)


def _open(path: bytes) -> int:
    try:
        return os.open(path, _FILE_FLAGS)
    except PermissionError:
        os.chmod(path, 0o600 | (0o100 if os.lstat(path).st_mode & 0o111 else 0))
        return os.open(path, _FILE_FLAGS)


def _unreadable(path: bytes, error: OSError) -> StateRefused:
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    return StateRefused("unreadable", f"state: {path[-80:]!r} cannot be read ({name})")
