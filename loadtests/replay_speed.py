"""How fast a recording is replayed and explained, on a generated one of any size.

Nothing in it was ever sampled or trained: lengths, rewards and digests are drawn from a seed, and there are no token ids. The
groups are joined by the real bank and decided by the real admission core while the file is written, so its decisions are those
that a run of these groups would have had. What is measured are the commands, as a person would call them.

Run: `python -m loadtests.replay_speed [--groups 100000] [--siblings 8] [--turns 2] [--json OUT]`
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from admission.assembly import Assembly, decide
from admission.joining import Bank, EpisodeFact, VerdictFact
from admission.outline import outline, pack_fact
from admission.record import found_by
from admission.recorded import configurations
from admission.service import gate_settings
from schemas.actions import Finish, ToolCall
from schemas.arrays import Array
from schemas.codec import digest, encode
from schemas.group import ReadyGroup
from schemas.lease import GroupLease, group_id
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry
from schemas.message import Message
from schemas.policy import FleetVersions, WeightsManifest
from schemas.table import Stream
from schemas.termination import Termination
from schemas.training import BatchDemand, ObjectRef, StepCommit
from schemas.trajectory import Episode, SamplingConfig, TurnEffect, TurnRecord, Verdict, VersionSpan
from services.config import Config, check, to_toml
from services.recording import OUTLINE, WIRE, Header, Record, Recording, StreamFacts, group_key
from services.recording_writer import RecordingWriter

RUN, START_NS, TICK_NS = "generated", 1_700_000_000_000_000_000, 40_000_000
FAMILIES = ("archive", "json", "rename", "sort")


def configuration(groups_per_batch: int, max_lag: int, window: int, siblings: int) -> Config:
    """The configuration under which the generated run is decided."""
    return check(
        {
            "run": {"name": RUN},
            "window": {"max_groups": window},
            "rollout": {"group_size": siblings},
            "admission": {"groups_per_batch": groups_per_batch, "max_lag": max_lag, "min_rewards": 1},
        }
    )


@dataclass
class Generator:
    """Writes a consistent run without bodies, message by message, with the server's times counted up."""

    writer: RecordingWriter
    config: Config
    groups: int
    siblings: int
    turns: int
    seed: int = 0
    now_ns: int = START_NS
    version: int = 0
    _last: dict[Stream, int] = field(default_factory=dict)
    _bank: Bank = field(default_factory=Bank)
    _state: Assembly = field(default_factory=Assembly)
    _since_batch: int = 0

    def run(self) -> None:
        """Lease within the window, play siblings in any order, close what admission decides."""
        random_ = random.Random(self.seed)
        gates, batch = gate_settings(self.config), self.config.admission.groups_per_batch
        playing: list[tuple[GroupLease, int, list[int]]] = []  # lease, version at its first token, slots to be played
        leased = 0
        self._demand(0, batch)
        while leased < self.groups or playing:
            while leased < self.groups and len(playing) < self.config.window.max_groups:
                playing.append(self._lease(leased))
                leased += 1
            place = random_.randrange(len(playing)) if random_.random() < 0.3 else 0
            lease, version, slots = playing[place]
            ready = self._play(lease, slots.pop(), version, random_)
            if not slots:
                playing.pop(place)
            if ready is not None:
                seq = self._write(Stream.READY, f"ready.{ready.group}", ready)
                self._state.ready(seq, ready)
                for entry in decide(self._state, gates):
                    self._close(entry, batch)

    def _lease(self, ordinal: int) -> tuple[GroupLease, int, list[int]]:
        family = FAMILIES[ordinal % len(FAMILIES)]
        lease = GroupLease(
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
            leased_at_version=self.version,
        )
        seq = self._write(Stream.TASKS, f"task.lease.{ordinal}", lease)
        self._bank.lease(lease, seq)
        return lease, self.version, list(range(self.siblings))

    def _play(self, lease: GroupLease, slot: int, begun: int, random_: random.Random) -> ReadyGroup | None:
        """Turns, sealed episode and verdict of one sibling; gives the group if that made it whole."""
        where, spans, starts, position = f"{lease.group}.{slot}", [], [], 0
        effect = None
        for number in range(self.turns):
            given, sampled = random_.randrange(8, 40), random_.randrange(4, 32)
            version = begun if number == 0 else self.version
            starts.append(position + given)
            spans.append(VersionSpan(position + given, position + given + sampled, version))
            turn = self._turn(lease, slot, number, given, sampled, version, effect, random_)
            self._write(Stream.TURNS, f"turn.{where}.0.{number}", turn)
            effect = TurnEffect(lane="command", exit_code=0, observation_dropped_bytes=given)
            position += given + sampled
        tokens = sum(span.end - span.start for span in spans)
        episode = Episode(
            run=RUN,
            group=lease.group,
            slot=slot,
            attempt=0,
            task_id=lease.task_id,
            family=lease.family,
            template=lease.template,
            seed=lease.seed,
            manifest=lease.manifest,
            termination=Termination.AGENT_FINISH,
            ids=Array("int32", (position,), b""),
            mask=Array("bool", (position,), b""),
            logprobs=Array("float32", (position,), b""),
            versions=tuple(spans),
            turn_starts=Array.of(np.array(starts, dtype=np.int32)),
            turns=self.turns,
            sampled_tokens=tokens,
            engines=("e0",),
            started_ns=self.now_ns,
            sealed_ns=self.now_ns,
        )
        name, found = f"episode.{where}", random_.randbytes(32)
        fact = EpisodeFact(
            group=lease.group,
            slot=slot,
            seq=self._next(Stream.EPISODES),
            digest=found.hex(),
            termination=episode.termination,
            oldest_version=episode.oldest_version(),
            newest_version=episode.newest_version(),
            sampled_tokens=tokens,
            total_tokens=position,
            turns=self.turns,
            manifest=lease.manifest,
            task_id=lease.task_id,
        )
        self._add(Stream.EPISODES, name, episode, OUTLINE, outline(episode), found, pack_fact(fact))
        self._bank.episode(fact)
        success = random_.random() < 0.5
        verdict = Verdict(
            run=RUN,
            group=lease.group,
            slot=slot,
            episode_digest=found.hex(),
            status="graded",
            success=success,
            reward=float(success),
            started_ns=self.now_ns,
            finished_ns=self.now_ns,
        )
        name, judged = f"verdict.{where}", random_.randbytes(32)
        judgement = VerdictFact(
            group=lease.group,
            slot=slot,
            seq=self._next(Stream.EPISODES),
            digest=judged.hex(),
            episode_digest=found.hex(),
            status="graded",
            reward=float(success),
            success=success,
        )
        self._add(Stream.EPISODES, name, verdict, OUTLINE, outline(verdict), judged, pack_fact(judgement))
        return self._bank.verdict(judgement)

    def _turn(
        self,
        lease: GroupLease,
        slot: int,
        number: int,
        given: int,
        sampled: int,
        version: int,
        before: TurnEffect | None,
        random_: random.Random,
    ) -> TurnRecord:
        last = number == self.turns - 1
        return TurnRecord(
            run=RUN,
            group=lease.group,
            slot=slot,
            attempt=0,
            turn=number,
            task_id=lease.task_id,
            manifest=lease.manifest,
            prompt_ids=Array("int32", (given,), b""),
            sampled_ids=Array("int32", (sampled,), b""),
            logprobs=Array("float32", (sampled,), b""),
            versions=(VersionSpan(0, sampled, version),),
            engine="e0",
            weight_digest=weights(version),
            generator="generated",
            finish_reason="stop",
            previous=before,
            action=Finish() if last else ToolCall(name="shell", arguments={"command": f"cat file{random_.randrange(1000)}"}),
            executor="x0",
            state_before=random_.randbytes(32).hex(),
            started_ns=self.now_ns,
            generated_ns=self.now_ns + TICK_NS // 2,
        )

    def _demand(self, step: int, groups: int) -> None:
        demand = BatchDemand(run=RUN, step=step, version=step, incarnation=0, groups=groups)
        self._state.demand(self._write(Stream.TRAIN, f"train.demand.{step}", demand), demand)

    def _close(self, entry: LedgerEntry, groups: int) -> None:
        if not isinstance(entry, BatchEntry):
            kind = "abandon" if isinstance(entry, AbandonEntry) else "quarantine"
            self._state.entry(self._write(Stream.LEDGER, f"ledger.{kind}.{entry.group}", entry), entry)
            return
        seq = self._write(Stream.LEDGER, f"ledger.batch.{entry.step}", entry)
        self._state.entry(seq, entry)
        made = entry.step + 1
        commit = StepCommit(
            run=RUN,
            step=entry.step,
            version=made,
            incarnation=0,
            digest=weights(made),
            base_digest=weights(entry.step),
            groups=tuple(member.group for member in entry.groups),
            rows=groups * self.siblings,
            trained_tokens=0,
            optimizer_steps=1,
            patches=(),
            patch_bytes=0,
            metrics={},
            ledger_seq=seq,
            train_s=1.0,
            finished_ns=self.now_ns,
        )
        self._write(Stream.TRAIN, f"train.step.{entry.step}", commit)
        patch = ObjectRef(name=f"patch-{made}", digest=weights(made), size_bytes=1)
        manifest = WeightsManifest(
            run=RUN,
            version=made,
            incarnation=0,
            digest=weights(made),
            form="patch",
            base_version=entry.step,
            base_digest=weights(entry.step),
            objects=(patch,),
            step=entry.step,
        )
        self._write(Stream.POLICY, f"policy.staged.{made}", manifest)
        fleet = FleetVersions(run=RUN, target=made, incarnation=0, engines={"e0": made}, oldest=made, newest=made)
        self._write(Stream.POLICY, "policy.active", fleet)
        self.version = made
        self._demand(made, groups)

    def _next(self, stream: Stream) -> int:
        return self._last.get(stream, 0) + 1

    def _write(self, stream: Stream, name: str, message: Message) -> int:
        """Store a message whole, or its outline in the journal; gives its sequence."""
        if stream is Stream.TURNS:
            data = outline(message)
            return self._add(stream, name, message, OUTLINE, data, bytes.fromhex(digest(data)))
        data = encode(message)
        return self._add(stream, name, message, WIRE, data, bytes.fromhex(digest(data)))

    def _add(self, stream: Stream, name: str, message: Message, form: int, data: bytes, found: bytes, fact: bytes = b"") -> int:
        seq = self._last[stream] = self._next(stream)
        self.now_ns += TICK_NS // (16 * self.siblings)
        groups, steps = found_by(name, message)
        record = Record(seq, self.now_ns, name, found, len(data), form, data, fact)
        self.writer.add(stream, record, {group_key(group) for group in groups}, steps)
        self.writer.streams.setdefault(stream, StreamFacts()).last_seq = seq
        return seq


