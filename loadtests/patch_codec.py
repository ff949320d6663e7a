"""Size and speed of weight patches, against a plain copy and against the format in common use.

    python -m loadtests.patch_codec [--elements N] [--densities 0.002,0.009] [--rounds N] [--json OUT]

Simulates Adam on float32 masters in the shapes of a transformer, with normal and log-normal weights: gradients with a lasting
and a random part and a scale for each row, moments with bias correction. Measured is the last step, rounded to bf16 before and
after, at three learning rates and at the rates that make the asked shares of elements change. Sizes are bits per changed
element, everything included. Times are multiples of M, one thread's copy of the new weights in the same run; each is the least
of several rounds in which all are measured in turn, in processor time of the one thread (with two threads: elapsed time), so
that a busy machine disturbs them little. `encode` has the digests of both states (`hash`), `apply` works in place and includes
the check of every tensor. The reference form is row and column deltas in the narrowest integers, absolute bf16 values, and one
zstd frame at level 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from param_sync.patch import changes, codec, merging
from param_sync.patch.bits import Bits, same_state
from param_sync.patch.digest import digest_of
from param_sync.patch.shadow import Shadow
from param_sync.patch.snapshot import Snapshot

U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]
Tensors = dict[str, F32]
HIDDEN, INTERMEDIATE = 3584, 18944
RATES = (1e-6, 3e-6, 1e-5)
DENSITIES = (0.002, 0.009, 0.03, 0.06)
MERGED, MERGED_RATE = 8, 1e-6
WARM_STEPS = 6


@dataclass(frozen=True, slots=True)
class Row:
    """One step's measurements. `_bits` per changed element, `_m` in multiples of M, by level where there are two."""

    weights: str
    rate: float
    density: float
    reference_bits: float
    bits: dict[int, float]
    ratio: dict[int, float]
    """Bytes over the reference form's."""
    copy_s: float
    """M."""
    scan_m: float
    hash_m: float
    encode_m: dict[int, float]
    apply_m: dict[int, float]
    reference_encode_m: float
    reference_by_numpy_m: float
    two_threads: dict[str, float]
    """How many times faster with a second thread, in elapsed time; `copy` is the machine's own figure."""
    apply_memory: dict[int, float]
    """Most memory that applying in place takes, over the model's bytes."""


class _Refused(Exception):
    """Takes a staged patch back, so that the next round finds the old weights."""


