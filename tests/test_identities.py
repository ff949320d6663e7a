"""Invariant 8 on a real server: each identity publishes its own subjects alone, reads what it may, empties no other's queue.

What is tried is what a stolen key could try, not only what our code does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from conftest import eventually
from keyed_server import INSTANCES, RUN, KeyedServer, stored
from nats.aio.msg import Msg

from schemas.permissions import ADMIN, BLOB_READERS, BLOB_WRITERS, IDENTITIES, permissions
from schemas.sandbox import LANES
from schemas.table import (
    CONSUMERS,
    STREAMS,
    ConsumerSpec,
    Role,
    Stream,
    Subjects,
    publish_permissions,
    readable_streams,
    spec_of,
)
from services import blobs
from services.bus import Bus
from services.config import check
from services.consume import read_all
from services.embedded_server import instances_by_role
from services.items import Forbidden, Item
from services.work import WorkConsumer

pytestmark = pytest.mark.timeout(180)
SUBJECTS = Subjects(RUN)
NUMBERS = itertools.count()
PATTERNS = [subject.pattern for spec in STREAMS for subject in spec.subjects]
LOGS = [spec for spec in STREAMS if spec.retention == "limits"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    keyed = KeyedServer(tmp_path_factory.mktemp("keyed"))
    keyed.start()
    asyncio.run(keyed.provision())
    yield keyed
    keyed.kill()


def own(role: Role, pattern: str) -> str:
    """A subject of this table pattern that nobody has used, as `role` would spell it."""
    if pattern == "reg.service.*.*":
        return SUBJECTS.pattern(f"reg.service.{role}.n{next(NUMBERS)}")
    return SUBJECTS.pattern(pattern.replace("*", f"n{next(NUMBERS)}"))


def own_patterns(role: Role) -> list[str]:
    return [pattern for pattern in PATTERNS if SUBJECTS.pattern(pattern) in publish_permissions(role, RUN)]


async def refused(bus: Bus, subject: str, body: dict[str, object] | None = None) -> None:
    """Fails unless the server refuses a request on `subject`, and at once."""
    with pytest.raises(Forbidden, match=f"the server refuses .* publish of {re.escape(subject)}"):
        await bus.client.request(subject, json.dumps(body or {}).encode(), timeout=20)


# -- publishing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_stores_its_own_subjects(server: KeyedServer, role: Role) -> None:
    async with server.bus(role) as bus, server.bus(ADMIN) as admin:
        for pattern in own_patterns(role):
            subject = own(role, pattern)
            seq = await bus.store(subject, b"x", {})
            name = SUBJECTS.stream(bus.stream_of(subject))
            assert (await admin.request(f"STREAM.MSG.GET.{name}", {"seq": seq}))["message"]["subject"] == subject


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_stores_nothing_on_any_other_subject(server: KeyedServer, role: Role) -> None:
    foreign = [own(role, pattern) for pattern in PATTERNS if pattern not in own_patterns(role)]
    foreign += [SUBJECTS.pattern(f"reg.service.{other}.0") for other in Role if other is not role]
    if role not in BLOB_WRITERS:
        foreign += [f"$O.{SUBJECTS.blob_bucket()}.C.chunk", f"$O.{SUBJECTS.blob_bucket()}.M.meta"]
    async with server.bus(role) as bus, server.bus(ADMIN) as admin:
        before = await stored(admin)
        for subject in foreign:
            with pytest.raises(Forbidden, match=f"the server refuses {role}'s publish of") as error:
                await bus.store(subject, b"x", {})
            assert subject in str(error.value)
        assert await stored(admin) == before


@pytest.mark.parametrize(
    ("role", "deed"),
    [
        (Role.ROLLOUTER, "verdict.g00000001.0"),
        (Role.ROLLOUTER, "ledger.batch.0"),
        (Role.ROLLOUTER, "ledger.quarantine.g00000001"),
        (Role.ROLLOUTER, "train.step.0"),
        (Role.ROLLOUTER, "ready.g00000001"),
        (Role.SANDBOX, "verdict.g00000001.0"),
        (Role.SANDBOX, "episode.g00000001.0"),
        (Role.VERIFIER, "episode.g00000001.0"),
        (Role.VERIFIER, "ledger.batch.0"),
        (Role.ENGINE, "policy.active"),
        (Role.ENGINE, "turn.g00000001.0.0.0"),
        (Role.TRAINER, "ledger.batch.0"),
        (Role.TRAINER, "policy.staged.1"),
        (Role.BANK, "verdict.g00000001.0"),
        (Role.ADMISSION, "ready.g00000001"),
        (Role.OBSERVER, "task.lease.0"),
    ],
)
async def test_who_decides_one_thing_cannot_decide_another(server: KeyedServer, role: Role, deed: str) -> None:
    async with server.bus(role) as bus:
        await refused(bus, SUBJECTS.pattern(deed))


async def test_the_admin_creates_streams_and_writes_into_none(server: KeyedServer) -> None:
    async with server.bus(ADMIN) as admin:
        before = await stored(admin)
        for pattern in PATTERNS:
            await refused(admin, own(Role.OBSERVER, pattern))
        assert await stored(admin) == before


# -- the server must not be made to write for somebody ----------------------------------------------------------------------


async def _let_the_server_write(bus: Bus, targets: list[str]) -> None:
    """Everything that makes the server send what we wrote to a subject that we name: answers, pulls, push consumers."""
    turns = bus.subjects.stream(Stream.TURNS)
    seq = await bus.store(bus.subjects.turn(f"g{next(NUMBERS)}", 0, 0, 0), b"forged", {})
    everything = {
        "ack_policy": "none",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": seq,
        "inactive_threshold": 10**10,
    }
    for target in targets:
        await bus.client.publish(f"$JS.API.STREAM.MSG.GET.{turns}", json.dumps({"seq": seq}).encode(), reply=target)
        made = await _fold(bus, turns, everything)
        pull = json.dumps({"batch": 1, "expires": 10**9}).encode()
        await bus.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{turns}.{made['name']}", pull, reply=target)
        await _fold(bus, turns, {**everything, "deliver_subject": target})
        await bus.client.publish(bus.subjects.turn(f"g{next(NUMBERS)}", 0, 0, 0), b"forged", reply=target)
    await bus.client.flush()
    await asyncio.sleep(1.5)  # a delivery that must not happen has no event to wait for


async def _fold(bus: Bus, stream: str, config: dict[str, object]) -> dict[str, Any]:
    """An ephemeral consumer, as a fold makes it."""
    name = f"fold-{next(NUMBERS)}"
    return await bus.request(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": {**config, "name": name}})


async def test_the_server_writes_nowhere_on_a_roles_behalf(server: KeyedServer) -> None:
    """A verdict by way of an answer's reply subject, a pull's, or a push consumer's delivery."""
    targets = [own(Role.VERIFIER, pattern) for pattern in PATTERNS if pattern not in own_patterns(Role.ROLLOUTER)]
    targets += [SUBJECTS.active(), SUBJECTS.verdict("g1", 0), f"$JS.API.STREAM.PURGE.{SUBJECTS.stream(Stream.LEDGER)}"]
    async with server.bus(Role.ROLLOUTER) as bus, server.bus(ADMIN) as admin:
        before = await stored(admin)
        await _let_the_server_write(bus, targets)
        after = await stored(admin)
    turns = SUBJECTS.stream(Stream.TURNS)
    assert after.pop(turns) != before.pop(turns)  # it did write its own
    assert after == before


