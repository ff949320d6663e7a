"""A served checkpoint: bfloat16 safetensors beside the configuration and tokenizer of the model that training began with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, serialize_file

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".safetensors.index.json", ".bin.index.json")


def write_checkpoint(folder: str | Path, weights: Iterable[tuple[str, npt.NDArray[np.uint16]]], *, source: str | Path) -> Path:
    """Write `model.safetensors` from (checkpoint name, bfloat16 bits) pairs and copy every other file of `source`.

    The folder appears under its name only when it is complete; an older one is replaced. Returns the folder.
    """
    target = Path(folder)
    aside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in sorted(Path(source).iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(file, aside / file.name)
    _state_dtype(aside / "config.json")
    held = {name: np.ascontiguousarray(bits) for name, bits in weights}  # alive until written: the specs hold bare addresses
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=list(bits.shape), data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in held.items()
    }
    serialize_file(specs, str(aside / "model.safetensors"), metadata={"format": "pt"})
    if target.exists():
        shutil.rmtree(target)
    aside.rename(target)
    return target


def _state_dtype(path: Path) -> None:
    """Make the configuration say bfloat16, so that loaders that trust it do not widen or narrow the weights."""
    config = json.loads(path.read_text())
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = "bfloat16"
    config.setdefault("dtype", "bfloat16")
    path.write_text(json.dumps(config, indent=2) + "\n")
