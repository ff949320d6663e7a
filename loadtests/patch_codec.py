"""Size and speed of weight patches, against a plain copy and against the format in common use.

    python -m loadtests.patch_codec [--elements N] [--densities 0.002,0.009] [--rates 1e-6] [--times N] [--json OUT]

Simulates Adam steps (`loadtests/adam_steps.py`) on Gaussian and on log-normal weights: at given learning rates, and at rates
for which a given share of the elements changes. Sizes are bits per changed element, everything included. Times are multiples of
M, one thread's copy of the new weights into memory that is there, in the same run; each is the best of several, and counts the
thread's processor time, so that other work on the machine disturbs less. What two threads gain is in wall time. The reference
form is row and column deltas in the narrowest integers, absolute bf16 values, and one zstd frame at level 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from loadtests.adam_steps import COLUMNS, FAMILIES, Layer, layers, rate_for, weights
from param_sync.patch import codec
from param_sync.patch.bits import State, same_state
from param_sync.patch.digest import digest_of
from param_sync.patch.snapshot import Snapshot

DENSITIES = (0.002, 0.009, 0.02, 0.06)
RATES = (1e-6, 3e-6, 1e-5)
LEVELS = (1, 2)
CHAIN = 8

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRow:
    """One level's figures. `_bits` per changed element, `_m` in multiples of M, `_gain` of two threads over one."""

    bits: float
    ratio: float
    """Bytes over the reference's."""
    encode_m: float
    reference_over_encode: float
    """How much longer the reference takes, with torch's `nonzero`, as it is published."""
    numpy_reference_over_encode: float
    """The same with numpy's faster `flatnonzero`."""
    apply_m: float
    """Decode, apply and verify every changed tensor, into memory that is there."""
    apply_fresh_m: float
    """The same into fresh memory."""
    encode_gain: float
    apply_gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step's measurements."""

    family: str
    rate: float
    density: float
    changed: int
    copy_s: float
    """M."""
    scan_m: float
    """Comparing old with new in numpy: what any encoder must at least do."""
    check_m: float
    """The digest of the whole state from its bits."""
    reference_bits: float
    reference_encode_m: float
    levels: dict[int, LevelRow]


def reference_encode(old: State, new: State, with_torch: bool = False) -> bytes:
    """Row and column deltas and absolute values of every tensor, one zstd-1 frame."""
    raw = []
    for name, bits in new.items():
        if with_torch:
            before, after = (torch.from_numpy(side[name].data.view(np.int16)).view(-1, COLUMNS) for side in (old, new))
            rows, columns = (part.numpy() for part in torch.nonzero(before != after, as_tuple=True))
            where = rows * COLUMNS + columns
        else:
            where = np.flatnonzero(old[name].data != bits.data)
            rows, columns = where // COLUMNS, where % COLUMNS
        row_deltas = np.diff(rows, prepend=0)
        column_deltas = np.where(row_deltas == 0, np.diff(columns, prepend=0), columns)
        raw += [_narrowest(row_deltas).tobytes(), _narrowest(column_deltas).tobytes(), bits.data[where].tobytes()]
    return zstandard.ZstdCompressor(level=1).compress(b"".join(raw))


