"""Create the run's streams on the server, or verify that what is there equals the table; a difference is an error
with a diff."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog

from schemas.permissions import uses_blobs, visible_streams
from schemas.table import BLOB_SHARE, STREAMS, StreamSpec
from services.bus import Bus
from services.health import Health, pause
from services.items import BusError

log = structlog.get_logger()
_MAX_MESSAGE_BYTES = 8 * 2**20
MINIMUM_STORE_BYTES = 64 * 2**20
WAIT_S = 30.0  # for streams that somebody else creates
_CLUSTER_S = 60.0  # for a cluster that is still finding its leader or its peers
_SOON = (10005, 10008, 10009)  # no suitable peers, temporarily unavailable, not available
_STREAM_EXISTS, _NO_STORAGE = 10058, 10047


class TableMismatch(BusError):
    """The server holds a stream that differs from the table."""


async def provision(bus: Bus, store_bytes: int, replicas: int = 1, *, raise_limits: bool = False) -> list[str]:
    """Create or verify every stream of the run. Raises `TableMismatch` naming stream, field, wanted and found value.

    With `raise_limits`, a stream that is otherwise as the table says is given the larger `max_bytes`; gives what was raised,
    a line for each. A limit is never lowered: a stream with more room than the table says is accepted as it is.
    """
    await _check_server(bus)
    configs = [_stream_config(bus, spec, store_bytes, replicas) for spec in STREAMS]
    raised = []
    for config in [*configs, _blob_config(bus, store_bytes, replicas)]:
        found = await _create_or_find(bus, config)
        if raise_limits and _differences(config, found).keys() == {"max_bytes"}:
            await _raise_limit(bus, found, config["max_bytes"])
            raised.append(f"{config['name']}: max_bytes {found['max_bytes']} -> {config['max_bytes']}")
        else:
            _verify(config, found)
    return raised


async def await_streams(
    bus: Bus, store_bytes: int, replicas: int, *, health: Health, stop: asyncio.Event, wait_s: float = WAIT_S
) -> bool:
    """Verify the streams that our role may see, which another identity creates; false if `stop` came first.

    Raises `BusError` naming who creates them when they are not there after `wait_s`, and `TableMismatch` as `provision` does.
    """
    await _check_server(bus)
    wanted = [_stream_config(bus, spec, store_bytes, replicas) for spec in STREAMS if spec.stream in visible_streams(bus.role)]
    if uses_blobs(bus.role):
        wanted.append(_blob_config(bus, store_bytes, replicas))
    creator = "`headrace provision` or `headrace up`"
    with health.waiting(f"streams of run {bus.run}", creator, wait_s, "the service ends"):
        deadline = time.monotonic() + wait_s
        said = False
        for config in wanted:
            while (found := await _info(bus, config["name"])) is None:
                if time.monotonic() > deadline:
                    raise BusError(f"stream {config['name']} is not there after {wait_s:.0f} s; {creator} creates it")
                if not said:
                    log.info("waiting", what=f"streams of run {bus.run}", culprit=creator, deadline_in_s=round(wait_s))
                    said = True
                if await pause(stop, 0.5):
                    return False
            _verify(config, found)
    return True


async def _check_server(bus: Bus) -> None:
    if bus.client.max_payload < _MAX_MESSAGE_BYTES - 4096:
        raise BusError(
            f"nats-server max_payload is {bus.client.max_payload} bytes; "
            "headrace needs max_payload: 8MB in the server configuration"
        )


def _stream_config(bus: Bus, spec: StreamSpec, store_bytes: int, replicas: int) -> dict[str, Any]:
    return {
        "name": bus.subjects.stream(spec.stream),
        "subjects": [bus.subjects.pattern(_listening(s.pattern)) for s in spec.subjects],
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
        "duplicate_window": 120_000_000_000,
    }


def _listening(pattern: str) -> str:
    """The stream's subject for a table pattern: one without a wildcard ends in one.

    The server delivers a push consumer's messages wherever somebody listens on exactly the subject that its creator names,
    without asking whether the creator may publish there. Who may read a log could so write into this one.
    """
    return pattern if "*" in pattern else f"{pattern.rpartition('.')[0]}.*"


async def _create_or_find(bus: Bus, wanted: dict[str, Any]) -> dict[str, Any]:
    """The stream's settings on the server, once it is there."""
    name = wanted["name"]
    found = await _info(bus, name)
    if found is not None:
        return found
    created = await _settled(bus, f"STREAM.CREATE.{name}", wanted)
    if "error" not in created:
        log.debug("stream created", stream=name)
        return dict(created["config"])
    if created["error"].get("err_code") != _STREAM_EXISTS:  # another service created it in the meantime
        full = created["error"].get("err_code") == _NO_STORAGE
        fix = " (raise nats.store_bytes or the server's max_file)" if full else ""
        raise BusError(f"{name}: {created['error'].get('description')}{fix}")
    return dict((await bus.request(f"STREAM.INFO.{name}", {}))["config"])


async def _raise_limit(bus: Bus, found: dict[str, Any], max_bytes: int) -> None:
    """More room for a stream; all else stays. Raises `BusError` when the server has not that much."""
    name = found["name"]
    reply = await _settled(bus, f"STREAM.UPDATE.{name}", {**found, "max_bytes": max_bytes})
    if "error" in reply:
        fix = " (raise the server's max_file first)" if reply["error"].get("err_code") == _NO_STORAGE else ""
        raise BusError(f"{name}: max_bytes is not raised to {max_bytes}: {reply['error'].get('description')}{fix}")
    log.info("limit raised", stream=name, max_bytes=max_bytes, before=found["max_bytes"])


async def _info(bus: Bus, name: str) -> dict[str, Any] | None:
    """A stream's settings on the server; `None` when there is no such stream."""
    reply = await _settled(bus, f"STREAM.INFO.{name}", {})
    if "error" not in reply:
        return dict(reply["config"])
    if reply["error"].get("code") != 404:
        raise BusError(f"{name}: {reply['error'].get('description')}")
    return None


async def _settled(bus: Bus, api: str, body: dict[str, Any]) -> dict[str, Any]:
    """An API call's answer, asked again for a bounded time while a cluster is still forming or electing."""
    deadline = time.monotonic() + _CLUSTER_S
    while True:
        reply = await bus.api(api, body, 10.0)
        error = reply.get("error", {})
        clustered = body.get("num_replicas", 1) > 1 or error.get("code") == 503
        if not (clustered and error.get("err_code") in _SOON) or time.monotonic() > deadline:
            return reply
        log.info("the cluster is not ready", api=api, reason=error.get("description"))
        await asyncio.sleep(1.0)


def _verify(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    different = _differences(wanted, found)
    if different:
        lines = "\n".join(f"  {key}: table says {want!r}, server has {have!r}" for key, (want, have) in different.items())
        fix = "use another run.name, or remove the stream if its data may go"
        if different.keys() == {"max_bytes"}:
            fix = "`headrace provision` raises it, with everything that is stored kept"
        raise TableMismatch(f"stream {wanted['name']} differs from the table:\n{lines}\n{fix}")


def _differences(wanted: dict[str, Any], found: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that are not as wanted, as (wanted, found). More room than wanted is no difference: somebody gave it."""
    different = {key: (value, found.get(key)) for key, value in wanted.items() if _same(found.get(key)) != _same(value)}
    if "max_bytes" in different and found["max_bytes"] > wanted["max_bytes"]:
        del different["max_bytes"]
    return different


def _same(value: Any) -> Any:
    """The server leaves defaults out of its answers."""
    return None if value in (0, False, None, -1, "") else value
