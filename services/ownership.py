"""Fencing of services that own a log: one owner at a time, and a second that waits for it by name.

The owner keeps a record on `reg.service.<role>.owner` and renews it by compare-and-set. A second watches it, and takes over
when it is released, when its process is provably gone from this machine, or when no renewal came for the time to live, by the
second's own monotonic clock. An owner that could not renew for two thirds of that does nothing (`confirm`) until a renewal
succeeds, which also proves that nobody took over in between; one that gets no answer for `fencing.cut_off_s` ends. The record
alone cannot stop a process that was suspended between the check and its effect, so every effect is guarded by a once-only write
as well.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec
import nats.errors
import structlog
from nats.js.errors import APIError, NoStreamResponseError

from schemas.codec import CodecError, digest, encode
from schemas.ownership import OWNER, Owner
from schemas.table import Role
from services.health import pause
from services.items import DIGEST_HEADER, BusError, Fenced
from services.process_name import has_ended, process_name
from services.runtime import ServiceContext
from services.standing_wait import StandingWait

log = structlog.get_logger()
_LOOK_EVERY_S = 0.25
_ANSWER_S = 1.0
_NAMED_WAIT_S = 600.0
_WRONG_LAST_SEQUENCE = (10071, 10164)
_EXIT_FENCED = 1


class _Taken(Exception):
    """The record is not the one that we expected to replace."""


class _Unanswered(Exception):
    """The server did not confirm a write; it may have stored it."""


@dataclass(frozen=True, slots=True)
class _Held:
    seq: int
    owner: Owner


class Ownership:
    """One process's claim to its role. `epoch` is 0 while it stands by."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._bus = context.bus
        self._settings = context.config.fencing
        self._ttl_s = self._settings.trainer_ttl_s if context.role is Role.TRAINER else self._settings.ttl_s
        self._subject = context.bus.subjects.service_heartbeat(context.role, OWNER)
        self._token = uuid.uuid4().hex
        self._record: Owner | None = None
        self._seq = 0
        self._lost = "it is not the owner"
        self._confirmed_s = 0.0  # monotonic, when the last renewal that succeeded was begun
        self._renewing = asyncio.Lock()
        self._gained = asyncio.Event()

    @property
    def epoch(self) -> int:
        return self._record.epoch if self._record is not None else 0

    @property
    def held(self) -> bool:
        """Whether this process has become the owner; before an effect, ask `confirm`."""
        return self._record is not None

    @property
    def certain(self) -> bool:
        """Whether `confirm` would return at once."""
        return self.held and time.monotonic() - self._confirmed_s <= self._ttl_s * 2 / 3

    async def hold(self, ended: asyncio.Event) -> None:
        """Stand by, own, and release, until `ended`. Raises `Fenced` when another owner is there, `BusError` when cut off."""
        if not await self._acquire(ended):
            return
        self._gained.set()
        try:
            while not await pause(ended, self._settings.renew_s):
                await self._renew()
        finally:
            await self._release()

    async def gained(self, stop: asyncio.Event) -> bool:
        """Wait to become the owner; false when `stop` comes first."""
        while not self._gained.is_set() and not stop.is_set():
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._gained.wait(), _LOOK_EVERY_S)
        return self._gained.is_set()

    async def confirm(self) -> None:
        """Return while this process is the owner for certain; after another where the last is old. Raises as `hold`."""
        if self._record is None:
            raise Fenced(f"{self._context.role} {self._context.instance}: {self._lost}")
        if not self.certain:
            await self._renew()

    # -- becoming the owner --------------------------------------------------------------------------------------------------

    async def _acquire(self, ended: asyncio.Event) -> bool:
        waiting = StandingWait(self._context.health, _NAMED_WAIT_S)
        silence = _Silence(self._ttl_s)
        begun = time.monotonic()
        try:
            while not ended.is_set():
                try:
                    held = await self._read()
                except BusError as error:
                    log.warning("cannot see who owns the role", reason=str(error))
                    await pause(ended, self._settings.renew_s)
                    continue
                why = _vacant(held) or silence.over(held.seq if held is not None else 0, time.monotonic())
                if why and await self._claim(held, why):
                    return True
                if not why and held is not None:
                    waiting.on(
                        f"the ownership of {held.owner.role}", _described(held.owner), "waits on; takes over a silent one"
                    )
                    self._stand_by(begun, held.owner)
                await pause(ended, _LOOK_EVERY_S)
            return False
        finally:
            waiting.over()
            self._context.health.set("standby", 0)

    def _stand_by(self, begun: float, owner: Owner) -> None:
        """Say ready once this is a second and no restart: whoever replaces the owner may then end it."""
        health = self._context.health
        if not health.counters.get("standby"):
            log.info("another one owns the role", owner=_described(owner), epoch=owner.epoch)
            health.set("standby", 1)
        if health.phase == "starting" and time.monotonic() - begun > self._ttl_s:
            health.enter("ready")

    async def _claim(self, held: _Held | None, why: str) -> bool:
        record = Owner(
            run=self._bus.run,
            role=str(self._context.role),
            instance=self._context.instance,
            host=socket.gethostname(),
            pid=os.getpid(),
            process=process_name(os.getpid()),
            token=self._token,
            epoch=held.owner.epoch + 1 if held is not None else 1,
            renewals=0,
            since_ns=time.time_ns(),
        )
        asked = time.monotonic()
        try:
            seq = await self._write(record, held.seq if held is not None else 0)
        except (_Taken, _Unanswered) as error:
            log.info("not the owner yet", reason=str(error))
            return False
        self._record, self._seq, self._confirmed_s = record, seq, asked
        log.info("owner", role=record.role, epoch=record.epoch, before=_described(held.owner) if held else "nobody", why=why)
        return True

    # -- staying the owner ---------------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        async with self._renewing:
            silent_since = time.monotonic()
            while self._record is not None:
                asked = time.monotonic()
                record = msgspec.structs.replace(self._record, renewals=self._record.renewals + 1)
                try:
                    self._seq = await self._write(record, self._seq)
                except _Unanswered as error:
                    if time.monotonic() - silent_since > self._settings.cut_off_s:
                        reason = f"no renewal for {self._settings.cut_off_s:g} s ({error}); another one may own the role by now"
                        self._lost = reason  # also for those that wait for this renewal
                        raise BusError(f"{self._context.role} {self._context.instance}: {reason}") from error
                    await asyncio.sleep(_LOOK_EVERY_S)
                    continue
                except _Taken as error:
                    self._record, self._lost = None, str(error)
                    break
                self._record, self._confirmed_s = record, asked
                return
            raise Fenced(f"{self._context.role} {self._context.instance}: {self._lost}")

    async def _release(self) -> None:
        if self._record is None or self._bus.client.is_closed:
            return
        record, self._record = msgspec.structs.replace(self._record, released=True), None
        try:
            await self._write(record, self._seq)
        except (_Taken, _Unanswered) as error:
            log.info("ownership not released in order", reason=str(error))

    # -- the record ----------------------------------------------------------------------------------------------------------

    async def _read(self) -> _Held | None:
        item = await self._bus.last(self._subject)
        if item is None:
            return None
        try:
            return _Held(item.seq, item.decode(Owner))
        except CodecError as error:
            raise BusError(f"{self._subject} holds something that is no ownership record: {error}") from error

    async def _write(self, record: Owner, last: int) -> int:
        """Replace the record at sequence `last` (0: none) and give the new sequence. One attempt."""
        data = encode(record)
        headers = {"Nats-Expected-Last-Subject-Sequence": str(last), DIGEST_HEADER: digest(data)}
        try:
            ack = await self._bus.jetstream.publish(self._subject, data, timeout=_ANSWER_S, headers=headers)
            return ack.seq
        except APIError as error:
            if error.err_code not in _WRONG_LAST_SEQUENCE:
                raise _Unanswered(str(error.description)) from error
        except (nats.errors.Error, NoStreamResponseError, OSError) as error:
            raise _Unanswered(repr(error)) from error
        try:
            held = await self._read()
        except BusError as error:
            raise _Unanswered(str(error)) from error
        if held is None or held.owner.token != self._token:
            raise _Taken(f"the owner is {_described(held.owner)}" if held is not None else "the record is gone")
        return await self._write(record, held.seq)  # an earlier attempt of ours was stored though its answer was lost


