"""Dead letters: what cannot be used is kept on DEAD with the reason, before the original is terminated or passed over.

Writing one never fails its caller: where it cannot be stored, that is an alarm of its own, and the caller decides.
"""

from __future__ import annotations

import time

import structlog

from schemas.dead_letter import DeadLetter, DeadReason, LostRange
from schemas.table import Role, Stream
from services.bus import Bus
from services.continuity import Hole
from services.items import BusError, Item, OnceConflict
from services.pull import Damaged

log = structlog.get_logger()
BODY_BYTES = 7 * 2**20  # leaves room for the letter itself below the message limit
_SHARE_OF_STREAM = 16  # one letter takes at most this part of what DEAD may hold
_DETAIL_CHARS = 2000
_HEADERS = 32
_HEADER_CHARS = 512
_PATIENCE_S = 5.0


async def bury(
    bus: Bus,
    item: Item,
    reason: DeadReason,
    detail: str,
    *,
    declared: str | None = None,
    consumer: str = "",
    deliveries: int = 0,
) -> bool:
    """Keep a refused message, once. False where it could not be kept; that is said aloud."""
    stream = bus.stream_of(item.subject)
    limit = await _body_limit(bus)
    letter = DeadLetter(
        run=bus.run,
        stream=str(stream),
        seq=item.seq,
        subject=item.subject,
        reason=reason,
        detail=detail[:_DETAIL_CHARS],
        digest=item.digest,
        declared_digest=item.digest if declared is None else declared,
        size_bytes=len(item.data),
        body=item.data[:limit],
        headers={key[:_HEADER_CHARS]: value[:_HEADER_CHARS] for key, value in list(item.headers.items())[:_HEADERS]},
        stored_ns=item.time_ns,
        refused_by=f"{bus.role}-{bus.instance}",
        consumer=consumer,
        deliveries=deliveries,
        refused_ns=time.time_ns(),
    )
    return await _keep(bus, bus.subjects.dead_letter(stream, item.seq), letter)


async def pass_over(bus: Bus, found: Item | Damaged, error: Exception | None = None) -> None:
    """An ordered reader cannot use this item and goes on without it: alarm, and a dead letter."""
    item = found.item if isinstance(found, Damaged) else found
    reason = DeadReason.DIGEST_MISMATCH if isinstance(found, Damaged) else DeadReason.UNREADABLE
    detail = found.reason if isinstance(found, Damaged) else str(error)
    declared = found.declared if isinstance(found, Damaged) else None
    if bus.alarm("unreadable", subject=item.subject, seq=item.seq, reason=detail):
        await bury(bus, item, reason, detail, declared=declared)


async def report_loss(bus: Bus, hole: Hole) -> None:
    """A hole in a log: alarm, and a record of it."""
    if not bus.alarm("lost_sequences", stream=str(hole.stream), first=hole.first, last=hole.last, how=hole.how):
        return
    record = LostRange(
        run=bus.run,
        stream=str(hole.stream),
        first_seq=hole.first,
        last_seq=hole.last,
        how=hole.how,
        noticed_by=f"{bus.role}-{bus.instance}",
        noticed_ns=time.time_ns(),
    )
    await _keep(bus, bus.subjects.lost_range(hole.stream, hole.first, hole.last), record)


async def _keep(bus: Bus, subject: str, record: DeadLetter | LostRange) -> bool:
    if bus.role is Role.OBSERVER:
        return False  # it looks on, and may write nothing
    try:
        await bus.publish_once(subject, record, give_up_s=_PATIENCE_S)
    except OnceConflict:
        return True  # another reader has kept it, with its own name and time
    except BusError as error:
        bus.alarm("dead_letter_not_kept", subject=subject, reason=str(error))
        return False
    return True


async def _body_limit(bus: Bus) -> int:
    """Bytes of a body that one letter may hold."""
    try:
        room = (await bus.stream_state(Stream.DEAD)).max_bytes
    except BusError:
        return 0
    return BODY_BYTES if room < 0 else min(BODY_BYTES, room // _SHARE_OF_STREAM)
