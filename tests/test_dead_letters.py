"""Dead letters: a message that nobody can use is kept before it is ended, shown, and given back where that makes sense."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from admission_stage import connected, make_lease, make_ready
from conftest import eventually
from keyed_server import KeyedServer

from admission.presence import lost_items
from schemas import table
from schemas.arrays import Array
from schemas.codec import digest, encode
from schemas.dead_letter import DeadLetter, DeadReason
from schemas.generation import AbortRequest, GenerateRequest
from schemas.lease import GroupLease
from schemas.table import Role, Stream, Subjects
from schemas.trajectory import SamplingConfig
from services.audit import gather
from services.bus import Bus
from services.consume import read_all
from services.dead_letters import bury
from services.dead_letters_command import CannotRedrive, redrivable
from services.high_water import cut_short
from services.items import DIGEST_HEADER, Item
from services.provision import provision
from services.work import Refused, WorkConsumer

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).resolve().parent.parent
SMALL_STORE = 64 * 2**20


def request(number: int) -> GenerateRequest:
    ids = Array.of(np.arange(3, dtype=np.int32))
    return GenerateRequest(request_id=str(number), requester="q", session="s", prompt_ids=ids, sampling=SamplingConfig())


async def letters(bus: Bus) -> list[tuple[int, DeadLetter]]:
    return [(item.seq, item.decode(DeadLetter)) for item in await read_all(bus, Stream.DEAD)]


async def stored(bus: Bus, stream: Stream) -> int:
    return (await bus.stream_state(stream)).messages


def headrace(url: str, run: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *words, "--nats", url, "--set", f"run.name={run}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment, check=False)


class Worker:
    """A work consumer as a task; what its handler was given."""

    def __init__(self, bus: Bus, template: str, handle, **options: object) -> None:
        self.consumer = WorkConsumer(bus, template, capacity=4, drain_s=2.0, **options)
        self.given: list[int] = []
        self._stop = asyncio.Event()
        self._handle = handle
        self.task = asyncio.create_task(self.consumer.run(self._on_item, self._stop))

    async def _on_item(self, item: Item) -> None:
        self.given.append(item.seq)
        await self._handle(item)

    async def end(self) -> None:
        self._stop.set()
        await asyncio.wait_for(self.task, 30)


async def decode_request(item: Item) -> None:
    item.decode(GenerateRequest)


async def test_a_request_that_nobody_can_read_is_kept_ended_shown_and_given_back(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.ENGINE, "e0") as bus:
        subject = bus.subjects.generate("e0")
        await bus.publish(subject, request(0))
        await bus.store(subject, b"poison", {"From": "a test"})
        await bus.publish(subject, AbortRequest(request_id="1", requester="q", reason="of another kind"))
        await bus.publish(subject, request(2))
        worker = Worker(bus, "engine-{x}", decode_request, x="e0")
        await eventually(lambda: worker.consumer.done == 2, within_s=60)
        (_, poison), (_, other) = sorted(await letters(bus), key=lambda found: found[1].seq)
        assert (poison.stream, poison.seq, poison.subject, poison.body) == ("GEN", 2, subject, b"poison")
        assert (poison.reason, poison.refused_by, poison.consumer) == (DeadReason.UNREADABLE, "engine-e0", "engine-e0")
        assert (poison.digest, poison.declared_digest, poison.headers["From"]) == (digest(b"poison"),) * 2 + ("a test",)
        assert "truncated" in poison.detail
        assert (other.seq, other.reason) == (3, DeadReason.UNREADABLE)
        assert "expected a GenerateRequest, got a AbortRequest" in other.detail

        async def ended() -> bool:
            return await stored(bus, Stream.GEN) == 0

        await eventually(ended, within_s=30, what="the originals are terminated")
        assert bus.alarms["dead_letters"] == 2

        shown = await asyncio.to_thread(headrace, nats_url, run_name, "dead-letters", "list")
        assert shown.returncode == 0, shown.stderr
        assert "gen.req.e0" in shown.stdout
        assert "unreadable" in shown.stdout
        number = next(seq for seq, letter in await letters(bus) if letter.seq == 2)
        one = await asyncio.to_thread(headrace, nats_url, run_name, "dead-letters", "show", str(number))
        assert one.returncode == 0, one.stderr
        assert "b'poison'" in one.stdout
        assert "engine-e0" in one.stdout
        status = await asyncio.to_thread(headrace, nats_url, run_name, "status")
        assert "dead letters: 2" in status.stdout, status.stderr

        again = await asyncio.to_thread(headrace, nats_url, run_name, "dead-letters", "redrive", str(number))
        assert again.returncode == 0, again.stderr
        await eventually(lambda: worker.given.count(5), within_s=60, what="it came to the engine again")

        async def third() -> list[DeadLetter]:
            return [letter for _, letter in await letters(bus) if letter.seq == 5]

        (repeated,) = await eventually(third, within_s=60)
        assert (repeated.body, repeated.headers["From"]) == (b"poison", "a test")
        await worker.end()


async def test_what_a_once_only_subject_holds_cannot_be_given_back_and_it_says_what_happens_instead(
    nats_url: str, run_name: str
) -> None:
    async with connected(nats_url, run_name, Role.ROLLOUTER) as bus:
        await bus.store(bus.subjects.lease(0), b"no lease", {})
        await bus.publish_once(bus.subjects.lease(1), make_lease(1))
        worker = Worker(bus, "rollouter", lambda item: _decode_lease(item))
        await eventually(lambda: worker.consumer.done == 1, within_s=60)
        ((number, letter),) = await eventually(lambda: letters(bus), within_s=30)
        assert letter.subject == bus.subjects.lease(0)
        refused = await asyncio.to_thread(headrace, nats_url, run_name, "dead-letters", "redrive", str(number))
        assert refused.returncode == 2
        assert "task.lease.0: that subject may hold one message for ever" in refused.stderr
        assert "ordinal 0 names no group; the next ordinal is leased" in refused.stderr
        assert await stored(bus, Stream.TASKS) == 2, "nothing was written"
        await worker.end()


async def _decode_lease(item: Item) -> None:
    item.decode(GroupLease)


async def test_damaged_bytes_are_never_given_back_as_if_they_were_whole(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.ENGINE, "e0") as bus:
        good = encode(request(0))
        await bus.jetstream.publish(bus.subjects.generate("e0"), good[:-1] + b"?", headers={DIGEST_HEADER: digest(good)})
        worker = Worker(bus, "engine-{x}", decode_request, x="e0")
        ((number, letter),) = await eventually(lambda: letters(bus), within_s=60)
        assert (letter.reason, letter.declared_digest) == (DeadReason.DIGEST_MISMATCH, digest(good))
        assert worker.given == [], "the handler never saw it"
        refused = await asyncio.to_thread(headrace, nats_url, run_name, "dead-letters", "redrive", str(number))
        assert refused.returncode == 2
        assert "would make the damage look whole" in refused.stderr
        await worker.end()


async def test_a_handler_may_refuse_for_good(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.ENGINE, "e0") as bus:
        await bus.publish(bus.subjects.generate("e0"), request(0))

        async def refuse(item: Item) -> None:
            raise Refused("no such adapter")

        worker = Worker(bus, "engine-{x}", refuse, x="e0")
        ((_, letter),) = await eventually(lambda: letters(bus), within_s=60)
        assert (letter.reason, letter.detail, letter.deliveries) == (DeadReason.REFUSED, "no such adapter", 1)
        assert redrivable(letter, bus.subjects.prefix).pattern == "gen.req.*"
        await worker.end()


async def test_a_message_that_ends_its_worker_at_every_delivery_is_refused_in_the_end(
    nats_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poison message must not crash one worker after the other for ever."""
    monkeypatch.setattr("services.work._MAX_TRIES", 3)
    soon = tuple(replace(row, ack_wait_s=1.0) if row.name == "engine-{x}" else row for row in table.CONSUMERS)
    monkeypatch.setattr(table, "CONSUMERS", soon)  # a delivery that nobody keeps comes back
    async with connected(nats_url, run_name, Role.ENGINE, "e0") as bus:
        await bus.publish(bus.subjects.generate("e0"), request(0))
        seen = 0

        async def crash(item: Item) -> None:
            nonlocal seen
            seen += 1
            raise ZeroDivisionError("this message does it")

        for attempt in (1, 2):
            worker = Worker(bus, "engine-{x}", crash, x="e0")
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(worker.task, 90)  # after it has waited for the acknowledgement in vain
            assert (seen, await letters(bus)) == (attempt, [])
        worker = Worker(bus, "engine-{x}", crash, x="e0")
        ((_, letter),) = await eventually(lambda: letters(bus), within_s=90)
        assert (letter.reason, letter.deliveries) == (DeadReason.REFUSED, 3)
        assert "failed at each of 3 deliveries, last with ZeroDivisionError" in letter.detail
        await worker.end()


