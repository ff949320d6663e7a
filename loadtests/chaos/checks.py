"""What must be true of a run however it was disturbed, read from its streams alone.

`headrace audit` (which `loadtests/chaos/audit_run.py` runs) looks at conservation, the ledger, checkpoints, versions, lag,
siblings and holes. Here is what it does not look at, and one thing again by other means: the line of committed steps, without
the product's own fold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from admission.conservation import account
from admission.replay import replay
from admission.service import gate_settings
from schemas.codec import decode_any
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, QuarantineEntry
from schemas.message import Message
from schemas.policy import EngineState, WeightsManifest
from schemas.table import STREAMS, Stream
from schemas.training import StepCommit
from schemas.trajectory import Episode, TurnRecord
from services.bus import Bus
from services.config import Config
from services.consume import read_all
from services.items import IntegrityError, Item

M = TypeVar("M", bound=Message)
_KEPT = tuple(spec.stream for spec in STREAMS if spec.retention == "limits" and spec.discard == "new")


@dataclass
class Findings:
    """`violations` is empty for a run that kept its promises. `steps` counts those on the line."""

    steps: int = 0
    incarnations: int = 0  # of the trainer, after the first
    account: str = ""
    items: int = 0
    final_digest: str = ""
    violations: list[str] = field(default_factory=list)


async def check_run(bus: Bus, config: Config, *, at_least_steps: int) -> Findings:
    """Every check. A stream that cannot be read whole is a violation that names the damage, and ends the checks."""
    found = Findings()
    streams: dict[Stream, list[Item]] = {}
    for stream in _KEPT:
        try:
            streams[stream] = await read_all(bus, stream)
        except IntegrityError as error:
            found.violations.append(f"{stream} cannot be read whole: {error}")
            return found
        found.items += len(streams[stream])
        found.violations += _repeated(stream, streams[stream])
    ledger = [(item.seq, _entry(item)) for item in streams[Stream.LEDGER]]
    commits = _of(streams[Stream.TRAIN], StepCommit)
    manifests = _of(streams[Stream.POLICY], WeightsManifest)
    line = line_of(commits)
    found.steps, found.incarnations = len(line), max((commit.incarnation for commit in commits), default=0)
    found.account = account(_of(streams[Stream.TASKS], GroupLease), [entry for _, entry in ledger]).line()
    found.final_digest = line[-1].digest if line else ""
    found.violations += check_line(line, at_least_steps)
    found.violations += check_made(commits, manifests)
    found.violations += check_served(_of(streams[Stream.POLICY], EngineState), manifests)
    found.violations += check_rows(streams[Stream.EPISODES], streams[Stream.TURNS])
    found.violations += check_replay(streams, ledger, config)
    return found


def line_of(commits: Iterable[StepCommit]) -> list[StepCommit]:
    """The commits that training stands on, in order: a new incarnation cuts off what the others had from its first step on, and
    what an older one says later counts for nothing.
    """
    line: list[StepCommit] = []
    incarnation = 0
    for commit in commits:
        if commit.incarnation > incarnation:
            incarnation = commit.incarnation
            line = [before for before in line if before.step < commit.step]
        if commit.incarnation == incarnation:
            line.append(commit)
    return line


def check_line(line: Sequence[StepCommit], at_least: int) -> list[str]:
    """Steps are in order and without a gap; no group is in two of them; each starts from the one before."""
    wrong = []
    if [step.step for step in line] != list(range(len(line))):
        wrong.append(f"steps are not in order and without a gap: {[step.step for step in line]}")
    if len(line) < at_least:
        wrong.append(f"{len(line)} steps are committed, {at_least} were wanted")
    twice = [group for group, count in Counter(group for step in line for group in step.groups).items() if count > 1]
    wrong += [f"{group} is in more than one committed step" for group in twice]
    return wrong + [
        f"step {after.step} starts from {after.base_digest[:12]}, step {before.step} ended at {before.digest[:12]}"
        for before, after in pairwise(line)
        if after.base_digest != before.digest
    ]


def check_made(commits: Sequence[StepCommit], manifests: Sequence[WeightsManifest]) -> list[str]:
    """Whatever is published was made by a step, of whatever incarnation; version 0 alone is nobody's."""
    made = {(commit.incarnation, commit.version) for commit in commits} | {(0, 0)}
    published = {(manifest.incarnation, manifest.version) for manifest in manifests}
    return [f"version {version} of incarnation {i} is published, no step made it" for i, version in sorted(published - made)]


