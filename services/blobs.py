"""Immutable objects on JetStream, in the published object-store layout, with a pipelined writer and reader of our own.

A name is written once and holds one content for ever (its SHA-256 is checked on read). The meta message goes last, so a crash
leaves an invisible object and no half-readable one.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
from dataclasses import dataclass

import nats.errors
from nats.nuid import NUID

from schemas.training import ObjectRef
from services.bus import Bus
from services.items import BusError, IntegrityError

_CHUNK_BYTES = 512 * 1024
_WINDOW = 8
MAX_OBJECT_BYTES = 64 * 2**30


@dataclass(frozen=True)
class _Meta:
    nuid: str
    size: int
    chunks: int
    digest: str


async def put(bus: Bus, name: str, data: bytes) -> ObjectRef:
    """Store `data` under an immutable name. Storing the same content again is harmless; raises `IntegrityError` for another."""
    sha = await asyncio.to_thread(hashlib.sha256, data)
    reference = ObjectRef(name=name, digest=sha.hexdigest(), size_bytes=len(data))
    held = await _meta(bus, name)
    if held is not None:
        if held.digest != _adr_digest(sha.digest()):
            raise IntegrityError(f"object {name} already holds other bytes")
        return reference
    bucket = bus.subjects.blob_bucket()
    pieces = [data[i : i + _CHUNK_BYTES] for i in range(0, len(data), _CHUNK_BYTES)]
    identity = await _store_chunks(bus, bucket, pieces)
    meta = {
        "name": name,
        "bucket": bucket,
        "nuid": identity,
        "size": len(data),
        "chunks": len(pieces),
        "digest": _adr_digest(sha.digest()),
        "options": {"max_chunk_size": _CHUNK_BYTES},
    }
    await bus.store(_meta_subject(bucket, name), json.dumps(meta).encode(), {})
    return reference


async def _store_chunks(bus: Bus, bucket: str, pieces: list[bytes]) -> str:
    """Store the pieces under one fresh identity, acknowledgements overlapping. Readers take chunks in the store's
    order, so when a
    retry made them land out of order, they are stored again under another identity."""
    for _ in range(5):
        identity = NUID().next().decode()
        limit = asyncio.Semaphore(_WINDOW)

        async def send(piece: bytes, subject: str = f"$O.{bucket}.C.{identity}", limit: asyncio.Semaphore = limit) -> int:
            async with limit:
                return await bus.store(subject, piece, {})

        sequences = await asyncio.gather(*(send(piece) for piece in pieces))
        if all(a < b for a, b in itertools.pairwise(sequences)):
            return identity
    raise BusError("object chunks kept landing out of order")


async def get(bus: Bus, reference: ObjectRef, *, timeout_s: float = 60.0) -> bytes:
    """The object's bytes. Raises `IntegrityError` when it is missing, incomplete or not what the reference says."""
    if reference.size_bytes > MAX_OBJECT_BYTES:
        raise IntegrityError(f"object {reference.name}: {reference.size_bytes} bytes exceed the limit of {MAX_OBJECT_BYTES}")
    meta = await _meta(bus, reference.name)
    if meta is None:
        raise IntegrityError(f"object {reference.name} is not in the store")
    if meta.size != reference.size_bytes:
        raise IntegrityError(f"object {reference.name}: {meta.size} bytes stored, {reference.size_bytes} expected")
    try:
        data = await asyncio.wait_for(_chunks(bus, meta), timeout_s)
    except asyncio.TimeoutError as error:
        raise IntegrityError(f"object {reference.name}: not readable within {timeout_s:.0f} s") from error
    actual = (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()
    if actual != reference.digest:
        raise IntegrityError(
            f"object {reference.name}: its bytes hash to {actual[:12]}, the reference says {reference.digest[:12]}"
        )
    return data


async def find(bus: Bus, name: str) -> ObjectRef | None:
    """The reference to an object of which only the name is known; `None` when there is none."""
    meta = await _meta(bus, name)
    if meta is None:
        return None
    raw = base64.urlsafe_b64decode(meta.digest.removeprefix("SHA-256="))
    return ObjectRef(name=name, digest=raw.hex(), size_bytes=meta.size)


async def remove(bus: Bus, name: str) -> bool:
    """Free an object's space; says whether it was there.

    Its meta message goes first, so that nobody finds it half removed; a crash in between leaves chunks that nobody can name.
    """
    meta = await _meta(bus, name)
    if meta is None:
        return False
    bucket = bus.subjects.blob_bucket()
    for subject in (_meta_subject(bucket, name), f"$O.{bucket}.C.{meta.nuid}"):
        await bus.request(f"STREAM.PURGE.{bus.subjects.blob_stream()}", {"filter": subject})
    return True


async def names(bus: Bus) -> set[str]:
    """Names of all objects in the store."""
    found: set[str] = set()
    prefix = _meta_subject(bus.subjects.blob_bucket(), "")
    while True:
        body = {"subjects_filter": f"{prefix}*", "offset": len(found)}
        reply = await bus.request(f"STREAM.INFO.{bus.subjects.blob_stream()}", body)
        page = reply["state"].get("subjects") or {}
        found |= {base64.urlsafe_b64decode(subject.removeprefix(prefix)).decode() for subject in page}
        if not page or len(found) >= int(reply.get("total", 0)):
            return found


async def _chunks(bus: Bus, meta: _Meta) -> bytes:
    stream = bus.subjects.blob_stream()
    subject = f"$O.{bus.subjects.blob_bucket()}.C.{meta.nuid}"
    parts: list[bytes] = []
    size, seq = 0, 1
    while size < meta.size:
        message = await _next_by_subject(bus, stream, subject, seq)
        if message is None:
            raise IntegrityError(f"object chunks of {meta.nuid} are missing after {size} of {meta.size} bytes")
        seq, piece = message
        seq += 1
        size += len(piece)
        if size > meta.size:
            raise IntegrityError(f"object chunks of {meta.nuid} hold more than the {meta.size} bytes announced")
        parts.append(piece)
    return b"".join(parts)


async def _next_by_subject(bus: Bus, stream: str, subject: str, seq: int) -> tuple[int, bytes] | None:
    request = json.dumps({"seq": seq, "next_by_subj": subject}).encode()
    for attempt in range(20):
        try:
            reply = await bus.client.request(f"$JS.API.DIRECT.GET.{stream}", request, timeout=5)
        except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
            await asyncio.sleep(min(2.0, 0.1 * 2**attempt))
            continue
        headers = reply.headers or {}
        if headers.get("Status") == "404":
            return None
        return int(headers["Nats-Sequence"]), reply.data
    return None


async def _meta(bus: Bus, name: str) -> _Meta | None:
    stream = bus.subjects.blob_stream()
    reply = await bus.api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": _meta_subject(bus.subjects.blob_bucket(), name)}, 5.0)
    if "error" in reply:
        return None
    raw = json.loads(base64.b64decode(reply["message"]["data"]))
    return _Meta(raw["nuid"], int(raw["size"]), int(raw["chunks"]), raw["digest"])


def _meta_subject(bucket: str, name: str) -> str:
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _adr_digest(raw: bytes) -> str:
    return "SHA-256=" + base64.urlsafe_b64encode(raw).decode()
