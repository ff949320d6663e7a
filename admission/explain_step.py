"""The life of one step: from its demand to the version that came out and who serves it. Pure; records in, a `Life` out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from admission.gradient_mass import MassRule, gradient_mass
from admission.life import Event, Life, Told, Unexplained, content_of, lost, version
from schemas.group import ReadyGroup
from schemas.ledger import BatchEntry, LostItem
from schemas.lineage import Lineage
from schemas.policy import EngineState, FleetVersions, WeightsManifest
from schemas.table import Stream
from schemas.training import BatchDemand, StepCommit
from services.recording_items import LATER_INCARNATIONS, step_name, version_name

About = Callable[[Iterable[str], Iterable[Stream]], Iterable[Told]]
OF_STEP = (Stream.LEDGER, Stream.TRAIN, Stream.POLICY)


@dataclass
class StepTold:
    """What the streams say of one step and of the version that it made. `line`: the versions that training stands on."""

    step: int
    line: Lineage = field(default_factory=Lineage)
    demands: list[tuple[int, int, BatchDemand]] = field(default_factory=list)
    batch: tuple[int, int, BatchEntry] | None = None
    commits: list[tuple[int, StepCommit]] = field(default_factory=list)
    manifests: list[tuple[int, WeightsManifest]] = field(default_factory=list)
    serving: dict[tuple[str, int], int] = field(default_factory=dict)  # engine, incarnation -> when it first served it
    fleet_ns: int = 0

    def commit(self) -> StepCommit | None:
        """The step's commit: on the line, or else the newest that there is."""
        found = self.line.commit_of(self.step)
        return found or (self.commits[-1][1] if self.commits else None)

    def is_left(self, commit: StepCommit) -> bool:
        """Whether training has left this commit's version behind as a dead branch."""
        return not self.line.on_line(commit.incarnation, commit.version)

    def left_out(self, group: str) -> LostItem | None:
        """The item for which the step went on without a group of its batch."""
        commit = self.commit()
        return next((left.item for left in commit.left_out() if left.group == group), None) if commit is not None else None


def told_of_step(step: int, told: Iterable[Told]) -> StepTold:
    """Pick what is this step's out of records."""
    found = StepTold(step)
    version = step + 1
    for stream, record in told:
        number, _, incarnation = record.name.rpartition(".")[2].partition("-")
        if stream in (Stream.LEDGER, Stream.TRAIN) and number != str(step):
            if (
                incarnation
                and record.name.startswith("train.step.")
                and isinstance(c := content_of(stream, record), StepCommit)
            ):
                found.line.add(c)
            continue
        match content_of(stream, record):
            case BatchDemand() as demand if demand.step == step:
                found.demands.append((record.seq, record.time_ns, demand))
            case BatchEntry() as batch if batch.step == step:
                found.batch = (record.seq, record.time_ns, batch)
            case StepCommit() as commit if commit.step == step:
                found.commits.append((record.time_ns, commit))
                found.line.add(commit)
            case WeightsManifest() as manifest if manifest.version == version:
                found.manifests.append((record.time_ns, manifest))
            case EngineState() as state if state.version == version and state.phase == "serving":
                found.serving.setdefault((state.engine, state.incarnation), record.time_ns)
            case FleetVersions() as fleet if fleet.oldest >= version and not found.fleet_ns:
                found.fleet_ns = record.time_ns
    return found


def told_step(step: int, about: About) -> StepTold:
    """What the records say of a step."""
    return told_of_step(step, about([step_name(step), version_name(step + 1), LATER_INCARNATIONS], OF_STEP))


def ready_of(names: Iterable[str], about: About) -> dict[str, tuple[int, ReadyGroup]]:
    """Time and entry of groups in READY."""
    wanted = set(names)
    found: dict[str, tuple[int, ReadyGroup]] = {}
    for stream, record in about(sorted(wanted), [Stream.READY]):
        group = content_of(stream, record) if record.name.partition(".")[2] in wanted else None
        if isinstance(group, ReadyGroup):
            found[group.group] = (record.time_ns, group)
    return found


