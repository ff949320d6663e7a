"""What one sandbox has done, on disk before anybody is told: the reason why a repeated command never runs twice.

One append-only file per sandbox. A record is length, checksum and a msgpack document; a torn last record (the process died
while writing it) was never answered to anybody and is cut off. Results stay in the file; memory holds only where they lie.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib

import msgspec

from schemas.trajectory import StateRef
from services.sandbox.command import CommandResult, SandboxError

_HEAD = struct.Struct("<II")
_MAX_RECORD_BYTES = 16 * 2**20


class JournalError(SandboxError):
    """The journal on disk contradicts itself or the request; the text names the sandbox."""

    code = "command_conflict"


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """The sandbox exists with this state; `request` is the digest of what was asked for."""

    request: str
    state_hash: str


class Ran(msgspec.Struct, frozen=True, kw_only=True, tag="ran"):
    """A command has ended; `request` is the digest of its text."""

    request: str
    result: CommandResult


class Sealed(msgspec.Struct, frozen=True, kw_only=True, tag="sealed"):
    """The terminal state is out under this reference; there is no other one."""

    state: StateRef


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The sandbox is no more; nothing will run under its id again."""

    reason: str


Record = Opened | Ran | Sealed | Ended
_DECODER = msgspec.msgpack.Decoder(Record)


def digest_of(*parts: bytes) -> str:
    """A digest of a request; every part is length-prefixed, so parts cannot be shifted into one another."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()


class Journal:
    """One sandbox's file. Used by one thread at a time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.opened: Opened | None = None
        self.ended: Ended | None = None
        self.state_hash = ""  # as the last record left the sandbox
        self.last_command = ""  # id of the last one that ran
        self._commands: dict[str, tuple[str, int, int]] = {}  # command id -> request digest, offset, length
        self._sealed: tuple[int, int] | None = None  # offset, length
        self._end = 0

    @classmethod
    def load(cls, path: str) -> Journal:
        """Read what is there; a missing file is an empty journal. A torn tail is cut off."""
        journal = cls(path)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return journal
        while (record := journal._next(data)) is not None:
            length = _HEAD.unpack_from(data, journal._end)[0]
            journal._note(record, journal._end + _HEAD.size, length)
        if journal._end < len(data):
            os.truncate(path, journal._end)
        return journal

    @property
    def commands(self) -> int:
        return len(self._commands)

    def result_of(self, command_id: str, request: str) -> CommandResult | None:
        """The recorded result of a command. Raises `JournalError` if that id stands for another command."""
        found = self._commands.get(command_id)
        if found is None:
            return None
        if found[0] != request:
            raise JournalError(f"command id {command_id!r} was used for another command; ids are never used twice")
        record = self._read(found[1], found[2])
        if not isinstance(record, Ran):
            raise JournalError(f"{self.path}: the record at byte {found[1]} is no result")
        return record.result

    def sealed_state(self) -> StateRef | None:
        """The terminal state, if it is out."""
        if self._sealed is None:
            return None
        record = self._read(*self._sealed)
        if not isinstance(record, Sealed):
            raise JournalError(f"{self.path}: the record at byte {self._sealed[0]} is no terminal state")
        return record.state

    def append(self, record: Record) -> None:
        """Write and sync; when this returns the record survives a crash."""
        payload = msgspec.msgpack.encode(record)
        fresh = self._end == 0
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            left = memoryview(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)
            while left:
                left = left[os.write(handle, left) :]
            os.fdatasync(handle)
        except OSError:
            os.ftruncate(handle, self._end)  # half a record would hide all that come after it
            raise
        finally:
            os.close(handle)
        if fresh:
            sync_folder(os.path.dirname(self.path))
        self._note(record, self._end + _HEAD.size, len(payload))

    def _note(self, record: Record, start: int, length: int) -> None:
        if isinstance(record, Opened):
            self.opened, self.state_hash = record, record.state_hash
        elif isinstance(record, Ended):
            self.ended = record
        elif isinstance(record, Sealed):
            self._sealed = (start, length)
        else:
            self._commands[record.result.command_id] = (record.request, start, length)
            self.last_command, self.state_hash = record.result.command_id, record.result.state_hash_after
        self._end = start + length

    def _read(self, start: int, length: int) -> Record:
        with open(self.path, "rb") as file:
            file.seek(start)
            return _DECODER.decode(file.read(length))

    def _next(self, data: bytes) -> Record | None:
        if self._end + _HEAD.size > len(data):
            return None
        length, checksum = _HEAD.unpack_from(data, self._end)
        payload = data[self._end + _HEAD.size : self._end + _HEAD.size + length]
        if length > _MAX_RECORD_BYTES or len(payload) < length or zlib.crc32(payload) != checksum:
            return None
        return _DECODER.decode(payload)


def sync_folder(folder: str) -> None:
    """Make a new or renamed name in a folder survive a crash."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
