"""A whole line of real services under one supervisor, on a real server of ours: parts of it are held, and the record is read.

What must be true is computed from the streams afterwards, not from counters that services keep of themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import nats.errors

from admission.conservation import Account, account
from loadtests.chaos.leftovers import clear
from loadtests.chaos.local_run import LocalRun
from loadtests.chaos.settings import ROOT, overrides
from schemas.codec import decode_any
from schemas.lease import GroupLease
from schemas.ledger import BatchEntry, LedgerEntry, QuarantineEntry
from schemas.sandbox import SandboxAttach, SandboxReset, SandboxRun, SandboxSeal
from schemas.table import CONSUMERS, Role, Stream, consumer_of
from schemas.training import StepCommit
from services.bus import Bus
from services.items import IntegrityError, Item
from services.pull import acknowledge, status_of
from services.sandbox.mounts import mounts_under, unmount
from tests.conftest import NatsServer, eventually

WINDOW, SIBLINGS, BATCH = 6, 2, 2
SETTINGS = (
    "engine.kind=transformers",
    'engine.names=["e0"]',
    f"window.max_groups={WINDOW}",
    "window.adapt=false",
    f"rollout.group_size={SIBLINGS}",
    f"admission.groups_per_batch={BATCH}",
    "admission.max_lag=4",
    "rollout.sandbox_timeout_s=90",
    "rollout.generate_timeout_s=90",
    "telemetry.heartbeat_s=0.5",
    "telemetry.trajectories_per_step=0",
    "eval.every_steps=0",
    "eval.at_start=false",
    "eval.at_end=false",
    "run.max_steps=0",
    "fencing.cut_off_s=4",
    "fencing.ttl_s=2",
    "fencing.renew_s=0.5",
    "fencing.trainer_ttl_s=3",
    "nats.connect_timeout_s=5",
    "nats.embedded_keys=false",  # the server is ours
)
WITHIN_S = 150.0  # a bound alone; starts of nine processes are in it


@dataclass(frozen=True)
class Picture:
    """One run's record at one moment."""

    leases: list[tuple[int, GroupLease]]  # with the server's time of each
    ledger: list[tuple[int, LedgerEntry]]
    steps: list[StepCommit]
    ready: list[str]
    closings: list[tuple[int, LedgerEntry]]  # the ledger again, read after the leases: every closing that made room for one

    def account(self) -> Account:
        return account([lease for _, lease in self.leases], [entry for _, entry in self.ledger])

    def most_open(self) -> int:
        """The most groups that were leased and not closed at any instant, by the times at which the server stored each item.

        The sampler leases because of what it has read in the ledger, so one server's times put cause before effect.
        """
        events = [(time_ns, 1) for time_ns, _ in self.leases]
        events += [(time_ns, -len(e.groups) if isinstance(e, BatchEntry) else -1) for time_ns, e in self.closings]
        now = most = 0
        for _, change in sorted(events):
            now += change
            most = max(most, now)
        return most

    def open_and_ready(self) -> set[str]:
        return set(self.account().open) & set(self.ready)


async def picture(bus: Bus) -> Picture:
    """Everything that the streams hold by now. LEDGER first: who is closed in it is leased in what is read after it."""
    ledger = [(item.time_ns, decode_any(item.data)) for item in await stored(bus, Stream.LEDGER)]
    ready = [item.subject.rpartition(".")[2] for item in await stored(bus, Stream.READY) if ".ready." in item.subject]
    leases = [(item.time_ns, item.decode(GroupLease)) for item in await stored(bus, Stream.TASKS)]
    steps = [item.decode(StepCommit) for item in await stored(bus, Stream.TRAIN) if ".train.step." in item.subject]
    closings = [(item.time_ns, decode_any(item.data)) for item in await stored(bus, Stream.LEDGER)]
    return Picture(leases=leases, ledger=ledger, steps=steps, ready=ready, closings=closings)


_seen: WeakKeyDictionary[Bus, dict[Stream, list[Item]]] = WeakKeyDictionary()


async def stored(bus: Bus, stream: Stream) -> list[Item]:
    """A log up to now, by single reads of what is new: a repeated look must not cost the server a consumer each time."""
    items = _seen.setdefault(bus, {}).setdefault(stream, [])
    for seq in range(len(items) + 1, await bus.last_sequence(stream) + 1):
        items.append(await bus.get(stream, seq))
    return list(items)


