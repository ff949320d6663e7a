"""What the tests of takeovers stand on: processes that are killed, and what must be true of whatever they left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from admission.joining import Bank, episode_fact, verdict_fact
from rollouter import service as rollouter_service
from schemas.codec import decode_any
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.message import Message
from schemas.table import Role, Stream
from schemas.trajectory import Episode, TurnRecord, Verdict
from services.bus import Bus
from services.config import Config, to_toml
from services.consume import read_all
from services.runtime import ServiceContext
from tests.rollout_stand import eventually, serving
from tests.takeover_child import shorten_leases

PATIENCE_S = 90.0


@pytest.fixture(name="short_leases", autouse=True)
def make_short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases come back soon in this process as well."""
    from schemas import table

    monkeypatch.setattr(table, "CONSUMERS", table.CONSUMERS)  # so that the end of the test puts them back
    shorten_leases()


class Child:
    """A service process of ours."""

    def __init__(self, role: Role, instance: str, config: Config, folder: Path, point: str = "") -> None:
        self._log = folder / f"{role}-{instance}-{time.monotonic_ns()}.log"
        path = folder / "config.toml"
        path.write_text(to_toml(config))
        command = [sys.executable, "-m", "tests.takeover_child", str(role), instance, str(path), *([point] if point else [])]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=os.getcwd())

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def ready(self) -> None:
        """Wait until it says that it does its work."""

        async def said_so() -> bool:
            return "ready" in self.said()

        await eventually(f"{self._log.name} is ready", said_so, PATIENCE_S)

    async def killed(self) -> None:
        """Wait until it has ended by SIGKILL."""

        async def over() -> bool:
            return self.process.poll() is not None

        await eventually(f"the end of {self._log.name}:\n{self.said()[-3000:]}", over, PATIENCE_S)
        assert self.process.returncode == -signal.SIGKILL, self.said()[-3000:]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


@contextmanager
def child(role: Role, instance: str, config: Config, folder: Path, point: str = "") -> Iterator[Child]:
    """A service process that is gone after the block."""
    made = Child(role, instance, config, folder, point)
    try:
        yield made
    finally:
        made.end()


@asynccontextmanager
async def rollouter(config: Config, instance: str) -> AsyncIterator[ServiceContext]:
    """A rollouter in this process."""
    async with serving(config, Role.ROLLOUTER, instance, rollouter_service.serve) as context:
        yield context


async def records_of(bus: Bus, group: str, slot: int) -> list[Message]:
    """Everything that the journal holds of one slot, in order."""
    return [decode_any(item.data) for item in await read_all(bus, Stream.TURNS, f"turn.{group}.{slot}.*.*")]


async def sealed(bus: Bus, group: str, slot: int, timeout_s: float = PATIENCE_S) -> Episode:
    """One slot's episode; there is never a second one."""
    subject = bus.subjects.episode(group, slot)

    async def there() -> bool:
        return await bus.last(subject) is not None

    await eventually(f"episode {group}/{slot}", there, timeout_s)
    items = await read_all(bus, Stream.EPISODES, f"episode.{group}.{slot}")
    assert len(items) == 1
    return items[0].decode(Episode)


async def check_journal(bus: Bus, lease: GroupLease, episode: Episode) -> list[TurnRecord]:
    """Invariants 1 and 2: the row is what the attempt's turns hold, token for token, and each turn was written once."""
    subjects = Counter(item.subject for item in await read_all(bus, Stream.TURNS, f"turn.{lease.group}.*.*.*"))
    assert set(subjects.values()) == {1}
    everything = await records_of(bus, lease.group, episode.slot)
    turns = [t for t in everything if isinstance(t, TurnRecord) and t.attempt == episode.attempt]
    assert [t.turn for t in turns] == list(range(episode.turns))
    parts = [(part.numpy(), sampled) for t in turns for part, sampled in ((t.prompt_ids, False), (t.sampled_ids, True))]
    ids, mask = episode.ids.numpy(), episode.mask.numpy()
    np.testing.assert_array_equal(ids, np.concatenate([values for values, _ in parts]))
    np.testing.assert_array_equal(mask, np.concatenate([np.full(values.shape, sampled) for values, sampled in parts]))
    np.testing.assert_array_equal(episode.logprobs.numpy()[mask], np.concatenate([t.logprobs.numpy() for t in turns]))
    assert episode.raw_logprobs is not None
    raw = np.concatenate([t.raw_logprobs.numpy() for t in turns if t.raw_logprobs is not None])
    np.testing.assert_array_equal(episode.raw_logprobs.numpy()[mask], raw)
    versions = [span.version for t in turns for span in t.versions for _ in range(span.start, span.end)]
    assert episode.token_versions()[mask].tolist() == versions
    assert set(episode.engines) == {t.engine for t in turns}
    starts = np.cumsum([0, *(values.shape[0] for values, _ in parts)])[1::2]
    assert episode.turn_starts.numpy().tolist() == starts[: episode.turns].tolist()
    return turns


async def joined(bus: Bus, one: GroupLease) -> ReadyGroup:
    """The group as the bank joins it."""
    bank = Bank()
    bank.lease(one)
    ready: ReadyGroup | None = None
    for item in await read_all(bus, Stream.EPISODES, f"episode.{one.group}.*", f"verdict.{one.group}.*"):
        message, slot = decode_any(item.data), int(item.subject.split(".")[-1])
        if isinstance(message, Episode):
            ready = bank.episode(episode_fact(one.group, slot, item.seq, item.digest, message)) or ready
        elif isinstance(message, Verdict):
            ready = bank.verdict(verdict_fact(one.group, slot, item.seq, item.digest, message)) or ready
    assert ready is not None
    return ready