async def test_a_message_that_cannot_be_kept_is_not_ended(
    nats_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The letter comes first: while DEAD is full, the message stays where it is and comes back."""
    monkeypatch.setattr("services.work._DAMAGE_RETRY_S", 1.0)
    monkeypatch.setattr("services.dead_letters._PATIENCE_S", 0.5)
    bus = await Bus.connect(nats_url, run_name, Role.ENGINE, "e0")
    await provision(bus, SMALL_STORE)
    limit = (await bus.stream_state(Stream.DEAD)).max_bytes
    filler = np.random.default_rng(0).integers(0, 256, limit // 4, dtype=np.uint8).tobytes()
    for number in range(3):
        await bus.store(bus.subjects.dead_letter(Stream.SBX, number), filler, {})
    last = filler[: limit - (await bus.request(f"STREAM.INFO.{bus.subjects.stream(Stream.DEAD)}", {}))["state"]["bytes"] - 400]
    await bus.store(bus.subjects.dead_letter(Stream.SBX, 9), last, {})
    await bus.store(bus.subjects.generate("e0"), b"poison", {})
    worker = Worker(bus, "engine-{x}", decode_request, x="e0")
    await eventually(lambda: len(worker.given) >= 2, within_s=60, what="it comes back")
    assert bus.alarms["dead_letter_not_kept"]
    assert await stored(bus, Stream.GEN) == 1
    await worker.end()
    await bus.close()


async def test_a_large_body_is_cut_and_its_size_told(nats_url: str, run_name: str) -> None:
    bus = await Bus.connect(nats_url, run_name, Role.ENGINE, "e0")
    await provision(bus, SMALL_STORE)
    big = np.random.default_rng(0).integers(0, 256, 400_000, dtype=np.uint8).tobytes()
    await bus.store(bus.subjects.generate("e0"), big, {})
    worker = Worker(bus, "engine-{x}", decode_request, x="e0")
    ((_, letter),) = await eventually(lambda: letters(bus), within_s=60)
    assert not letter.is_whole()
    assert (letter.size_bytes, letter.digest, letter.body) == (len(big), digest(big), big[: len(letter.body)])
    with pytest.raises(CannotRedrive, match=f"only {len(letter.body)} of its 400000 bytes were kept"):
        redrivable(letter, bus.subjects.prefix)
    await worker.end()
    await bus.close()


async def test_an_onlooker_keeps_no_letters(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.OBSERVER) as bus:
        item = Item(bus.subjects.stream(Stream.GEN), bus.subjects.generate("e0"), 1, 0, b"x", digest(b"x"), {})
        assert not await bury(bus, item, DeadReason.UNREADABLE, "not a message")
        assert await letters(bus) == []


async def test_under_its_own_key_everyone_can_do_its_part(tmp_path: Path) -> None:
    """An engine keeps a letter, the bank sees how far the workers are, admission looks at a batch, the onlooker audits."""
    server = KeyedServer(tmp_path)
    server.start()
    try:
        await server.provision()
        async with server.bus("rollouter") as rollouter, server.bus("engine") as engine, server.bus("observer") as observer:
            await rollouter.store(rollouter.subjects.generate("e0"), b"poison", {})
            worker = Worker(engine, "engine-{x}", decode_request, x="e0")
            ((number, letter),) = await eventually(lambda: letters(observer), within_s=60)
            assert letter.refused_by == "engine-t"
            found = await gather(observer)
            assert [seq for seq, _ in found.letters] == [number]
            await WorkConsumer(rollouter, "rollouter", capacity=1).create()
            async with server.bus("bank") as bank, server.bus("admission") as admission:
                info = await bank.request(f"CONSUMER.INFO.{bank.subjects.stream(Stream.TASKS)}.rollouter", {})
                assert info["ack_floor"]["stream_seq"] == 0
                assert await cut_short(bank) == []
                assert (await lost_items(admission, [(1, make_ready(0))]))["g00000000"].stream == "READY"
            words = ("dead-letters", "redrive", str(number), "--set", f'nats.nkey_folder="{server.keys}"')
            again = await asyncio.to_thread(headrace, server.url, observer.run, *words)
            assert again.returncode == 0, again.stderr
            await eventually(lambda: len(worker.given) == 2, within_s=60, what="it came to the engine again")
            await worker.end()
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("episode.g00000003.1", "group g00000003 is abandoned as lost_item"),
        ("verdict.g00000003.1", "group g00000003 is abandoned as lost_item"),
        ("ready.g00000003", "group g00000003 is abandoned as lost_item"),
        ("graded.e00000003", "evaluation group e00000003 count as censored"),
        ("turn.g00000003.2.0.5", "slot 2 of g00000003 is played under the next attempt's name"),
        ("ledger.batch.3", "stops and names it"),
        ("policy.active", "writes the next value itself"),
        ("nothing.of.ours", "no subject of the table"),
    ],
)
def test_every_subject_that_takes_nothing_back_says_what_happens_instead(name: str, text: str) -> None:
    prefix = Subjects("t").prefix
    letter = DeadLetter(
        run="t",
        stream="",
        seq=1,
        subject=prefix + name,
        reason=DeadReason.UNREADABLE,
        detail="",
        digest="d",
        declared_digest="d",
        size_bytes=1,
        body=b"x",
        headers={},
        stored_ns=1,
        refused_by="bank-0",
    )
    with pytest.raises(CannotRedrive, match=text):
        redrivable(letter, prefix)
