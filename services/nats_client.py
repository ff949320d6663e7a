"""The NATS client, made to say at once which request the server refuses, and which stream has no room.

The server answers a publish that it does not permit with an error on the connection, not to the request, which would then run
into its time-out; the error spells the subject in lower case.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

_NO_ROOM = (10077, 10047, 10023)  # error codes: the stream, the account or the server has no room
_FORGET_AFTER_S = 15.0  # a publisher that still holds tries again sooner
_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.IGNORECASE)


@dataclass(frozen=True)
class NoRoom:
    """A publish that the server has no room for: since when, and when it was last tried; nanoseconds since the epoch."""

    since_ns: int
    tried_ns: int


class RefusalClient(Client):
    """A client whose requests end with the error that `refuse` gives, where the server refused their subject."""

    def __init__(self) -> None:
        super().__init__()
        self._without_room: dict[str, NoRoom] = {}
        self._requests: defaultdict[str, dict[asyncio.Future[Msg], str]] = defaultdict(dict)

    async def publish(self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, Any] | None = None) -> None:
        """Publish; a request of this client, known by its reply subject, is kept in mind until it is answered."""
        answer = self._resp_map.get(reply.rpartition(".")[2]) if reply else None
        if answer is not None:
            key = subject.lower()
            self._requests[key][answer] = subject
            answer.add_done_callback(lambda done: self._forget(key, done))
        await super().publish(subject, payload, reply, headers)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """A request; a publish that its stream has no room for is kept in mind until it is taken or no longer tried."""
        answer = await super().request(subject, payload, timeout, old_style, headers)
        if not subject.startswith("$JS."):
            if no_room(answer.data):
                now = time.time_ns()
                known = self._without_room.get(subject)
                self._without_room[subject] = NoRoom(known.since_ns if known else now, now)
            else:
                self._without_room.pop(subject, None)
        return answer

    def without_room(self) -> dict[str, NoRoom]:
        """Subjects whose publishers hold now, because their streams are full."""
        oldest = time.time_ns() - int(_FORGET_AFTER_S * 1e9)
        self._without_room = {subject: held for subject, held in self._without_room.items() if held.tried_ns > oldest}
        return self._without_room

    @property
    def is_encrypted(self) -> bool:
        """Whether the server that we are connected to asked for TLS; the client takes part without a word when it does not."""
        return bool(self._server_info.get("tls_required"))

    def spelled(self, refused: str) -> str:
        """The subject as it was spelled, where a request on it waits; otherwise as the server spells it."""
        return next(iter(self._requests.get(refused, {}).values()), refused)

    def refuse(self, refused: str, error: Exception) -> None:
        """End every request that waits on this subject (in lower case) with `error`."""
        for answer in list(self._requests.get(refused, {})):
            if not answer.done():
                answer.set_exception(error)

    def _forget(self, key: str, answer: asyncio.Future[Msg]) -> None:
        waiting = self._requests[key]
        waiting.pop(answer, None)
        if not waiting:
            del self._requests[key]


@dataclass(frozen=True)
class Refusal:
    """What the server did not permit: a publish or a subscription, and its subject in lower case."""

    deed: str
    subject: str


def no_room(answer: bytes) -> bool:
    """Whether the answer to a publish says that there is no room for it."""
    if b'"error"' not in answer:
        return False
    error = json.loads(answer).get("error")
    return isinstance(error, dict) and error.get("err_code") in _NO_ROOM


def refusal_of(error: Exception) -> Refusal | None:
    """The refusal that an error on the connection tells of; `None` for any other error."""
    found = _VIOLATION.search(str(error))
    return Refusal(found[1].lower(), found[2]) if found else None


def closed_door_of(error: Exception, identity: str, *, has_key: bool, has_ca: bool) -> str:
    """Why the server lets nobody in with what we have, and what to set; empty for an error that may pass."""
    if isinstance(error, ssl.SSLCertVerificationError):
        fix = "nats.tls_ca_file is not the CA of this server" if has_ca else "set nats.tls_ca_file to the CA of this server"
        return f"its certificate is not trusted ({error.verify_message}); {fix}"
    if "authorization violation" not in str(error).lower():
        return ""
    if not has_key:
        return (
            f"the server asks for a key and {identity} has none; set nats.nkey_seed_file, or nats.nkey_folder (`headrace init`)"
        )
    return f"the server does not know the key of {identity}; its configuration and the keys come from one `headrace init`"
