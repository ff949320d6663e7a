"""The one door to `transformers` for model weights: a checkpoint directory in, a causal language model out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelLoadError(RuntimeError):
    """A model directory cannot be used; the text names the directory and what is missing."""


def load_causal_lm(path: str | Path, dtype: Literal["float32", "bfloat16"], device: str) -> PreTrainedModel:
    """The causal language model of a local checkpoint directory, weights in `dtype` on `device`, in evaluation mode.

    Never touches the network. bfloat16 weights loaded as `float32` keep their exact values.
    Raises `ModelLoadError` when the directory has no `config.json` or the weights do not fit it.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder}: no config.json; give the directory of a transformers checkpoint")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loader: Any = AutoModelForCausalLM
    try:
        loaded, report = loader.from_pretrained(
            folder, dtype=DTYPES[dtype], local_files_only=True, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError) as failure:
        raise ModelLoadError(f"{folder}: the model cannot be loaded: {failure}") from failure
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelLoadError(f"{folder}: weights are missing for {missing[:5]}; a part-initialised model is never used")
    model: PreTrainedModel = loaded.to(device).eval()
    return model


def use_attention(model: PreTrainedModel, name: str, function: Callable[..., tuple[torch.Tensor, None]]) -> None:
    """Make `model` compute attention with `function` (signature of a `transformers` attention function), known as `name`."""
    AttentionInterface.register(name, function)
    model.set_attn_implementation(name)


def convert_gguf(gguf: str | Path, out: str | Path) -> Path:
    """De-quantise a GGUF file into a checkpoint directory: bfloat16 safetensors, configuration, tokenizer, chat template.

    Done by hand because a model that was loaded from GGUF refuses `save_pretrained`. Needs the `gguf` package.
    Raises `ModelLoadError` when the file cannot be read.
    """
    source, target = Path(gguf), Path(out)
    loader: Any = AutoModelForCausalLM
    tokenizers: Any = AutoTokenizer
    try:
        loaded = loader.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True)
        tokenizer = tokenizers.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    except (OSError, ValueError, ImportError) as failure:
        raise ModelLoadError(f"{source}: cannot be de-quantised: {failure}") from failure
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = type(loaded)(type(loaded.config).from_dict(settings)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
