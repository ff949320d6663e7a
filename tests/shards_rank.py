"""One rank of a trainer whose weights leave it in shards: run with the launcher's variables, writes what it made to a file.

usage: shards_rank.py MODEL_DIR OUTPUT.npz STATE_DIR [WEIGHTS.npz]

Without WEIGHTS it trains; with it, it takes each stage's weights from there, so that another number of ranks holds the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tiny_model import make_rows

from param_sync.patch import frame
from services.device import choose_device
from trainer import ranks as rank_group
from trainer.config import OptimizerConfig, TrainerConfig
from trainer.deepspeed_engine import ShardedModel
from trainer.deepspeed_trainer import DeepSpeedTrainer
from trainer.scorer import TokenScorer
from trainer.slices import Slice
from trainer.weight_shards import Name, WeightShards

STAGES = (0, 1, 2, 3)
LEVELS = (1, 2)
RESTARTED = 1  # the level at which there is a restart
FROZEN = "model.layers.0.mlp.up_proj.weight"
SEGMENT, RANKED_FROM = 1000, 64  # so that a small model has tensors of several segments, and ranked frames
Out = dict[str, npt.NDArray[Any]]


def small_frames() -> None:
    """Cut frames and try form 4 as in a large model. The test does the same before it compares."""
    frame.SEGMENT_ELEMENTS, frame.RANKED_FROM = SEGMENT, RANKED_FROM


@contextmanager
def no_gathers() -> Iterator[None]:
    """Any gather of weights inside is an error."""

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were gathered")

    import deepspeed

    names = ("all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast")
    before = deepspeed.zero.GatheredParameters, [getattr(torch.distributed, name) for name in names]
    deepspeed.zero.GatheredParameters = refused
    for name in names:
        setattr(torch.distributed, name, refused)
    try:
        yield
    finally:
        deepspeed.zero.GatheredParameters = before[0]
        for name, function in zip(names, before[1], strict=True):
            setattr(torch.distributed, name, function)


class PartlyFrozen(DeepSpeedTrainer):
    """One matrix is not trained, so it is in none of DeepSpeed's flat buffers."""

    def _scorer(self, model_dir: str) -> TokenScorer:
        scorer = super()._scorer(model_dir)
        dict(scorer.named_parameters())[f"model.{FROZEN}"].requires_grad_(False)
        return scorer


class Traffic:
    """`exchange`, with the bytes that left this rank."""

    def __init__(self) -> None:
        self.sent = 0

    def __call__(self, outgoing: Any) -> list[bytes]:
        here = torch.distributed.get_rank()
        self.sent += sum(len(data) for rank, data in enumerate(outgoing) if rank != here)
        return rank_group.exchange(outgoing, "cpu")


def make(model_dir: str, stage: int, level: int) -> tuple[DeepSpeedTrainer, WeightShards, Traffic]:
    config = TrainerConfig(
        model_dir=model_dir,
        zero_stage=stage,  # type: ignore[arg-type]
        micro_batch_tokens=96,
        optimizer=OptimizerConfig(learning_rate=2e-4, weight_decay=0.01),  # with decay: two flat buffers
    )
    compute = "bfloat16" if level == 2 and stage else "float32"  # other optimizers inside DeepSpeed, other flat buffers
    trainer, traffic = PartlyFrozen(config, choose_device("cpu", threads=1, compute_dtype=compute)), Traffic()
    return trainer, WeightShards(trainer.shards, traffic, level=level), traffic


def save(out: Out, key: str, made: Any) -> None:
    if made is not None:
        out[key] = np.frombuffer(made.tobytes(), np.uint8)


def bits(trainer: DeepSpeedTrainer, out: Out, key: str) -> None:
    out.update({f"{key}/{name}": words for name, words in trainer.policy_bits(owned=False)})


def train(model_dir: str, states: Path) -> Out:
    """At each stage and level: two updates with their patches, an anchor, and a third update both on and after a restart."""
    out: Out = {}
    for stage in STAGES:
        for level in LEVELS:
            key = f"{stage}/{level}"
            trainer, shards, traffic = make(model_dir, stage, level)
            bits(trainer, out, f"{key}/weights/0")
            with no_gathers():
                name = Name(0, 0, shards.read())
            for version in (1, 2):
                trainer.train_batch([make_rows(30 + version, 6)])
                bits(trainer, out, f"{key}/weights/{version}")
                traffic.sent = 0
                with no_gathers():
                    name, patch = shards.step(name, version)
                out[f"{key}/digest/{version}"] = np.array(name.digest)
                out[f"{key}/sent/{version}"] = np.array(traffic.sent)
                save(out, f"{key}/patch/{version}", patch)
            with no_gathers():
                save(out, f"{key}/anchor", shards.anchor(name))
            held = [*(tensor.data for tensor in shards._held.values()), *shards._pieces.values()]
            out[f"{key}/shadow"] = np.array(sum(words.size for words in held))
            out[f"{key}/owned"] = np.array(sum(part.elements for part in shards._own))
            if level != RESTARTED:
                trainer.close()
                continue
            folder = states / f"{stage}-{level}"
            trainer.save_state(folder)
            out[f"{key}/next"] = third(trainer, shards, name)
            trainer.close()
            trainer, shards, _ = make(model_dir, stage, level)
            trainer.load_state(folder)
            out[f"{key}/after restart"] = third(trainer, shards, Name(2, 0, shards.read()))
            trainer.close()
    return out


def third(trainer: DeepSpeedTrainer, shards: WeightShards, name: Name) -> npt.NDArray[np.uint8]:
    trainer.train_batch([make_rows(33, 6)])
    _, patch = shards.step(name, 3)
    return np.frombuffer(b"" if patch is None else patch.tobytes(), np.uint8)


def put(model: ShardedModel, weights: Out, key: str) -> None:
    """Overwrite this rank's slices with the bits under `key`."""
    for part in model.slices():
        if part.rank == model.rank:
            words = weights[f"{key}/{part.name}"].reshape(-1)[part.start : part.start + part.elements]
            view = view_of(model, part)
            view.copy_(torch.from_numpy(words.copy()).view(torch.bfloat16))


def view_of(model: ShardedModel, part: Slice) -> torch.Tensor:
    parameter = model._parameters[part.name]
    flat = parameter.ds_tensor.narrow(0, 0, part.elements) if model.stage == 3 else parameter.detach().reshape(-1)
    return flat if model.stage == 3 else flat.narrow(0, part.start, part.elements)


def replay(model_dir: str, weights: Out) -> Out:
    """The patches between the given weights, at each stage and level."""
    out: Out = {}
    for stage in STAGES:
        for level in LEVELS:
            key = f"{stage}/{level}"
            trainer, shards, _ = make(model_dir, stage, level)
            put(trainer.shards, weights, f"{key}/weights/0")
            name = Name(0, 0, shards.read())
            for version in (1, 2):
                put(trainer.shards, weights, f"{key}/weights/{version}")
                name, patch = shards.step(name, version)
                save(out, f"{key}/patch/{version}", patch)
            save(out, f"{key}/anchor", shards.anchor(name))
            trainer.close()
    return out


if __name__ == "__main__":
    small_frames()
    given = dict(np.load(sys.argv[4])) if len(sys.argv) > 4 else None
    np.savez(sys.argv[2], **(train(sys.argv[1], Path(sys.argv[3])) if given is None else replay(sys.argv[1], given)))