def step_events(told: StepTold) -> Iterator[Event]:
    """From the demand to the version in service."""
    for seq, at, demand in told.demands:
        by = f" (incarnation {demand.incarnation})" if demand.incarnation else ""
        asked = f"demands batch {demand.step} of {demand.groups} groups for version {demand.version}"
        yield Event(at, "trainer", f"{asked}{by} (TRAIN {seq})")
    decided = told.batch[1] if told.batch is not None else 0
    if told.batch is not None:
        seq, at, batch = told.batch
        lags = [member.lag for member in batch.groups]
        yield Event(at, "admission", f"decides batch {batch.step}: {len(lags)} groups, lags {lags} (LEDGER {seq})")
    for at, commit in told.commits:
        if at > decided > 0:
            worked = f"trains step {commit.step}: {commit.rows} rows, {commit.trained_tokens} tokens"
            yield Event(decided, "trainer", worked, at)
        dead = "; training has left this branch since" if told.is_left(commit) else ""
        made = version(commit.version, commit.incarnation)
        yield Event(at, "trainer", f"commits step {commit.step}: {made}, digest {commit.digest[:12]}{dead}")
        for left in commit.left_out():
            yield Event(at, "trainer", f"takes {left.group} out of step {commit.step}: item lost: {lost(left.item)}")
    for at, manifest in told.manifests:
        made = version(manifest.version, manifest.incarnation)
        yield Event(at, "weights", f"{made} is published as {manifest.form}")
    for (engine, incarnation), at in sorted(told.serving.items()):
        yield Event(at, "weights", f"engine {engine} serves {version(told.step + 1, incarnation)}")
    if told.fleet_ns:
        yield Event(told.fleet_ns, "weights", f"every engine in rotation serves version {told.step + 1} or later")


def step_life(step: int, about: About, mass: MassRule | None) -> Life:
    """A step with a row for each of its groups. Raises `Unexplained` when nothing tells of it."""
    told = told_step(step, about)
    if told.batch is None and not told.demands and not told.commits:
        raise Unexplained(f"step {step}: nothing tells of it; steps are numbered from 0")
    life = Life(f"step {step}", events=list(step_events(told)))
    names = [member.group for member in told.batch[2].groups] if told.batch is not None else []
    ready = ready_of(names, about)
    commit = told.commit()
    trained = [ready[name][1] for name in commit.groups if name in ready] if commit is not None else []
    whole = commit is not None and len(trained) == len(commit.groups)
    shares = gradient_mass(trained, mass) if mass is not None and whole else {}
    life.facts = _step_facts(told, ready, shares)
    if shares:
        life.facts["gradient_mass_by"] = str(mass)
    if commit is not None:
        made = version(commit.version, commit.incarnation)
        life.answer = f"step {step} made {made} ({commit.digest[:12]}) out of {len(commit.groups)} groups"
        if out := [left.group for left in commit.left_out()]:
            life.answer += f"; {', '.join(out)} taken out of it: item lost"
        if told.is_left(commit):
            life.answer += "; training has left that version since and has not taken the step again yet"
    else:
        life.answer = f"step {step} has {'its batch and is not committed' if told.batch else 'no batch yet'}"
    for name, (at, group) in ready.items():
        decided = told.batch[1] if told.batch is not None else 0
        life.events.append(
            Event(at, "bank", f"{name} becomes whole, oldest version {group.oldest_version()}", max(decided, at), kind="wait")
        )
    return life.sorted()


def _step_facts(told: StepTold, ready: dict[str, tuple[int, ReadyGroup]], shares: dict[str, float]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    c = told.commit()
    if c is not None:
        facts |= {"version": c.version, "incarnation": c.incarnation, "digest": c.digest}
        facts |= {"wait_s": c.wait_s, "train_s": c.train_s, "publish_s": c.publish_s}
        facts |= {"rows": c.rows, "tokens": c.trained_tokens, "patch_bytes": c.patch_bytes}
        facts["left_out"] = [{"group": left.group, "item": lost(left.item)} for left in c.left_out()]
        facts["metrics"] = dict(c.metrics)
    if told.batch is not None:
        _, at, batch = told.batch
        facts |= {"max_lag": batch.max_lag, "settings": batch.settings_hash, "ready_high_water": batch.ready_high_water}
        out = {left.group for left in c.left_out()} if c is not None else set()
        facts["groups"] = [
            {
                "group": m.group,
                "lag": m.lag,
                "oldest_version": m.oldest_version,
                "family": ready[m.group][1].family if m.group in ready else "",
                "in_bank_s": round((at - ready[m.group][0]) / 1e9, 3) if m.group in ready else None,
                "gradient_mass": round(shares[m.group], 6) if m.group in shares else None,
                "fate": "taken out: item lost" if m.group in out else "trained on" if c is not None else "in the batch",
            }
            for m in batch.groups
        ]
    return facts
