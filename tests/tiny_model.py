"""A random Qwen2 of a few thousand weights on disk, and rows for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from trainer.batch import TrainRow

VOCABULARY = 64


def write_tiny_model(folder: Path, *, seed: int = 0, tied: bool = True, hidden: int = 32) -> Path:
    """Two layers, bfloat16 safetensors, deterministic for a seed."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_row(
    generator: np.random.Generator, length: int, *, prompt: int = 3, advantage: float | None = 1.0, lag: int = 0
) -> TrainRow:
    """Random ids, everything after the prompt sampled in two turns; behaviour log-probs near those of a uniform policy."""
    mask = np.zeros(length, dtype=np.bool_)
    mask[prompt:] = True
    second = (prompt + length) // 2
    if second + 1 < length and second > prompt:
        mask[second] = False  # an observation token between the turns
        starts = [prompt, second + 1]
    else:
        starts = [prompt]
    logprobs = np.where(mask, generator.normal(-4.2, 0.1, length), 0.0).astype(np.float32)
    return TrainRow(
        ids=generator.integers(0, VOCABULARY, length).astype(np.int32),
        mask=mask,
        logprobs=logprobs,
        advantage=advantage,
        lag=lag,
        turn_starts=np.array(starts, dtype=np.int32),
    )


def make_rows(seed: int, count: int, *, shortest: int = 8, longest: int = 40) -> list[TrainRow]:
    """`count` rows of mixed lengths with advantages of both signs."""
    generator = np.random.default_rng(seed)
    return [
        make_row(generator, int(generator.integers(shortest, longest + 1)), advantage=float(generator.normal()))
        for _ in range(count)
    ]


def bits_of(weights: dict[str, npt.NDArray[np.uint16]]) -> dict[str, npt.NDArray[np.float32]]:
    """bfloat16 bits as float32 values."""
    return {name: (bits.astype(np.uint32) << 16).view(np.float32) for name, bits in weights.items()}
