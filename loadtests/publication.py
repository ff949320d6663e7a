"""What a change of weights costs: pause-all against progressive publication, in every in-flight mode.

    python -m loadtests.publication --json OUT [--kind simulated|vllm] [--steps N] [--compression N] [--only "NAME|NAME"]

Real: nats-server, param_sync, the engine services, every patch (encoded, stored, fetched, decoded, verified, written, read
back), the requester's routing and its counting of tokens. Played here: a trainer that commits a new version as soon as a batch
of episodes is complete, and agents whose episodes are turns with a pause between them, for a tool.

With `--kind simulated` four engines invent tokens at the pace of a service model, and the clock is compressed: one second here
stands for `--compression` seconds there. The model's lengths are chosen so that a batch at fixed weights takes about the
196.1 s of the reference workload; nothing else is fitted. What the real parts take is not compressed, so it counts
`--compression` times in the report; only the time in which they wait for a processor that other programs use is left out
(`loadtests.quiet_clock`), and the report says how long that was. With `--kind vllm` two real engines serve the example's small
policy on this machine's cores, in real time, all of which counts. The report holds what was measured, in seconds of the
workload, beside the reference's figures.

A step is the time from one complete batch to the next, the mean of those after the first. Tokens are wasted when they were
sampled and thrown away. The lag of an episode is (version when its batch is complete) - (oldest version among its tokens).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import structlog

import param_sync.service
import services.engine.service
from loadtests import quiet_clock
from loadtests.weight_steps import Steps
from rollouter.generation import Conversation, Generation, WeightsReplaced
from schemas.policy import EngineState
from schemas.table import Role
from schemas.trajectory import SamplingConfig
from services.bus import Bus
from services.config import Config, check
from services.health import Health
from services.nats_server import binary, configuration, free_port
from services.provision import provision
from services.runtime import Serve, ServiceContext

REFERENCE_S = {"fixed weights": 196.1, "pause-all": 426.0, "one engine at a time": 240.1}
"""Seconds per step of the reference workload, as published."""
MODES = ("finish_old", "continue_keep", "continue_recompute", "regenerate", "restart")
MODEL = "examples/terminal/model"
STORE_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Episodes of `turns` turns with a pause after each; lengths are log-normal tokens with a long tail, cut at `longest`."""

    engines: int
    conversations: int
    batch: int
    turns: int
    median_tokens: float
    spread: float
    longest: int
    tool_s: float
    step_s: float  # of the simulated engine, for one token of every running sequence
    sequence_s: float  # and for each of them
    grace_s: float

    def compressed(self, factor: float) -> Workload:
        """The same, `factor` times faster."""
        times = {name: getattr(self, name) / factor for name in ("tool_s", "step_s", "sequence_s", "grace_s")}
        return replace(self, **times)


SIMULATED = Workload(
    engines=4,
    conversations=48,
    batch=48,
    turns=3,
    median_tokens=62.0,
    spread=1.0,
    longest=500,
    tool_s=5.0,
    step_s=0.62,
    sequence_s=0.002,
    grace_s=15.0,
)
REAL = Workload(
    engines=2,
    conversations=16,
    batch=24,
    turns=3,
    median_tokens=30.0,
    spread=0.8,
    longest=160,
    tool_s=0.1,
    step_s=0.0,
    sequence_s=0.0,
    grace_s=0.3,
)


@dataclass(slots=True, kw_only=True)
class Row:
    """One way of publishing. Seconds are those of the workload: measured ones times the compression."""

    name: str
    unavailable: str
    mode: str
    step_s: float
    steps_s: list[float]
    over_fixed: float = 0.0
    tokens_kept: int
    tokens_wasted: int
    lag: dict[int, int]
    paused_s: dict[str, float] = field(default_factory=dict)  # by engine, per change
    changes: int = 0
    queued_s: float = 0.0
    """Real seconds of the trial that were not counted, since the program waited for a processor."""


