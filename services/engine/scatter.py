"""Changed elements on their way into a running model: laid out beside the weights first, then written in one go.

`stage` does everything that can fail while the engine still serves: it finds the places, checks that the weights there are
the ones that the change starts from, and brings the new bits to the device. `commit` is what remains for the pause: it writes,
reads every written element back, and compares. The device is the parameters' own; nothing here asks which it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.engine.changes import BaseDiffers, ChangeError, TensorChange
from services.engine.load_plan import Landing, LoadPlan, PlanError, View
from services.engine.routes import Places, Route

U16 = npt.NDArray[np.uint16]
COMPILED_FROM = 1 << 20  # elements of a model in this process's memory from which loops are compiled for it
CHUNK = 1 << 20  # elements written or compared at a time: bounds the memory beside what is staged
_INT32 = 2**31


class ScatterError(RuntimeError):
    """What was read back is not what was written, or a write broke off: these weights are nobody's."""


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """For one parameter: `places` [k] in its storage, and the `words` [k] to be written there, both on its device."""

    flat: torch.Tensor
    places: torch.Tensor
    words: torch.Tensor
    compiled: bool

    def holds(self, words: torch.Tensor) -> bool:
        """Whether `words` [k] are what stands at the places."""
        if self.compiled:
            from services.engine import cpu_writes

            return cpu_writes.holds(_unsigned(self.flat), self.places.numpy(), _unsigned(words))
        return all(
            torch.equal(self.flat.index_select(0, at), as_stored(part, self.flat.dtype)) for at, part in self._chunks(words)
        )

    def carry_out(self) -> None:
        """Write. Raises `ScatterError` where a place is none of this parameter's."""
        if self.compiled:
            from services.engine import cpu_writes

            if cpu_writes.put(_unsigned(self.flat), self.places.numpy(), _unsigned(self.words)) != self.places.numel():
                raise ScatterError("an element has its place outside of the parameter")
            return
        for at, part in self._chunks(self.words):
            self.flat.index_copy_(0, at, as_stored(part, self.flat.dtype))

    def _chunks(self, words: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(places as index, words) of at most `CHUNK` elements each."""
        for i in range(0, words.numel(), CHUNK):
            yield self.places[i : i + CHUNK].to(torch.int64), words[i : i + CHUNK]


class Scatter:
    """Takes changes in checkpoint coordinates to the parameters of one rank."""

    def __init__(self, plan: LoadPlan) -> None:
        """Raises `PlanError` where the plan's landings cannot be inverted: such a model takes whole tensors only."""
        self._plan = plan
        self._routes = {name: [Route.of(landing) for landing in landings] for name, landings in plan.landings.items()}
        used = {route.parameter for routes in self._routes.values() for route in routes}
        flat = {name: flat_words(name, plan.parameters[name]) for name in sorted(used)}
        self._narrow = {name: words.numel() < _INT32 for name, words in flat.items()}
        self._compiled = sum(words.numel() for words in flat.values() if words.device.type == "cpu") >= COMPILED_FROM
        if self._compiled:
            from services.engine import cpu_writes  # noqa: F401  # compiled now, not while a change is laid out
        self._staged: list[_Write] = []
        self._names: set[str] = set()

    @property
    def staged_tensors(self) -> int:
        """Checkpoint tensors that the staged changes belong to."""
        return len(self._names)

    @property
    def staged_elements(self) -> int:
        """Elements of this rank that wait to be written."""
        return sum(write.words.numel() for write in self._staged)

    @property
    def staged_bytes(self) -> int:
        """Device memory that the staged changes hold."""
        return sum(w.places.nbytes + w.words.nbytes for w in self._staged)

    def drop(self) -> None:
        """Forget what is staged."""
        self._staged, self._names = [], set()

    def stage(self, change: TensorChange) -> int:
        """Lay one tensor's change out; how many elements of it land on this rank. Nothing of the model changes.

        Raises `ChangeError` for a tensor that the checkpoint does not have so, `BaseDiffers` where the running weights are
        other ones than `change.old`.
        """
        change = change.checked()
        if self._plan.shapes.get(change.name) != tuple(change.shape):
            raise ChangeError(f"tensor {change.name} of shape {tuple(change.shape)} is not in the checkpoint that is served")
        self._names.add(change.name)
        count = 0
        for route in self._routes.get(change.name, ()):
            part, inside, places = route.take(change.index, self._narrow[route.parameter])
            if not places.size:
                continue
            old, new = change.old[part], change.new[part]
            if inside is not None:
                old, new = old[inside], new[inside]
            self._lay_out(change.name, route.parameter, places, old, new)
            count += places.size
        return count

    def _lay_out(self, name: str, parameter: str, places: Places, old: U16, new: U16) -> None:
        flat = flat_words(parameter, self._plan.parameters[parameter])
        compiled = self._compiled and flat.device.type == "cpu"
        write = _Write(flat, torch.from_numpy(places).to(flat.device), _on_device(new, flat.device), compiled)
        if not write.holds(_on_device(old, flat.device)):
            raise BaseDiffers(f"tensor {name}: the running weights are not the ones that the change starts from")
        self._staged.append(write)

    def commit(self) -> int:
        """Write everything that is staged, read it back, compare; how many elements. Raises `ScatterError`."""
        writes = self._staged
        self.drop()
        with torch.no_grad():
            for write in writes:
                write.carry_out()
        if not all(write.holds(write.words) for write in writes):
            raise ScatterError("written elements read back as other ones")
        return sum(write.words.numel() for write in writes)


def scatter_of(plan: LoadPlan) -> tuple[Scatter | None, str]:
    """The scatter for a model, or None and why it takes whole tensors only."""
    try:
        return Scatter(plan), ""
    except PlanError as error:
        return None, str(error)


def identity_plan(parameters: Mapping[str, torch.Tensor]) -> LoadPlan:
    """The plan of a model whose parameters are the checkpoint's tensors."""
    landings = {}
    for name, parameter in parameters.items():
        source = View.of(torch.empty(parameter.shape, device="meta"), 0)
        target = View(tuple(parameter.shape), tuple(parameter.stride()), 0)
        landings[name] = [Landing(name, target, source)]
    return LoadPlan(dict(parameters), {name: tuple(p.shape) for name, p in parameters.items()}, landings)


def flat_words(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A runtime parameter's storage from its first element on, as integers of its own width.

    Raises `PlanError` for a dtype that does not hold bfloat16 weights exactly.
    """
    data = parameter.data
    whole = {torch.bfloat16: torch.int16, torch.float32: torch.int32}.get(data.dtype)
    if whole is None:
        raise PlanError(f"parameter {name} is {data.dtype}, which does not hold a checkpoint's bfloat16 bits")
    start = int(data.storage_offset())
    size = data.untyped_storage().nbytes() // data.element_size() - start
    return torch.as_strided(data, (size,), (1,), start).view(whole)


def as_stored(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """bfloat16 bits (int16) as the parameter keeps them: themselves, or the upper half of a float32."""
    return words if dtype == torch.int16 else words.to(torch.int32) << 16


def _on_device(words: U16, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int16)).to(device)


def _unsigned(words: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory, as numpy's unsigned words."""
    held = words.numpy()
    return held.view(np.dtype(f"u{held.itemsize}"))
