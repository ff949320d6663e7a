"""Between runtime parameters and checkpoint bits, both ways and exactly.

Runtime weights are bfloat16, or float32 holding bfloat16 values; a checkpoint is bfloat16 bits. Everything works on integers,
so signed zeros and NaN payloads survive. Used inside engines and inside vLLM's workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch


class NotRepresentable(ValueError):
    """A runtime parameter holds a value that bfloat16 cannot hold, so it is not the published weight."""


def bits_of(name: str, tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    """The bfloat16 bits of a runtime parameter, flat and in C order. Raises `NotRepresentable` where bits would be lost."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype == torch.bfloat16:
        return flat.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    if flat.dtype != torch.float32:
        raise NotRepresentable(
            f"{name}: runtime dtype {flat.dtype} cannot hold bfloat16 weights exactly; use bfloat16 or float32"
        )
    words = flat.contiguous().view(torch.int32).cpu().numpy().view(np.uint16).reshape(-1, 2)  # little-endian: [low, high]
    if words[:, 0].any():
        raise NotRepresentable(f"{name}: float32 parameter holds values outside bfloat16")
    return np.ascontiguousarray(words[:, 1])


def tensor_of(bits: npt.NDArray[np.uint16], shape: tuple[int, ...]) -> torch.Tensor:
    """A bfloat16 CPU tensor of `shape` over the bits. Raises `ValueError` when they do not fit."""
    flat = np.ascontiguousarray(bits).reshape(-1)
    if flat.dtype != np.uint16 or flat.size != math.prod(shape):
        raise ValueError(f"shape {shape} needs {math.prod(shape)} uint16 words, got {flat.size} of {flat.dtype}")
    if not flat.flags.writeable:
        flat = flat.copy()
    return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16).reshape(shape)


def copy_bits(name: str, parameter: torch.Tensor, bits: npt.NDArray[np.uint16], shape: tuple[int, ...]) -> None:
    """Overwrite a runtime parameter with checkpoint bits. Raises `ValueError` when the shapes differ."""
    if tuple(parameter.shape) != tuple(shape):
        raise ValueError(f"{name}: checkpoint shape {tuple(shape)} differs from runtime shape {tuple(parameter.shape)}")
    with torch.no_grad():
        parameter.copy_(tensor_of(bits, tuple(shape)))  # bfloat16 → float32 is exact


def round_to_checkpoint(parameters: Iterable[torch.Tensor]) -> None:
    """Round float32 parameters to bfloat16 values in place, so that what is served is what a bfloat16 checkpoint holds."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.dtype == torch.float32:
                parameter.copy_(parameter.to(torch.bfloat16))
