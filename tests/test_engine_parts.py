"""The parts that engines are made of, each on its own: read-back, staging, files, door, sampler, results, options."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import services.engine.scatter
from schemas.trajectory import SamplingConfig, VersionSpan
from services.engine import cpu_writes, load_plan, readback, staging
from services.engine.changes import BaseDiffers, ChangeError, TensorChange
from services.engine.checkpoint_files import rounded, shapes_of, tensors_of
from services.engine.contract import checked_logprobs
from services.engine.gate import Gate
from services.engine.protocol import DrainTimeout, EngineUnavailable, LogprobsMissing, RequestRefused
from services.engine.registry import create_engine
from services.engine.routes import Route
from services.engine.scatter import Scatter, ScatterError, identity_plan, scatter_of
from services.engine.spans import check_cover, spans_of
from services.engine.token_sampler import draw, transformed
from services.engine.vllm_options import VllmOptions
from services.engine.vllm_results import generation_of, label_of

# -- reading weights back ----------------------------------------------------------------------------------------------------


def words(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.random.default_rng(seed).integers(0, 2**16, shape, dtype=np.uint16)


def test_bits_survive_both_runtime_dtypes() -> None:
    """Every one of the 65536 patterns, infinities and NaN payloads among them."""
    every = np.arange(2**16, dtype=np.uint16)
    for dtype in (torch.bfloat16, torch.float32):
        parameter = torch.zeros(256, 256, dtype=dtype)
        quiet = every | np.where((every & 0x7F80 == 0x7F80) & (every & 0x7F != 0), 0x40, 0).astype(np.uint16)
        readback.copy_bits("w", parameter, quiet, (256, 256))
        np.testing.assert_array_equal(readback.bits_of("w", parameter), quiet)


def test_values_that_no_checkpoint_can_hold_are_not_read_back() -> None:
    with pytest.raises(readback.NotRepresentable, match="outside bfloat16"):
        readback.bits_of("w", torch.tensor([1.0 + 2**-20]))
    with pytest.raises(readback.NotRepresentable, match="float16"):
        readback.bits_of("w", torch.ones(2, dtype=torch.float16))
    with pytest.raises(ValueError, match="differs from runtime shape"):
        readback.copy_bits("w", torch.zeros(2, 3), words(3, 2), (3, 2))


class Fused(torch.nn.Module):
    """A rank of a model as an inference engine keeps it: two projections fused and sliced by rank, a padded vocabulary."""

    def __init__(self, rank: int, ranks: int, pad: int = 3) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.gate_up = torch.nn.Parameter(torch.zeros(2 * 8 // ranks, 4))
        self.down = torch.nn.Parameter(torch.zeros(4, 8 // ranks))
        self.norm = torch.nn.Parameter(torch.zeros(4))
        self.embed = torch.nn.Parameter(torch.zeros((6 + pad), 4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        rows = 8 // self.ranks
        for name, tensor in weights:
            if name in ("gate", "up"):
                at = rows * (name == "up")
                self.gate_up.data.narrow(0, at, rows).copy_(tensor.narrow(0, self.rank * rows, rows))
            elif name == "down":
                self.down.data.copy_(tensor.narrow(1, self.rank * rows, rows))
            elif name == "embed":
                self.embed.data[:6].copy_(tensor)
                self.embed.data[6:].fill_(0)
            elif name == "norm":
                self.norm.data.copy_(tensor)


SHAPES = [("gate", (8, 4)), ("up", (8, 4)), ("down", (4, 8)), ("norm", (4,)), ("embed", (6, 4)), ("unused", (5,))]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_plan_reads_back_what_the_loader_wrote(ranks: int) -> None:
    bits = {name: words(*shape, seed=i) & 0xBFFF for i, (name, shape) in enumerate(SHAPES)}
    read = {name: np.full(int(np.prod(shape)), -1, dtype=np.int64) for name, shape in SHAPES}
    for rank in range(ranks):
        model = Fused(rank, ranks)
        plan = load_plan.record(dict(model.named_parameters()), model.load_weights, SHAPES)
        assert all(not parameter.any() for parameter in model.parameters()), "recording must not write"
        model.load_weights((name, readback.tensor_of(bits[name], shape)) for name, shape in SHAPES)
        assert plan.names == ["gate", "up", "down", "norm", "embed"]
        for name, shape in SHAPES:
            held = torch.full((int(np.prod(shape)),), -1, dtype=torch.int32)
            plan.read(name, held)
            read[name] = np.maximum(read[name], held.numpy())
            if ranks == 1 and name != "unused":
                assert plan.complete(name)
                np.testing.assert_array_equal(plan.bits(name), bits[name].reshape(-1))
    for name, _ in SHAPES[:-1]:
        np.testing.assert_array_equal(read[name], bits[name].reshape(-1))
    assert (read["unused"] == -1).all()


def test_a_loader_that_computes_has_no_plan() -> None:
    target = torch.nn.Parameter(torch.zeros(2, 3))

    def scaling(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            target.data.copy_(tensor * 2)

    def adding(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            target.data.add_(tensor)

    for loader, reason in [(scaling, "not a view of a checkpoint tensor"), (adding, "only copies")]:
        with pytest.raises(load_plan.PlanError, match=reason):
            load_plan.record({"target": target}, loader, [("w", (2, 3))])


def change_of(name: str, shape: tuple[int, ...], old: Any, new: Any) -> TensorChange:
    index = np.flatnonzero(old.reshape(-1) != new.reshape(-1)).astype(np.uint32)
    return TensorChange(name, shape, index, old.reshape(-1)[index], new.reshape(-1)[index])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_changed_elements_land_where_the_loader_would_put_them(
    monkeypatch: pytest.MonkeyPatch, ranks: int, dtype: torch.dtype, compiled: bool
) -> None:
    """Row and column slices, fused stacks and padding: scattered changes equal a load of the whole, bit for bit, by rank."""
    old = {name: words(*shape, seed=i) & 0xBFFF for i, (name, shape) in enumerate(SHAPES)}
    new = {
        name: np.where(words(*shape, seed=50 + i) % 3 == 0, old[name] ^ 1, old[name]) for i, (name, shape) in enumerate(SHAPES)
    }
    monkeypatch.setattr(services.engine.scatter, "COMPILED_FROM", 0 if compiled else 2**40)
    landed = 0
    for rank in range(ranks):
        scattered, loaded = Fused(rank, ranks).to(dtype), Fused(rank, ranks).to(dtype)
        plan = load_plan.record(dict(scattered.named_parameters()), scattered.load_weights, SHAPES)
        scattered.load_weights((name, readback.tensor_of(old[name], shape)) for name, shape in SHAPES)
        loaded.load_weights((name, readback.tensor_of(new[name], shape)) for name, shape in SHAPES)
        scatter = Scatter(plan)
        before = [parameter.clone() for parameter in scattered.parameters()]
        landed += sum(scatter.stage(change_of(name, shape, old[name], new[name])) for name, shape in SHAPES)
        assert all(torch.equal(a, b) for a, b in zip(before, scattered.parameters(), strict=True)), "laying out writes nothing"
        assert scatter.commit() and scatter.staged_elements == 0
        for one, other in zip(scattered.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(one, other)
    sliced = sum(int((old[name] != new[name]).sum()) for name in ("gate", "up", "down"))
    everywhere = sum(int((old[name] != new[name]).sum()) for name in ("norm", "embed"))
    assert landed == sliced + ranks * everywhere


@pytest.mark.parametrize("compiled", [True, False])
def test_a_scatter_checks_its_base_and_what_it_wrote(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    monkeypatch.setattr(services.engine.scatter, "COMPILED_FROM", 0 if compiled else 2**40)
    model = Fused(0, 1)
    plan = load_plan.record(dict(model.named_parameters()), model.load_weights, SHAPES)
    zeros, ones = np.zeros(4, dtype=np.uint16), np.ones(4, dtype=np.uint16)
    scatter = Scatter(plan)
    with pytest.raises(BaseDiffers, match="norm"):
        scatter.stage(change_of("norm", (4,), ones, zeros))
    scatter.stage(change_of("norm", (4,), zeros, ones))
    scatter._staged.append(replace(scatter._staged[0], words=scatter._staged[0].words + 1))  # somebody else writes there too
    with pytest.raises(ScatterError):
        scatter.commit()
    scatter.stage(change_of("norm", (4,), ones + 1, zeros))
    scatter._staged[0] = replace(scatter._staged[0], flat=scatter._staged[0].flat[:2])  # the parameter has shrunk meanwhile
    with pytest.raises((ScatterError, IndexError)):
        scatter.commit()


@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_compiled_writes_touch_their_places_alone(width: type[np.signedinteger], dtype: type[np.unsignedinteger]) -> None:
    """And none outside, whatever they are told."""
    flat, shift = np.arange(1000, dtype=dtype), 0 if dtype is np.uint16 else 16
    places = np.array([3, 500, 999, 0], dtype=width)
    words = np.array([7, 0xFFFF, 0x8000, 1], dtype=np.uint16)
    expected = flat.copy()
    expected[places] = words.astype(dtype) << dtype(shift)
    assert not cpu_writes.holds(flat, places, words)
    assert cpu_writes.put(flat, places, words) == 4 and cpu_writes.holds(flat, places, words)
    np.testing.assert_array_equal(flat, expected)
    for outside in (1000, -1):
        places[2] = outside
        assert not cpu_writes.holds(flat, places, words)
        assert cpu_writes.put(flat, places, words) == 2
    np.testing.assert_array_equal(flat, expected)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 10**6),
)
def test_a_route_inverts_any_slice_of_any_layout(shape: list[int], seed: int) -> None:
    """A random box of a tensor, its dimensions in any order, copied into a random box of a parameter."""
    random = np.random.default_rng(seed)
    source = torch.arange(int(np.prod(shape))).reshape(shape)
    for dim, size in enumerate(shape):
        first = int(random.integers(0, size))
        source = source.narrow(dim, first, int(random.integers(1, size - first + 1)))
    source = source.permute(*random.permutation(len(shape)).tolist())
    parameter = torch.full([size + 2 for size in source.shape], -1)
    target = parameter[tuple(slice(1, 1 + size) for size in source.shape)]
    target.copy_(source)
    landing = load_plan.Landing("p", load_plan.View.of(target, 0), load_plan.View.of(source, 0))
    index = np.flatnonzero(random.random(int(np.prod(shape))) < 0.7).astype(np.uint32)
    for narrow, positions in itertools.product((True, False), (index, index.astype(np.int64))):
        part, inside, places = Route.of(landing).take(positions, narrow)
        taken = positions[part] if inside is None else positions[part][inside]
        assert sorted(taken) == sorted(set(index.tolist()) & set(source.reshape(-1).tolist()))
        assert places.dtype == (np.int32 if narrow else np.int64)
        assert parameter.reshape(-1)[torch.from_numpy(places)].tolist() == taken.tolist()


def test_overlapping_views_and_foreign_dtypes_take_whole_tensors() -> None:
    overlapping = load_plan.View((3, 3), (1, 1), 0)
    with pytest.raises(load_plan.PlanError, match="overlapping"):
        Route.of(load_plan.Landing("p", load_plan.View((3, 3), (3, 1), 0), overlapping))
    quantized = {"w": torch.zeros(4, dtype=torch.int8)}
    scatter, reason = scatter_of(identity_plan(quantized))
    assert scatter is None and "int8" in reason


def test_staged_changes_survive_their_file(tmp_path: Path) -> None:
    """Split where a chunk would overflow, put together again; a file that was tampered with is refused."""
    changes = [change_of(f"t{i}", (40, 10), words(40, 10, seed=i), words(40, 10, seed=9 + i)) for i in range(3)]
    got: dict[str, list[TensorChange]] = {}
    with staging.staging_file(str(tmp_path)) as path:
        for chunk in staging.staged_changes(path, iter(changes), 1600):
            assert path.stat().st_size <= 1600
            for change in staging.changes_in(chunk.path, chunk.digest, chunk.changes):
                got.setdefault(change.name, []).append(change)
        damaged = bytearray(path.read_bytes())
        damaged[5] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ChangeError, match="not the one"):
            list(staging.changes_in(chunk.path, chunk.digest, chunk.changes))
    for change in changes:
        parts = got[change.name]
        assert len(parts) > 1
        for attribute in ("index", "old", "new"):
            joined = np.concatenate([getattr(part, attribute) for part in parts])
            np.testing.assert_array_equal(joined, getattr(change, attribute))


def test_staging_never_splits_a_tensor(tmp_path: Path) -> None:
    tensors = [(f"t{i}", words(i + 1, 7, seed=i), (i + 1, 7)) for i in range(6)]
    seen = {}
    with staging.staging_file(str(tmp_path)) as path:
        for chunk in staging.staged(path, iter(tensors), 150):
            data = np.memmap(chunk.path, dtype=np.uint16, mode="r")
            assert chunk.bytes <= 150 or len(chunk.tensors) == 1
            for name, shape, offset in chunk.tensors:
                seen[name] = np.array(data[offset // 2 : offset // 2 + int(np.prod(shape))]).reshape(shape)
    assert not path.exists()
    assert list(seen) == [name for name, _, _ in tensors]
    for name, bits, _ in tensors:
        np.testing.assert_array_equal(seen[name], bits)


def write_safetensors(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def as_torch_rounds(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def test_checkpoint_files_are_read_and_checked(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(6).astype(np.float32)
    half = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}
    full = {"dtype": "F32", "shape": [6], "data_offsets": [8, 32]}
    bits = words(2, 2)
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"__metadata__": {}, "a": half, "b": full}, bits.tobytes() + values.tobytes())
    assert shapes_of(str(tmp_path)) == [("a", (2, 2)), ("b", (6,))]
    read = {name: (np.array(b), shape) for name, b, shape in tensors_of(str(tmp_path))}
    np.testing.assert_array_equal(read["a"][0], bits.reshape(-1))
    np.testing.assert_array_equal(
        read["b"][0], torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    )
    write_safetensors(path, {"a": half | {"data_offsets": [0, 6]}}, bits.tobytes())
    with pytest.raises(EngineUnavailable, match="damaged"):
        shapes_of(str(tmp_path))
    path.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(EngineUnavailable, match="impossible"):
        shapes_of(str(tmp_path))
    write_safetensors(path, {"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}, bytes(4))
    with pytest.raises(EngineUnavailable, match="BF16 or F32"):
        list(tensors_of(str(tmp_path)))
    path.unlink()
    with pytest.raises(EngineUnavailable, match=r"no \*\.safetensors"):
        shapes_of(str(tmp_path))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_rounding_is_torchs(patterns: list[int]) -> None:
    raw = np.array(patterns, dtype=np.uint32)
    ours = rounded(raw)
    theirs = torch.from_numpy(raw.view(np.float32).copy()).to(torch.bfloat16)
    same = ours == theirs.view(torch.int16).numpy().view(np.uint16)
    assert (same | torch.isnan(theirs).numpy()).all()


# -- the door ----------------------------------------------------------------------------------------------------------------


async def test_the_door_counts_waits_and_names_the_culprit() -> None:
    gate, leave = Gate(), asyncio.Event()

    async def visit(name: str) -> bool:
        async with gate.admit(name) as admitted:
            if name == "slow":
                await leave.wait()
            return admitted

    slow = asyncio.create_task(visit("slow"))
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused, match="already in flight"):
        await visit("slow")
    gate.close()
    with pytest.raises(DrainTimeout, match="slow"):
        await gate.drained(0.01)
    late, later = asyncio.create_task(visit("late")), asyncio.create_task(visit("later"))
    await asyncio.sleep(0)
    assert (gate.inside, gate.outside) == (1, 2)
    assert await gate.abort_waiting("later") and not await later
    assert not await gate.abort_waiting("nobody")
    leave.set()
    assert await slow and await gate.drained(1.0) >= 0
    assert not late.done()
    await gate.reopen()
    assert await late
    assert (gate.inside, gate.outside) == (0, 0)


async def test_a_cancelled_visitor_leaves_no_trace() -> None:
    gate = Gate()
    gate.close()

    async def visit() -> None:
        async with gate.admit("x"):
            pass

    waiting = asyncio.create_task(visit())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert gate.outside == 0
    await gate.reopen()
    await visit()


# -- sampling ----------------------------------------------------------------------------------------------------------------

samplings = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 700, 5000]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(samplings, min_size=1, max_size=5), st.integers(0, 10**6), st.sampled_from([5, 600, 1500]), st.floats(0.1, 20))
def test_the_sampler_against_the_definition(rows: list[SamplingConfig], seed: int, vocab: int, spread: float) -> None:
    """Mixed batches, vocabularies above and below the number of tokens that are ranked at first."""
    logits = spread * torch.from_numpy(np.random.default_rng(seed).standard_normal((len(rows), vocab))).float()
    got = transformed(logits.clone(), rows)
    tokens, logprobs, raw = draw(logits.clone(), rows, [np.random.default_rng([seed, i]) for i in range(len(rows))])
    for b, sampling in enumerate(rows):
        row = logits[b].double()
        plain = torch.log_softmax(row, 0)
        assert raw[b] == pytest.approx(float(plain[tokens[b]]), abs=1e-4)
        if sampling.temperature == 0.0:
            assert tokens[b] == int(row.argmax()) and logprobs[b] == 0.0
            continue
        row = row / sampling.temperature
        order = row.argsort(descending=True)
        kept = order[: sampling.top_k or vocab]
        mass = torch.softmax(row[kept], 0)
        before = mass.cumsum(0) - mass
        sure = kept[(before < sampling.top_p - 1e-5) | (torch.arange(kept.numel()) == 0)]
        maybe = kept[(before < sampling.top_p + 1e-5) | (torch.arange(kept.numel()) == 0)]
        support = set(torch.isfinite(got[b]).nonzero()[:, 0].tolist())
        assert set(sure.tolist()) <= support <= set(maybe.tolist())
        members = sorted(support)
        expected = torch.log_softmax(row[members], 0)
        np.testing.assert_allclose(got[b][members].numpy(), expected.numpy(), atol=2e-4)
        assert int(tokens[b]) in support
        assert logprobs[b] == pytest.approx(float(expected[members.index(int(tokens[b]))]), abs=2e-4)


# -- results -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, -9999.0, 0.5])
def test_a_missing_logprob_is_never_padded(value: float) -> None:
    with pytest.raises(LogprobsMissing, match=r"logprobs\[1\]"):
        checked_logprobs(np.array([-0.5, value]), "logprobs", "r1")


class Flat(SimpleNamespace):
    def __len__(self) -> int:
        return int(self.positions)


def vllm_output(ids: list[int], tokens: list[int], logprobs: list[float], spans: list[tuple[int, int, str]]) -> Any:
    flat = Flat(token_ids=tokens, logprobs=logprobs, positions=len(ids))
    versions = [SimpleNamespace(start=s, end=e, version=v) for s, e, v in spans]
    one = SimpleNamespace(
        token_ids=ids, logprobs=flat, weight_versions=versions, finish_reason="stop", stop_reason=7, routed_experts=None
    )
    return SimpleNamespace(outputs=[one], num_cached_tokens=3)


def test_results_match_logprobs_with_tokens() -> None:
    two = SamplingConfig(temperature=0.5)
    label = label_of(4, 1)
    good = vllm_output([5, 7], [5, 5, 7, 7], [-1.0, -2.0, -0.1, -0.2], [(0, 1, label_of(3, 1)), (1, 2, label)])
    out = generation_of("r", good, two, {(4, 1): "digest"})
    assert out.ids.tolist() == [5, 7] and out.logprobs.tolist() == pytest.approx([-1.0, -0.1])
    assert out.raw_logprobs is not None and out.raw_logprobs.tolist() == pytest.approx([-2.0, -0.2])
    assert out.versions == (VersionSpan(0, 1, 3, 1), VersionSpan(1, 2, 4, 1))
    assert (out.stop_reason, out.cached_prompt_tokens, out.weight_digest) == ("7", 3, "digest")
    greedy = generation_of("r", good, SamplingConfig(temperature=0.0), {})
    assert greedy.logprobs.tolist() == [0.0, 0.0] and greedy.raw_logprobs is not None
    other = vllm_output([5, 7], [5, 5, 7, 8], [-1.0, -2.0, -0.1, -0.2], [(0, 2, label)])
    with pytest.raises(LogprobsMissing, match="other tokens"):
        generation_of("r", other, two, {})
    short = vllm_output([5, 7], [5], [-1.0], [(0, 2, label)])
    with pytest.raises(LogprobsMissing, match="2 tokens came with 1"):
        generation_of("r", short, two, {})
    hole = vllm_output([5, 7], [5, 7], [-1.0, -1.0], [(0, 1, label)])
    with pytest.raises(ValueError, match="cover exactly 2"):
        generation_of("r", hole, two, {})


def test_spans_tile_the_tokens() -> None:
    assert spans_of([(3, 0), (3, 0), (4, 0), (4, 1)]) == (VersionSpan(0, 2, 3), VersionSpan(2, 3, 4), VersionSpan(3, 4, 4, 1))
    assert spans_of([]) == ()
    for broken in [(VersionSpan(0, 1, 3), VersionSpan(2, 3, 4)), (VersionSpan(0, 2, 3), VersionSpan(1, 3, 4))]:
        with pytest.raises(ValueError, match="without a hole"):
            check_cover(broken, 3)


# -- building ----------------------------------------------------------------------------------------------------------------


def test_the_registry_says_what_is_wrong() -> None:
    with pytest.raises(EngineUnavailable, match="unknown; use one of"):
        create_engine("sglang", {})  # type: ignore[arg-type]
    with pytest.raises(EngineUnavailable, match="has no field \\['modle'\\]"):
        create_engine("transformers", {"modle": "x"})
    with pytest.raises(EngineUnavailable, match="max_num_seqs"):
        create_engine("simulated", {"max_num_seqs": "many"})


def test_vllm_options_reach_the_engine_arguments() -> None:
    options = VllmOptions(
        model="m",
        device="cuda",
        dtype="bfloat16",
        tensor_parallel_size=4,
        kv_cache_dtype="fp8",
        kv_cache_bytes=0,
        speculative={"method": "mtp", "num_speculative_tokens": 2},
        extra_args={"enforce_eager": True, "max_num_partial_prefills": 2},
    )
    args = options.engine_args()
    assert args["tensor_parallel_size"] == 4 and args["kv_cache_dtype"] == "fp8" and args["enforce_eager"] is True
    assert args["speculative_config"]["method"] == "mtp" and args["max_num_partial_prefills"] == 2
    assert args["logprobs_mode"] == "processed_logprobs" and args["skip_tokenizer_init"]
    assert "kv_cache_memory_bytes" not in args and "distributed_executor_backend" not in args and not options.both_logprobs
    pinned = VllmOptions(model="m", cpu_threads=1, cpu_list="1")
    assert pinned.engine_args()["distributed_executor_backend"] == "uni"
    assert pinned.environment()["GOMP_CPU_AFFINITY"] == "1" and pinned.environment()["OMP_NUM_THREADS"] == "1"
    assert pinned.engine_args()["seed"] != VllmOptions(model="m").engine_args()["seed"]
