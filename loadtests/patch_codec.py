"""Size and speed of weight patches, against a plain copy and against the format in common use.

    python -m loadtests.patch_codec [--elements N] [--densities 0.002,0.009] [--workers N] [--json OUT]

Simulates one optimizer step on float32 masters drawn from N(0, 0.02), rounds to bf16 before and after, and picks the learning
rate so that the asked share of elements changes. Sizes are bits per changed element, everything included. Times are multiples
of M, one thread's copy of the new weights in the same run, the best of several. The reference form is row and column deltas in
the narrowest integers, absolute bf16 values, and one zstd frame at level 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard

from param_sync.patch import codec
from param_sync.patch.bits import Bits, same_state
from param_sync.patch.digest import tensor_digest
from param_sync.patch.snapshot import Snapshot

U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]
COLUMNS = 4096
DENSITIES = (0.002, 0.009, 0.06, 0.2, 0.45)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Row:
    """One density's measurements. `_bits` per changed element, `_m` in multiples of M."""

    density: float
    changed: int
    copy_s: float
    """M."""
    patch_bits: float
    reference_bits: float
    ratio: float
    anchor_ratio: float
    """Anchor bytes over raw bytes."""
    encode_m: float
    apply_m: float
    reference_encode_m: float
    hash_m: float


def to_bf16(values: F32) -> U16:
    """Round to nearest, ties to even, as the trainer does."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def step(masters: F32, direction: F32, density: float) -> U16:
    """The bf16 weights after a step whose size makes about `density` of a sample change."""
    sample = slice(0, min(masters.size, 1 << 19))
    before, low, high = to_bf16(masters[sample]), 1e-9, 1.0
    for _ in range(40):
        rate = np.float32((low * high) ** 0.5)
        share = np.mean(to_bf16(masters[sample] - rate * direction[sample]) != before)
        low, high = (float(rate), high) if share < density else (low, float(rate))
    return to_bf16(masters - np.float32(high) * direction)


def reference_encode(old: U16, new: U16) -> bytes:
    """Row and column deltas, absolute values, one zstd-1 frame."""
    where = np.flatnonzero(old != new)
    rows, columns = where // COLUMNS, where % COLUMNS
    row_deltas = np.diff(rows, prepend=0)
    column_deltas = np.where(row_deltas == 0, np.diff(columns, prepend=0), columns)
    raw = b"".join(_narrowest(part).tobytes() for part in (row_deltas, column_deltas)) + new[where].tobytes()
    return zstandard.ZstdCompressor(level=1).compress(raw)


def _narrowest(values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    most = int(values.max(initial=0))
    return values.astype(np.uint8 if most < 256 else np.uint16 if most < 65536 else np.int32)


def best_of(times: int, function: Callable[[], _Result]) -> tuple[_Result, float]:
    """The result and the shortest of `times` runs, in seconds."""
    shortest = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        result = function()
        shortest = min(shortest, time.perf_counter() - start)
    return result, shortest


def measure(masters: F32, direction: F32, density: float, workers: int, times: int) -> Row:
    """One row. Every patch is applied and compared bit for bit."""
    before, after = to_bf16(masters), step(masters, direction, density)
    shape = (masters.size // COLUMNS, COLUMNS)
    old = Snapshot.of({"w": Bits("bf16", shape, before)}, version=0, incarnation=0)
    new = Snapshot.of({"w": Bits("bf16", shape, after)}, version=1, incarnation=0)
    target = np.empty_like(after)
    _, copy_s = best_of(times + 2, lambda: np.copyto(target, after))
    _, hash_s = best_of(times, lambda: tensor_digest(after))
    patch, encode_s = best_of(times, lambda: codec.encode(old, new, workers=workers))
    file = patch.tobytes()
    made, apply_s = best_of(times, lambda: codec.apply(old, file, workers=workers))
    if not same_state(made.tensors, new.tensors):
        raise SystemExit(f"density {density}: the applied patch differs from the new weights")
    reference, reference_s = best_of(1, lambda: reference_encode(before, after))
    changed = int(np.count_nonzero(before != after))
    return Row(
        density=changed / masters.size,
        changed=changed,
        copy_s=copy_s,
        patch_bits=8 * len(file) / changed,
        reference_bits=8 * len(reference) / changed,
        ratio=len(file) / len(reference),
        anchor_ratio=codec.encode_anchor(new).nbytes / after.nbytes,
        encode_m=encode_s / copy_s,
        apply_m=apply_s / copy_s,
        reference_encode_m=reference_s / copy_s,
        hash_m=hash_s / copy_s,
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table; with `--json` also write it."""
    parser = argparse.ArgumentParser(description="Size and speed of weight patches")
    parser.add_argument("--elements", type=int, default=1 << 25, help="bf16 elements in the simulated tensor")
    parser.add_argument("--densities", default=",".join(map(str, DENSITIES)), help="shares of elements that change")
    parser.add_argument("--workers", type=int, default=1, help="threads of the codec")
    parser.add_argument("--times", type=int, default=3, help="runs of each measurement, the best counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the rows to this file")
    options = parser.parse_args(argv)
    rng = np.random.default_rng(options.seed)
    count = max(1, options.elements // COLUMNS) * COLUMNS
    masters = rng.standard_normal(count, dtype=np.float32) * np.float32(0.02)
    direction = rng.standard_normal(count, dtype=np.float32)
    print(" density    bits  reference  ratio | encode M  apply M  reference M  hash M | anchor")
    rows = []
    for density in map(float, options.densities.split(",")):
        row = measure(masters, direction, density, options.workers, options.times)
        rows.append(row)
        print(
            f"{row.density:8.2%}  {row.patch_bits:6.2f}  {row.reference_bits:9.2f}  {row.ratio:5.2f} | {row.encode_m:8.1f}"
            f"  {row.apply_m:7.1f}  {row.reference_encode_m:11.1f}  {row.hash_m:6.2f} | {row.anchor_ratio:6.2f}",
            flush=True,
        )
    if options.json is not None:
        report = {"elements": count, "workers": options.workers, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
