"""The weights that a simulated engine pretends to compute with: real bits, really changed, really digested."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from param_sync.patch.digest import state_digest, tensor_digest
from services.engine.changes import BaseDiffers, ChangeError, TensorChange
from services.engine.checkpoint_files import tensors_of
from services.engine.protocol import WeightsRejected, WeightUpdate


class SimulatedWeights:
    """The tensors of a checkpoint folder, or none at all; `trusting` takes announced digests without looking at the bits."""

    def __init__(self, folder: str, trusting: bool) -> None:
        self._known = bool(folder)
        self._trusting = trusting
        self._trusted = ""
        self._words: dict[str, npt.NDArray[np.uint16]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._staged: list[TensorChange] = []
        for name, bits, shape in tensors_of(folder) if folder else ():
            self._hold(name, bits, shape)

    def digest(self) -> str:
        """Of all bits, now."""
        if self._trusted:
            return self._trusted
        return state_digest({name: ("bf16", self._shapes[name], tensor_digest(words)) for name, words in self._words.items()})

    def drop(self) -> None:
        """Forget what is staged."""
        self._staged = []

    def stage(self, change: TensorChange) -> None:
        """Check one change against the bits. Raises `ChangeError`, `BaseDiffers`."""
        change.checked()
        if self._shapes.get(change.name) != tuple(change.shape):
            raise ChangeError(f"tensor {change.name} of shape {tuple(change.shape)} is not in the checkpoint that is served")
        if not np.array_equal(self._words[change.name][change.index], change.old):
            raise BaseDiffers(f"tensor {change.name}: the weights are not the ones that the change starts from")
        self._staged.append(change)

    def commit(self) -> tuple[int, int]:
        """Write what is staged and read it back; (tensors, bytes). Raises `WeightsRejected`."""
        changes, self._staged = self._staged, []
        for change in changes:
            self._words[change.name][change.index] = change.new
        if not all(np.array_equal(self._words[change.name][change.index], change.new) for change in changes):
            raise WeightsRejected("written elements read back as other ones")
        return len(changes), sum(change.nbytes for change in changes)

    def replace(self, update: WeightUpdate) -> tuple[int, int]:
        """Take whole tensors; (tensors, bytes). Raises `ValueError` for one that does not belong here."""
        if self._trusting:
            self._trusted = update.digest
            return 0, 0
        count = size = 0
        for name, bits, shape in update.load():
            if bits.size != math.prod(shape) or (self._known and self._shapes.get(name) != shape):
                raise ValueError(f"tensor {name} of shape {shape} is not in the checkpoint, or came with {bits.size} words")
            self._hold(name, bits, shape)
            count, size = count + 1, size + bits.nbytes
        return count, size

    def _hold(self, name: str, bits: npt.NDArray[np.uint16], shape: tuple[int, ...]) -> None:
        self._words[name] = np.array(bits, dtype=np.uint16).reshape(-1)
        self._shapes[name] = tuple(shape)
