"""One rank of a trainer under test: run with the launcher's variables, writes what it saw to a file.

usage: trainer_rank.py MODEL_DIR OUTPUT.npz STATE_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tiny_model import make_rows

from services.device import choose_device
from trainer.batch import padding_row
from trainer.config import OptimizerConfig, TrainerConfig
from trainer.deepspeed_trainer import DeepSpeedTrainer

STAGES = (0, 1, 2, 3)


def run(model_dir: str, states: Path) -> dict[str, npt.NDArray[Any]]:
    """Two updates at each stage, on the same rows whatever the number of ranks; then save, load and one more."""
    out: dict[str, npt.NDArray[Any]] = {}
    for stage in STAGES:
        config = TrainerConfig(
            model_dir=model_dir,
            zero_stage=stage,  # type: ignore[arg-type]
            micro_batch_tokens=96,
            optimizer=OptimizerConfig(learning_rate=0.3, epsilon=1.0),
        )
        device = choose_device("cpu", threads=1)
        trainer = DeepSpeedTrainer(config, device)
        # The second mini-batch has fewer long rows than ranks' micro-batches, so that one rank runs empty ones.
        batch = [make_rows(20, 8), [*make_rows(21, 1, shortest=40), padding_row()]]
        metrics = trainer.train_batch(batch)
        out[f"{stage}/loss"] = np.array([update.loss for update in metrics.updates])
        out[f"{stage}/norm"] = np.array([update.gradient_norm for update in metrics.updates])
        out[f"{stage}/drift"] = np.array([update.drift for update in metrics.updates])
        out[f"{stage}/tokens"] = np.array([update.tokens for update in metrics.updates])
        out[f"{stage}/logprobs"] = np.concatenate(trainer.log_probs(make_rows(22, 5)))
        for name, bits in trainer.policy_bits(owned=False):
            out[f"{stage}/weights/{name}"] = bits
        out[f"{stage}/owned"] = np.array([name for name, _ in trainer.policy_bits()])
        folder = states / f"stage{stage}"
        trainer.save_state(folder)
        trainer.train_batch([make_rows(23, 4)])
        expected = dict(trainer.policy_bits(owned=False))
        trainer.close()
        resumed = DeepSpeedTrainer(config, device)
        resumed.load_state(folder)
        resumed.train_batch([make_rows(23, 4)])
        same = all((bits == expected[name]).all() for name, bits in resumed.policy_bits(owned=False))
        out[f"{stage}/resumed"] = np.array(same)
        resumed.close()
    return out


if __name__ == "__main__":
    np.savez(sys.argv[2], **run(sys.argv[1], Path(sys.argv[3])))
