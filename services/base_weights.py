"""The starting weights of a run, as a verified snapshot: the checkpoint folder's tensors as bfloat16 bits, version 0."""

from __future__ import annotations

from param_sync.patch.bits import Bits
from param_sync.patch.snapshot import Snapshot
from services.engine.checkpoint_files import tensors_of


def snapshot_of(folder: str) -> Snapshot:
    """Read and digest a checkpoint folder. Raises `EngineUnavailable` naming the file when it is unreadable."""
    state = {name: Bits("bf16", shape, bits) for name, bits, shape in tensors_of(folder)}
    return Snapshot.of(state, version=0, incarnation=0)
