"""What the trainer's recovery tests stand on: a tiny model, a trainer in a process of its own, and the parts around it.

Admission, param_sync and engines are the real services, as tasks of the test; leases, episodes and verdicts come from
`Sampled`, which stamps each token with what an engine serves at that moment.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from admission_stage import make_lease
from conftest import eventually
from tiny_model import VOCABULARY, write_tiny_model
from trainer_zygote import Zygote

from admission.joining import Bank, episode_fact, verdict_fact
from schemas.arrays import Array
from schemas.codec import decode_any
from schemas.group import ReadyGroup
from schemas.ledger import BatchEntry, BatchGroup, LedgerEntry
from schemas.lineage import Lineage
from schemas.policy import EngineState
from schemas.table import Stream
from schemas.termination import Termination
from schemas.training import StepCommit
from schemas.trajectory import Episode, Verdict, VersionSpan
from services.bus import Bus
from services.config import Config, check, to_toml
from services.consume import fold, read_all

ROOT = Path(__file__).resolve().parent.parent
# what an earlier trainer in this process may have set
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GROUPS, SIBLINGS, TOKENS = 2, 2, 12


def configuration(folder: Path, run: str, url: str, **trainer: Any) -> Config:
    """A run on the tiny model below `folder`. The model is made once."""
    model = folder / "model"
    if not model.exists():
        write_tiny_model(model)
    return check(
        {
            "run": {"name": run, "folder": str(folder / "runs"), "max_steps": 6, "seed": 3},
            "nats": {"url": url, "store_bytes": 256 * 2**20},
            "policy": {"model": str(model)},
            "window": {"max_groups": 8},
            "rollout": {"group_size": SIBLINGS},
            "engine": {"kind": "simulated", "names": ["e0", "e1"]},
            "admission": {"groups_per_batch": GROUPS, "max_lag": 50, "min_rewards": 1},
            "trainer": {"device": "cpu", "learning_rate": 0.01, "checkpoint_every": 2, "keep_checkpoints": 3, **trainer},
            "param_sync": {"anchor_ratio": 1000.0},  # a step changes most of the tiny model, and weighs as much as an anchor
            "fencing": {"renew_s": 0.5, "trainer_ttl_s": 20.0, "ttl_s": 10.0, "cut_off_s": 45.0},
            "telemetry": {"heartbeat_s": 0.5},
        }
    )


@functools.cache
def zygote() -> Zygote:
    """The process that forks this test process's trainers."""
    made = Zygote()
    atexit.register(made.end)
    return made


