"""All random generators of a trainer rank: seeded together, saved and restored exactly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch


class RandomState(msgspec.Struct, frozen=True, kw_only=True):
    """The generators' states and the number of optimizer steps taken with them."""

    optimizer_steps: int
    python: tuple[int, tuple[int, ...], float | None]
    numpy_keys: bytes  # uint32 [624], little-endian
    numpy_position: tuple[int, int, float]
    torch_cpu: bytes
    torch_cuda: tuple[bytes, ...]


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_random_state(path: Path, optimizer_steps: int) -> None:
    """Write the present states."""
    version, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = RandomState(
        optimizer_steps=optimizer_steps,
        python=(version, internal, gauss),
        numpy_keys=np.asarray(keys, dtype="<u4").tobytes(),
        numpy_position=(int(position), int(has_gauss), float(cached)),
        torch_cpu=torch.get_rng_state().numpy().tobytes(),
        torch_cuda=tuple(s.cpu().numpy().tobytes() for s in torch.cuda.get_rng_state_all())
        if torch.cuda.is_available()
        else (),
    )
    path.write_bytes(msgspec.msgpack.encode(state))


def restore_random_state(path: Path) -> int:
    """Put the generators back; returns the saved number of optimizer steps."""
    state = msgspec.msgpack.decode(path.read_bytes(), type=RandomState)
    random.setstate(state.python)
    position, has_gauss, cached = state.numpy_position
    np.random.set_state(("MT19937", np.frombuffer(state.numpy_keys, dtype="<u4"), position, has_gauss, cached))
    torch.set_rng_state(_byte_tensor(state.torch_cpu))
    if state.torch_cuda:
        torch.cuda.set_rng_state_all([_byte_tensor(data) for data in state.torch_cuda])
    return state.optimizer_steps


def _byte_tensor(data: bytes) -> Any:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