async def sealed_episodes(bus: Bus) -> tuple[set[tuple[str, int]], int]:
    """(group, slot) of every sealed episode, and the most at any point of EPISODES that had no verdict."""
    sealed, waiting, most = set[tuple[str, int]](), set[tuple[str, int]](), 0
    for item in await stored(bus, Stream.EPISODES):
        kind, group, slot = item.subject.removeprefix(bus.subjects.prefix).split(".")
        if kind == "episode":
            sealed.add((group, int(slot)))
            waiting.add((group, int(slot)))
        else:
            waiting.discard((group, int(slot)))
        most = max(most, len(waiting))
    return sealed, most


async def consumer(bus: Bus, template: str, **names: str) -> dict[str, Any]:
    """The server's words on a work consumer."""
    spec = consumer_of(template)
    return await bus.request(f"CONSUMER.INFO.{bus.subjects.stream(spec.stream)}.{spec.name.format(**names)}", {})


async def sandbox_requests(bus: Bus) -> Counter[str]:
    """Requests to executors that are still in their queue, by sandbox; removals aside, which nobody waits for.

    A sandbox can have two: one that is answered and whose acknowledgement is not there yet, and the next.
    """
    found = Counter[str]()
    state = await bus.stream_state(Stream.SBX)
    for seq in range(state.first_seq, state.last_seq + 1):
        try:
            item = await bus.get(Stream.SBX, seq)
        except IntegrityError:  # it is answered and gone
            continue
        message = decode_any(item.data)
        if isinstance(message, SandboxReset | SandboxRun | SandboxSeal | SandboxAttach):
            found[message.sandbox] += 1
    return found


async def _has_streams(bus: Bus) -> bool:
    return "error" not in await bus.api(f"STREAM.INFO.{bus.subjects.blob_stream()}", {})  # the last one to be made


