"""How long `headrace replay --verify` and `headrace explain` take on a large recording, each in a process of its own.

The recording is generated: no run made it, and it says so. Episodes have no bodies, as `headrace record` leaves them out. Ready
groups come from the bank's own joining and the ledger from admission's own `decide`, so that a replay has everything to do.

Run: `python -m loadtests.replay_speed [--groups 100000] [--siblings 8] [--json OUT]`
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from admission.assembly import Assembly, decide
from admission.gates import GateSettings
from admission.joining import Bank, EpisodeFact, VerdictFact
from admission.slim import SlimEpisode, SlimTurn, SlimVerdict
from schemas.codec import CODEC_VERSION, encode
from schemas.lease import GroupLease, group_id
from schemas.ledger import BatchEntry, LedgerEntry
from schemas.message import SCHEMA_VERSION, Message
from schemas.policy import FleetVersions
from schemas.table import Stream
from schemas.termination import Termination
from schemas.training import BatchDemand, StepCommit
from schemas.trajectory import SamplingConfig, VersionSpan
from services.config import check, to_toml
from services.recording import RECORDED, Form, Manifest, Part, Record
from services.recording_items import items_of
from services.recording_reader import RecordingReader
from services.recording_writer import RecordingWriter

RUN, PER_BATCH, MAX_LAG, TURNS = "generated", 8, 2, 3
_FAMILIES = ("files", "json", "schema", "cli")
_GROUP_NS, _BEGUN_NS = 50_000_000, 1_700_000_000_000_000_000


@dataclass
class GeneratedRun:
    """A run of any size; records are kept by stream until they are written."""

    groups: int
    siblings: int
    seed: int = 0
    gates: GateSettings = field(default_factory=lambda: GateSettings(max_lag=MAX_LAG, min_rewards=1))
    records: dict[Stream, list[tuple[Record, list[str]]]] = field(default_factory=lambda: {s: [] for s in RECORDED})
    now_ns: int = _BEGUN_NS

    def make(self) -> None:
        """Lease by lease: episodes, verdicts, the ready group, and whatever is decided then."""
        random = np.random.default_rng(self.seed)
        bank, state, step = Bank(), Assembly(), 0
        self._demand(state, step)
        for ordinal in range(self.groups):
            self.now_ns += _GROUP_NS
            lease = self._lease(ordinal)
            bank.lease(lease, self._add(Stream.TASKS, f"task.lease.{ordinal}", lease))
            oldest = max(0, step - int(random.integers(0, MAX_LAG + 2)))
            for fact in self._siblings(lease, oldest, random):
                whole = bank.episode(fact) if isinstance(fact, EpisodeFact) else bank.verdict(fact)
                if whole is not None:
                    state.ready(self._add(Stream.READY, f"ready.{whole.group}", whole), whole)
            while entries := decide(state, self.gates):
                for entry in entries:
                    state.entry(self._add(Stream.LEDGER, _subject(entry), entry), entry)
                    if isinstance(entry, BatchEntry):
                        self._commit(entry)
                        step += 1
                        self._demand(state, step)

    def _add(self, stream: Stream, name: str, message: Message) -> int:
        seq = len(self.records[stream]) + 1
        record = Record(seq, self.now_ns, name, Form.WHOLE, encode(message))
        self.records[stream].append((record, items_of(stream, name, message)))
        return seq

    def _slim(self, stream: Stream, name: str, content: msgspec.Struct, digest: bytes) -> None:
        record = Record(len(self.records[stream]) + 1, self.now_ns, name, Form.SLIM, msgspec.msgpack.encode(content), digest)
        self.records[stream].append((record, items_of(stream, name, None)))

    def _lease(self, ordinal: int) -> GroupLease:
        family = _FAMILIES[ordinal % len(_FAMILIES)]
        return GroupLease(
            run=RUN,
            group=group_id("train", ordinal),
            ordinal=ordinal,
            purpose="train",
            task_id=f"{family}-{ordinal % 64}",
            family=family,
            template=family,
            split="train",
            group_size=self.siblings,
            manifest="generated",
            environment="generated",
            base_snapshot="",
            sampling=SamplingConfig(),
            seed=ordinal,
        )

    def _siblings(self, lease: GroupLease, version: int, random: np.random.Generator) -> Iterator[EpisodeFact | VerdictFact]:
        for slot in range(self.siblings):
            self._turns(lease, slot, version, random)
            digest, judged = random.bytes(32), random.bytes(32)
            fact = EpisodeFact(
                group=lease.group,
                slot=slot,
                seq=len(self.records[Stream.EPISODES]) + 1,
                digest=digest.hex(),
                termination=Termination.AGENT_FINISH,
                oldest_version=version,
                newest_version=version,
                sampled_tokens=64,
                total_tokens=96,
                turns=TURNS,
                manifest=lease.manifest,
                task_id=lease.task_id,
            )
            self._slim(Stream.EPISODES, f"episode.{lease.group}.{slot}", _episode(fact, self.now_ns), digest)
            yield fact
            reward = float(random.integers(0, 2))
            verdict = VerdictFact(
                group=lease.group,
                slot=slot,
                seq=fact.seq + 1,
                digest=judged.hex(),
                episode_digest=fact.digest,
                status="graded",
                reward=reward,
                success=reward > 0.5,
            )
            self._slim(Stream.EPISODES, f"verdict.{lease.group}.{slot}", _verdict(verdict, self.now_ns), judged)
            yield verdict

    def _turns(self, lease: GroupLease, slot: int, version: int, random: np.random.Generator) -> None:
        for k in range(TURNS):
            turn = SlimTurn(
                group=lease.group,
                slot=slot,
                attempt=0,
                turn=k,
                prompt_tokens=12,
                sampled_tokens=20,
                versions=(VersionSpan(0, 20, version),),
                engine=f"e{slot % 2}",
                finish_reason="stop",
                action="call shell",
                executor="x0",
                has_command=True,
                previous=None,
                started_ns=self.now_ns + k * 1_000_000,
                generated_ns=self.now_ns + k * 1_000_000 + 700_000,
            )
            self._slim(Stream.TURNS, f"turn.{lease.group}.{slot}.0.{k}", turn, random.bytes(32))

    def _demand(self, state: Assembly, step: int) -> None:
        demand = BatchDemand(run=RUN, step=step, version=step, incarnation=0, groups=PER_BATCH)
        state.demand(self._add(Stream.TRAIN, f"train.demand.{step}", demand), demand)

    def _commit(self, batch: BatchEntry) -> None:
        commit = StepCommit(
            run=RUN,
            step=batch.step,
            version=batch.version + 1,
            incarnation=0,
            digest=f"{batch.version + 1:064x}",
            base_digest=f"{batch.version:064x}",
            groups=tuple(member.group for member in batch.groups),
            rows=PER_BATCH * self.siblings,
            trained_tokens=0,
            optimizer_steps=1,
            patches=(),
            patch_bytes=0,
            metrics={},
            ledger_seq=0,
        )
        self._add(Stream.TRAIN, f"train.step.{batch.step}", commit)
        version = commit.version
        fleet = FleetVersions(run=RUN, target=version, incarnation=0, engines={"e0": version}, oldest=version, newest=version)
        self._add(Stream.POLICY, "policy.active", fleet)

    def write(self, path: Path) -> int:
        """The recording; gives the number of records."""
        parts = {str(s): Part(first=1, last=len(held), whole=True) for s, held in self.records.items()}
        config = check(
            {"run": {"name": RUN}, "admission": {"max_lag": MAX_LAG, "min_rewards": 1, "groups_per_batch": PER_BATCH}}
        )
        manifest = Manifest(
            run=RUN,
            headrace="generated",
            codec_version=CODEC_VERSION,
            schema_version=SCHEMA_VERSION,
            bodies=False,
            made_ns=_BEGUN_NS,
            source="loadtests.replay_speed",
            asked="everything",
            generated=True,
            config=to_toml(config),
            parts=parts,
        )
        with RecordingWriter(path, manifest) as writer:
            for stream in RECORDED:
                for record, items in self.records[stream]:
                    writer.add(stream, record, items)
            return writer.records


def _episode(fact: EpisodeFact, now_ns: int) -> SlimEpisode:
    return SlimEpisode(
        fact=fact,
        attempt=0,
        seed=0,
        invalid_actions=0,
        engines=("e0",),
        executor="x0",
        rollouter="r0",
        started_ns=now_ns,
        sealed_ns=now_ns + 4_000_000,
        sampled=((12, 32), (44, 64), (76, 96)),
        turn_starts=(12, 44, 76),
        versions=(VersionSpan(12, 96, fact.oldest_version),),
    )


def _verdict(fact: VerdictFact, now_ns: int) -> SlimVerdict:
    return SlimVerdict(fact=fact, violations=(), detail="", verifier="v0", started_ns=now_ns + 5_000_000, finished_ns=now_ns)


def _subject(entry: LedgerEntry) -> str:
    if isinstance(entry, BatchEntry):
        return f"ledger.batch.{entry.step}"
    return f"ledger.{entry.__struct_config__.tag}.{entry.group}"


def timed(*words: str) -> tuple[float, float, int]:
    """Run a module: wall seconds, processor seconds, and the process's own peak bytes. Exits where it fails."""
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([sys.executable, "-m", *words], stdout=out, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.monotonic() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        said = out.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}:\n{said[-4000:]}")
    print(said[-400:] if "replay" in words else "\n".join(said.splitlines()[:2]), flush=True)
    return wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def measure(folder: Path, groups: int, siblings: int) -> dict[str, float | bool]:
    """Generate, verify, explain, each in a process of its own. Seconds and bytes."""
    path = folder / "generated.hrrec"
    words = ("--groups", str(groups), "--siblings", str(siblings), "--write", str(path))
    result: dict[str, float | bool] = {"generated": True, "groups": groups, "siblings": siblings}
    result["generate_s"], *_ = timed("loadtests.replay_speed", *words)
    with RecordingReader(path) as reader:
        result["records"] = sum(reader.count(stream) for stream in RECORDED)
    result["file_bytes"] = path.stat().st_size
    result["bytes_per_trajectory"] = path.stat().st_size / (groups * siblings)
    middle = group_id("train", groups // 2)
    for name, asked in (
        ("explain_group", ("explain", "group", middle, "--recording", str(path))),
        ("explain_token", ("explain", "token", f"{middle}/1@50", "--recording", str(path))),
        ("explain_step", ("explain", "step", str(groups // 4 // PER_BATCH), "--recording", str(path))),
        ("verify", ("replay", str(path), "--verify")),
    ):
        figures = timed("services.cli", *asked)
        result[f"{name}_s"], result[f"{name}_cpu_s"], result[f"{name}_peak_bytes"] = figures
    result["load_average"] = os.getloadavg()[0]
    return result


def main() -> None:
    """Measure once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="only generate the recording, and write it here")
    options = parser.parse_args()
    if options.write:
        run = GeneratedRun(options.groups, options.siblings)
        run.make()
        print(f"{run.write(options.write)} records")
        return
    with tempfile.TemporaryDirectory(prefix="headrace-replay-") as folder:
        result = measure(Path(folder), options.groups, options.siblings)
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
