"""From the run's configuration to one engine's options; the only place that knows both."""

from __future__ import annotations

from pathlib import Path

from services.config import Config
from services.device import choose_device
from services.engine.protocol import Engine, EngineUnavailable
from services.engine.registry import create_engine, vllm_available
from services.engine.transformers_engine_options import TransformersOptions
from services.engine.vllm_options import VllmOptions


def engine_from_config(config: Config, name: str) -> Engine:
    """The engine `name`, not yet started. Raises `EngineUnavailable` naming what is missing."""
    return create_engine(config.engine.kind, **options)