class Line:
    """The run, its server, and a hand on each of its processes."""

    def __init__(self, folder: Path, sandboxes: Path, *settings: str) -> None:
        (folder / "server").mkdir()
        self.server = NatsServer(folder / "server")
        base = (*SETTINGS, f'nats.url="{self.server.url}"', f'sandbox.root="{sandboxes}"', *settings)
        self.run = LocalRun(overrides(base, "press", folder))

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        """A look at the streams from outside."""
        bus = await Bus.connect(self.server.url, self.run.config.run.name, Role.OBSERVER, f"look-{os.getpid()}")
        try:
            await eventually(lambda: _has_streams(bus), within_s=WITHIN_S, what="the run's streams")
            yield bus
        finally:
            await bus.close()

    @contextmanager
    def held(self, label: str) -> Iterator[None]:
        """A process stands still while the block runs."""
        assert self.run.signal(label, signal.SIGSTOP) is not None, self.run.said()
        try:
            yield
        finally:
            self.run.signal(label, signal.SIGCONT)

    async def flows(self, bus: Bus, steps: int = 1) -> None:
        """Wait until so many further steps are committed."""
        wanted = len((await picture(bus)).steps) + steps
        last = -1

        async def there() -> bool:
            nonlocal last
            assert self.run.running(), f"{self.run.said()}\n{self.run.logs()}"
            if (now := await bus.last_sequence(Stream.TRAIN)) == last:
                return False
            last = now
            return len((await picture(bus)).steps) >= wanted

        try:
            await eventually(there, within_s=WITHIN_S, what=f"{wanted} committed steps")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.run.said()}\n{self.run.logs()}") from None

    async def all_closed(self, bus: Bus, groups: set[str]) -> Picture:
        """Wait until each of these groups has its fate; gives the record then."""

        async def closed() -> Picture | None:
            now = await picture(bus)
            return now if not groups & set(now.account().open) else None

        found: Picture = await eventually(closed, within_s=WITHIN_S, what=f"the fate of {sorted(groups)}")
        return found

    def resident_bytes(self) -> dict[str, int]:
        """Memory of each service process."""
        found = {}
        for label in self.run.labels():
            process = self.run.now(label)
            with_it = Path(f"/proc/{process.pid}/statm") if process is not None else None
            if with_it is not None and with_it.exists():
                found[label] = int(with_it.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return found


@contextmanager
def running_line(folder: Path, *settings: str) -> Iterator[Line]:
    """A line that works while the block runs; nothing of it is left afterwards."""
    sandboxes = Path(tempfile.mkdtemp(prefix="hr-sbx-"))
    sandboxes.chmod(0o711)  # a sandbox's own user must reach it, unlike pytest's folders
    line = Line(folder, sandboxes, *settings)
    line.server.start()
    try:
        line.run.start()
        yield line
    finally:
        line.run.kill()
        clear(line.run)
        line.server.kill()
        remove_sandboxes(sandboxes)


def remove_sandboxes(folder: Path) -> None:
    """What services that were ended hard have left mounted, and the folder."""
    for point in sorted(mounts_under(str(folder)), reverse=True):
        unmount(point)
    shutil.rmtree(folder)


def check_record(now: Picture, *, reasons: frozenset[str] = frozenset({"stale"})) -> None:
    """Invariants 3 and 4 on the record: conservation, the window at every instant, each committed group in its batch alone.

    `reasons`: why groups may be quarantined; none may be abandoned.
    """
    books = now.account()
    assert books.holds, books.line()
    assert now.most_open() <= WINDOW, f"{now.most_open()} open at once; {books.line()}"
    others = [e for _, e in now.ledger if isinstance(e, QuarantineEntry) and e.reason not in reasons]
    assert not others and not books.abandoned, f"{books.line()}\n{[(e.group, str(e.reason), e.detail) for e in others]}"
    batches = {entry.step: entry for _, entry in now.ledger if isinstance(entry, BatchEntry)}
    trained = [group for step in now.steps for group in step.groups]
    assert len(trained) == len(set(trained))
    assert [step.step for step in now.steps] == list(range(len(now.steps)))
    for step in now.steps:
        assert step.groups == tuple(member.group for member in batches[step.step].groups)


async def settle(seconds: float) -> None:
    """Time for whatever would go beyond a bound to do so; nothing is asserted about how long anything takes."""
    await asyncio.sleep(seconds)


async def lower_limit(bus: Bus, stream: Stream, *, room_bytes: int) -> int:
    """Set a stream's limit a little above what it holds, as somebody does who gives it too little; gives the limit."""
    name = bus.subjects.stream(stream)
    info = await bus.request(f"STREAM.INFO.{name}", {})
    limit = int(info["state"]["bytes"]) + room_bytes
    await bus.request(f"STREAM.UPDATE.{name}", {**info["config"], "max_bytes": limit})
    return limit


def said(line: Line, label: str, event: str, *words: str) -> list[str]:
    """Lines of a service's log with this event and all of these words."""
    log = line.run.folder / "logs" / f"{label}.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [text for text in lines if f'"{event}"' in text and all(word in text for word in words)]


async def has_said(line: Line, label: str, event: str, *words: str) -> None:
    """Wait until a service's log has such a line."""
    what = f"{label}: {event}, with {words}"
    await eventually(lambda: said(line, label, event, *words), within_s=WITHIN_S, what=what)


async def command(line: Line, *words: str, code: int = 0) -> str:
    """What a `headrace` command prints about this run."""
    argv = [sys.executable, "-m", "services.cli", *words, "--config", str(line.run.folder / "config.toml")]
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == code, output.decode(errors="replace")
    return output.decode(errors="replace")


async def left_to_time_outs(bus: Bus, *roles: Role) -> list[str]:
    """Messages of work consumers (of these roles, or of all) that were delivered and neither acknowledged nor handed back.

    Nobody has them, and they come again only when their time is over; everything else comes at once to whoever asks. A server
    that was killed forgets the acknowledgements of its last tenth of a second, so this says nothing after that.
    """
    found = []
    of_them = [spec.name.partition("{")[0] for spec in CONSUMERS if not roles or spec.role in roles]
    for spec in (Stream.TASKS, Stream.EPISODES, Stream.GEN, Stream.SBX):
        stream = bus.subjects.stream(spec)
        for info in (await bus.request(f"CONSUMER.LIST.{stream}", {}))["consumers"] or []:
            if info["config"].get("durable_name") and info["name"].startswith(tuple(of_them)):
                owed = info["num_pending"] + info["num_ack_pending"]
                came = await pulled(bus, stream, info["name"], owed)
                if came < owed:
                    found.append(f"{info['name']}: {owed - came} of {info['num_pending']} + {info['num_ack_pending']}")
    return found


async def pulled(bus: Bus, stream: str, consumer: str, count: int) -> int:
    """How many messages a work consumer gives out now; each is handed back."""
    if not count:
        return 0
    inbox = bus.client.new_inbox()
    subscription = await bus.client.subscribe(inbox)
    request = json.dumps({"batch": count, "expires": 2_000_000_000}).encode()
    await bus.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", request, reply=inbox)
    came = 0
    try:
        while came < count:
            message = await subscription.next_msg(timeout=4)
            if status_of(message) is not None:
                break
            came += 1
            await acknowledge(message, b"-NAK")
    except nats.errors.TimeoutError:
        pass
    finally:
        await subscription.unsubscribe()
    return came
