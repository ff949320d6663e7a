"""Trains a run's committed steps again, undisturbed, from what its ledger names, and compares every digest.

`python -m loadtests.chaos.retrain RUN_FOLDER` prints one JSON object. However often the trainer was killed and started again,
its weights must be those of a trainer that took the same batches in one go.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from loadtests.chaos.store import reopened
from schemas.ledger import BatchEntry
from schemas.table import Stream
from schemas.training import StepCommit
from services.bus import Bus
from services.config import Config
from services.consume import read_all
from trainer.intake import fetch, rows_of
from trainer.learner import Learner


async def retrain(bus: Bus, config: Config) -> dict[str, Any]:
    """Steps taken again, and the first that came out otherwise, if any did. Only the first incarnation is one chain."""
    announced = [item.decode(StepCommit) for item in await read_all(bus, Stream.TRAIN, "train.step.*")]
    entries = {e.step: (i.seq, e) for i in await read_all(bus, Stream.LEDGER, "ledger.batch.*") for e in [i.decode(BatchEntry)]}
    with tempfile.TemporaryDirectory(prefix="hr-retrain-") as folder:
        aside = config.run.model_copy(update={"folder": folder})
        trainer = config.trainer.model_copy(update={"checkpoint_every": 10**9})
        learner = Learner(config.model_copy(update={"run": aside, "trainer": trainer}))
        out: dict[str, Any] = {"steps": 0, "different": None}
        for commit in announced:
            if commit.incarnation:
                break
            seq, entry = entries[commit.step]
            kept = tuple(member for member in entry.groups if member.group in commit.groups)  # without what the store has lost
            rows = rows_of(
                await fetch(bus, msgspec.structs.replace(entry, groups=kept)),
                updating_version=entry.version,
                credit=config.trainer.credit,
                scale=config.trainer.group_scale,
                shuffle_seed=config.run.seed if config.trainer.shuffle_rewards else None,
            )
            outcome = learner.train(commit.step, rows, commit.groups, seq)
            if outcome.new.digest != commit.digest:
                out["different"] = (
                    f"step {commit.step}: announced {commit.digest[:12]}, trained again {outcome.new.digest[:12]}"
                )
                break
            out["steps"] += 1
        learner.close()
    return out


async def _main(folder: Path) -> dict[str, Any]:
    async with reopened(folder) as (bus, config):
        return await retrain(bus, config)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_main(Path(sys.argv[1])))))
