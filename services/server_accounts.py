"""The server's accounts of one run: one that holds the streams, and one for each identity, the admin's too, which only imports.

A JetStream server sends what a request asks for to the reply subject that the request names, and does not ask whether the
requester may publish there. In one shared account, whoever may read a log that it writes itself could therefore have the server
write any bytes on any subject. Answers to an imported service go back into the importer's own account, where no stream listens;
only subjects that the identity's permissions allow cross the border.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from schemas.permissions import Instances, Permissions, permissions
from schemas.table import Subjects

_ANSWERS_WITHIN_S = 60  # of an import with many answers; a pull expires long before


def accounts(run: str, public_keys: Mapping[str, str], instances: Instances) -> str:
    """The `accounts` block for the server configuration. `public_keys` has one key for each identity, the admin's included."""
    blocks = [_streams_account(run, [account(run, name) for name in public_keys])]
    for name, key in public_keys.items():
        blocks.append(_identity_account(run, name, key, permissions(name, run, instances)))
    return "accounts {\n" + "\n".join(blocks) + "\n}\n"


def account(run: str, identity: str = "") -> str:
    """The account's name; without an identity, of the one that holds the run's streams."""
    return f"hr_{run}_{identity}" if identity else f"hr_{run}"


def _streams_account(run: str, importers: list[str]) -> str:
    """Nobody connects to it, the admin neither: a push consumer's delivery reaches whoever listens in its own account."""
    exported = ",\n".join(
        f"      {{ service: {json.dumps(subject)}{answers}, accounts: {json.dumps(importers)} }}"
        for subject, answers in _services(run).items()
    )
    return f"  {account(run)} {{\n    jetstream: enabled\n    exports: [\n{exported}\n    ]\n  }}"


def _identity_account(run: str, identity: str, key: str, allowed: Permissions) -> str:
    imported = ", ".join(
        f"{{ service: {{ account: {account(run)}, subject: {json.dumps(subject)} }} }}" for subject in _services(run)
    )
    return f"  {account(run, identity)} {{\n    users: [{_user(key, allowed)}]\n    imports: [{imported}]\n  }}"


def _services(run: str) -> dict[str, str]:
    """What crosses the border, and how it is answered. The API goes as a whole: imported in parts, the server's own import of
    it would answer first that this account has no JetStream."""
    subjects = Subjects(run)
    return {
        "$JS.API.>": f', response_type: stream, response_threshold: "{_ANSWERS_WITHIN_S}s"',
        "$JS.ACK.>": "",
        subjects.pattern(">"): "",
        f"$O.{subjects.blob_bucket()}.>": "",
    }


def _user(key: str, allowed: Permissions) -> str:
    publish = f"allow: {json.dumps(allowed.publish)}, deny: {json.dumps(allowed.publish_deny)}"
    subscribe = f"allow: {json.dumps(allowed.subscribe)}"
    return f"{{ nkey: {key}, permissions: {{ publish: {{ {publish} }}, subscribe: {{ {subscribe} }} }} }}"