class TrainerProcess:
    """`headrace run trainer` as a process group of its own, with its log. `killed_at` names a point where it kills itself."""

    def __init__(self, config: Config, log: Path, *, instance: str = "0", killed_at: str = "", url: str = "") -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.with_suffix(".toml")
        file.write_text(to_toml(config), encoding="utf-8")
        arguments = ["run", "trainer", "--instance", instance, "--config", str(file), "--nats", url or config.nats.url]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        ours = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        environment = {**ours, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", **threads}
        self.process = zygote().fork(arguments, environment, log, killed_at)

    def kill(self) -> None:
        """SIGKILL to this process alone."""
        self.process.kill()
        self.process.wait(30)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def ended(self, within_s: float = 120.0) -> int:
        """Its exit code, once it has ended by itself."""
        await eventually(lambda: self.process.poll() is not None, within_s=within_s, what=f"end of the trainer\n{self.tail()}")
        return int(self.process.returncode)

    def sweep(self) -> None:
        """Whatever is left of its group."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(30)

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def said(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")


@contextmanager
def trainer(config: Config, log: Path, **options: str) -> Iterator[TrainerProcess]:
    """A trainer that is gone at the end, however it ended."""
    running = TrainerProcess(config, log, **options)
    try:
        yield running
    finally:
        running.sweep()


async def commits(bus: Bus) -> list[StepCommit]:
    """Every step commit, in stream order."""
    return [item.decode(StepCommit) for item in await read_all(bus, Stream.TRAIN, "train.step.*")]


async def line(bus: Bus) -> Lineage:
    found = Lineage()
    for commit in await commits(bus):
        found.add(commit)
    return found


async def reached(
    bus: Bus, step: int, *, incarnation: int = -1, within_s: float = 240.0, trainer: TrainerProcess | None = None
) -> None:
    """Wait until the step is committed on the line, by this incarnation if one is named."""
    seen = -1

    async def there() -> bool:
        nonlocal seen
        if trainer is not None:
            assert trainer.process.poll() is None, trainer.tail()
        if (last := await bus.last_sequence(Stream.TRAIN)) == seen:  # a fold costs a consumer, which the server counts
            return False
        seen = last
        commit = (await line(bus)).commit_of(step)
        return commit is not None and incarnation in (-1, commit.incarnation)

    await eventually(there, within_s=within_s, what=f"step {step}\n{trainer.tail() if trainer else ''}")


class Sampled:
    """Leases, episodes, verdicts and ready groups of one run, made here; each token says which version sampled it."""

    def __init__(self, bus: Bus, seed: int = 7) -> None:
        self._bus = bus
        self._random = np.random.default_rng(seed)
        self._bank = Bank()
        self.states: dict[str, EngineState] = {}
        self.closed: set[str] = set()
        self.made: dict[str, tuple[VersionSpan, ...]] = {}
        self._one_at_a_time = asyncio.Lock()

    async def group(self, *spans: VersionSpan) -> tuple[int, ReadyGroup]:
        """Publish one whole group whose sampled tokens were sampled as `spans` say, from position 2 on."""
        async with self._one_at_a_time:
            return await self._group(spans)

    async def _group(self, spans: tuple[VersionSpan, ...]) -> tuple[int, ReadyGroup]:
        lease = make_lease(len(self.made), group_size=SIBLINGS, run=self._bus.run)
        await self._bus.publish_once(self._bus.subjects.lease(lease.ordinal), lease)
        self._bank.lease(lease)
        ready: ReadyGroup | None = None
        for slot in range(SIBLINGS):
            episode = self._episode(lease.group, lease.task_id, slot, spans)
            stored = await self._bus.publish_once(self._bus.subjects.episode(lease.group, slot), episode)
            self._bank.episode(episode_fact(lease.group, slot, stored.seq, stored.digest, episode))
            verdict = Verdict(
                run=self._bus.run,
                group=lease.group,
                slot=slot,
                episode_digest=stored.digest,
                status="graded",
                success=slot == 0,
                reward=float(slot == 0),
            )
            judged = await self._bus.publish_once(self._bus.subjects.verdict(lease.group, slot), verdict)
            ready = self._bank.verdict(verdict_fact(lease.group, slot, judged.seq, judged.digest, verdict))
        assert ready is not None
        self.made[lease.group] = spans
        return (await self._bus.publish_once(self._bus.subjects.ready(lease.group), ready)).seq, ready

    def _episode(self, group: str, task_id: str, slot: int, spans: tuple[VersionSpan, ...]) -> Episode:
        mask = np.arange(TOKENS) >= 2
        logprobs = np.where(mask, self._random.normal(-4.2, 0.1, TOKENS), 0.0).astype(np.float32)
        return Episode(
            run=self._bus.run,
            group=group,
            slot=slot,
            attempt=0,
            task_id=task_id,
            family="files",
            template="files-t00",
            manifest="m0",
            termination=Termination.AGENT_FINISH,
            ids=Array.of(self._random.integers(0, VOCABULARY, TOKENS).astype(np.int32)),
            mask=Array.of(mask),
            logprobs=Array.of(logprobs),
            versions=spans,
            turn_starts=Array.of(np.array([2], dtype=np.int32)),
            turns=1,
            sampled_tokens=TOKENS - 2,
        )

    async def keep_sampling(self, window: int, stop: asyncio.Event) -> None:
        """Keep up to `window` groups open, each sampled under what some engine serves when it is made."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_engines(stop))
            group.create_task(self._follow_ledger(stop))
            while not stop.is_set():
                serving = [state for state in self.states.values() if state.phase == "serving" and state.version >= 0]
                if serving and len(self.made) - len(self.closed) < window:
                    state = serving[len(self.made) % len(serving)]
                    await self.group(VersionSpan(2, TOKENS, state.version, state.incarnation))
                else:
                    await asyncio.sleep(0.05)

    async def _follow_engines(self, stop: asyncio.Event) -> None:
        async for item in fold(self._bus, Stream.POLICY, "policy.engine.*", stop=stop):
            if item is not None:
                state = item.decode(EngineState)
                self.states[state.engine] = state

    async def _follow_ledger(self, stop: asyncio.Event) -> None:
        async for item in fold(self._bus, Stream.LEDGER, stop=stop):
            if item is not None:
                entry = decode_any(item.data)
                self.closed |= {m.group for m in entry.groups} if isinstance(entry, BatchEntry) else {entry.group}


async def write_ledger(bus: Bus, sampled: Sampled, steps: Iterable[int]) -> None:
    """The batches of these steps as admission would have decided them, all sampled under version 0."""
    for step in steps:
        members = [await sampled.group(VersionSpan(2, TOKENS, 0)) for _ in range(GROUPS)]
        entry = BatchEntry(
            run=bus.run,
            step=step,
            version=step,
            incarnation=0,
            groups=tuple(
                BatchGroup(group=ready.group, ready_seq=seq, oldest_version=0, newest_version=0, lag=step)
                for seq, ready in members
            ),
            ready_high_water=members[-1][0],
            demand_seq=0,
            settings_hash="",
            max_lag=50,
        )
        await bus.publish_once(bus.subjects.batch(step), entry)


async def ledger_of(bus: Bus) -> list[tuple[int, LedgerEntry]]:
    return [(item.seq, decode_any(item.data)) for item in await read_all(bus, Stream.LEDGER)]
