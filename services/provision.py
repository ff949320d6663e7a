"""Create the run's streams on the server, or verify that what is there equals the table; a difference is an error
with a diff."""

from __future__ import annotations

from typing import Any

import structlog

from schemas.table import BLOB_SHARE, STREAMS, StreamSpec
from services.bus import Bus, BusError

log = structlog.get_logger()
_MAX_MESSAGE_BYTES = 8 * 2**20
MINIMUM_STORE_BYTES = 64 * 2**20


class TableMismatch(BusError):
    """The server holds a stream that differs from the table."""


async def provision(bus: Bus, store_bytes: int, replicas: int = 1) -> None:
    """Create or verify every stream of the run. Raises `TableMismatch` naming stream, field, wanted and found value."""
    await _check_server(bus)
    for spec in STREAMS:
        await _create_or_verify(bus, _stream_config(bus, spec, store_bytes, replicas))
    await _create_or_verify(bus, _blob_config(bus, store_bytes, replicas))


async def _check_server(bus: Bus) -> None:
    if bus.client.max_payload < _MAX_MESSAGE_BYTES - 4096:
        raise BusError(
            f"nats-server max_payload is {bus.client.max_payload} bytes; "
            "headrace needs max_payload: 8MB in the server configuration"
        )


def _stream_config(bus: Bus, spec: StreamSpec, store_bytes: int, replicas: int) -> dict[str, Any]:
    return {
        "name": bus.subjects.stream(spec.stream),
        "subjects": [bus.subjects.pattern(s.pattern) for s in spec.subjects],
        "retention": spec.retention,
        "storage": spec.storage,
        "discard": spec.discard,
        "max_bytes": int(store_bytes * spec.share),
        "max_age": int(spec.max_age_s * 1e9),
        "max_msgs_per_subject": spec.max_msgs_per_subject,
        "max_msg_size": _MAX_MESSAGE_BYTES,
        "max_consumers": -1,
        "num_replicas": replicas,
        "deny_delete": spec.deny_delete,
        "allow_direct": True,
        "duplicate_window": 120_000_000_000,
    }


def _blob_config(bus: Bus, store_bytes: int, replicas: int) -> dict[str, Any]:
    bucket = bus.subjects.blob_bucket()
    return {
        "name": bus.subjects.blob_stream(),
        "subjects": [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_bytes": int(store_bytes * BLOB_SHARE),
        "max_age": 0,
        "max_msgs_per_subject": -1,
        "max_msg_size": -1,
        "max_consumers": -1,
        "num_replicas": replicas,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "duplicate_window": 120_000_000_000,
    }


async def _create_or_verify(bus: Bus, wanted: dict[str, Any]) -> None:
    name = wanted["name"]
    reply = await bus.api(f"STREAM.INFO.{name}", {}, 5.0)
    if "error" in reply:
        if reply["error"].get("code") != 404:
            raise BusError(f"{name}: {reply['error'].get('description')}")
        created = await bus.api(f"STREAM.CREATE.{name}", wanted, 10.0)
        if "error" not in created:
            log.debug("stream created", stream=name)
            return
        if created["error"].get("err_code") != 10058:  # another service created it in the meantime
            fix = " (raise nats.store_bytes or the server's max_file)" if created["error"].get("err_code") == 10047 else ""
            raise BusError(f"{name}: {created['error'].get('description')}{fix}")
        reply = await bus.request(f"STREAM.INFO.{name}", {})
    found = reply["config"]
    different = {key: (value, found.get(key)) for key, value in wanted.items() if _same(found.get(key)) != _same(value)}
    if different:
        lines = "\n".join(f"  {key}: table says {want!r}, server has {have!r}" for key, (want, have) in different.items())
        raise TableMismatch(
            f"stream {name} differs from the table:\n{lines}\nuse another run.name, or remove the stream if its data may go"
        )


def _same(value: Any) -> Any:
    """The server leaves defaults out of its answers."""
    return None if value in (0, False, None, -1, "") else value