def _narrowest(values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    most = int(values.max(initial=0))
    return values.astype(np.uint8 if most < 256 else np.uint16 if most < 65536 else np.int32)


def best_of(
    times: int, function: Callable[[], _Result], clock: Callable[[], float] = time.thread_time
) -> tuple[_Result, float]:
    """The result and the shortest of `times` runs, in seconds."""
    shortest = float("inf")
    for _ in range(times):
        start = clock()
        result = function()
        shortest = min(shortest, clock() - start)
    return result, shortest


def measure(family: str, rate: float, before: State, after: State, times: int) -> Row:
    """One row. Every patch is applied and compared bit for bit. Raises `SystemExit` when one differs."""
    old = Snapshot.of(before, version=0, incarnation=0)
    new = Snapshot.of(after, version=1, incarnation=0)
    spare = {name: np.zeros_like(bits.data) for name, bits in after.items()}

    def copy() -> None:
        for name, bits in after.items():
            np.copyto(spare[name], bits.data)

    _, copy_s = best_of(2 * times, copy)
    _, scan_s = best_of(times, lambda: [before[name].data != bits.data for name, bits in after.items()])
    _, check_s = best_of(times, lambda: digest_of(after))
    reference, numpy_s = best_of(max(1, times // 3), lambda: reference_encode(before, after))
    same, reference_s = best_of(max(1, times // 3), lambda: reference_encode(before, after, True))
    if same != reference:
        raise SystemExit(f"{family} at {rate:.1e}: the two ways to the reference differ")
    changed = sum(int(np.count_nonzero(before[name].data != bits.data)) for name, bits in after.items())

    def of_level(level: int) -> LevelRow:
        patch, encode_s = best_of(times, lambda: codec.encode(old, new, level=level))
        file = patch.tobytes()
        made, apply_s = best_of(times, lambda: codec.apply(old, file, into=spare))
        if not same_state(made.tensors, after):
            raise SystemExit(f"{family} at {rate:.1e}, level {level}: the applied patch differs from the new weights")
        _, fresh_s = best_of(times, lambda: codec.apply(old, file))

        def wall(function: Callable[[int], object]) -> float:
            one, two = (best_of(times, partial(function, n), time.perf_counter)[1] for n in (1, 2))
            return one / two

        return LevelRow(
            bits=8 * len(file) / changed,
            ratio=len(file) / len(reference),
            encode_m=encode_s / copy_s,
            reference_over_encode=reference_s / encode_s,
            numpy_reference_over_encode=numpy_s / encode_s,
            apply_m=apply_s / copy_s,
            apply_fresh_m=fresh_s / copy_s,
            encode_gain=wall(lambda n: codec.encode(old, new, level=level, workers=n)),
            apply_gain=wall(lambda n: codec.apply(old, file, into=spare, workers=n)),
        )

    return Row(
        family=family,
        rate=rate,
        density=changed / sum(bits.data.size for bits in after.values()),
        changed=changed,
        copy_s=copy_s,
        scan_m=scan_s / copy_s,
        check_m=check_s / copy_s,
        reference_bits=8 * len(reference) / changed,
        reference_encode_m=reference_s / copy_s,
        levels={level: of_level(level) for level in LEVELS},
    )


def merged(model: list[Layer], rng: np.random.Generator, rate: float) -> dict[str, float]:
    """By level, the bytes of one patch over eight steps as a share of the eight patches' bytes. The model trains on."""
    held = first = Snapshot.of(weights(model), version=0, incarnation=0)
    files: dict[int, list[bytes]] = {level: [] for level in LEVELS}
    for version in range(1, CHAIN + 1):
        for layer in model:
            layer.step(rng, rate)
        before, held = held, Snapshot.of(weights(model), version=version, incarnation=0)
        for level, chain in files.items():
            chain.append(codec.encode(before, held, level=level).tobytes())
    shares = {}
    for level, chain in files.items():
        one = codec.compose(first, chain, level=level)
        if codec.apply(first, one.tobytes()).digest != held.digest:
            raise SystemExit(f"level {level}: the merged patch does not lead where the chain does")
        shares[str(level)] = one.nbytes / sum(map(len, chain))
    return shares


def _line(row: Row) -> str:
    cells = [
        f"L{level} {r.bits:6.2f} {r.ratio:5.3f} {r.encode_m:5.1f} {r.reference_over_encode:5.1f} {r.apply_m:5.1f}"
        f" {r.apply_fresh_m:5.1f} {r.encode_gain:4.2f} {r.apply_gain:4.2f}"
        for level, r in row.levels.items()
    ]
    head = f"{row.family:10}  {row.rate:7.1e}  {row.density:7.3%}  {row.reference_bits:9.2f}"
    return " | ".join([f"{head}  {row.scan_m:4.2f}  {row.check_m:5.2f}", *cells])


def main(argv: list[str] | None = None) -> int:
    """Print the table; with `--json` also write it."""
    parser = argparse.ArgumentParser(description="Size and speed of weight patches")
    parser.add_argument("--elements", type=int, default=10 << 22, help="bf16 elements of the simulated model")
    parser.add_argument("--densities", default=",".join(map(str, DENSITIES)), help="shares of elements that change")
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="learning rates")
    parser.add_argument("--families", default=",".join(FAMILIES), help="how weights are distributed")
    parser.add_argument("--times", type=int, default=5, help="runs of each measurement, the best counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the rows to this file")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rng = np.random.default_rng(options.seed)
    rows, chains = [], {}
    print("                                 reference  scan  check | by level: bits ratio encode M ref/encode apply M fresh M")
    print("weights        rate  changed       bits     M      M |           gains of a second thread: encode, apply")
    for family in options.families.split(","):
        model = layers(rng, family, options.elements)
        before = weights(model)
        rates = [float(rate) for rate in options.rates.split(",") if rate]
        rates += [rate_for(model[0], float(density)) for density in options.densities.split(",") if density]
        for rate in rates:
            rows.append(measure(family, rate, before, weights(model, rate), options.times))
            print(_line(rows[-1]), flush=True)
        chains[family] = merged(layers(rng, family, options.elements // 4), rng, 3e-6)
        print(f"{family}: one patch over {CHAIN} steps at 3e-6 as a share of the {CHAIN} patches: {chains[family]}", flush=True)
    if options.json is not None:
        report = {
            "elements": options.elements,
            "times": options.times,
            "rows": [asdict(row) for row in rows],
            "merged_share": chains,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