def shapes(elements: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Embedding and two layers of a 7B model with fewer rows, of about so many elements."""
    rows = max(8, elements // (40 * HIDDEN))
    yield "embed", (4 * rows, HIDDEN)
    for layer in range(2):
        for name, times, columns in (
            ("q", 1.0, HIDDEN),
            ("k", 1 / 7, HIDDEN),
            ("v", 1 / 7, HIDDEN),
            ("o", 1.0, HIDDEN),
            ("gate", INTERMEDIATE / HIDDEN, HIDDEN),
            ("up", INTERMEDIATE / HIDDEN, HIDDEN),
            ("down", 1.0, INTERMEDIATE),
        ):
            yield f"layers.{layer}.{name}", (max(1, round(times * rows)), columns)
        yield f"layers.{layer}.norm", (HIDDEN,)


class Adam:
    """Masters and Adam's moments for tensors of `shapes`, and the direction of the next step."""

    def __init__(self, rng: np.random.Generator, weights: str, sizes: Mapping[str, tuple[int, ...]]) -> None:
        self._rng = rng
        self.masters: Tensors = {}
        self._lasting: Tensors = {}
        self._moments: dict[str, tuple[F32, F32]] = {}
        self._step = 0
        for name, shape in sizes.items():
            draw = rng.standard_normal(shape, dtype=np.float32)
            if weights == "normal":
                self.masters[name] = draw * np.float32(0.02)
            else:
                sign = rng.choice(np.array([-1, 1], np.float32), shape)
                self.masters[name] = np.exp(draw * np.float32(1.0) - np.float32(4.4)) * sign
            scale = np.exp(rng.standard_normal((*shape[:1], *(1 for _ in shape[1:])), dtype=np.float32))
            self._lasting[name] = rng.standard_normal(shape, dtype=np.float32) * scale
            self._moments[name] = (np.zeros(shape, np.float32), np.zeros(shape, np.float32))

    def directions(self) -> Tensors:
        """Take the next gradients in, and give m / (sqrt(v) + eps) of every tensor (Kingma and Ba 2015)."""
        self._step += 1
        one, two, made = np.float32(1 - 0.9**self._step), np.float32(1 - 0.999**self._step), {}
        for name, lasting in self._lasting.items():
            gradient = self._rng.standard_normal(lasting.shape, dtype=np.float32)
            gradient *= np.abs(lasting).mean(axis=-1, keepdims=True) * np.float32(1.25)
            gradient += lasting
            first, second = self._moments[name]
            first += np.float32(0.1) * (gradient - first)
            np.square(gradient, out=gradient)
            second += np.float32(0.001) * (gradient - second)
            np.divide(second, two, out=gradient)
            np.sqrt(gradient, out=gradient)
            gradient += np.float32(1e-8)
            np.divide(first / one, gradient, out=gradient)
            made[name] = gradient
        return made


def to_bf16(values: F32) -> U16:
    """Round to nearest, ties to even, as the trainer does."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def snapshot(masters: Tensors, version: int, directions: Tensors | None = None, rate: float = 0.0) -> Snapshot:
    """The bf16 weights, after a step if there are directions."""
    state = {}
    for name, values in masters.items():
        moved = values if directions is None else values - np.float32(rate) * directions[name]
        state[name] = Bits("bf16", values.shape, to_bf16(moved))
    return Snapshot.of(state, version=version, incarnation=0)


def rate_for(masters: Tensors, directions: Tensors, density: float) -> float:
    """The learning rate at which about `density` of a sample changes."""
    parts = [(masters[n].ravel()[:: 1 + masters[n].size // 60_000], directions[n].ravel()) for n in masters]
    sample = np.concatenate([m for m, _ in parts])
    toward = np.concatenate([d[:: 1 + d.size // 60_000] for _, d in parts])
    before, low, high = to_bf16(sample), 1e-9, 1.0
    for _ in range(40):
        rate = (low * high) ** 0.5
        share = np.mean(to_bf16(sample - np.float32(rate) * toward) != before)
        low, high = (rate, high) if share < density else (low, rate)
    return high


def reference_encode(old: Snapshot, new: Snapshot) -> bytes:
    """Row and column deltas, absolute values, one zstd-1 frame; with torch, on one thread, as published encoders do it."""
    raw = []
    for name, bits in new.tensors.items():
        shape = bits.shape if len(bits.shape) == 2 else (1, bits.data.size)
        before, after = (torch.from_numpy(side.tensors[name].data.view(np.int16)).view(shape) for side in (old, new))
        mask = before != after
        where = mask.nonzero()
        rows, columns = where[:, 0], where[:, 1]
        row_deltas = torch.diff(rows, prepend=rows.new_zeros(1))
        column_deltas = torch.where(row_deltas == 0, torch.diff(columns, prepend=columns.new_zeros(1)), columns)
        raw += [_narrowest(part) for part in (row_deltas, column_deltas)] + [after[mask].numpy().tobytes()]
    return zstandard.ZstdCompressor(level=1).compress(b"".join(raw))


def reference_by_numpy(old: Snapshot, new: Snapshot) -> bytes:
    """The same bytes, found with numpy, which is quicker at it."""
    raw = []
    for name, bits in new.tensors.items():
        where = np.flatnonzero(old.tensors[name].data != bits.data)
        rows, columns = np.divmod(where, bits.shape[-1])
        row_deltas = np.diff(rows, prepend=0)
        column_deltas = np.where(row_deltas == 0, np.diff(columns, prepend=0), columns)
        raw += [_narrowest(torch.from_numpy(part)) for part in (row_deltas, column_deltas)] + [bits.data[where].tobytes()]
    return zstandard.ZstdCompressor(level=1).compress(b"".join(raw))


def _narrowest(values: torch.Tensor) -> bytes:
    most = int(values.max()) if values.numel() else 0
    kind = np.uint8 if most < 256 else np.uint16 if most < 65536 else np.int32
    return values.numpy().astype(kind).tobytes()


def apply_in_place(shadow: Shadow, file: bytes, clock: Callable[[], float], workers: int = 1) -> float:
    """Seconds from the patch to verified weights; they are then taken back."""
    start, end = clock(), 0.0
    try:
        with shadow.staged(file, workers=workers):
            end = clock()
            raise _Refused
    except _Refused:
        return end - start


def timed(function: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds that a call takes on `clock`."""
    start = clock()
    function()
    return clock() - start


def _copy(source: Snapshot, target: Mapping[str, U16], workers: int = 1) -> None:
    pairs = [(target[name], bits.data) for name, bits in source.tensors.items()]
    with ThreadPoolExecutor(workers) as pool:
        run = pool.map if workers > 1 else map
        list(run(lambda pair: np.copyto(*pair), pairs))


def _scan(old: Snapshot, new: Snapshot) -> None:
    for name, bits in new.tensors.items():
        changes.find(old.tensors[name].data, bits.data)


def measure(old: Snapshot, new: Snapshot, weights: str, rate: float, rounds: int) -> Row:
    """One row. Every patch is applied and compared bit for bit."""
    size = sum(bits.data.nbytes for bits in new.tensors.values())
    changed = sum(int(np.count_nonzero(old.tensors[n].data != bits.data)) for n, bits in new.tensors.items())
    files = {level: codec.encode(old, new, level=level).tobytes() for level in (1, 2)}
    target = {name: np.empty_like(bits.data) for name, bits in new.tensors.items()}
    own = {name: Bits("bf16", bits.shape, bits.data.copy()) for name, bits in old.tensors.items()}
    shadow = Shadow(Snapshot(old.version, 0, own, old.entries, old.digest))
    work: dict[str, Callable[[], float]] = {
        "copy": lambda: timed(lambda: _copy(new, target)),
        "scan": lambda: timed(lambda: _scan(old, new)),
        "hash": lambda: timed(lambda: digest_of(new.tensors)),
        "reference": lambda: timed(lambda: reference_encode(old, new)),
        "reference by numpy": lambda: timed(lambda: reference_by_numpy(old, new)),
    }
    for level, file in files.items():
        work[f"encode {level}"] = partial(timed, partial(codec.encode, old, new, level=level))
        work[f"apply {level}"] = partial(apply_in_place, shadow, file, time.thread_time)
    for threads in (1, 2):
        work[f"copy with {threads}"] = partial(timed, partial(_copy, new, target, threads), time.perf_counter)
        for level, file in files.items():
            encode = partial(codec.encode, old, new, level=level, workers=threads)
            work[f"encode {level} with {threads}"] = partial(timed, encode, time.perf_counter)
            work[f"apply {level} with {threads}"] = partial(apply_in_place, shadow, file, time.perf_counter, threads)
    best = dict.fromkeys(work, float("inf"))
    for _ in range(rounds):
        for name, run in work.items():
            best[name] = min(best[name], run())
    reference = len(reference_encode(old, new))
    if reference_by_numpy(old, new) != reference_encode(old, new):
        raise SystemExit("the two writers of the reference form disagree")
    memory = {}
    for level, file in files.items():
        tracemalloc.start()
        apply_in_place(shadow, file, time.thread_time)
        memory[level] = tracemalloc.get_traced_memory()[1] / size
        tracemalloc.stop()
        made = codec.apply(old, file)
        if not same_state(made.tensors, new.tensors) or not same_state(shadow.snapshot.tensors, old.tensors):
            raise SystemExit(f"level {level}: the applied patch differs from the new weights, or was not taken back")
    m = best["copy"]
    twice = ("copy", "encode 1", "encode 2", "apply 1", "apply 2")
    return Row(
        weights=weights,
        rate=rate,
        density=changed * 2 / size,
        reference_bits=8 * reference / changed,
        bits={level: 8 * len(file) / changed for level, file in files.items()},
        ratio={level: len(file) / reference for level, file in files.items()},
        copy_s=m,
        scan_m=best["scan"] / m,
        hash_m=best["hash"] / m,
        encode_m={level: best[f"encode {level}"] / m for level in files},
        apply_m={level: best[f"apply {level}"] / m for level in files},
        reference_encode_m=best["reference"] / m,
        reference_by_numpy_m=best["reference by numpy"] / m,
        two_threads={name: best[f"{name} with 1"] / best[f"{name} with 2"] for name in twice},
        apply_memory=memory,
    )


def merged_ratio(rng: np.random.Generator, elements: int, rate: float) -> dict[int, float]:
    """One patch over eight steps, over the sum of the eight patches, by level."""
    adam = Adam(rng, "normal", dict(shapes(elements)))
    for _ in range(WARM_STEPS):
        adam.directions()
    base = snapshot(adam.masters, 0)
    files: dict[int, list[bytes]] = {1: [], 2: []}
    held = base
    for step in range(1, MERGED + 1):
        for name, direction in adam.directions().items():
            adam.masters[name] -= np.float32(rate) * direction
        after = snapshot(adam.masters, step)
        for level, chain in files.items():
            chain.append(codec.encode(held, after, level=level).tobytes())
        held = after
    found = {}
    for level, chain in files.items():
        merged = merging.merge(base, chain, level=level).tobytes()
        if codec.apply(base, merged).digest != held.digest:
            raise SystemExit("the merged patch does not lead to the last weights")
        found[level] = len(merged) / sum(map(len, chain))
    return found


HEAD = (
    "   weights     rate  density | bits L1    L2  reference | ratio L1    L2 | encode M L1    L2  apply M L1    L2"
    " |  hash  scan  reference  by numpy"
)


def _line(row: Row) -> str:
    sizes = f"{row.bits[1]:7.2f} {row.bits[2]:5.2f}  {row.reference_bits:9.2f} | {row.ratio[1]:8.3f} {row.ratio[2]:5.3f}"
    times = f"{row.encode_m[1]:11.2f} {row.encode_m[2]:5.2f}  {row.apply_m[1]:10.2f} {row.apply_m[2]:5.2f}"
    others = f"{row.hash_m:5.2f} {row.scan_m:5.2f}  {row.reference_encode_m:9.1f} {row.reference_by_numpy_m:9.1f}"
    return f"{row.weights:>10}  {row.rate:.1e}  {row.density:7.2%} | {sizes} | {times} | {others}"


def main(argv: list[str] | None = None) -> int:
    """Print the table; with `--json` also write it."""
    parser = argparse.ArgumentParser(description="Size and speed of weight patches")
    parser.add_argument("--elements", type=int, default=40_000_000, help="bf16 elements in the simulated model, about")
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="learning rates")
    parser.add_argument("--densities", default=",".join(map(str, DENSITIES)), help="shares of elements that change")
    parser.add_argument("--weights", default="normal,log-normal", help="distributions of the weights")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of measurement, the best of which counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the rows to this file")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rng = np.random.default_rng(options.seed)
    sizes = dict(shapes(options.elements))
    rows = []
    print(HEAD)
    for weights in options.weights.split(","):
        adam = Adam(rng, weights, sizes)
        for _ in range(WARM_STEPS):
            directions = adam.directions()
        masters = adam.masters
        del adam
        old = snapshot(masters, 0)
        rates = [float(rate) for rate in options.rates.split(",") if rate]
        asked = [rate_for(masters, directions, float(density)) for density in options.densities.split(",") if density]
        for rate in rates + asked:
            rows.append(measure(old, snapshot(masters, 1, directions, rate), weights, rate, options.rounds))
            print(_line(rows[-1]), flush=True)
    merged = merged_ratio(rng, min(options.elements, 8_000_000), MERGED_RATE)
    print("faster with a second thread:", {name: round(factor, 2) for name, factor in rows[-1].two_threads.items()})
    print("memory of an apply in place over the model's:", {v: round(part, 3) for v, part in rows[-1].apply_memory.items()})
    print(f"one patch over {MERGED} steps over their sum:", {v: round(part, 2) for v, part in merged.items()})
    if options.json is not None:
        elements = sum(math.prod(shape) for shape in sizes.values())
        report = {"elements": elements, "merged": merged, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
