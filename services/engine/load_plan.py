"""Where every element of a checkpoint lands in a running model: recorded once from the model's own weight loader.

The loader is run over uninitialized tensors of the checkpoint's shapes while a dispatch mode swallows each final copy and
notes its destination (a view of a parameter) and its source (a view of the checkpoint tensor). That covers fused projections,
expert stacks, vocabulary padding and tensor-parallel slices without knowing any architecture, and makes reading back exact:
run the copies in the other direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.engine.readback import bits_of

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


class PlanError(RuntimeError):
    """The model's loader does something other than copying slices, so its weights cannot be read back exactly."""


@dataclass(frozen=True, slots=True)
class View:
    """Geometry of a strided view into flat storage: sizes, strides and offset in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, base: int) -> View:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()) - base)


@dataclass(frozen=True, slots=True)
class Landing:
    """One copy: `source` (a view of the flat checkpoint tensor) goes to `target` (a view of a runtime parameter's storage)."""

    parameter: str
    target: View
    source: View


class LoadPlan:
    """Landings by checkpoint name, for the parameters of one rank."""

    def __init__(
        self, parameters: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]], landings: dict[str, list[Landing]]
    ) -> None:
        self.parameters = parameters
        self.shapes = shapes
        self.landings = landings

    @property
    def names(self) -> list[str]:
        """Checkpoint tensors that this rank holds any part of, in checkpoint order."""
        return [name for name in self.shapes if self.landings.get(name)]

    def complete(self, name: str) -> bool:
        """True when this rank alone holds every element of the checkpoint tensor."""
        return sum(math.prod(landing.source.size) for landing in self.landings.get(name, ())) == math.prod(self.shapes[name])

    def bits(self, name: str) -> npt.NDArray[np.uint16]:
        """The bfloat16 bits of a tensor that this rank holds completely, flat and in C order."""
        landings = self.landings[name]
        if len(landings) == 1 and landings[0].source == View.of(torch.empty(self.shapes[name], device="meta"), 0):
            return bits_of(name, self._held(landings[0]))
        words = torch.empty(math.prod(self.shapes[name]), dtype=torch.int16)
        for landing in landings:
            part = torch.from_numpy(bits_of(name, self._held(landing)).view(np.int16)).reshape(landing.source.size)
            torch.as_strided(words, landing.source.size, landing.source.stride, landing.source.offset).copy_(part)
        return words.numpy().view(np.uint16)

    def read(self, name: str, words: torch.Tensor) -> None:
        """Write this rank's part of a tensor into flat int32 `words` as 0..65535; other elements stay as they are."""
        for landing in self.landings.get(name, ()):
            part = torch.from_numpy(bits_of(name, self._held(landing)).astype(np.int32)).reshape(landing.source.size)
            torch.as_strided(words, landing.source.size, landing.source.stride, landing.source.offset).copy_(part)

    def _held(self, landing: Landing) -> torch.Tensor:
        runtime = self.parameters[landing.parameter].data
        target = landing.target
        return torch.as_strided(runtime, target.size, target.stride, target.offset + runtime.storage_offset())


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Swallows `copy_` into parameters and notes where it came from; everything else runs."""

    def __init__(self, owners: dict[int, tuple[str, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners = owners
        self.source: dict[int, str] = {}
        self.landings: dict[str, list[Landing]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        owner = None if target is None else self._owners.get(target.untyped_storage().data_ptr())
        if target is None or owner is None or not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            return target  # padding of a vocabulary; it belongs to no checkpoint tensor
        if func is not torch.ops.aten.copy_.default:
            raise PlanError(f"parameter {owner[0]} is written by {func}; only copies can be read back")
        origin = args[1]
        name = self.source.get(origin.untyped_storage().data_ptr())
        if name is None:
            raise PlanError(f"parameter {owner[0]} receives a tensor that is not a view of a checkpoint tensor")
        if origin.shape != target.shape:
            raise PlanError(f"parameter {owner[0]}: {tuple(origin.shape)} is broadcast to {tuple(target.shape)}")
        to, source = View.of(target, int(owner[1].storage_offset())), View.of(origin, 0)
        self.landings.setdefault(name, []).append(Landing(owner[0], to, source))
        return target


def record(parameters: dict[str, torch.Tensor], load: Loader, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> LoadPlan:
    """Run `load` over stand-ins for the checkpoint's tensors (name, shape) and note every landing. Nothing is overwritten.

    `parameters` are the model's, by name, tied ones once. Raises `PlanError` when a landing cannot be reversed.
    """
    owners: dict[int, tuple[str, torch.Tensor]] = {}
    for name, parameter in parameters.items():
        owners.setdefault(parameter.data.untyped_storage().data_ptr(), (name, parameter.data))
    recorder = _Recorder(owners)
    shapes = dict(tensors)
    alive: list[torch.Tensor] = []  # a stand-in must outlive the recording, or its address would be reused

    def stand_ins() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in shapes.items():
            tensor = torch.empty(max(1, math.prod(shape)), dtype=torch.bfloat16)[: math.prod(shape)].reshape(shape)
            recorder.source[tensor.untyped_storage().data_ptr()] = name
            alive.append(tensor)
            yield name, tensor

    with recorder, torch.no_grad():
        load(stand_ins())
    return LoadPlan(parameters, shapes, recorder.landings)
