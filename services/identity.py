"""Keys of identities: one nkey seed per file, mode 0600, in a folder of mode 0700; the server knows the public halves alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import nkeys

from schemas.permissions import ADMIN
from services.config import ConfigError, Nats

_SEED_BYTES = 32


def make_keys(folder: Path, identities: Iterable[str]) -> dict[str, str]:
    """Public keys by identity. Makes the folder and the keys that are not in it yet; existing ones stay as they are."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for identity in identities:
        if not seed_path(folder, identity).exists():
            _write(seed_path(folder, identity), nkeys.encode_seed(os.urandom(_SEED_BYTES), nkeys.PREFIX_BYTE_USER) + b"\n")
    return {identity: public_key(read_seed(seed_path(folder, identity))) for identity in identities}


def seed_path(folder: Path, identity: str) -> Path:
    return folder / f"{identity}.nk"


def run_keys(run_folder: Path) -> Path:
    """Where the keys of a local run with an embedded server lie."""
    return run_folder / "nats" / "keys"


def public_key(seed: str) -> str:
    """The public half, as it stands in a server configuration. Raises `ConfigError` for something that is no seed."""
    try:
        key: bytes = nkeys.from_seed(bytearray(seed.encode("ascii"))).public_key
    except (nkeys.NkeysError, ValueError) as error:
        raise ConfigError(f"not an nkey seed: {error!r}; `headrace init` makes them") from error
    return key.decode("ascii")


def read_seed(path: Path) -> str:
    """The seed in a file. Raises `ConfigError` naming the file when it cannot be read or holds none."""
    try:
        seed = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "") or "not text"
        raise ConfigError(f"cannot read the key {path} ({reason}); `headrace init` makes keys") from error
    try:
        public_key(seed)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return seed


def seed_file(nats: Nats, identity: str) -> Path | None:
    """The file with an identity's seed by the configuration; `None` where it has no key."""
    if identity == ADMIN:
        if nats.admin_seed_file:
            return Path(nats.admin_seed_file)
        path = seed_path(Path(nats.nkey_folder), ADMIN)
        return path if nats.nkey_folder and path.is_file() else None
    if nats.nkey_seed_file:
        return Path(nats.nkey_seed_file)
    return seed_path(Path(nats.nkey_folder), identity) if nats.nkey_folder else None


def may_create_streams(nats: Nats, identity: str) -> bool:
    """Without keys everybody may; with keys the admin alone."""
    return identity == ADMIN or seed_file(nats, identity) is None


def _write(path: Path, content: bytes) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "wb") as file:
        file.write(content)
