"""Speed and memory of a sparse weight update inside vLLM, against vLLM's own sparse loader on the same patch in the same run.

    python -m loadtests.engine_apply [--layers N] [--hidden N] [--densities 0.002,0.009] [--times N] [--ranks N] [--json OUT]

A random Qwen2 checkpoint is served by a real engine. One simulated optimizer step changes a share of its elements; the update
is applied forth by one way and back by the other, several times, and after every one of them all weights are read back and
compared with the digest of the files. `ours` is laying out beside the weights (done while serving) plus writing and reading
back (done in the pause); `theirs` is `load_checkpoint_weight_patches`, whole. Times are the best of several. Memory is the
highest peak of a worker process above what it held before, in multiples of the patch (four bytes of position and two of value
for each changed element), the patch itself included; `staged` is what of that is laid out for the switch.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loadtests.patch_codec import to_bf16
from loadtests.weight_steps import step
from services.engine.changes import TensorChange
from services.engine.checkpoint_files import digest_of
from services.engine.registry import create_engine
from services.engine.staging import Placed, changes_in, staged_changes, staging_file
from services.engine.vllm_plugin import WeightWorker

U16 = npt.NDArray[np.uint16]
VOCABULARY = 32000
DENSITIES = (0.002, 0.009, 0.06)


@dataclass(frozen=True, slots=True)
class Row:
    """One density. Seconds are the slowest rank's; memory is in multiples of the patch."""

    density: float
    changed: int
    patch_bytes: int
    ours_s: float
    ours_in_pause_s: float
    theirs_s: float
    speedup: float
    speedup_in_pause: float
    ours_cpu_s: float
    theirs_cpu_s: float
    speedup_cpu: float
    """Of processor time, which other work on the machine disturbs less."""
    ours_memory: float
    ours_staged: float
    theirs_memory: float


class BenchWorker(WeightWorker):
    """The plug-in, with a stop-watch and vLLM's own loader beside it.

    Both ways give (seconds, of them in the pause, seconds of processor time, bytes above what was held, bytes staged).
    Bytes are only counted with `memory`, since giving freed memory back first costs time afterwards.
    """

    def headrace_ours(self, path: str, digest: bytes, changes: list[Placed], memory: bool) -> tuple[float, ...]:
        scatter = self._scatter()
        with _peak(memory) as peak:
            listed = list(changes_in(path, digest, changes))  # what is laid out may be views of it
            began, cpu = time.perf_counter(), time.process_time()
            for change in listed:
                scatter.stage(change)
            laid_out, staged = time.perf_counter(), scatter.staged_bytes
            scatter.commit()
            ended, cpu = time.perf_counter(), time.process_time() - cpu
        return ended - began, ended - laid_out, cpu, peak(), staged

    def headrace_theirs(self, path: str, digest: bytes, changes: list[Placed], memory: bool) -> tuple[float, ...]:
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        with _peak(memory) as peak:
            patches = [
                CheckpointWeightPatch(
                    change.name,
                    change.shape,
                    torch.bfloat16,
                    torch.from_numpy(change.new.view(np.int16)).view(torch.bfloat16),
                    torch.from_numpy(change.index.view(np.int32)),
                )
                for change in changes_in(path, digest, changes)
            ]
            began, cpu = time.perf_counter(), time.process_time()
            load_checkpoint_weight_patches(self.model_runner.get_model(), patches)
            ended, cpu = time.perf_counter(), time.process_time() - cpu
        return ended - began, ended - began, cpu, peak(), 0


@contextmanager
def _peak(memory: bool) -> Iterator[Callable[[], int]]:
    """Gives a function that says how far this process's memory rose above what it held when the block began."""
    held = 0
    if memory:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else what was freed before would be used again and not be seen
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        held = _status("VmRSS")
    yield lambda: max(0, _status("VmHWM") - held) if memory else 0


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def write_model(folder: Path, *, layers: int, hidden: int, seed: int) -> dict[str, tuple[int, ...]]:
    """The configuration of a Qwen2, tied embeddings; the shapes of its tensors in a checkpoint."""
    heads, kv_heads, inner = hidden // 64, max(1, hidden // 256), hidden * 11 // 4
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", 64 * kv_heads), ("v", 64 * kv_heads)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, hidden)
            shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    return shapes


def write_tensors(path: Path, tensors: dict[str, tuple[U16, tuple[int, ...]]]) -> None:
    """A safetensors file of bfloat16 bits."""
    header, at = {}, 0
    for name, (bits, shape) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits, _ in tensors.values():
            file.write(bits.tobytes())


