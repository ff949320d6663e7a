"""The root of every message: frozen, keyword-only, tagged with its kind and carrying its schema version."""

from __future__ import annotations

import msgspec

SCHEMA_VERSION = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """A message on a subject. `kind` names its type on the wire; `v` is refused by the decoder unless it is known."""

    v: int = SCHEMA_VERSION
