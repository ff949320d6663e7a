"""Settings of the embedded engine, typed, without importing torch."""

from __future__ import annotations

from typing import Literal

import msgspec


class TransformersOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the embedded engine."""

    model: str  # folder of the checkpoint
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    max_model_len: int = 1024
    max_num_seqs: int = 64
    prefix_cache: bool = True
    threads: int = 0  # torch threads; 0 leaves the process's setting alone
    initial_version: int = 0
    initial_incarnation: int = 0
    drain_timeout_s: float = 600.0
    audit_every: int = 8  # switches of changed elements after which all weights are read back, while serving; 0: never
