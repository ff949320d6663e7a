"""The life of one step: who asked for its batch, which groups entered with what, the update, and the version that came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from admission.explain_source import Found
from admission.story import Event, Story, Value
from schemas.group import ReadyGroup
from schemas.ledger import BatchEntry
from schemas.lineage import Lineage
from schemas.policy import EngineState, WeightsManifest
from schemas.table import Stream
from schemas.training import BatchDemand, StepCommit
from services.config import Config

Advantages = Callable[..., list[float | None]]  # `trainer.credit.advantages`


@dataclass
class StepParts:
    """The messages of one step, sorted out; of several commits that of the newest incarnation counts."""

    demand: tuple[Found, BatchDemand] | None = None
    batch: tuple[Found, BatchEntry] | None = None
    commit: tuple[Found, StepCommit] | None = None
    staged: tuple[Found, WeightsManifest] | None = None
    engines: dict[str, tuple[Found, EngineState]] | None = None

    @classmethod
    def of(cls, found: Sequence[Found]) -> StepParts:
        parts, line, engines = cls(), Lineage(), dict[str, tuple[Found, EngineState]]()
        for item in sorted(found, key=lambda item: (item.stream, item.seq)):
            match item.message:
                case BatchDemand() as demand:
                    parts.demand = (item, demand)
                case BatchEntry() as batch:
                    parts.batch = (item, batch)
                case StepCommit() as commit:
                    if line.add(commit) or parts.commit is None:
                        parts.commit = (item, commit)
                case WeightsManifest() as manifest if manifest.form == "patch" or parts.staged is None:
                    parts.staged = (item, manifest)
                case EngineState() as state if state.phase == "serving":
                    engines.setdefault(state.engine, (item, state))
                case _:
                    pass
        parts.engines = engines
        return parts

    def events(self) -> list[Event]:
        """From the demand to the last engine that serves what came out."""
        out: list[Event] = []
        if self.demand is not None:
            found, demand = self.demand
            text = f"the trainer asks for batch {demand.step}: {demand.groups} groups for version {demand.version}"
            until = self.batch[0].time_ns if self.batch is not None else 0
            out.append(Event(at_ns=found.time_ns, until_ns=until, lane="trainer", what="demand", text=text))
        if self.commit is not None:
            found, commit = self.commit
            ended = commit.finished_ns or found.time_ns
            begun = ended - int((commit.train_s + commit.publish_s) * 1e9)
            text = (
                f"step {commit.step}: {len(commit.groups)} groups, {commit.rows} rows, {commit.trained_tokens} tokens,"
                f" {commit.optimizer_steps} update(s); waited {commit.wait_s:.3f} s, trained {commit.train_s:.3f} s"
            )
            details: dict[str, Value] = {"version": commit.version, "digest": commit.digest, **commit.metrics}
            out.append(Event(at_ns=begun, until_ns=ended, lane="trainer", what="step", text=text, details=details))
        if self.staged is not None:
            found, manifest = self.staged
            text = f"version {manifest.version} is staged ({manifest.form}), digest {manifest.digest[:12]}"
            out.append(Event(at_ns=found.time_ns, lane="weights", what="version", text=text))
        for engine, (found, state) in (self.engines or {}).items():
            text = f"{engine} serves version {state.version}, after a pause of {state.paused_s:.3f} s"
            out.append(Event(at_ns=found.time_ns, lane="weights", what="version", text=text))
        return out


def gradient_mass(groups: Sequence[ReadyGroup], config: Config, advantages: Advantages) -> dict[str, float]:
    """Each group's share of `sum |weight * advantage|` over the batch, before clipping and off-policy weights.

    From the recorded rewards and token counts, with credit and reduction as configured (`trainer/reductions.py` gives the
    weights; within an episode they sum to a multiple of its tokens, or to a constant where lengths are normalized).
    """
    trainer = config.trainer
    by_length = trainer.reduction != "length_normalized"
    mass: dict[str, float] = {}
    for group in groups:
        siblings = sorted(group.siblings, key=lambda s: s.slot)
        credit = advantages([s.reward for s in siblings], credit=trainer.credit, scale=trainer.group_scale)
        parts = zip(credit, siblings, strict=True)
        mass[group.group] = sum(abs(value or 0.0) * (s.sampled_tokens if by_length else 1) for value, s in parts)
    total = sum(mass.values())
    return {name: value / total if total else 0.0 for name, value in mass.items()}


def step_story(
    step: int, run: str, found: Sequence[Found], ready: Sequence[Found], config: Config | None, advantages: Advantages
) -> Story:
    """The step with one row for each of its groups."""
    parts = StepParts.of(found)
    story = Story("step", str(step), run, _answer(step, parts), events=parts.events())
    groups = {item.message.group: (item, item.message) for item in ready if isinstance(item.message, ReadyGroup)}
    shares = gradient_mass([group for _, group in groups.values()], config, advantages) if config is not None else {}
    if parts.batch is not None:
        at, batch = parts.batch
        story.facts |= {"version": batch.version, "groups": len(batch.groups), "max_lag": batch.max_lag, "ledger_seq": at.seq}
        if len(groups) < len(batch.groups):
            story.facts["not readable here"] = len(batch.groups) - len(groups)
        for member in batch.groups:
            row: dict[str, Value] = {"group": member.group, "lag": member.lag}
            row["versions"] = f"{member.oldest_version} to {member.newest_version}"
            if member.group in groups:
                item, group = groups[member.group]
                story.events.append(
                    Event(
                        at_ns=item.time_ns,
                        until_ns=at.time_ns,
                        lane=group.group,
                        what="wait",
                        text=f"{group.group} ({group.family}) is ready and waits in the bank",
                        details={"group": group.group},
                    )
                )
                row |= {
                    "family": group.family,
                    "rewards": " ".join("-" if r is None else f"{r:g}" for r in group.rewards()),
                    "tokens": sum(s.sampled_tokens for s in group.siblings),
                    "waited s": round((at.time_ns - item.time_ns) / 1e9, 3),
                    "gradient mass": round(shares[member.group], 4) if member.group in shares else None,
                }
            story.rows.append(row)
    if parts.commit is not None:
        commit = parts.commit[1]
        story.facts |= {"made version": commit.version, "digest": commit.digest, "rows": commit.rows, "wait_s": commit.wait_s}
        story.facts |= {
            name: round(value, 6) for name, value in commit.metrics.items() if name in ("loss", "grad_norm", "entropy")
        }
    return story.in_order()


def _answer(step: int, parts: StepParts) -> str:
    if parts.commit is not None:
        commit = parts.commit[1]
        lags = [member.lag for member in parts.batch[1].groups] if parts.batch is not None else []
        lag = f", lag {min(lags)} to {max(lags)}" if lags else ""
        return f"step {step} trained on {len(commit.groups)} groups{lag} and made version {commit.version}"
    if parts.batch is not None:
        return f"step {step} has its batch of {len(parts.batch[1].groups)} groups and is not committed yet"
    if parts.demand is not None:
        return f"step {step} was asked for and waits for {parts.demand[1].groups} eligible groups"
    return f"step {step} is not known here"


def is_known(found: Sequence[Found]) -> bool:
    """Whether anything of a step is there, besides what engines say of its version."""
    return any(item.stream in (Stream.TRAIN, Stream.LEDGER) for item in found)