async def test_in_one_shared_account_the_same_would_be_stored(server: KeyedServer, nats_url: str) -> None:
    """Why each identity has an account of its own: on a server without accounts the very same requests forge a verdict."""
    from services.provision import provision

    bus = await Bus.connect(nats_url, RUN, Role.ROLLOUTER, "t")
    await provision(bus, 256 * 2**20)
    before = await stored(bus)
    await _let_the_server_write(bus, [SUBJECTS.verdict("g1", 0)])
    after = await stored(bus)
    await bus.close()
    assert after[SUBJECTS.stream(Stream.EPISODES)] != before[SUBJECTS.stream(Stream.EPISODES)]


async def test_a_push_consumer_reaches_nobodys_inbox(server: KeyedServer) -> None:
    """Deliveries stay in the account that holds the streams, to which nobody connects: neither a service nor the admin."""
    turns, heard = SUBJECTS.stream(Stream.TURNS), Counter[str]()
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(server.bus(Role.ROLLOUTER))
        seq = await bus.store(bus.subjects.turn(f"g{next(NUMBERS)}", 0, 0, 0), b"forged", {})
        inboxes = {}
        for identity in IDENTITIES:
            listener = await stack.enter_async_context(server.bus(identity))
            inboxes[identity] = listener.client.new_inbox()

            async def hear(message: Msg, identity: str = identity) -> None:
                heard[identity] += 1

            await listener.client.subscribe(inboxes[identity], cb=hear)
            await listener.client.flush()
        for inbox in inboxes.values():
            name = f"n{next(NUMBERS)}"
            config = {
                "deliver_subject": inbox,
                "ack_policy": "none",
                "deliver_policy": "by_start_sequence",
                "opt_start_seq": seq,
            }
            reply = await bus.request(f"CONSUMER.CREATE.{turns}.{name}", {"stream_name": turns, "config": config})
            assert reply["config"]["deliver_subject"] == inbox
            pull = {"deliver_policy": "by_start_sequence", "opt_start_seq": seq, "ack_policy": "none"}
            made = await bus.request(f"CONSUMER.CREATE.{turns}.{name}-p", {"stream_name": turns, "config": pull})
            await bus.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{turns}.{made['name']}", b"1", reply=inbox)
            await bus.client.publish(f"$JS.API.STREAM.MSG.GET.{turns}", json.dumps({"seq": seq}).encode(), reply=inbox)
        await bus.client.flush()
        await eventually(lambda: heard[str(Role.ROLLOUTER)] >= 2, within_s=30, what="its own answers come to its own inbox")
        await asyncio.sleep(1.5)  # a delivery that must not happen has no event to wait for
        assert set(heard) == {str(Role.ROLLOUTER)}


