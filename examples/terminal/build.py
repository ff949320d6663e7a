"""Builds the policy's folder: tokenizer, chat template, configuration, and initial weights from a seed.

    python -m examples.terminal.build OUTPUT_DIR [--seed 0]

The tokenizer is a byte-level BPE that splits letters, digits and the rest, so that a word is the same tokens wherever it
stands. It is trained on demonstrations, so it knows no held-out sentence.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .drill import drill
from .suite import suite

SPECIAL_TOKENS = (
    "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|shell|>", "<|finish|>", "<|abstain|>",
)  # fmt: skip
PAD_ID, END_ID = 0, 1
VOCAB_SIZE = 832  # a multiple of 64
HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD = 192, 4, 6, 2, 512
HEAD = HIDDEN // HEADS
MAX_POSITIONS = 1024
ROPE_THETA = 1000.0  # episodes are short: slower rotations would carry nothing
INITIAL_SCALE = 0.06
LOOK_BACK_SCALE = 4.6  # the token at the right distance gets e^3 times the attention of its neighbours
TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def corpus(count: int = 6000, seed: int = 0) -> Iterator[str]:
    """Instructions, commands and outputs of training templates, the texts that the policy reads and writes."""
    rng = random.Random(f"corpus {seed}")
    templates = [template for template in suite.templates.values() if not template.heldout]
    for _ in range(count):
        template = rng.choice(templates)
        case = template.case(rng.randrange(100, 9000))
        yield from (template.wording.format_map(dict(case.slots)), *case.oracle, *case.outputs)
        yield drill(rng).instruction
    for error in _ERRORS:
        yield from [error] * (count // 20)


_ERRORS = (
    "shell(command)",
    "ok",
    "invalid unterminated: no end",
    "invalid malformed: no action",
    "invalid malformed: one action only",
    "invalid unknown_tool: no such tool",
    "invalid empty: no command",
    "invalid empty: nothing was said",
    "mv: cannot stat 'x': No such file or directory\n[exit 1]",
    "sed: can't read x: No such file or directory\n[exit 2]",
    "cat: x: No such file or directory",
    "grep: x: No such file or directory",
    "rm: cannot remove 'x': No such file or directory",
    "sh: 1: cannot create x: Directory nonexistent",
    "sh: 1: x: not found\n[exit 127]",
    "mkdir: cannot create directory 'x': File exists",
)


def train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[A-Za-z]+|[0-9]+|[^A-Za-z0-9]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=20,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer=trainer)
    return tokenizer


def config() -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "initializer_range": INITIAL_SCALE,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "bfloat16",
    }


def initial_weights(seed: int) -> dict[str, torch.Tensor]:
    """Random weights with two hints that save a small policy most of its way to copying names out of the prompt.

    Names and shapes are those of `Qwen2ForCausalLM`. The hints only shape the start, every weight is trained:
    - The first three heads of the first layer look one, two and three tokens back (`_look_back`), the first half of induction.
    - Each head's output matrix is its value matrix transposed, so that a head repeats what it attends to, and queries of
      later layers resemble keys, so that like attends to like (mimetic initialization, Trockman and Kolter 2023).
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = INITIAL_SCALE) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN, INITIAL_SCALE / 2),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        key, value = matrix(KV_HEADS * HEAD, HIDDEN), matrix(KV_HEADS * HEAD, HIDDEN)
        query = matrix(HEADS * HEAD, HIDDEN)
        shared = torch.arange(HEADS).repeat_interleave(HEAD) // (HEADS // KV_HEADS) * HEAD + torch.arange(HEAD).repeat(HEADS)
        if layer > 0:
            query = (query + key[shared]) * 0.5**0.5
        biases = {"q": torch.zeros(HEADS * HEAD), "k": torch.zeros(KV_HEADS * HEAD), "v": torch.zeros(KV_HEADS * HEAD)}
        if layer == 0:
            biases["k"][:HEAD] = _look_back(0)
            for head in range(HEADS // KV_HEADS):
                biases["q"][head * HEAD : (head + 1) * HEAD] = _look_back(head + 1)
        prefix = f"model.layers.{layer}"
        for name, projection in (("q", query), ("k", key), ("v", value)):
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = projection
            weights[f"{prefix}.self_attn.{name}_proj.bias"] = biases[name]
        residual = (2 * LAYERS) ** -0.5
        weights[f"{prefix}.self_attn.o_proj.weight"] = value[shared].T * residual
        weights[f"{prefix}.mlp.gate_proj.weight"] = matrix(FEED_FORWARD, HIDDEN)
        weights[f"{prefix}.mlp.up_proj.weight"] = matrix(FEED_FORWARD, HIDDEN)
        weights[f"{prefix}.mlp.down_proj.weight"] = matrix(HIDDEN, FEED_FORWARD, INITIAL_SCALE * residual)
        weights[f"{prefix}.input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    return {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}


def _look_back(distance: int) -> torch.Tensor:
    """A bias whose product with `_look_back(0)`, both under rotary embedding, peaks `distance` tokens back. [HEAD]"""
    angles = distance * ROPE_THETA ** (-torch.arange(HEAD // 2) / (HEAD // 2))
    return LOOK_BACK_SCALE * torch.cat([torch.cos(angles), -torch.sin(angles)])


def build(output_dir: Path, seed: int = 0) -> None:
    """Writes the whole folder; the same seed gives the same bytes."""
    output_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    tokenizer.save(str(output_dir / "tokenizer.json"))
    tokenizer_config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[END_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    generation: dict[str, object] = {"eos_token_id": END_ID, "pad_token_id": PAD_ID, "do_sample": True, "temperature": 1.0}
    for name, content in (
        ("config.json", config()),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    ):
        (output_dir / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(TEMPLATE, output_dir / "chat_template.jinja")
    save_file(initial_weights(seed), output_dir / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.output_dir, arguments.seed)


if __name__ == "__main__":
    main()
