"""Answers to this process's requests: matched by id, late and repeated ones counted and ignored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from schemas.message import Message
from services.bus import Bus
from services.health import Health
from services.items import Item
from services.work import WorkConsumer

R = TypeVar("R", bound=Message)
_CAPACITY = 256
_INACTIVE_S = 900.0  # a requester's name never comes back, so the server may forget its consumer


class NoAnswer(Exception):
    """The deadline passed without an answer."""


class RequestLost(Exception):
    """The party that had the request is gone."""


class Replies(Generic[R]):
    """One requester's inbox on a work queue.

    Consumes: its own result subject. Every `ask` waits until its deadline. On stop: what still waits is the caller's to end.
    """

    def __init__(self, bus: Bus, template: str, requester: str, kind: type[R], key: Callable[[R], str], health: Health) -> None:
        self._consumer = WorkConsumer(bus, template, x=requester, capacity=_CAPACITY, drain_s=2.0, inactive_s=_INACTIVE_S)
        self._kind = kind
        self._key = key
        self._health = health
        self._waiting: dict[str, asyncio.Future[R]] = {}

    async def run(self, stop: asyncio.Event) -> None:
        await self._consumer.run(self._on_item, stop)

    async def ask(self, key: str, send: Callable[[], Awaitable[object]], timeout_s: float) -> R:
        """Send a request and wait for the answer under `key`. Raises `NoAnswer` at the deadline, `RequestLost` from `lose`."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            await send()
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise NoAnswer(f"no answer within {timeout_s:.0f} s") from None
        finally:
            del self._waiting[key]

    def lose(self, key: str, reason: str) -> None:
        """End one wait with `RequestLost`; an unknown key is ignored."""
        future = self._waiting.get(key)
        if future is not None and not future.done():
            future.set_exception(RequestLost(reason))

    async def _on_item(self, item: Item) -> None:
        answer = item.decode(self._kind)
        future = self._waiting.get(self._key(answer))
        if future is None or future.done():
            self._health.count("late_answers")
            return
        future.set_result(answer)