def masters_of(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Float32 weights from N(0, 0.02), flat."""
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal(int(np.prod(shape)), dtype=np.float32) * np.float32(0.02) for name, shape in shapes.items()
    }


async def measure(engine: Any, path: Path, shapes: Any, old: Any, new: Any, times: int) -> Row:
    """One density: theirs forth, ours back, and the other way round, each read back whole. Raises `SystemExit`."""
    forth = [_change(name, shapes[name], old[name], new[name]) for name in shapes]
    back = [_change(name, shapes[name], new[name], old[name]) for name in shapes]
    forth, back = ([c for c in side if c.index.size] for side in (forth, back))
    digests = [digest_of((name, bits[name], shapes[name]) for name in shapes) for bits in (old, new)]
    results: dict[str, list[list[float]]] = {"headrace_ours": [], "headrace_theirs": []}
    for round_ in range(2 + times):  # the first two count memory
        ways = ["headrace_theirs", "headrace_ours"] if round_ % 2 == 0 else ["headrace_ours", "headrace_theirs"]
        for way, changes, digest in zip(ways, (forth, back), (digests[1], digests[0]), strict=True):
            (chunk,) = staged_changes(path, iter(changes), 2**40)
            replies = await engine._workers(way, chunk.path, chunk.digest, chunk.changes, round_ < 2)
            results[way].append([max(column) for column in zip(*replies, strict=True)])  # the slowest and the largest rank
            if await engine.weight_digest() != digest:
                raise SystemExit(f"{way}: the weights that are read back are not those of the files")
    changed = sum(change.index.size for change in forth)
    patch_bytes = sum(change.nbytes for change in forth)
    ours, theirs = (list(zip(*results[way], strict=True)) for way in ("headrace_ours", "headrace_theirs"))
    (ours_s, in_pause_s, ours_cpu_s), (theirs_s, _, theirs_cpu_s) = ([min(c[2:]) for c in side[:3]] for side in (ours, theirs))
    return Row(
        density=changed / sum(bits.size for bits in old.values()),
        changed=changed,
        patch_bytes=patch_bytes,
        ours_s=ours_s,
        ours_in_pause_s=in_pause_s,
        theirs_s=theirs_s,
        speedup=theirs_s / ours_s,
        speedup_in_pause=theirs_s / in_pause_s,
        ours_cpu_s=ours_cpu_s,
        theirs_cpu_s=theirs_cpu_s,
        speedup_cpu=theirs_cpu_s / ours_cpu_s,
        ours_memory=max(ours[3]) / patch_bytes,
        ours_staged=max(ours[4]) / patch_bytes,
        theirs_memory=max(theirs[3]) / patch_bytes,
    )


def _change(name: str, shape: tuple[int, ...], old: U16, new: U16) -> TensorChange:
    index = np.flatnonzero(old != new).astype(np.uint32)
    return TensorChange(name, shape, index, old[index], new[index])


async def run(options: argparse.Namespace) -> list[Row]:
    """Start the engine, measure every density, stop it."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="headrace-apply-") as folder:
        shapes = write_model(Path(folder), layers=options.layers, hidden=options.hidden, seed=options.seed)
        masters = masters_of(shapes, options.seed)
        old = {name: to_bf16(values) for name, values in masters.items()}
        write_tensors(Path(folder) / "model.safetensors", {name: (bits, shapes[name]) for name, bits in old.items()})
        settings = {
            "model": folder,
            "device": options.device,
            "dtype": "float32" if options.device == "cpu" else "bfloat16",
            "max_model_len": 128,
            "max_num_seqs": 4,
            "kv_cache_bytes": 32 * 2**20,
            "tensor_parallel_size": options.ranks,
            "extra_args": {"worker_extension_cls": "loadtests.engine_apply.BenchWorker"},
        }
        engine: Any = create_engine("vllm", settings)
        await engine.start()
        try:
            print(f"{engine.build}, {options.ranks} rank(s), {sum(b.size for b in old.values()) / 1e6:.1f} M parameters")
            print(
                " density   changed | ours s  in pause  theirs s | speed-up  in pause  of CPU | x patch: ours  staged  theirs"
            )
            random = np.random.default_rng(options.seed + 1)
            directions = {name: random.standard_normal(bits.size, dtype=np.float32) for name, bits in old.items()}
            for density in map(float, options.densities.split(",")):
                new = {name: step(masters[name], directions[name], density) for name in shapes}
                with staging_file("/dev/shm") as path:
                    row = await measure(engine, path, shapes, old, new, options.times)
                rows.append(row)
                print(line_of(row), flush=True)
        finally:
            await engine.stop()
    return rows


def line_of(row: Row) -> str:
    """A row of the table."""
    return (
        f"{row.density:8.2%}  {row.changed:8d} | {row.ours_s:6.3f}  {row.ours_in_pause_s:8.3f}  {row.theirs_s:8.3f} "
        f"| {row.speedup:8.1f}  {row.speedup_in_pause:8.1f}  {row.speedup_cpu:6.1f} "
        f"| {row.ours_memory:11.2f}  {row.ours_staged:6.2f}  {row.theirs_memory:6.2f}"
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table; with `--json` also write it."""
    parser = argparse.ArgumentParser(description="Speed and memory of sparse weight updates inside vLLM")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--densities", default=",".join(map(str, DENSITIES)), help="shares of elements that change")
    parser.add_argument("--times", type=int, default=4, help="runs of each measurement, the best counts")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the rows to this file")
    options = parser.parse_args(argv)
    rows = asyncio.run(run(options))
    if options.json is not None:
        report = {"options": vars(options) | {"json": str(options.json)}, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
