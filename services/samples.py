"""Trajectories that a person can read, in the run folder: a few of every step, and every quarantined group."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
from tokenizers import Tokenizer

from schemas.codec import CodecError
from schemas.group import ReadyGroup, Sibling
from schemas.ledger import QuarantineEntry
from schemas.table import Stream
from schemas.training import StepCommit
from schemas.trajectory import Episode, Verdict
from services.bus import Bus
from services.config import Config
from services.items import BusError, IntegrityError

log = structlog.get_logger()
_QUEUE = 256


class Samples:
    """Consumes: step commits and quarantine entries. Produces: JSON files, each written once. A sample that fails is logged."""

    def __init__(self, bus: Bus, config: Config, folder: Path) -> None:
        self._bus = bus
        self._per_step = config.telemetry.trajectories_per_step
        self._folder = folder
        self._queue: asyncio.Queue[StepCommit | QuarantineEntry] = asyncio.Queue(_QUEUE)
        file = Path(config.policy.model) / "tokenizer.json"
        self._tokenizer: Tokenizer | None = Tokenizer.from_file(str(file)) if file.is_file() else None

    async def put(self, message: StepCommit | QuarantineEntry) -> None:
        await self._queue.put(message)

    async def run(self, stop: asyncio.Event) -> None:
        """Write samples until `stop` and the queue is empty."""
        while not (stop.is_set() and self._queue.empty()):
            try:
                message = await asyncio.wait_for(self._queue.get(), 0.5)
            except asyncio.TimeoutError:
                continue
            try:
                if isinstance(message, StepCommit):
                    await self._of_step(message)
                else:
                    await self._of_quarantine(message)
            except (BusError, IntegrityError, CodecError, OSError) as error:
                log.warning("no sample", of=type(message).__name__, error=str(error))

    async def _of_step(self, commit: StepCommit) -> None:
        if not self._per_step or not commit.groups or list(self._folder.glob(f"trajectories/step-{commit.step:05d}-*")):
            return
        groups = [await self._group(name) for name in commit.groups]
        siblings = [(group, sibling) for group in groups if group is not None for sibling in group.siblings]
        ordered = sorted(
            siblings, key=lambda pair: (pair[1].reward is None, pair[1].reward or 0.0, pair[0].group, pair[1].slot)
        )
        for position in _spread(len(ordered), self._per_step):
            group, sibling = ordered[position]
            record = {"step": commit.step, **_group_fields(group), **await self._trajectory(sibling)}
            await self._write(f"trajectories/step-{commit.step:05d}-{group.group}-{sibling.slot}.json", record)

    async def _of_quarantine(self, entry: QuarantineEntry) -> None:
        name = f"quarantine/{entry.group}.json"
        if (self._folder / name).exists():
            return
        group = await self._group(entry.group)
        siblings = group.siblings if group is not None else ()
        record = {
            "reason": entry.reason,
            "detail": entry.detail,
            "at_version": entry.at_version,
            "lag": entry.lag,
            **(_group_fields(group) if group is not None else {"group": entry.group}),
            "trajectories": [await self._trajectory(sibling) for sibling in siblings],
        }
        await self._write(name, record)

    async def _group(self, name: str) -> ReadyGroup | None:
        item = await self._bus.last(self._bus.subjects.ready(name))
        return item.decode(ReadyGroup) if item is not None else None

    async def _trajectory(self, sibling: Sibling) -> dict[str, Any]:
        episode = (await self._bus.get(Stream.EPISODES, sibling.episode_seq)).decode(Episode).checked()
        verdict = (await self._bus.get(Stream.EPISODES, sibling.verdict_seq)).decode(Verdict) if sibling.verdict_seq else None
        return {
            "slot": episode.slot,
            "termination": episode.termination,
            "reward": sibling.reward,
            "components": verdict.components if verdict is not None else {},
            "violations": verdict.violations if verdict is not None else (),
            "detail": verdict.detail if verdict is not None else "",
            "turns": episode.turns,
            "invalid_actions": episode.invalid_actions,
            "engines": episode.engines,
            "seed": episode.seed,
            "parts": self._parts(episode),
        }

    def _parts(self, episode: Episode) -> list[dict[str, Any]]:
        """The token line, cut where sampled and given tokens meet."""
        ids, mask, logprobs = episode.ids.numpy("ids"), episode.mask.numpy("mask"), episode.logprobs.numpy("logprobs")
        versions = episode.token_versions()
        cuts = [0, *(int(cut) + 1 for cut in np.flatnonzero(np.diff(mask.astype(np.int8)))), len(ids)] if len(ids) else []
        parts: list[dict[str, Any]] = []
        for start, end in pairwise(cuts):
            part: dict[str, Any] = {"by": "policy" if mask[start] else "environment", "tokens": end - start}
            if self._tokenizer is not None:
                part["text"] = self._tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False)
            if mask[start]:
                part["versions"] = sorted({int(version) for version in versions[start:end]})
                part["logprob_mean"] = round(float(logprobs[start:end].mean()), 5)
            parts.append(part)
        return parts

    async def _write(self, name: str, record: dict[str, Any]) -> None:
        text = json.dumps(msgspec.to_builtins(record), indent=1, ensure_ascii=False)
        await asyncio.to_thread(_write_whole, self._folder / name, text)


def _group_fields(group: ReadyGroup) -> dict[str, Any]:
    return {
        "group": group.group,
        "task_id": group.task_id,
        "family": group.family,
        "template": group.template,
        "split": group.split,
    }


def _spread(length: int, count: int) -> list[int]:
    """Up to `count` positions from the first to the last; a reader sees the worst and the best reward first."""
    if count >= length:
        return list(range(length))
    return sorted({round(k * (length - 1) / max(1, count - 1)) for k in range(count)})


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    aside.write_text(text + "\n", encoding="utf-8")
    aside.rename(path)