async def test_a_direct_read_of_the_object_store_answers_the_reader_alone(server: KeyedServer) -> None:
    async with server.bus(Role.PARAM_SYNC) as bus, server.bus(ADMIN) as admin:
        await blobs.put(bus, f"object-{next(NUMBERS)}", b"y" * 100)
        before = await stored(admin)
        for target in (SUBJECTS.verdict("g2", 0), SUBJECTS.batch(9), SUBJECTS.step(9)):
            await bus.client.publish(f"$JS.API.DIRECT.GET.{SUBJECTS.blob_stream()}", b'{"seq": 1}', reply=target)
        await bus.client.flush()
        await asyncio.sleep(1.0)
        assert await stored(admin) == before


# -- streams -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", list(Role))
async def test_only_the_admin_creates_deletes_and_purges_streams(server: KeyedServer, role: Role) -> None:
    async with server.bus(role) as bus, server.bus(ADMIN) as admin:
        before = await stored(admin)
        for stream in (*(SUBJECTS.stream(stream) for stream in Stream), SUBJECTS.blob_stream()):
            deeds = ["UPDATE", "DELETE", "MSG.DELETE", "SNAPSHOT", "RESTORE", "PEER.REMOVE", "LEADER.STEPDOWN"]
            if not (role is Role.PARAM_SYNC and stream == SUBJECTS.blob_stream()):  # it removes what no engine needs any more
                deeds.append("PURGE")
            for deed in deeds:
                await refused(bus, f"$JS.API.STREAM.{deed}.{stream}", {"name": stream})
        await refused(bus, "$JS.API.STREAM.CREATE.mine", {"name": "mine", "subjects": ["mine"]})
        await refused(bus, "$JS.API.STREAM.NAMES")
        await refused(bus, "$JS.API.META.LEADER.STEPDOWN")
        assert await stored(admin) == before


async def test_the_admin_may_create_and_delete(server: KeyedServer) -> None:
    async with server.bus(ADMIN) as admin:
        await admin.request("STREAM.CREATE.spare", {"name": "spare", "subjects": ["spare.>"], "max_bytes": 2**20})
        await admin.request("STREAM.DELETE.spare", {})


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_sees_the_streams_that_it_reads_or_writes_and_no_other(server: KeyedServer, role: Role) -> None:
    written = {spec.stream for spec in STREAMS for subject in spec.subjects if role in subject.publishers}
    async with server.bus(role) as bus:
        for stream in Stream:
            if stream in written | set(readable_streams(role)):
                await bus.last_sequence(stream)
            else:
                await refused(bus, f"$JS.API.STREAM.INFO.{SUBJECTS.stream(stream)}")
            if stream not in readable_streams(role):
                await refused(bus, f"$JS.API.CONSUMER.CREATE.{SUBJECTS.stream(stream)}.mine")
            await refused(bus, f"$JS.API.CONSUMER.CREATE.{SUBJECTS.stream(stream)}")


