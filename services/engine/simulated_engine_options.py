"""Settings of the simulated engine."""

from __future__ import annotations

import msgspec


class SimulatedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The service model. Defaults resemble a small model on a GPU, twenty times faster than real time."""

    model: str = ""  # checkpoint folder whose digests are kept; empty: weights start as no tensors at all
    vocab_size: int = 128
    max_model_len: int = 4096
    max_num_seqs: int = 64
    step_s: float = 0.001
    sequence_s: float = 0.00001
    prefill_token_s: float = 0.0000025
    mean_tokens: float = 24.0  # of a generation that may stop by itself
    replies: tuple[tuple[int, ...], ...] = ()  # what to say instead of random tokens, so that an agent loop gets somewhere
    trust_updates: bool = False  # take the announced digest without reading the tensors
    load_s: float = 0.0  # time that a weight update takes
    initial_version: int = 0
    initial_incarnation: int = 0
    drain_timeout_s: float = 600.0
    seed: int = 0
    audit_every: int = 0  # switches of changed elements after which all weights are read back; 0: never
