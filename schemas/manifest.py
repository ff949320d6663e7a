"""The policy manifest: everything besides the weights that makes a policy behave as it does.

Built by whoever runs a part of the behaviour; leases carry it, and every turn, episode and group its hash. Producers: sampler
(in leases), trainer (in demands). Consumers: rollouter and admission, which name the field that differs.
"""

from __future__ import annotations

import hashlib

import msgspec

from schemas.message import Message


class PolicyManifest(Message, frozen=True, kw_only=True, tag="policy_manifest"):
    """The behaviour's fixed parts (T11). Its hash is `manifest` on leases, turns, episodes and groups."""

    model: str
    base_digest: str
    tokenizer_sha256: str
    template_sha256: str
    system_prompt_sha256: str
    tool_schemas_sha256: str
    parser: str
    memory_policy: str = "linear"
    compactor: str = "none"
    max_turns: int
    max_action_tokens: int
    max_context_tokens: int
    sampling: str

    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 over the canonical encoding."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]

    def differing(self, other: PolicyManifest) -> tuple[str, ...]:
        """The fields in which another manifest differs, by name."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name))


def drift(there: PolicyManifest | None, here: PolicyManifest | None) -> str:
    """What differs between two manifests, to end a sentence: `; <field>: <there>, here <here>`. Empty if one is unknown."""
    if there is None or here is None:
        return ""
    return "".join(f"; {name}: {getattr(there, name)!r}, here {getattr(here, name)!r}" for name in there.differing(here))
