"""A user in the account of the streams of a run under test, who may see and say everything; only this harness makes such a key.

Services and the admin have accounts of their own, which see nothing of each other; what they publish crosses into the account
that holds the streams, to which nobody connects. A user there sees every message the moment it comes, requests and answers too.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import nkeys

from loadtests.chaos.points import SERVER
from services.server_accounts import account

_SEED_BYTES = 32


def new_seed() -> str:
    """A fresh nkey seed of a user."""
    return str(nkeys.encode_seed(os.urandom(_SEED_BYTES), nkeys.PREFIX_BYTE_USER).decode("ascii"))


def admitted(configuration: str, run: str, key: str) -> str:
    """The server configuration with a user in the account of the run's streams. Raises `ValueError` if it has none."""
    begin = f"  {account(run)} {{\n    jetstream: enabled\n"
    if configuration.count(begin) != 1:
        raise ValueError(f"the server configuration has no account {account(run)}")
    return configuration.replace(begin, f"{begin}    users: [{{ nkey: {key} }}]\n")


def admit(folder: Path, run: str, key: str) -> None:
    """Let the key in, now and whenever the server is started again: into its file, and the running server reads it anew."""
    file = folder / "nats" / "nats.conf"
    file.write_text(admitted(file.read_text(encoding="utf-8"), run, key), encoding="utf-8")
    os.kill(_server_pid(folder / "logs" / "supervisor.log"), signal.SIGHUP)


def _server_pid(log: Path) -> int:
    """The newest server that the supervisor of this folder says it has started."""
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    return int([e["pid"] for e in events if e.get("event") == "child started" and e.get("child") == SERVER][-1])
