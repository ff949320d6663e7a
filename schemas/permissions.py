"""What each identity may publish and subscribe to, derived from the one table; the server enforces it.

A service has the identity of its role. One more, `admin`, creates streams and is no service: services only verify them.
Nothing here is enough by itself when identities share an account: a server delivers answers to whatever reply subject a request
names, a foreign subject included. So each identity connects to an account of its own (`services/server_accounts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from schemas.sandbox import LANES
from schemas.table import CONSUMERS, STREAMS, ConsumerSpec, Role, Stream, StreamSpec, Subjects, publish_permissions

ADMIN: Final = "admin"
IDENTITIES: tuple[str, ...] = (*(str(role) for role in Role), ADMIN)
BLOB_WRITERS = (Role.SANDBOX, Role.TRAINER, Role.PARAM_SYNC)
BLOB_READERS = (Role.VERIFIER, Role.ENGINE, Role.PARAM_SYNC, Role.OBSERVER)
BLOB_REMOVERS = (Role.PARAM_SYNC,)
Instances = Mapping[Role, tuple[str, ...]]
_API = "$JS.API."


@dataclass(frozen=True, kw_only=True)
class Permissions:
    """Subject patterns. `publish_deny` is taken away from `publish`; nothing else may be published or subscribed to."""

    publish: tuple[str, ...]
    publish_deny: tuple[str, ...]
    subscribe: tuple[str, ...]


def permissions(identity: str, run: str, instances: Instances) -> Permissions:
    """Everything that `identity` may do in `run`. Raises `ValueError` for an unknown identity.

    `instances` names the instances of the roles whose consumers are called after them, as the configuration lists them; a role
    that is not in it has names that nobody can know before, and may use every consumer that belongs to no other role.
    """
    subscribe = (f"{inbox_prefix(identity)}.>",)
    if identity == ADMIN:
        return Permissions(publish=(f"{_API}>",), publish_deny=(), subscribe=subscribe)
    role = Role(identity)
    publish = list(_own_subjects(role, run))
    deny: list[str] = []
    for spec in STREAMS:
        if spec.stream in visible_streams(role):
            publish += _reading(role, spec, run)
    for consumer in CONSUMERS:
        for x, lane in _instances(consumer, instances):
            if role in consumer.watchers:
                publish.append(f"{_API}CONSUMER.INFO.{Subjects(run).stream(consumer.stream)}.{_name(consumer, x, lane)}")
            if consumer.role is role:
                publish += _working(consumer, x, lane, run)
            elif x != "*" and role in _readers(consumer.stream):
                deny += _touching(consumer, x, lane, run)
    publish += _blobs(role, run)
    return Permissions(publish=_once(publish), publish_deny=_once(deny), subscribe=subscribe)


def inbox_prefix(identity: str) -> str:
    """First word of the subjects where an identity gets its answers; nobody else may subscribe there."""
    return f"_INBOX_{identity}"


def visible_streams(role: Role) -> tuple[Stream, ...]:
    """Streams that a role may read or write, whose settings it may therefore see."""
    return tuple(
        spec.stream for spec in STREAMS if role in spec.readers or any(role in subject.publishers for subject in spec.subjects)
    )


def uses_blobs(role: Role) -> bool:
    return role in BLOB_WRITERS or role in BLOB_READERS


def _own_subjects(role: Role, run: str) -> Iterator[str]:
    """Its subjects by the table; of those that every role has, only the part under its own name."""
    shared = Subjects(run).pattern("reg.service.*.*")
    for subject in publish_permissions(role, run):
        yield Subjects(run).pattern(f"reg.service.{role}.*") if subject == shared else subject


def _reading(role: Role, spec: StreamSpec, run: str) -> Iterator[str]:
    """Reading a log by sequence, by subject and in order. A request queue is read through durable consumers alone."""
    stream = Subjects(run).stream(spec.stream)
    yield f"{_API}STREAM.INFO.{stream}"
    if spec.retention != "limits":
        return
    if role in spec.readers or any(subject.once and role in subject.publishers for subject in spec.subjects):
        yield f"{_API}STREAM.MSG.GET.{stream}"  # who writes a subject once must see what already stands there
    if role in spec.readers:
        # The name stands in the subject, where others' names are denied. Without it, the server takes the name from the request
        # and changes whatever consumer has it.
        yield f"{_API}CONSUMER.CREATE.{stream}.*"
        yield f"{_API}CONSUMER.INFO.{stream}.*"
        yield f"{_API}CONSUMER.MSG.NEXT.{stream}.*"


def _working(consumer: ConsumerSpec, x: str, lane: str, run: str) -> Iterator[str]:
    """A durable consumer of its own: create it with its one filter, pull, acknowledge."""
    filtered = Subjects(run).pattern(consumer.filter.format(x=x, lane=lane))
    yield f"{_API}CONSUMER.INFO.{Subjects(run).stream(consumer.stream)}.{_name(consumer, x, lane)}"
    yield from _using(consumer, _name(consumer, x, lane), filtered, run)


def _touching(consumer: ConsumerSpec, x: str, lane: str, run: str) -> Iterator[str]:
    """Everything that could change or empty another role's consumer."""
    name = _name(consumer, x, lane)
    yield f"{_API}CONSUMER.CREATE.{Subjects(run).stream(consumer.stream)}.{name}"
    yield from _using(consumer, name, ">", run)


def _using(consumer: ConsumerSpec, name: str, filtered: str, run: str) -> Iterator[str]:
    stream = Subjects(run).stream(consumer.stream)
    yield f"{_API}CONSUMER.CREATE.{stream}.{name}.{filtered}"
    yield f"{_API}CONSUMER.MSG.NEXT.{stream}.{name}"
    yield f"$JS.ACK.{stream}.{name}.>"
    yield f"$JS.ACK.*.*.{stream}.{name}.>"  # the newer form, with domain and account


def _name(consumer: ConsumerSpec, x: str, lane: str) -> str:
    """Its name on the server; a wildcard can only stand for the whole of it."""
    return "*" if x == "*" and "{x}" in consumer.name else consumer.name.format(x=x, lane=lane)


def _instances(consumer: ConsumerSpec, instances: Instances) -> Iterator[tuple[str, str]]:
    """The (x, lane) that a consumer's template is filled with; x is `*` where nobody can know it before."""
    for x in instances.get(consumer.role, ("*",)) if "{x}" in consumer.name else ("",):
        for lane in LANES if "{lane}" in consumer.name else ("",):
            yield x, lane


def _readers(stream: Stream) -> tuple[Role, ...]:
    return next(spec.readers for spec in STREAMS if spec.stream is stream)


def _blobs(role: Role, run: str) -> Iterator[str]:
    """The object store: chunks and their meta message; written by few, read by few."""
    subjects = Subjects(run)
    stream, bucket = subjects.blob_stream(), subjects.blob_bucket()
    if uses_blobs(role):
        yield f"{_API}STREAM.INFO.{stream}"
        yield f"{_API}STREAM.MSG.GET.{stream}"
    if role in BLOB_WRITERS:
        yield f"$O.{bucket}.C.*"
        yield f"$O.{bucket}.M.*"
    if role in BLOB_READERS:
        yield f"{_API}DIRECT.GET.{stream}"
    if role in BLOB_REMOVERS:
        yield f"{_API}STREAM.PURGE.{stream}"


def _once(subjects: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(subjects))
