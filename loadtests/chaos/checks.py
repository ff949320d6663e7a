"""What must be true of a run however it was disturbed, read from its streams and its checkpoints alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from admission.conservation import account
from admission.replay import replay
from admission.service import gate_settings
from schemas.codec import decode_any
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, QuarantineEntry
from schemas.message import Message
from schemas.policy import WeightsManifest
from schemas.table import STREAMS, Stream
from schemas.training import StepCommit
from schemas.trajectory import Episode, TurnRecord
from services.bus import Bus
from services.config import Config
from services.consume import read_all
from services.items import IntegrityError, Item
from trainer.checkpoint import Checkpoint, verify

M = TypeVar("M", bound=Message)
_KEPT = tuple(spec.stream for spec in STREAMS if spec.retention == "limits" and spec.discard == "new")


@dataclass
class Findings:
    """`violations` is empty for a run that kept its promises."""

    steps: int = 0
    account: str = ""
    items: int = 0
    final_digest: str = ""
    violations: list[str] = field(default_factory=list)


async def audit(bus: Bus, config: Config, folder: Path, *, at_least_steps: int) -> Findings:
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
        found.violations += _holes(stream, streams[stream]) + _repeated(stream, streams[stream])
    leases = _of(streams[Stream.TASKS], GroupLease)
    ledger = [(item.seq, _entry(item)) for item in streams[Stream.LEDGER]]
    entries = [entry for _, entry in ledger]
    steps = _of(streams[Stream.TRAIN], StepCommit)
    total = account(leases, entries)
    found.steps, found.account = len(steps), total.line()
    found.final_digest = steps[-1].digest if steps else ""
    found.violations += total.violations if not total.holds else ()
    found.violations += check_steps(steps, [entry for entry in entries if isinstance(entry, BatchEntry)], at_least_steps)
    found.violations += check_ready(streams[Stream.READY], streams[Stream.EPISODES])
    found.violations += check_published(steps, _of(streams[Stream.POLICY], WeightsManifest))
    found.violations += check_rows(streams[Stream.EPISODES], streams[Stream.TURNS])
    found.violations += check_checkpoints(folder, steps)
    found.violations += check_replay(streams, ledger, config)
    return found


def check_steps(steps: Sequence[StepCommit], batches: Sequence[BatchEntry], at_least: int) -> list[str]:
    """Steps are the ledger's batches, in order, without a gap; no group is in two of them; each starts from the one before."""
    wrong = []
    if [step.step for step in steps] != list(range(len(steps))):
        wrong.append(f"steps are not in order and without a gap: {[step.step for step in steps]}")
    if len(steps) < at_least:
        wrong.append(f"{len(steps)} steps are committed, {at_least} were wanted")
    planned = {batch.step: tuple(member.group for member in batch.groups) for batch in batches}
    for step in steps:
        if planned.get(step.step) != step.groups:
            wrong.append(f"step {step.step} trained on {step.groups}, the ledger gave it {planned.get(step.step)}")
    twice = [group for group, count in Counter(group for step in steps for group in step.groups).items() if count > 1]
    wrong += [f"{group} is in more than one committed step" for group in twice]
    for before, after in pairwise(steps):
        if after.incarnation == before.incarnation and after.base_digest != before.digest:
            wrong.append(
                f"step {after.step} starts from {after.base_digest[:12]}, step {before.step} ended at {before.digest[:12]}"
            )
    return wrong


def check_ready(ready: Iterable[Item], episodes: Iterable[Item]) -> list[str]:
    """A ready group names exactly the episodes and verdicts that are stored."""
    stored = {item.seq: item for item in episodes}
    wrong = []
    for item in ready:
        group = item.decode(ReadyGroup)
        for sibling in group.siblings:
            named = ((sibling.episode_seq, sibling.episode_digest), (sibling.verdict_seq, sibling.verdict_digest))
            for seq, digest in named:
                if seq and (seq not in stored or stored[seq].digest != digest):
                    wrong.append(f"{group.group}/{sibling.slot} names {digest[:12]} at {seq}, which is not what stands there")
    return wrong


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


def check_published(steps: Sequence[StepCommit], manifests: Sequence[WeightsManifest]) -> list[str]:
    """One digest for each version, whoever names it, and a step for each but the first."""
    digests: dict[tuple[int, int], set[str]] = {}
    for step in steps:
        digests.setdefault((step.incarnation, step.version), set()).add(step.digest)
    for manifest in manifests:
        digests.setdefault((manifest.incarnation, manifest.version), set()).add(manifest.digest)
    made = {(step.incarnation, step.version) for step in steps} | {(0, 0)}
    wrong = [f"version {version} is published, no step made it" for _, version in sorted(digests.keys() - made)]
    return wrong + [
        f"version {version} stands for {sorted(found)}" for (_, version), found in digests.items() if len(found) > 1
    ]


def check_checkpoints(folder: Path, steps: Sequence[StepCommit]) -> list[str]:
    """Every intact checkpoint holds the weights of its step and the names of all groups that are in them, in order."""
    wrong = []
    for path in sorted((folder / "checkpoints").glob("step-*")):
        checked = verify(path)
        if not isinstance(checked, Checkpoint):
            continue  # torn by a fault, named and passed over; a later one replaces it
        record = checked.commit
        done = [step for step in steps if step.step <= record.step]
        consumed = tuple(group for step in done for group in step.groups)
        if record.consumed_group_ids != consumed:
            wrong.append(
                f"{path.name} names {len(record.consumed_group_ids)} consumed groups, its weights hold {len(consumed)}"
            )
        if done and record.step == done[-1].step and record.digest != done[-1].digest:
            wrong.append(f"{path.name} holds {record.digest[:12]}, its step was announced as {done[-1].digest[:12]}")
    return wrong


def check_replay(streams: dict[Stream, list[Item]], ledger: Sequence[tuple[int, LedgerEntry]], config: Config) -> list[str]:
    """The recorded decisions come out of the recorded streams again."""
    ready = [(item.seq, item.decode(ReadyGroup)) for item in streams[Stream.READY]]
    train = [(item.seq, decode_any(item.data)) for item in streams[Stream.TRAIN]]
    difference = replay(ready, train, ledger, gate_settings(config))
    return [] if difference is None else [f"ledger entry {difference.seq} does not come out again: {difference.why}"]


def _holes(stream: Stream, items: Sequence[Item]) -> list[str]:
    """Nothing of these streams is ever removed, so their sequences begin at 1 and have no gap."""
    expected, wrong = 1, []
    for item in items:
        if item.seq != expected:
            wrong.append(f"{stream}: sequences {expected} to {item.seq - 1} are missing")
        expected = item.seq + 1
    return wrong


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
