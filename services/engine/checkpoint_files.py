"""The tensors of a checkpoint folder (`*.safetensors`), as bfloat16 bits, without a framework.

Format: 8 bytes little-endian header size, a JSON header `{name: {dtype, shape, data_offsets}}`, then the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from param_sync.patch.digest import Entry, state_digest, tensor_digest
from services.engine.protocol import CheckpointTensor, EngineUnavailable

MAX_HEADER_BYTES = 100 * 2**20


def shapes_of(folder: str) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor, in file order. Raises `EngineUnavailable` when there is no readable checkpoint."""
    return [(name, shape) for path in _files(folder) for name, _, shape, _ in _entries(path)]


def tensors_of(folder: str) -> Iterator[CheckpointTensor]:
    """Every tensor as bfloat16 bits; float32 checkpoints are rounded to nearest even, as the published weights are."""
    for path in _files(folder):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        for name, dtype, shape, (start, end) in _entries(path):
            raw = data[start:end]
            if dtype == "BF16":
                yield name, raw.view(np.uint16), shape
            elif dtype == "F32":
                yield name, rounded(raw.view(np.uint32)), shape
            else:
                raise EngineUnavailable(f"{path.name}: tensor {name} is {dtype}; served checkpoints are BF16 or F32")


def digest_of(tensors: Iterable[CheckpointTensor]) -> str:
    """State digest of bfloat16 tensors: the name of these weights."""
    entries: dict[str, Entry] = {name: ("bf16", tuple(shape), tensor_digest(bits)) for name, bits, shape in tensors}
    return state_digest(entries)


def digest_of_folder(folder: str, names: set[str]) -> str:
    """State digest of the named tensors of a checkpoint folder."""
    return digest_of(tensor for tensor in tensors_of(folder) if tensor[0] in names)


def rounded(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """float32 bits → bfloat16 bits, round to nearest even; NaN stays NaN."""
    nan = (words & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    out = ((words + (np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    return np.where(nan, np.uint16(0x7FC0), out)


def _files(folder: str) -> list[Path]:
    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise EngineUnavailable(f"{folder}: no *.safetensors file; give the folder of a checkpoint")
    return paths


def _entries(path: Path) -> list[tuple[str, str, tuple[int, ...], tuple[int, int]]]:
    """(name, dtype, shape, absolute byte range), checked against the file's size."""
    total = path.stat().st_size
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(MAX_HEADER_BYTES, total):
            raise EngineUnavailable(f"{path.name}: header of {size} bytes is impossible; the file is damaged")
        header = json.loads(file.read(size))
    out = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, (start, end) = tuple(int(n) for n in entry["shape"]), entry["data_offsets"]
        width = {"BF16": 2, "F32": 4}.get(entry["dtype"])
        if width is not None and (end - start != width * math.prod(shape) or 8 + size + end > total):
            raise EngineUnavailable(f"{path.name}: tensor {name} does not fit its shape or the file; the file is damaged")
        out.append((name, str(entry["dtype"]), shape, (8 + size + int(start), 8 + size + int(end))))
    return out
