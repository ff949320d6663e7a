"""Opening a connection to the server: who we are, whom we trust, and what is said when it fails or is lost."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import nats.errors
import structlog
from nats.aio.client import Client

from schemas.permissions import inbox_prefix
from services.items import BusError, Forbidden
from services.nats_client import RefusalClient, closed_door_of, refusal_of

log = structlog.get_logger()
PENDING_BYTES = 16 * 2**20  # that the client keeps for a server which does not take them


async def open_client(
    url: str,
    identity: str,
    name: str,
    *,
    timeout_s: float,
    nkeys_seed: str | None,
    tls: ssl.SSLContext | None,
    on_loss: Callable[[str], None],
    on_reconnect: Callable[[], None],
) -> RefusalClient:
    """Connect within `timeout_s`. Later, `on_loss` is told why the connection is of no more use.

    Raises `BusError` naming the server when it cannot be reached, and `Forbidden` when it does not let us in or uses no TLS
    though `tls` says whom to trust.
    """
    client = RefusalClient()
    is_in = False

    def lost(reason: str) -> None:
        if is_in:
            on_loss(reason)

    async def on_error(error: Exception) -> None:
        log.warning("nats error", error=repr(error))
        if closed_door := closed_door_of(error, identity, has_key=bool(nkeys_seed), has_ca=tls is not None):
            text = f"{places(url)}: {closed_door}"
            if not is_in:  # the client would try for ever
                raise Forbidden(text)
            lost(text)
        elif refused := refusal_of(error):
            text = f"the server refuses {identity}'s {refused.deed} of {client.spelled(refused.subject)}"
            client.refuse(refused.subject, Forbidden(text))
            lost(text)

    async def on_closed() -> None:
        lost("the nats client is closed")

    async def on_reconnected() -> None:
        log.info("nats reconnected")
        if tls is not None and not client.is_encrypted:
            lost(f"{places(url)}: the server no longer uses TLS")
        on_reconnect()

    options = _options(url, identity, name, nkeys_seed, tls)
    options |= {"error_cb": on_error, "closed_cb": on_closed, "reconnected_cb": on_reconnected}
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connecting = client.connect(**options)
            await asyncio.wait_for(connecting, timeout=max(0.5, min(5.0, deadline - time.monotonic())))
            break
        except (OSError, asyncio.TimeoutError, nats.errors.Error) as error:
            if time.monotonic() >= deadline:
                raise BusError(
                    f"no NATS server answered at {places(url)} within {timeout_s:.0f} s ({error!r}); start one or set nats.url"
                ) from error
            await asyncio.sleep(0.3)
            client = RefusalClient()
        except Forbidden:
            with suppress(asyncio.TimeoutError, nats.errors.Error, OSError):  # after a failed handshake it waits for ever
                await asyncio.wait_for(client.close(), 1)
            raise
    if tls is not None and not client.is_encrypted:
        await close_client(client)
        raise Forbidden(f"{places(url)}: the server does not use TLS, though nats.tls_ca_file is set")
    is_in = True
    return client


async def close_client(client: Client) -> None:
    """Flush and close; harmless when the server is gone."""
    for end in (client.flush, client.close):
        # RuntimeError: the client writes what it still has to a transport that uvloop has closed
        with suppress(asyncio.TimeoutError, nats.errors.Error, OSError, RuntimeError):
            await asyncio.wait_for(end(), 3)


def places(url: str) -> str:
    """Host and port of each server in a configured URL; never what else it may carry."""
    parts = [urlsplit(part.strip() if "//" in part else f"//{part.strip()}") for part in url.split(",")]
    return ", ".join(part.netloc.rpartition("@")[2] or part.path for part in parts)


def _options(url: str, identity: str, name: str, nkeys_seed: str | None, tls: ssl.SSLContext | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "servers": [part.strip() for part in url.split(",")],
        "name": name,
        "inbox_prefix": inbox_prefix(identity).encode(),
        "max_reconnect_attempts": -1,
        "allow_reconnect": True,
        "reconnect_time_wait": 0.5,
        "ping_interval": 5,
        "max_outstanding_pings": 2,
        "connect_timeout": 3,
        "drain_timeout": 5,
        "pending_size": PENDING_BYTES,
        "flush_timeout": 30,
    }
    if nkeys_seed:
        options["nkeys_seed_str"] = nkeys_seed
    if tls is not None:
        options["tls"] = tls
    return options