# -- reading -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_folds_every_log_that_it_may_read(server: KeyedServer, role: Role) -> None:
    for spec in LOGS:
        writer, pattern = spec.subjects[0].publishers[0], spec.subjects[0].pattern
        async with server.bus(writer) as bus:
            seq = await bus.store(own(writer, pattern), b"x", {})
        if spec.stream not in readable_streams(role):
            continue
        async with server.bus(role) as bus:
            assert (await bus.get(spec.stream, seq)).data == b"x"
            items = await read_all(bus, spec.stream, start=seq)
            assert items[0].seq == seq


def test_nobody_reads_a_request_queue_but_through_a_consumer_of_his_own() -> None:
    for identity, spec in itertools.product(IDENTITIES, STREAMS):
        if identity != ADMIN and spec.retention == "workqueue":
            allowed = permissions(identity, RUN, INSTANCES).publish
            name = SUBJECTS.stream(spec.stream)
            assert f"$JS.API.CONSUMER.CREATE.{name}" not in allowed
            assert f"$JS.API.CONSUMER.CREATE.{name}.*" not in allowed
            assert f"$JS.API.STREAM.MSG.GET.{name}" not in allowed
            assert f"$JS.API.DIRECT.GET.{name}" not in allowed


def named(spec: ConsumerSpec) -> list[tuple[str, str]]:
    """(x, lane) of consumers of this row, as services would fill it in."""
    lanes = LANES if "{lane}" in spec.name else ("",)
    names = INSTANCES.get(spec.role, (f"r{next(NUMBERS)}",)) if "{x}" in spec.name else ("",)
    return list(itertools.product(names, lanes))


@pytest.mark.parametrize("spec", CONSUMERS, ids=lambda spec: spec.name)
async def test_a_role_works_through_its_own_consumers(server: KeyedServer, spec: ConsumerSpec) -> None:
    pattern = next(s for s in spec_of(spec.stream).subjects if s.pattern.split(".")[:2] == spec.filter.split(".")[:2])
    async with server.bus(spec.role) as bus, server.bus(pattern.publishers[0]) as writer:
        for x, lane in named(spec):
            subject = SUBJECTS.pattern(spec.filter.format(x=x, lane=lane).replace("*", f"n{next(NUMBERS)}"))
            seq = await writer.store(subject, b"work", {})
            got: list[int] = []
            stop = asyncio.Event()

            async def handler(item: Item, seq: int = seq, got: list[int] = got, stop: asyncio.Event = stop) -> None:
                got.append(item.seq)
                if item.seq == seq:
                    stop.set()

            consumer = WorkConsumer(bus, spec.name, x=x, lane=lane, capacity=8)
            await asyncio.wait_for(consumer.run(handler, stop), 60)
            assert seq in got
            acked = f"CONSUMER.INFO.{consumer.stream}.{consumer.name}"
            await eventually(lambda api=acked: _nothing_pending(bus, api), within_s=30, what="every message is acknowledged")


