"""Stored states of one host, by id, each bound to its manifest. Blocking; safe for several threads."""

from __future__ import annotations

import hashlib
import os
import re
import threading

import msgspec

from services.sandbox.command import SandboxError
from services.sandbox.journal import sync_folder
from services.sandbox.state import PackedState, SnapshotManifest, snapshot_manifest

_ID = re.compile(r"snap-[0-9a-f]{40}")


class SnapshotUnknown(SandboxError):
    """No such snapshot here: it was made on another host, dropped, or damaged on disk."""

    code = "snapshot_unknown"


class SnapshotsFull(SandboxError):
    """The store is at its bound; drop snapshots that are no longer needed."""

    code = "snapshots_full"
    retry = True


class Snapshots:
    """A folder of `<id>.tar` and `<id>.json`; the manifest is written last, so a snapshot is there whole or not at all."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._writing = threading.Lock()

    def put(self, packed: PackedState, *, parent: str, environment: str) -> SnapshotManifest:
        """Store a state; storing the same one again is harmless. Raises `SnapshotsFull`, or `SandboxError` for a refused
        state.
        """
        if packed.refused:
            raise SandboxError(f"snapshot: the state cannot be carried ({packed.refused})")
        manifest = snapshot_manifest(packed, parent=parent, environment=environment)
        with self._writing:
            if os.path.exists(self._path(manifest.snapshot_id, "json")):
                return manifest
            used = sum(item.stat().st_size for item in os.scandir(self._folder))
            if used + len(packed.tar) > self._max_bytes:
                raise SnapshotsFull(
                    f"snapshots: {used} of {self._max_bytes} bytes are in use, {len(packed.tar)} more are wanted"
                )
            self._write(manifest.snapshot_id, "tar", packed.tar)
            self._write(manifest.snapshot_id, "json", msgspec.json.encode(manifest))
        return manifest

    def get(self, snapshot_id: str) -> tuple[SnapshotManifest, bytes]:
        """Manifest and archive. Raises `SnapshotUnknown`, also if the archive no longer has its digest."""
        if not is_snapshot_id(snapshot_id):
            raise SnapshotUnknown(f"snapshot {snapshot_id!r}: not an id of the form snap-<40 hex digits>")
        try:
            with open(self._path(snapshot_id, "json"), "rb") as file:
                manifest = msgspec.json.decode(file.read(), type=SnapshotManifest)
            with open(self._path(snapshot_id, "tar"), "rb") as file:
                archive = file.read(manifest.size_bytes + 1)
        except FileNotFoundError as error:
            raise SnapshotUnknown(f"snapshot {snapshot_id}: not on this host") from error
        if hashlib.sha256(archive).hexdigest() != manifest.tar_digest:
            raise SnapshotUnknown(f"snapshot {snapshot_id}: its archive is damaged")
        return manifest, archive

    def drop(self, snapshot_id: str) -> None:
        """Idempotent."""
        if is_snapshot_id(snapshot_id):
            for kind in ("json", "tar"):
                if os.path.exists(path := self._path(snapshot_id, kind)):
                    os.remove(path)

    def _path(self, snapshot_id: str, kind: str) -> str:
        return os.path.join(self._folder, f"{snapshot_id}.{kind}")

    def _write(self, snapshot_id: str, kind: str, data: bytes) -> None:
        path = self._path(snapshot_id, kind)
        with open(path + ".new", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".new", path)
        sync_folder(self._folder)


def is_snapshot_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None