def check_served(states: Iterable[EngineState], manifests: Iterable[WeightsManifest]) -> list[str]:
    """No engine ever said that it serves a version under another digest than it was published with."""
    digests = {(manifest.incarnation, manifest.version): manifest.digest for manifest in manifests}
    serving = {(s.engine, s.incarnation, s.version, s.digest) for s in states if s.phase == "serving" and s.version >= 0}
    return [
        f"engine {engine} served {digest[:12]} as version {version} of incarnation {incarnation}"
        for engine, incarnation, version, digest in sorted(serving)
        if digests.get((incarnation, version)) != digest
    ]


def check_rows(episodes: Iterable[Item], turns: Iterable[Item]) -> list[str]:
    """A sealed trajectory is its attempt's journal, end to end, token by token, whoever wrote the parts of it."""
    journal: dict[tuple[str, int, int], list[TurnRecord]] = {}
    for turn in _of(turns, TurnRecord):
        journal.setdefault((turn.group, turn.slot, turn.attempt), []).append(turn)
    wrong = []
    for episode in _of(episodes, Episode):
        if not episode.turns:
            continue  # given up: it has no row, whatever its last attempt had journalled
        played = sorted(journal.get((episode.group, episode.slot, episode.attempt), []), key=lambda turn: turn.turn)
        name = f"{episode.group}/{episode.slot} attempt {episode.attempt}"
        if [turn.turn for turn in played] != list(range(episode.turns)):
            wrong.append(f"{name} has {episode.turns} turns, its journal {[turn.turn for turn in played]}")
            continue
        ids = [number for turn in played for part in (turn.prompt_ids, turn.sampled_ids) for number in part.numpy().tolist()]
        logprobs = [value for turn in played for value in turn.logprobs.numpy().tolist()]
        if episode.ids.numpy().tolist()[: len(ids)] != ids:
            wrong.append(f"{name} holds other tokens than its journal")
        if episode.logprobs.numpy()[episode.mask.numpy()].tolist() != logprobs:
            wrong.append(f"{name} holds other log-probabilities than its journal")
    return wrong


def check_replay(streams: dict[Stream, list[Item]], ledger: Sequence[tuple[int, LedgerEntry]], config: Config) -> list[str]:
    """The recorded decisions come out of the recorded streams again."""
    ready = [(item.seq, item.decode(ReadyGroup)) for item in streams[Stream.READY]]
    train = [(item.seq, decode_any(item.data)) for item in streams[Stream.TRAIN]]
    difference = replay(ready, train, ledger, gate_settings(config))
    return [] if difference is None else [f"ledger entry {difference.seq} does not come out again: {difference.why}"]


def _repeated(stream: Stream, items: Sequence[Item]) -> list[str]:
    """Subjects that may hold one message for ever hold one."""
    spec = next(spec for spec in STREAMS if spec.stream is stream)
    once = {subject.pattern.split(".*", 1)[0] for subject in spec.subjects if subject.once}
    counts = Counter(item.subject for item in items if _family(item.subject) in once)
    return [f"{subject} was stored {count} times" for subject, count in counts.items() if count > 1]


def _family(subject: str) -> str:
    """`hr.<run>.task.lease.7` → `task.lease`, `hr.<run>.turn.g1.0.0.3` → `turn`: the words before the first that varies."""
    words = subject.split(".")[2:]
    patterns = [entry.pattern.split(".") for spec in STREAMS for entry in spec.subjects]
    fitting = next(
        p for p in patterns if len(p) == len(words) and all(w in ("*", word) for w, word in zip(p, words, strict=True))
    )
    return ".".join(fitting[: fitting.index("*")]) if "*" in fitting else ".".join(fitting)


def _of(items: Iterable[Item], kind: type[M]) -> list[M]:
    messages = (decode_any(item.data) for item in items)
    return [message for message in messages if isinstance(message, kind)]


def _entry(item: Item) -> LedgerEntry:
    message = decode_any(item.data)
    assert isinstance(message, BatchEntry | QuarantineEntry | AbandonEntry), f"{item.subject} is no ledger entry"
    return message