class Trial:
    """One configuration from start to end: services, trainer and agents on one server."""

    def __init__(self, url: str, config: Config, workload: Workload, seed: int) -> None:
        self._url = url
        self._config = config
        self._load = workload
        self._random = np.random.default_rng(seed)
        self._done: asyncio.Queue[int] = asyncio.Queue()  # oldest version of each complete episode
        self._stop = asyncio.Event()
        self._engines: list[ServiceContext] = []

    async def run(self, steps: int, publishes: bool) -> Row:
        """`steps` batches; the first one is not counted."""
        async with contextlib.AsyncExitStack() as stack:
            bus = await stack.enter_async_context(self._connected(Role.TRAINER, "trainer"))
            await stack.enter_async_context(self._serving(Role.PARAM_SYNC, "sync", param_sync.service.serve))
            for name in self._config.engine.names:
                serve = services.engine.service.serve
                self._engines.append(await stack.enter_async_context(self._serving(Role.ENGINE, name, serve)))
            requester = await stack.enter_async_context(self._connected(Role.ROLLOUTER, "agents"))
            health = Health(requester, 1.0)
            generation = Generation(requester, "agents", 600.0, health)
            async with asyncio.TaskGroup() as group:
                receiving = asyncio.Event()
                group.create_task(generation.run(receiving))
                await self._all_serve(bus, 0)
                async with asyncio.TaskGroup() as agents:
                    for number in range(self._load.conversations):
                        agents.create_task(self._agent(generation, number))
                    row = await self._train(bus, steps, publishes, health)
                    self._stop.set()
                receiving.set()
            return row

    async def _train(self, bus: Bus, steps: int, publishes: bool, health: Health) -> Row:
        """Take batches as they complete; commit a version after each."""
        line, times, lags, version = Steps(bus, MODEL), [], Counter[int](), 0
        clock = asyncio.get_running_loop().time
        before, began = dict(health.counters), clock()
        for step in range(steps):
            oldest = [await self._done.get() for _ in range(self._load.batch)]
            now = clock()
            if step:
                times.append(now - began)
                lags.update(version - each for each in oldest)
            else:
                before = dict(health.counters)
            began = now
            if publishes:
                version += 1
                await line.commit(version)
        tokens = {name: int(health.counters.get(name, 0) - before.get(name, 0)) for name in ("tokens_kept", "tokens_wasted")}
        paused = {c.instance: c.health.counters.get("weights_paused_s", 0.0) for c in self._engines}
        changes = {c.instance: c.health.counters.get("weight_switches", 0.0) for c in self._engines}
        settings = self._config.param_sync
        return Row(
            name="",
            unavailable=str(settings.max_unavailable) if publishes else "-",
            mode=settings.mode if publishes else "-",
            step_s=statistics.fmean(times),
            steps_s=times,
            lag=dict(sorted(lags.items())),
            paused_s={name: paused[name] / max(1.0, changes[name]) for name in paused},
            changes=int(sum(changes.values())),
            **tokens,
        )

    async def _agent(self, generation: Generation, number: int) -> None:
        """Episodes without end. Where the mode is to restart, an episode whose weights changed begins anew."""
        count = 0
        while not self._stop.is_set():
            lengths = self._random.lognormal(np.log(self._load.median_tokens), self._load.spread, self._load.turns)
            tokens = np.clip(lengths, 2, self._load.longest).astype(int)
            while not self._stop.is_set():
                count += 1
                try:
                    oldest = await self._episode(generation, f"g{number}-{count}-0", tokens.tolist())
                except WeightsReplaced:
                    continue
                await self._done.put(oldest)
                break

    async def _episode(self, generation: Generation, session: str, lengths: list[int]) -> int:
        """The oldest version among its tokens. Raises `WeightsReplaced` in mode `restart`."""
        restarts = self._config.param_sync.mode == "restart"
        who = Conversation(session=session, group=session.split("-")[0], name=session, restarts=restarts)
        versions: set[int] = set()
        kept = 0
        ids = np.arange(16, dtype=np.int32)
        try:
            for length in lengths:
                sampled = await generation.sample(who, ids, SamplingConfig(max_tokens=length))
                kept += int(sampled.ids.size)
                versions |= {span.version for span in sampled.versions}
                if restarts and len(versions) > 1:
                    generation.wasted(kept)
                    raise WeightsReplaced(session)
                ids = np.concatenate([ids, sampled.ids])[-self._config.policy.max_context_tokens // 2 :]
                await asyncio.sleep(self._load.tool_s)
        finally:
            generation.fleet.forget(session)
        return min(versions)

    async def _all_serve(self, bus: Bus, version: int) -> None:
        async with asyncio.timeout(300):
            for name in self._config.engine.names:
                while True:
                    item = await bus.last(bus.subjects.engine_heartbeat(name))
                    if item is not None and item.decode(EngineState).version >= version:
                        break
                    await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def _connected(self, role: Role, instance: str) -> AsyncIterator[Bus]:
        bus = await Bus.connect(self._url, self._config.run.name, role, instance)
        try:
            await provision(bus, STORE_BYTES)
            yield bus
        finally:
            await bus.close()

    @contextlib.asynccontextmanager
    async def _serving(self, role: Role, instance: str, serve: Serve) -> AsyncIterator[ServiceContext]:
        async with self._connected(role, instance) as bus:
            context = ServiceContext(self._config, bus, role, instance, asyncio.Event(), Health(bus, 1.0))

            async def live() -> None:
                await serve(context)

            task = asyncio.create_task(live(), name=f"{role}-{instance}")
            try:
                yield context
            finally:
                context.stop.set()
                await asyncio.wait_for(task, 120)


def config_of(url: str, run: str, kind: str, workload: Workload, mode: str, unavailable: int | str) -> Config:
    """One trial's configuration."""
    simulated = {"step_s": workload.step_s, "sequence_s": workload.sequence_s, "prefill_token_s": 0.0, "max_num_seqs": 64}
    return check(
        {
            "run": {"name": run},
            "nats": {"url": url},
            "policy": {"model": MODEL, "max_context_tokens": 512},
            "engine": {
                "kind": kind,
                "names": [f"e{n}" for n in range(workload.engines)],
                "simulated": {**simulated, "vocab_size": 256},
                "vllm": {"kv_cache_bytes": 64 * 2**20} if kind == "vllm" else {},
            },
            "param_sync": {"mode": mode, "max_unavailable": unavailable, "grace_s": workload.grace_s, "anchor_every": 1000},
        }
    )


def trials() -> list[tuple[str, str, int | str]]:
    """(name, mode, max_unavailable): fixed weights first, then pause-all, one at a time, two at a time."""
    found: list[tuple[str, str, int | str]] = [("fixed weights", "continue_keep", 1)]
    for label, unavailable in (("pause-all", "all"), ("one at a time", 1), ("two at a time", 2)):
        found += [(f"{label}, {mode}", mode, unavailable) for mode in MODES]
    return found


@contextlib.asynccontextmanager
async def server(folder: Path) -> AsyncIterator[str]:
    """A nats-server of our own; gives its URL."""
    port = free_port()
    (folder / "nats.conf").write_text(configuration(store=folder / "store", port=port, max_file_bytes=8 * 2**30))
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*(binary(), "-c", str(folder / "nats.conf")), stdout=quiet, stderr=quiet)
    try:
        quiet_clock.leave_out(process.pid)
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def run(options: argparse.Namespace) -> None:
    """All trials, one after another, each on a run of its own."""
    factor = options.compression if options.kind == "simulated" else 1.0
    workload = (SIMULATED if options.kind == "simulated" else REAL).compressed(factor)
    rows: list[Row] = []
    wanted = options.only.split("|") if options.only else []
    print("                                     step s  over fixed |    kept  wasted | paused s per change | episodes by lag")
    for number, (name, mode, unavailable) in enumerate(trials()):
        if wanted and name not in wanted:
            continue
        with tempfile.TemporaryDirectory(prefix="headrace-publication-") as folder:
            async with server(Path(folder)) as url:
                config = config_of(url, f"p{number}", options.kind, workload, mode, unavailable)
                before = quiet_clock.queued_s()
                row = await Trial(url, config, workload, options.seed).run(options.steps, name != "fixed weights")
        row.name, row.queued_s = name, quiet_clock.queued_s() - before
        row.step_s *= factor
        row.steps_s = [each * factor for each in row.steps_s]
        row.paused_s = {engine: each * factor for engine, each in row.paused_s.items()}
        row.over_fixed = row.step_s / rows[0].step_s - 1 if rows else 0.0
        rows.append(row)
        write(options, rows)
        paused = max(row.paused_s.values(), default=0.0)
        print(
            f"{name:36s} {row.step_s:7.2f} {row.over_fixed:10.1%} | {row.tokens_kept:7d} {row.tokens_wasted:7d} "
            f"| {paused:19.3f} | {' '.join(f'{lag}:{count}' for lag, count in row.lag.items())}",
            flush=True,
        )


def write(options: argparse.Namespace, rows: list[Row]) -> None:
    """The report so far: a trial takes minutes, and one that is broken off should not cost those before it."""
    if options.json is None:
        return
    workload = SIMULATED if options.kind == "simulated" else REAL
    report = {
        "kind": options.kind,
        "compression": options.compression if options.kind == "simulated" else 1.0,
        "workload": asdict(workload),
        "reference_s": REFERENCE_S,
        "rows": [asdict(row) for row in rows],
    }
    options.json.write_text(json.dumps(report, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Print the table; with `--json` also write it."""
    parser = argparse.ArgumentParser(description="What a change of weights costs")
    parser.add_argument("--kind", choices=("simulated", "vllm"), default="simulated")
    parser.add_argument("--steps", type=int, default=5, help="batches per trial; the first is not counted")
    parser.add_argument("--compression", type=float, default=25.0, help="simulated: seconds of the workload in one second here")
    parser.add_argument("--only", default="", help="names of trials, separated by |")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the report to this file")
    options = parser.parse_args(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with asyncio.Runner(loop_factory=quiet_clock.runner() if options.kind == "simulated" else None) as runner:
        runner.run(run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