async def _nothing_pending(bus: Bus, api: str) -> bool:
    info = await bus.request(api, {})
    return bool(info["num_ack_pending"] == 0 and info["num_pending"] == 0)


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_cannot_touch_another_roles_consumers(server: KeyedServer, role: Role) -> None:
    """Neither empty nor acknowledge them, nor create or delete under their names; where names can be known before."""
    async with server.bus(role) as bus:
        for spec in CONSUMERS:
            if spec.role is role or ("{x}" in spec.name and spec.role not in INSTANCES):
                continue
            stream = SUBJECTS.stream(spec.stream)
            for x, lane in named(spec):
                name = spec.name.format(x=x, lane=lane)
                filtered = SUBJECTS.pattern(spec.filter.format(x=x, lane=lane))
                await refused(bus, f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}")
                await refused(bus, f"$JS.API.CONSUMER.CREATE.{stream}")
                await refused(bus, f"$JS.API.CONSUMER.CREATE.{stream}.{name}")
                await refused(bus, f"$JS.API.CONSUMER.CREATE.{stream}.{name}.{filtered}")
                await refused(bus, f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.{name}")
                await refused(bus, f"$JS.API.CONSUMER.DELETE.{stream}.{name}")
                await refused(bus, f"$JS.ACK.{stream}.{name}.1.1.1.1.1")
                await refused(bus, f"$JS.ACK._.hash.{stream}.{name}.1.1.1.1.1")


def _forgeries(stream: str, name: str, filtered: str) -> list[tuple[str, dict[str, object]]]:
    """Every form of a request that creates or changes a consumer, with the name in the subject, in the body, and in both."""
    changed = {"ack_policy": "explicit", "filter_subject": filtered, "max_ack_pending": 1, "ack_wait": 10**12}
    bodies: list[dict[str, object]] = [
        changed,
        {**changed, "name": name},
        {**changed, "durable_name": name},
        {**changed, "name": name, "durable_name": name},
        {**changed, "name": name, "inactive_threshold": 10**9, "mem_storage": True, "num_replicas": 1},
        {**changed, "name": name, "deliver_subject": "elsewhere"},
        {**changed, "name": name, "max_waiting": 64},  # what the server would accept as a change
        {**changed, "durable_name": name, "max_waiting": 64},
    ]
    subjects = [f"CONSUMER.CREATE.{stream}", f"CONSUMER.DURABLE.CREATE.{stream}.{name}"]
    subjects += [f"CONSUMER.CREATE.{stream}.{who}{end}" for who in (name, "mine") for end in ("", f".{filtered}", ".>")]
    return [(f"$JS.API.{subject}", body) for subject in subjects for body in bodies]


@pytest.mark.parametrize(("template", "owner"), [("rollouter", Role.ROLLOUTER), ("verifier", Role.VERIFIER)])
async def test_no_form_of_create_alters_anothers_consumer(server: KeyedServer, template: str, owner: Role) -> None:
    """Its readers may create consumers on the same stream; whatever name they put where, this one stays as it was."""
    async with server.bus(owner) as bus, server.bus(ADMIN) as admin:
        consumer = WorkConsumer(bus, template, capacity=1)
        await consumer.create()
        writer, pattern = spec_of(consumer.spec.stream).subjects[0].publishers[0], consumer.spec.filter
        async with server.bus(writer) as publisher:
            await publisher.store(own(writer, pattern), b"x", {})
        info = f"CONSUMER.INFO.{consumer.stream}.{consumer.name}"
        before = _standing(await admin.request(info, {}))
        tried = 0
        for role in spec_of(consumer.spec.stream).readers:
            if role is owner:
                continue
            async with server.bus(role) as reader:
                for subject, config in _forgeries(consumer.stream, consumer.name, consumer.filter):
                    for action in ("", "create", "update"):
                        body = {"stream_name": consumer.stream, "config": config, "action": action}
                        with suppress(Forbidden):
                            await reader.client.request(subject, json.dumps(body).encode(), timeout=20)
                        tried += 1
                for verb in ("DELETE", "PAUSE", "RESET", "UNPIN", "LEADER.STEPDOWN", "PEER.REMOVE"):
                    await refused(reader, f"$JS.API.CONSUMER.{verb}.{consumer.stream}.{consumer.name}")
                for verb in ("NAMES", "LIST"):  # names that nobody can guess stay unknown
                    await refused(reader, f"$JS.API.CONSUMER.{verb}.{consumer.stream}")
            assert _standing(await admin.request(info, {})) == before, f"as {role}"
        assert tried


def _standing(info: dict[str, Any]) -> dict[str, Any]:
    return {key: info[key] for key in ("created", "config", "delivered", "ack_floor", "num_pending", "num_ack_pending")}


async def test_the_old_form_of_create_alters_a_consumer_that_its_body_names(server: KeyedServer) -> None:
    """Why nobody but the admin may use it: the server takes the name in the body and changes what it finds."""
    async with server.bus(Role.ROLLOUTER) as bus, server.bus(ADMIN) as admin:
        consumer = WorkConsumer(bus, "rollouter", capacity=1)
        await consumer.create()
        config = {"ack_policy": "explicit", "filter_subject": consumer.filter, "max_waiting": 64, "max_ack_pending": 1}
        config["name"] = consumer.name
        changed = await admin.request(f"CONSUMER.CREATE.{consumer.stream}", {"stream_name": consumer.stream, "config": config})
        assert changed["config"]["max_ack_pending"] == 1
        await consumer.create()
        info = await admin.request(f"CONSUMER.INFO.{consumer.stream}.{consumer.name}", {})
        assert info["config"]["max_ack_pending"] == consumer.spec.max_ack_pending


async def test_what_is_pulled_in_anothers_name_is_delivered_again(server: KeyedServer) -> None:
    """What accounts leave open: a push consumer aimed at another's pull subject has the server take that for a pull. Nobody
    gets the message, nothing acknowledges it, and its owner gets it when `ack_wait` is over."""
    async with server.bus(Role.ROLLOUTER) as owner, server.bus(Role.OBSERVER) as thief, server.bus(ADMIN) as admin:
        turns, name = SUBJECTS.stream(Stream.TURNS), f"x{next(NUMBERS)}"
        await owner.store(owner.subjects.turn(f"g{next(NUMBERS)}", 0, 0, 0), b"x", {})
        stop, got, consumer = asyncio.Event(), list[int](), WorkConsumer(owner, "sbxout-{x}", x=name, capacity=1)
        await consumer.create()
        info = f"CONSUMER.INFO.{consumer.stream}.{consumer.name}"
        async with server.bus(Role.SANDBOX) as sandbox:
            seq = await sandbox.store(SUBJECTS.sandbox_result(name), b"result", {})
        pull = f"$JS.API.CONSUMER.MSG.NEXT.{consumer.stream}.{consumer.name}"
        push = {"deliver_subject": pull, "ack_policy": "explicit", "headers_only": True, "deliver_policy": "last"}
        await thief.request(f"CONSUMER.CREATE.{turns}.{name}", {"stream_name": turns, "config": push})

        async def is_taken() -> bool:
            return bool((await admin.request(info, {}))["num_ack_pending"])

        await eventually(is_taken, within_s=30, what="the server takes the delivery for a pull")

        async def handler(item: Item) -> None:
            got.append(item.seq)
            stop.set()

        await asyncio.wait_for(consumer.run(handler, stop), 90)
        assert got == [seq]


def test_consumers_on_logs_have_names_that_can_be_denied() -> None:
    """Readers create consumers under any name but these, so none may be known to nobody before."""
    for consumer in CONSUMERS:
        if spec_of(consumer.stream).retention == "limits":
            assert "{" not in consumer.name


async def test_only_a_rollouter_reads_its_answers(server: KeyedServer) -> None:
    for spec in CONSUMERS:
        if spec.role is not Role.ROLLOUTER or "{x}" not in spec.name:
            continue
        for role in Role:
            if role is not Role.ROLLOUTER:
                async with server.bus(role) as bus:
                    await refused(bus, f"$JS.API.CONSUMER.MSG.NEXT.{SUBJECTS.stream(spec.stream)}.{spec.name.format(x='r0-1')}")


@pytest.mark.parametrize("role", list(Role))
async def test_blobs_are_written_by_few_and_read_by_few(server: KeyedServer, role: Role) -> None:
    async with server.bus(Role.TRAINER) as trainer:
        held = await blobs.put(trainer, f"weights-{next(NUMBERS)}", b"w" * 700_000)
    async with server.bus(role) as bus:
        if role in BLOB_WRITERS:
            await blobs.put(bus, f"mine-{next(NUMBERS)}", b"m" * 700_000)
        if role in BLOB_READERS:
            assert await blobs.get(bus, held) == b"w" * 700_000
        else:
            await refused(bus, f"$JS.API.DIRECT.GET.{SUBJECTS.blob_stream()}", {"seq": 1})


@pytest.mark.parametrize("identity", IDENTITIES)
async def test_nobody_listens_to_another_or_to_everything(server: KeyedServer, identity: str) -> None:
    reasons: list[str] = []
    bus = await server.connect(identity, on_fatal=reasons.append)
    foreign = [f"_INBOX_{other}.>" for other in IDENTITIES if other != identity]
    foreign += [">", "_INBOX.>", "_R_.>", SUBJECTS.pattern(">"), "$JS.EVENT.>", "$SYS.>"]
    for subject in foreign:
        await bus.client.subscribe(subject)
    await bus.client.flush()
    await eventually(lambda: len(reasons) >= len(foreign), within_s=30, what="every subscription is refused")
    for subject in foreign:
        assert f"the server refuses {identity}'s subscription of {subject.lower()}" in reasons
    await bus.close()


def test_names_that_may_join_are_permitted_and_others_are_not() -> None:
    """An engine's queue is called after it, so the server must know the name, or let every engine use every engine's."""
    name = SUBJECTS.stream(Stream.GEN)

    def pulls(*joining: str) -> set[str]:
        settings = check({"run": {"name": RUN}, "engine": {"names": ["e0"]}, "nats": {"joining": joining}})
        allowed = permissions(Role.ENGINE, RUN, instances_by_role(settings)).publish
        return {subject for subject in allowed if subject.startswith(f"$JS.API.CONSUMER.MSG.NEXT.{name}")}

    assert pulls() == {f"$JS.API.CONSUMER.MSG.NEXT.{name}.engine-e0"}
    assert pulls("e7") == pulls() | {f"$JS.API.CONSUMER.MSG.NEXT.{name}.engine-e7"}
    assert pulls("*") == {f"$JS.API.CONSUMER.MSG.NEXT.{name}.*"}
