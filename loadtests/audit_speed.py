"""How long `headrace audit` takes on a synthetic run: consistent logs of any size, written to a server of our own.

Nothing in the run was ever sampled or trained: token ids, log-probabilities and weight digests are drawn from a seed. What is
measured is the audit alone, as a person would call it, on a store that is served from disk.

Run: `python -m loadtests.audit_speed [--groups 10000] [--siblings 8] [--json OUT]`
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from nats.js.api import PubAck

from schemas.arrays import Array
from schemas.codec import digest, encode
from schemas.group import ReadyGroup, Sibling
from schemas.lease import GroupLease, group_id
from schemas.ledger import BatchEntry, BatchGroup, QuarantineEntry, QuarantineReason
from schemas.message import Message
from schemas.policy import WeightsManifest
from schemas.table import Role, Stream
from schemas.termination import Termination
from schemas.training import BatchDemand, ObjectRef, StepCommit
from schemas.trajectory import Episode, SamplingConfig, Verdict, VersionSpan
from services import nats_server
from services.bus import Bus
from services.items import DIGEST_HEADER
from services.provision import provision

PER_BATCH = 8
STALE_EVERY = 9  # of so many groups one is quarantined
TOKENS = 96
_STORE_BYTES = 8 * 2**30
_UNACKNOWLEDGED = 512


@dataclass
class SyntheticRun:
    """Messages of a whole run in the order in which they are stored, sequences counted along."""

    run: str
    groups: int
    siblings: int
    seed: int = 0
    _last: dict[Stream, int] = field(default_factory=dict)
    _waiting: list[tuple[int, ReadyGroup]] = field(default_factory=list)
    _steps: int = 0

    def messages(self) -> Iterator[tuple[Stream, str, Message]]:
        """Stream, subject below the run's prefix, message."""
        random = np.random.default_rng(self.seed)
        yield self._at(Stream.POLICY, "policy.anchor.0", self._manifest(0))
        for ordinal in range(self.groups):
            lease = self._lease(ordinal)
            yield self._at(Stream.TASKS, f"task.lease.{ordinal}", lease)
            siblings = []
            for slot in range(self.siblings):
                episode = self._episode(lease, slot, random)
                yield self._at(Stream.EPISODES, f"episode.{lease.group}.{slot}", episode)
                verdict = self._verdict(lease, slot, digest(encode(episode)), random)
                yield self._at(Stream.EPISODES, f"verdict.{lease.group}.{slot}", verdict)
                siblings.append(self._sibling(episode, verdict))
            ready = self._ready(lease, tuple(siblings))
            yield self._at(Stream.READY, f"ready.{lease.group}", ready)
            if ordinal % STALE_EVERY == STALE_EVERY - 1:
                yield self._at(Stream.LEDGER, f"ledger.quarantine.{lease.group}", self._quarantine(ready))
            else:
                self._waiting.append((self._last[Stream.READY], ready))
            if len(self._waiting) == PER_BATCH:
                yield from self._step()

    def _at(self, stream: Stream, name: str, message: Message) -> tuple[Stream, str, Message]:
        self._last[stream] = self._last.get(stream, 0) + 1
        return stream, name, message

    def _step(self) -> Iterator[tuple[Stream, str, Message]]:
        step, members = self._steps, self._waiting
        self._steps, self._waiting = step + 1, []
        demand = BatchDemand(run=self.run, step=step, version=step, incarnation=0, groups=PER_BATCH)
        yield self._at(Stream.TRAIN, f"train.demand.{step}", demand)
        batch = BatchEntry(
            run=self.run,
            step=step,
            version=step,
            incarnation=0,
            groups=tuple(
                BatchGroup(
                    group=g.group, ready_seq=seq, oldest_version=step, newest_version=step, lag=step - g.oldest_version()
                )
                for seq, g in members
            ),
            ready_high_water=members[-1][0],
            demand_seq=self._last[Stream.TRAIN],
            settings_hash="synthetic",
            max_lag=1,
        )
        yield self._at(Stream.LEDGER, f"ledger.batch.{step}", batch)
        commit = StepCommit(
            run=self.run,
            step=step,
            version=step + 1,
            incarnation=0,
            digest=_weights(step + 1),
            base_digest=_weights(step),
            groups=tuple(g.group for _, g in members),
            rows=PER_BATCH * self.siblings,
            trained_tokens=0,
            optimizer_steps=1,
            patches=(),
            patch_bytes=0,
            metrics={},
            ledger_seq=self._last[Stream.LEDGER],
        )
        yield self._at(Stream.TRAIN, f"train.step.{step}", commit)
        yield self._at(Stream.POLICY, f"policy.staged.{step + 1}", self._manifest(step + 1))

    def _lease(self, ordinal: int) -> GroupLease:
        return GroupLease(
            run=self.run,
            group=group_id("train", ordinal),
            ordinal=ordinal,
            purpose="train",
            task_id=f"synthetic-{ordinal % 64}",
            family="synthetic",
            template="synthetic",
            split="train",
            group_size=self.siblings,
            manifest="synthetic",
            environment="synthetic",
            base_snapshot="",
            sampling=SamplingConfig(),
            seed=ordinal,
        )

    def _episode(self, lease: GroupLease, slot: int, random: np.random.Generator) -> Episode:
        mask = np.arange(TOKENS) >= TOKENS // 3
        return Episode(
            run=self.run,
            group=lease.group,
            slot=slot,
            attempt=0,
            task_id=lease.task_id,
            family=lease.family,
            template=lease.template,
            seed=lease.seed,
            manifest=lease.manifest,
            termination=Termination.AGENT_FINISH,
            ids=Array.of(random.integers(0, 1024, TOKENS, dtype=np.int32)),
            mask=Array.of(mask),
            logprobs=Array.of(np.where(mask, -random.random(TOKENS), 0.0).astype(np.float32)),
            versions=(VersionSpan(TOKENS // 3, TOKENS, self._steps),),
            turn_starts=Array.of(np.array([TOKENS // 3], dtype=np.int32)),
            turns=1,
            sampled_tokens=int(mask.sum()),
        )

    def _verdict(self, lease: GroupLease, slot: int, of: str, random: np.random.Generator) -> Verdict:
        success = bool(random.random() < 0.5)
        return Verdict(
            run=self.run,
            group=lease.group,
            slot=slot,
            episode_digest=of,
            status="graded",
            success=success,
            reward=float(success),
        )

    def _sibling(self, episode: Episode, verdict: Verdict) -> Sibling:
        last = self._last[Stream.EPISODES]
        return Sibling(
            slot=episode.slot,
            episode_seq=last - 1,
            episode_digest=verdict.episode_digest,
            verdict_seq=last,
            verdict_digest=digest(encode(verdict)),
            termination=episode.termination,
            status=verdict.status,
            reward=verdict.reward,
            success=verdict.success,
            oldest_version=episode.oldest_version(),
            newest_version=episode.newest_version(),
            incarnation=0,
            sampled_tokens=episode.sampled_tokens,
            total_tokens=TOKENS,
            turns=1,
            manifest=episode.manifest,
        )

    def _ready(self, lease: GroupLease, siblings: tuple[Sibling, ...]) -> ReadyGroup:
        return ReadyGroup(
            run=self.run,
            group=lease.group,
            ordinal=lease.ordinal,
            purpose="train",
            task_id=lease.task_id,
            family=lease.family,
            template=lease.template,
            split="train",
            manifest=lease.manifest,
            group_size=self.siblings,
            siblings=siblings,
        )

    def _quarantine(self, ready: ReadyGroup) -> QuarantineEntry:
        return QuarantineEntry(
            run=self.run,
            group=ready.group,
            ready_seq=self._last[Stream.READY],
            reason=QuarantineReason.STALE,
            detail="synthetic",
            at_version=self._steps,
            oldest_version=ready.oldest_version(),
            lag=2,
            family=ready.family,
            mean_reward=None,
            sampled_tokens=0,
            demand_seq=self._last.get(Stream.TRAIN, 0),
            settings_hash="synthetic",
        )

    def _manifest(self, version: int) -> WeightsManifest:
        form = "patch" if version else "anchor"
        return WeightsManifest(
            run=self.run,
            version=version,
            incarnation=0,
            digest=_weights(version),
            form="patch" if version else "anchor",
            base_version=version - 1,
            base_digest=_weights(version - 1) if version else "",
            objects=(ObjectRef(name=f"{form}-0-{version}", digest=_weights(version), size_bytes=1),),
            step=version - 1,
        )


def _weights(version: int) -> str:
    return hashlib.sha256(f"synthetic {version}".encode()).hexdigest()


async def write(bus: Bus, run: SyntheticRun) -> int:
    """Store a synthetic run, acknowledgements overlapping and in order; gives the number of messages."""
    pending: list[asyncio.Future[PubAck]] = []
    count = 0
    for _, name, message in run.messages():
        data = encode(message)
        stored = await bus.jetstream.publish_async(bus.subjects.pattern(name), data, headers={DIGEST_HEADER: digest(data)})
        pending.append(stored)
        count += 1
        if len(pending) >= _UNACKNOWLEDGED:
            await asyncio.gather(*pending)
            pending.clear()
    await asyncio.gather(*pending)
    return count


async def measure(folder: Path, groups: int, siblings: int) -> dict[str, float]:
    """Write a run, restart its server, audit it in a process of its own. Gives counts and seconds."""
    port = nats_server.free_port()
    text = nats_server.configuration(store=folder / "store", port=port, max_file_bytes=2 * _STORE_BYTES)
    (folder / "nats.conf").write_text(text.replace("sync_interval: always", "sync_interval: 2m"), encoding="utf-8")
    url = f"nats://127.0.0.1:{port}"
    result: dict[str, float] = {"groups": groups, "siblings": siblings}
    server = await _serve(folder, port)
    try:
        bus = await Bus.connect(url, "synthetic", Role.OBSERVER, "writer")
        await provision(bus, _STORE_BYTES)
        begun = time.monotonic()
        result["messages"] = await write(bus, SyntheticRun("synthetic", groups, siblings))
        result["write_s"] = time.monotonic() - begun
        await bus.close()
    finally:
        server.terminate()
        await server.wait()
    server = await _serve(folder, port)
    try:
        begun, used = time.monotonic(), _children_cpu_s()
        words = [
            "-m",
            "services.cli",
            "audit",
            "--nats",
            url,
            "--set",
            "run.name=synthetic",
            "--json",
            str(folder / "audit.json"),
        ]
        audit = await asyncio.create_subprocess_exec(
            sys.executable, *words, "--set", f"run.folder={folder}", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await audit.communicate()
        result["audit_s"], result["audit_cpu_s"] = time.monotonic() - begun, _children_cpu_s() - used
        result["load_average"] = os.getloadavg()[0]
        print(output.decode(), end="")
        if audit.returncode != 0:
            raise SystemExit(f"the audit of a consistent run ended with {audit.returncode}")
    finally:
        server.terminate()
        await server.wait()
    result["store_bytes"] = sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file())
    return result


def _children_cpu_s() -> float:
    """Processor time of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def _serve(folder: Path, port: int) -> asyncio.subprocess.Process:
    with (folder / "nats.log").open("ab") as log:
        server = await asyncio.create_subprocess_exec(
            nats_server.binary(), "-c", str(folder / "nats.conf"), stdout=log, stderr=log
        )
    if not await nats_server.accepts(port, 60):
        raise SystemExit(f"nats-server does not answer; see {folder / 'nats.log'}")
    return server


def main() -> None:
    """Measure once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-audit-") as folder:
        result = asyncio.run(measure(Path(folder), options.groups, options.siblings))
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