def weights(version: int) -> str:
    """A digest that stands for weights which never were."""
    return digest(f"generated {version}".encode())


def generate(path: Path, groups: int, siblings: int, turns: int, *, seed: int = 0, max_lag: int = 2) -> None:
    """Write a generated recording."""
    config = configuration(8, max_lag, 24, siblings)
    note = f"generated from seed {seed} by loadtests/replay_speed.py; nothing in it was sampled or trained"
    header = Header(run=RUN, made_ns=START_NS, bodies=False, selection="", configs=(to_toml(config),), note=note)
    with RecordingWriter(path, header) as writer:
        Generator(writer, config, groups, siblings, turns, seed).run()


def measure(path: Path, groups: int, siblings: int, turns: int) -> dict[str, float | str]:
    """Generate, verify, explain a group in the middle. Gives counts, seconds and the processor's seconds."""
    result: dict[str, float | str] = {"recording": "generated", "groups": groups, "siblings": siblings, "turns": turns}
    begun = time.monotonic()
    generate(path, groups, siblings, turns)
    result["generate_s"] = time.monotonic() - begun
    size = path.stat().st_size
    result["bytes"], result["bytes_per_trajectory"] = size, size / (groups * siblings)
    with Recording(path) as recording:
        assert configurations(recording), "the generated recording names its configuration"
        result["messages"] = sum(facts.records for facts in recording.index.streams.values())
        result["blocks"] = len(recording.index.blocks)
    out = path.with_suffix(".json")
    for name, words in _commands(path, group_id("train", groups // 2), out):
        begun, used = time.monotonic(), _children_cpu_s()
        done = subprocess.run([sys.executable, "-m", "services.cli", *words], capture_output=True, text=True, check=False)
        result[f"{name}_s"], result[f"{name}_cpu_s"] = time.monotonic() - begun, _children_cpu_s() - used
        print(done.stdout[-1500:], done.stderr[-1500:], sep="")
        if done.returncode != 0:
            raise SystemExit(f"headrace {words[0]} ended with {done.returncode}")
    result["entries"] = json.loads(out.read_text(encoding="utf-8"))["entries"]
    result["load_average"] = os.getloadavg()[0]
    return result


def _commands(path: Path, group: str, out: Path) -> Iterator[tuple[str, list[str]]]:
    yield "verify", ["replay", str(path), "--verify", "--json", str(out)]
    yield "explain_group", ["explain", "group", group, "--recording", str(path)]
    yield "explain_token", ["explain", "token", f"{group}/0/40", "--recording", str(path)]
    yield "explain_step", ["explain", "step", "100", "--recording", str(path)]


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-replay-") as folder:
        result = measure(Path(folder) / "generated.hrr", options.groups, options.siblings, options.turns)
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