class _Silence:
    """Says when one sequence has stood still for long enough, seen without a gap by this process's own clock."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._seq = -1
        self._since = self._looked = 0.0

    def over(self, seq: int, now: float) -> str:
        """Why the owner counts as gone, or empty. After a late look it starts anew: the server or we may have stood still."""
        if seq != self._seq or now - self._looked > self._ttl_s / 2:
            self._seq, self._since = seq, now
        self._looked = now
        return f"silent for {self._ttl_s:g} s" if now - self._since >= self._ttl_s else ""


@asynccontextmanager
async def owned(context: ServiceContext, *, end_at_once: bool = False) -> AsyncIterator[Ownership | None]:
    """The body runs as owner of its role; it gets `None` when the service was stopped while it stood by.

    Losing the role raises `Fenced` or `BusError` out of the body. With `end_at_once` it ends the process where it stands, for
    work that cannot be interrupted; the supervisor starts it again as a second.
    """
    ownership = Ownership(context)
    ended = asyncio.Event()

    async def hold() -> None:
        try:
            await ownership.hold(ended)
        except BusError as error:
            if end_at_once:
                log.error("ownership lost", error=str(error))
                os._exit(_EXIT_FENCED)
            context.stop.set()  # a cancellation alone can be lost in the bus's client
            raise

    async with asyncio.TaskGroup() as group:
        group.create_task(hold(), name="ownership")
        try:
            yield ownership if await ownership.gained(context.stop) else None
        finally:
            ended.set()


def _vacant(held: _Held | None) -> str:
    """Why nobody owns the role, as far as the record or this machine's process table can prove it."""
    if held is None:
        return "there was none"
    if held.owner.released:
        return "it was released"
    return "its process has ended" if has_ended(held.owner.pid, held.owner.process) else ""


def _described(owner: Owner) -> str:
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(owner.since_ns / 1e9))
    return f"{owner.role} {owner.instance} on {owner.host}, process {owner.pid}, owner since {since}"
