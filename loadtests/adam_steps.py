"""Simulated Adam steps on float32 masters, rounded to bf16 as a trainer does it: what weight patches are measured on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from param_sync.patch.bits import Bits

U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]
COLUMNS = 4096
ROWS = 1024
BETA1, BETA2 = np.float32(0.9), np.float32(0.999)
FAMILIES = ("gaussian", "log-normal")


def to_bf16(values: F32) -> U16:
    """Round to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One matrix in training: masters and Adam's moments, [rows * 4096] float32 each."""

    masters: F32
    mean: F32
    square: F32

    @classmethod
    def of(cls, rng: np.random.Generator, family: str, rows: int) -> Layer:
        """Weights of about 0.02: Gaussian, or log-normal magnitudes whose logarithm has a deviation of 1. Moments are those of
        a run that has gone on for long: gradients are noise of unit scale."""
        n = rows * COLUMNS
        masters = rng.standard_normal(n, dtype=np.float32)
        if family == "log-normal":
            signs = np.sign(masters)
            masters = signs * np.exp(rng.standard_normal(n, dtype=np.float32))
        masters *= np.float32(0.02)
        mean = rng.standard_normal(n, dtype=np.float32) * np.sqrt((1 - BETA1) / (1 + BETA1))
        spread = 1 + rng.standard_normal(n, dtype=np.float32) * np.sqrt(2 * (1 - BETA2) / (1 + BETA2))
        return cls(masters, mean, spread)

    def direction(self) -> F32:
        """What a step subtracts, for each unit of learning rate."""
        return (self.mean / (np.sqrt(self.square) + np.float32(1e-8))).astype(np.float32, copy=False)

    def step(self, rng: np.random.Generator, rate: float) -> None:
        """One more gradient, and the step it makes, in place."""
        gradient = rng.standard_normal(self.masters.size, dtype=np.float32)
        for moment, beta, fresh in ((self.mean, BETA1, gradient), (self.square, BETA2, gradient * gradient)):
            moment *= beta
            moment += (1 - beta) * fresh
        self.masters[:] -= np.float32(rate) * self.direction()


def layers(rng: np.random.Generator, family: str, elements: int) -> list[Layer]:
    """Matrices of at most 4 Mi elements, together about `elements`."""
    rows = max(1, elements // COLUMNS)
    return [Layer.of(rng, family, min(ROWS, rows - at)) for at in range(0, rows, ROWS)]


def rate_for(layer: Layer, density: float) -> float:
    """The learning rate at which about that share of a sample of the layer changes in a step."""
    sample = slice(0, min(layer.masters.size, 1 << 19))
    masters, direction = layer.masters[sample], layer.direction()[sample]
    before, low, high = to_bf16(masters), 1e-9, 1.0
    for _ in range(40):
        rate = (low * high) ** 0.5
        share = np.mean(to_bf16(masters - np.float32(rate) * direction) != before)
        low, high = (rate, high) if share < density else (low, rate)
    return high


def weights(model: list[Layer], rate: float = 0.0) -> dict[str, Bits]:
    """The bf16 weights, or those that a step of that rate would make."""

    def words(layer: Layer) -> U16:
        return to_bf16(layer.masters - np.float32(rate) * layer.direction() if rate else layer.masters)

    return {f"layer.{i}": Bits("bf16", (one.masters.size // COLUMNS, COLUMNS), words(one)) for i, one in enumerate(model)}
