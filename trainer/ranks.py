"""The trainer's process group: who am I among how many, and small exchanges between ranks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from services.device import Device


class RankError(RuntimeError):
    """The launcher's environment for distributed training is incomplete or contradicts itself; the text names the variable."""


def join_ranks(device: Device, timeout_s: float, environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Join the process group that the launcher describes; returns (rank, world size). A group that is already there is kept.

    Without `WORLD_SIZE` the process is alone and needs no address. With it, `RANK`, `MASTER_ADDR` and `MASTER_PORT` must be
    set, as torchrun, Slurm wrappers and Kubernetes operators do. Raises `RankError` naming a missing variable.
    """
    given = os.environ if environment is None else environment
    if not dist.is_initialized():
        world = int(given.get("WORLD_SIZE", "1"))
        timeout = timedelta(seconds=timeout_s)
        if world == 1:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(device.distributed_backend, store=store, rank=0, world_size=1, timeout=timeout)
        else:
            for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
                if name not in given:
                    raise RankError(
                        f"{name}: not set, but WORLD_SIZE is {world}; start every rank with its launcher's variables"
                    )
            address = f"tcp://{given['MASTER_ADDR']}:{given['MASTER_PORT']}"
            dist.init_process_group(
                device.distributed_backend, init_method=address, rank=int(given["RANK"]), world_size=world, timeout=timeout
            )
    rank, size = dist.get_rank(), dist.get_world_size()
    # DeepSpeed reads these even when the group exists already.
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", int(given.get("LOCAL_RANK", "0")))):
        os.environ.setdefault(name, str(value))
    return rank, size


def gather_arrays(values: npt.NDArray[Any], device: str) -> npt.NDArray[Any]:
    """Every rank's 1-D array, joined in rank order, on every rank. Lengths may differ; dtypes may not."""
    if dist.get_world_size() == 1:
        return values
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([values.shape[0]], dtype=torch.int64, device=device))
    sizes = [int(length) for length in lengths]
    padded = np.zeros(max(sizes), dtype=values.dtype)
    padded[: values.shape[0]] = values
    parts = [torch.zeros(max(sizes), dtype=torch.from_numpy(padded).dtype, device=device) for _ in sizes]
    dist.all_gather(parts, torch.from_numpy(padded).to(device))
    return np.concatenate([part.cpu().numpy()[:size] for part, size in zip(parts, sizes, strict=True)])


def exchange(outgoing: Sequence[bytes | bytearray], device: str) -> list[bytes]:
    """Send `outgoing[r]` to rank `r`, for every rank; returns what each rank sent here. All ranks take part."""
    if len(outgoing) == 1:
        return [bytes(outgoing[0])]
    lengths = [len(data) for data in outgoing]
    announced = torch.empty(len(outgoing), dtype=torch.int64, device=device)
    dist.all_to_all_single(announced, torch.tensor(lengths, dtype=torch.int64, device=device))
    sizes = [int(size) for size in announced.tolist()]
    sent = torch.frombuffer(bytearray(b"".join(outgoing)) or bytearray(1), dtype=torch.uint8)[: sum(lengths)].to(device)
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, sent, sizes, lengths)
    joined = received.cpu().numpy().tobytes()
    ends = list(itertools.accumulate(sizes))
    return [joined[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def barrier() -> None:
    """Wait for every rank, at most the group's timeout."""
    if dist.get_world_size() > 1:
        dist.barrier()
