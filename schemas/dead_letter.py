"""What could not be used: messages that a reader refused for good, and sequences that are gone from a log.

Producer: whichever service meets it first (`dead.<STREAM>.<seq>`, `dead.<STREAM>.lost-<first>-<last>`, once).
Consumers: `headrace dead-letters`, status, audit.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from schemas.message import Message


class DeadReason(StrEnum):
    """Why a message was refused for good."""

    UNREADABLE = "unreadable"  # its bytes are not the message that its subject promises
    DIGEST_MISMATCH = "digest_mismatch"  # its bytes are not those that its publisher sent
    REFUSED = "refused"  # it can be read, and its handler can never carry it out


class DeadLetter(Message, frozen=True, kw_only=True, tag="dead_letter"):
    """One refused message, kept before the original is terminated or passed over."""

    run: str
    stream: str  # as the table names it
    seq: int
    subject: str
    reason: DeadReason
    detail: str
    digest: str  # SHA-256 of the bytes as they were found
    declared_digest: str  # that its publisher sent; empty: none
    size_bytes: int
    body: bytes  # of `size_bytes`, unless it was cut
    headers: dict[str, str]
    stored_ns: int  # the server's time of the original
    refused_by: str
    consumer: str = ""  # durable consumer; empty: an ordered reader
    deliveries: int = 0
    refused_ns: int = 0

    def is_whole(self) -> bool:
        """Whether `body` is all of the original."""
        return len(self.body) == self.size_bytes


LossKind = Literal["deleted", "unreadable", "truncated", "recreated"]


class LostRange(Message, frozen=True, kw_only=True, tag="lost_range"):
    """Sequences of a log that keeps everything which are not there.

    `deleted`: the server lists them so. `unreadable`: it passes over them in silence. `truncated`: the log ends before them,
    though they had been read. `recreated`: the whole stream was made anew.
    """

    run: str
    stream: str
    first_seq: int
    last_seq: int
    how: LossKind
    noticed_by: str
    noticed_ns: int = 0
