"""The server's JetStream API: single calls, exact reads of one message, and what it says of a stream."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import nats.errors
from nats.aio.client import Client

from schemas.table import Stream, Subjects
from services.items import BusError, IntegrityError, Item, StreamState, headers_of, item_of, nanoseconds, unpacked

BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_NO_MESSAGE = 10037
_TRIES = 12
_UNAVAILABLE = 503


class ServerApi:
    """Calls over one connection, about one run's streams."""

    def __init__(self, client: Client, run: str) -> None:
        self.client = client
        self.run = run
        self.subjects = Subjects(run)
        self.give_up_s = 900.0  # after which a publish, and sooner a call, is given up; a draining service lowers it

    async def request(self, api: str, body: dict[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
        """One JetStream API call, retried over reconnects. Raises `BusError` with the server's words."""
        reply: dict[str, Any] = await self.api(api, body, timeout_s)
        if "error" in reply:
            raise BusError(f"{api}: {reply['error'].get('description')} ({reply['error'].get('err_code')})")
        return reply

    async def api(self, api: str, body: dict[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
        """One JetStream API call whose answer may be an error; retried over reconnects."""
        payload = json.dumps(body).encode() if body else b""
        begun_s = time.monotonic()
        for attempt in range(_TRIES):
            try:
                message = await self.client.request(f"$JS.API.{api}", payload, timeout=timeout_s)
                reply = dict(json.loads(message.data))
                if not _is_between_leaders(reply) or attempt == _TRIES - 1 or time.monotonic() - begun_s > self.give_up_s:
                    return reply
                await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])
            except (nats.errors.TimeoutError, nats.errors.NoRespondersError, nats.errors.OutboundBufferLimitError) as error:
                if attempt == _TRIES - 1 or time.monotonic() - begun_s > self.give_up_s:
                    raise BusError(f"{api}: no answer from the server ({error!r})") from error
                await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])
        raise BusError(f"{api}: no answer")

    async def last(self, subject: str, stream: Stream | None = None) -> Item | None:
        """The newest message of a subject, read from the stream's leader; `None` when there is none."""
        return await self._get(stream or self.stream_of(subject), {"last_by_subj": subject})

    async def get(self, stream: Stream, seq: int) -> Item:
        """The message at a sequence. Raises `IntegrityError` if it is gone or its bytes do not match its digest."""
        item = await self._get(stream, {"seq": seq})
        if item is None:
            raise IntegrityError(f"{self.subjects.stream(stream)}: sequence {seq} is missing from the store")
        return item

    async def _get(self, stream: Stream, body: dict[str, Any]) -> Item | None:
        raw = await self._raw(stream, body)
        if raw is None:
            return None
        name = self.subjects.stream(stream)
        headers, data = headers_of(unpacked(raw.get("hdrs"))), unpacked(raw.get("data"))
        return item_of(name, raw["subject"], int(raw["seq"]), nanoseconds(raw["time"]), data, headers)

    async def _raw(self, stream: Stream, body: dict[str, Any]) -> dict[str, Any] | None:
        name = self.subjects.stream(stream)
        reply = await self.api(f"STREAM.MSG.GET.{name}", body, 5.0)
        if "error" in reply:
            if reply["error"].get("err_code") == _NO_MESSAGE or reply["error"].get("code") == 404:
                return None
            raise BusError(f"{name}: {reply['error'].get('description')}")
        return dict(reply["message"])

    async def stored_ns(self, stream: Stream, which: dict[str, Any]) -> int | None:
        """The server's time of a message, asked for by `seq` and perhaps `next_by_subj`; `None` when there is none."""
        raw = await self._raw(stream, which)
        return None if raw is None else nanoseconds(raw["time"])

    async def last_sequence(self, stream: Stream) -> int:
        """The stream's last sequence."""
        reply = await self.request(f"STREAM.INFO.{self.subjects.stream(stream)}", {})
        return int(reply["state"]["last_seq"])

    async def stream_state(self, stream: Stream) -> StreamState:
        """What the server says of the stream, the sequences that it lost included."""
        reply = await self.request(f"STREAM.INFO.{self.subjects.stream(stream)}", {"deleted_details": True})
        state = reply["state"]
        return StreamState(
            created=reply["created"],
            messages=int(state["messages"]),
            first_seq=int(state["first_seq"]),
            last_seq=int(state["last_seq"]),
            deleted=tuple(sorted(state.get("deleted") or ())),
            max_bytes=int(reply["config"].get("max_bytes", -1)),
        )

    def stream_of(self, subject: str) -> Stream:
        """The stream that a subject of this run belongs to, by its first words."""
        head = subject.removeprefix(self.subjects.prefix).split(".", 1)[0]
        return _STREAM_BY_HEAD[head]


def _is_between_leaders(reply: dict[str, Any]) -> bool:
    """Whether a cluster says that it has no leader for this just now, as during an election; it has one in a moment."""
    return bool(reply.get("error", {}).get("code") == _UNAVAILABLE)


_STREAM_BY_HEAD = {
    "task": Stream.TASKS,
    "gen": Stream.GEN,
    "sbx": Stream.SBX,
    "turn": Stream.TURNS,
    "episode": Stream.EPISODES,
    "verdict": Stream.EPISODES,
    "ready": Stream.READY,
    "graded": Stream.READY,
    "ledger": Stream.LEDGER,
    "train": Stream.TRAIN,
    "policy": Stream.POLICY,
    "reg": Stream.REGISTRY,
    "dead": Stream.DEAD,
}
