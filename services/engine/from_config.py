"""From the run's configuration to one engine; the only place that knows both the configuration and every engine's options."""

from __future__ import annotations

from typing import Any

from services.config import Config
from services.device import choose_device
from services.engine.protocol import Engine
from services.engine.registry import create_engine, vllm_available


def engine_from_config(config: Config, name: str) -> Engine:
    """The engine `name`, not yet started. Raises `EngineUnavailable` naming what is missing."""
    settings = config.engine
    kind = settings.kind
    if kind == "auto":
        kind = "vllm" if vllm_available()[0] else "transformers"
    if kind == "simulated":
        return create_engine(kind, {"model": config.policy.model, "audit_every": settings.audit_every} | settings.simulated)
    device = choose_device(settings.device, threads=settings.cpu_threads)
    options: dict[str, Any] = {
        "model": config.policy.model,
        "dtype": settings.dtype if settings.dtype != "auto" else ("float32" if device.kind == "cpu" else "bfloat16"),
        "max_model_len": config.policy.max_context_tokens,
        "max_num_seqs": settings.max_running,
        "audit_every": settings.audit_every,
    }
    if kind == "transformers":
        return create_engine(kind, options | {"device": device.torch_device, "threads": settings.cpu_threads})
    cores = cores_of(settings.cpu_list, settings.names, name)
    seed = config.run.seed + place_of(settings.names, name)  # engines must not draw the same numbers
    named = {"device": device.kind, "cpu_threads": settings.cpu_threads, "cpu_list": cores, "seed": seed}
    return create_engine(kind, options | named | settings.vllm)


def cores_of(cpu_list: str, names: tuple[str, ...], name: str) -> str:
    """The engine's part of `engine.cpu_list` (`0;1` gives e0 core 0 and e1 core 1); empty when nothing is pinned."""
    parts = cpu_list.split(";") if cpu_list else []
    place = place_of(names, name)
    return parts[place].strip() if place < len(parts) else ""


def place_of(names: tuple[str, ...], name: str) -> int:
    """The engine's place in the configured fleet; one that joined under another name stands behind all of them."""
    return names.index(name) if name in names else len(names)
