"""One contract, three engines. Every test runs on each; those about real numbers skip the simulated engine, which has none.

The reference is a plain `transformers` forward over prompt + sampled tokens, in float32, with no cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
import transformers

from param_sync.patch.digest import state_digest, tensor_digest
from schemas.trajectory import SamplingConfig
from services.engine.changes import TensorChange
from services.engine.checkpoint_files import tensors_of
from services.engine.protocol import (
    AppliedWeights,
    CheckpointTensor,
    Engine,
    Generation,
    Mode,
    RequestRefused,
    StagingFailed,
    Unserviceable,
    WeightsRejected,
    WeightUpdate,
)
from services.engine.registry import create_engine, vllm_available
from services.engine.staging import staged, staging_file

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

VOCAB = 128
TOLERANCE = 2e-4  # float32, two implementations of the same sums
Weights = dict[str, tuple[npt.NDArray[np.uint16], tuple[int, ...]]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen2 with biases, grouped queries and tied embeddings: every kind of fusing that vLLM does."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm), "simulated"],
)
async def served(request: pytest.FixtureRequest, model_folder: Path) -> AsyncIterator[Served]:
    """A running engine, started once per kind."""
    kind = request.param
    if kind == "vllm":
        available, reason = vllm_available()
        if not available:
            pytest.skip(reason)
    common = {"model": str(model_folder), "max_model_len": 256, "max_num_seqs": 16}
    # the simulated steps are slow enough that 60 of them outlast a glance at the engine
    own: dict[str, dict[str, Any]] = {
        "transformers": {"threads": 1},
        "vllm": {"kv_cache_bytes": 8 * 2**20, "max_num_batched_tokens": 256, "staging_chunk_bytes": 2**16},
        "simulated": {"vocab_size": VOCAB, "step_s": 0.002},
    }
    engine = create_engine(kind, common | own[kind])
    await engine.start()
    yield Served(engine, str(model_folder))
    await engine.stop()
    with pytest.raises(Unserviceable):
        await engine.generate("late", prompt(), SamplingConfig())


class Served:
    """An engine under test, and the weights that it is meant to hold."""

    def __init__(self, engine: Engine, folder: str) -> None:
        self.engine = engine
        self.folder = folder
        self.weights: Weights = {name: (np.array(bits), shape) for name, bits, shape in tensors_of(folder)}
        self.version = 0
        self._ids = itertools.count()

    @property
    def real(self) -> bool:
        return self.engine.capabilities.real_tokens

    async def ask(self, ids: npt.NDArray[np.int32], session: str = "", name: str = "", **sampling: Any) -> Generation:
        return await self.engine.generate(name or f"r{next(self._ids)}", ids, SamplingConfig(**sampling), session)

    def changed(self, seed: int, names: int = 6, size: float = 0.02) -> Weights:
        """New values for some tensors, the tied embedding and a slice of every fused projection among them."""
        random = np.random.default_rng(seed)
        always = ["model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight"]
        picked = set(always) | set(random.choice(sorted(self.weights), names, replace=False).tolist())
        out: Weights = {}
        for name in sorted(picked):
            bits, shape = self.weights[name]
            values = torch.from_numpy(bits.reshape(-1).view(np.int16)).view(torch.bfloat16).float()
            moved = (values + size * torch.from_numpy(random.standard_normal(values.numel())).float()).to(torch.bfloat16)
            out[name] = (moved.view(torch.int16).numpy().view(np.uint16), shape)
        return out

    def update(self, tensors: Weights, digest: str = "", elements: bool = False) -> WeightUpdate:
        """An update that carries `tensors`, or what they change; its digest is that of the result, unless told otherwise."""
        return WeightUpdate(
            version=self.version + 1,
            incarnation=2,
            digest=digest or digest_of(self.weights | tensors),
            load=lambda: iter([(name, bits, shape) for name, (bits, shape) in tensors.items()]),
            base_digest=digest_of(self.weights) if elements else "",
            changes=(lambda: iter(self.changes(tensors))) if elements else None,
        )

    def changes(self, tensors: Weights) -> list[TensorChange]:
        """The elements in which `tensors` differ from what is held."""
        out = []
        for name, (bits, shape) in tensors.items():
            old, new = self.weights[name][0].reshape(-1), bits.reshape(-1)
            index = np.flatnonzero(old != new).astype(np.uint32)
            out.append(TensorChange(name, shape, index, old[index], new[index]))
        return out

    async def move(
        self, tensors: Weights, mode: Mode = "finish_old", *, elements: bool = False, grace_s: float = 0.0
    ) -> AppliedWeights:
        receipt = await self.engine.apply(self.update(tensors, elements=elements), mode, grace_s)
        self.weights = self.weights | tensors
        self.version += 1
        assert receipt.version == self.version and receipt.digest == digest_of(self.weights)
        assert receipt.tensors == len(tensors) and receipt.path == ("elements" if elements else "tensors")
        assert 0 < receipt.frozen_s <= receipt.closed_s
        return receipt

    async def flip(self, name: str, position: int) -> None:
        """Turn one bit of the running weights over behind everyone's back."""
        engine: Any = self.engine
        words = self.weights[name][0].reshape(-1).copy()
        words[position] ^= 1
        if engine.kind == "simulated":
            engine._weights._words[name][position] = words[position]
        elif engine.kind == "transformers":
            await engine._at_boundary(lambda: engine._running().model.load(name, words, self.weights[name][1]))
        else:
            with staging_file("/dev/shm") as path:
                (chunk,) = staged(path, [(name, words, self.weights[name][1])], 2**30)
                await engine._workers("headrace_load", chunk.path, chunk.tensors)

    def reference(self, weights: Weights | None = None) -> Any:
        """A plain float32 model with the given weights."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        state = dict(model.named_parameters())
        for name, (bits, shape) in (weights or self.weights).items():
            values = torch.from_numpy(bits.reshape(-1).view(np.int16).copy()).view(torch.bfloat16).reshape(shape)
            state[name].data.copy_(values)
        return model.eval()


def digest_of(weights: Weights) -> str:
    return state_digest({name: ("bf16", shape, tensor_digest(bits)) for name, (bits, shape) in weights.items()})


def prompt(seed: int = 0, size: int = 24) -> npt.NDArray[np.int32]:
    return np.random.default_rng([7, seed, size]).integers(0, VOCAB, size, dtype=np.int32)


def reference_logprobs(
    model: Any,
    ids: npt.NDArray[np.int32],
    sampled: npt.NDArray[np.int32],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> npt.NDArray[np.float64]:
    """Log-probability of each sampled token, float64, written from the definition: rescale, keep top-k, keep the nucleus."""
    with torch.no_grad():
        row = torch.from_numpy(np.concatenate([ids, sampled]).astype(np.int64))[None]
        logits = model(row).logits[0, ids.size - 1 : -1].double() / temperature
    out = []
    for position, token in enumerate(sampled):
        order = torch.argsort(logits[position], descending=True)
        kept = order[: top_k or VOCAB]
        mass = torch.softmax(logits[position][kept], 0)
        before = torch.cumsum(mass, 0) - mass
        kept = kept[(before < top_p) | (torch.arange(kept.numel()) == 0)]
        at = (kept == int(token)).nonzero()
        out.append(float(torch.log_softmax(logits[position][kept], 0)[at[0, 0]]) if at.numel() else -np.inf)
    return np.array(out)


def kept_logprobs(
    old: Any, new: Any, ids: npt.NDArray[np.int32], sampled: npt.NDArray[np.int32], at: int
) -> npt.NDArray[np.float64]:
    """Log-probability of `sampled[at:]` under `new`; what was fed before `sampled[at - 1]` has keys and values of `old`."""
    row = torch.from_numpy(np.concatenate([ids, sampled]).astype(np.int64))[None]
    seen = ids.size + at - 1
    with torch.no_grad():
        cache = old(row[:, :seen], use_cache=True).past_key_values
        logits = new(row[:, seen:-1], past_key_values=cache, use_cache=True).logits[0].double()
    picked = torch.log_softmax(logits, -1).gather(1, row[0, seen + 1 :, None])
    return np.asarray(picked[:, 0].numpy())


def check_shape(out: Generation) -> None:
    """What holds for every generation of every engine."""
    assert out.ids.dtype == np.int32 and out.logprobs.dtype == np.float32 and out.ids.shape == out.logprobs.shape
    assert np.isfinite(out.logprobs).all() and (out.logprobs <= 0).all()
    assert out.raw_logprobs is None or out.raw_logprobs.shape == out.ids.shape
    covered = [position for span in out.versions for position in range(span.start, span.end)]
    assert covered == list(range(out.ids.size))


async def in_flight(served: Served, count: int, tokens: int, **sampling: Any) -> list[asyncio.Task[Generation]]:
    """`count` generations that have all begun and will go on for a while."""
    before = (await served.engine.load()).running
    tasks = [asyncio.create_task(served.ask(prompt(i), max_tokens=tokens, **sampling)) for i in range(count)]
    async with asyncio.timeout(60):
        while (await served.engine.load()).running < before + count:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)  # a few tokens
    return tasks


async def test_starts_with_the_checkpoint(served: Served) -> None:
    assert served.engine.build and served.engine.capabilities.vocab_size == VOCAB
    assert served.engine.weights.serviceable
    assert served.engine.weights.digest == await served.engine.weight_digest() == digest_of(served.weights)


async def test_logprobs_are_those_of_the_plain_model(served: Served) -> None:
    ids = prompt()
    out = await served.ask(ids, max_tokens=20, seed=1)
    check_shape(out)
    assert out.ids.size == 20 and out.finish_reason == "length" and out.raw_logprobs is None
    assert out.weight_digest == served.engine.weights.digest
    if served.real:
        np.testing.assert_allclose(out.logprobs, reference_logprobs(served.reference(), ids, out.ids), atol=TOLERANCE)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 0), (1.0, 20), (0.9, 30)])
async def test_logprobs_are_those_of_the_sampling_distribution(served: Served, top_p: float, top_k: int) -> None:
    ids = prompt(1)
    out = await served.ask(ids, max_tokens=20, seed=2, temperature=0.7, top_p=top_p, top_k=top_k)
    check_shape(out)
    assert out.raw_logprobs is not None
    if served.real:
        model = served.reference()
        expected = reference_logprobs(model, ids, out.ids, temperature=0.7, top_p=top_p, top_k=top_k)
        np.testing.assert_allclose(out.logprobs, expected, atol=TOLERANCE)
        np.testing.assert_allclose(out.raw_logprobs, reference_logprobs(model, ids, out.ids), atol=TOLERANCE)


async def test_greedy_is_certain(served: Served) -> None:
    ids = prompt(2)
    first, second = await served.ask(ids, max_tokens=12, temperature=0.0), await served.ask(ids, max_tokens=12, temperature=0.0)
    assert (first.logprobs == 0).all() and first.raw_logprobs is not None
    if served.real:
        assert first.ids.tolist() == second.ids.tolist()
        np.testing.assert_allclose(first.raw_logprobs, reference_logprobs(served.reference(), ids, first.ids), atol=TOLERANCE)


async def test_frequencies_follow_the_distribution(served: Served) -> None:
    """1024 first tokens against the model's own probabilities: total variation within what chance allows."""
    if not served.real:
        pytest.skip("invented tokens follow no distribution")
    ids = prompt(3)
    outs = await asyncio.gather(*[served.ask(ids, max_tokens=1, temperature=0.5, top_k=8, seed=i) for i in range(1024)])
    counts = np.bincount([int(out.ids[0]) for out in outs], minlength=VOCAB) / len(outs)
    tokens = np.arange(VOCAB, dtype=np.int32)
    model = served.reference()
    expected = np.exp([reference_logprobs(model, ids, tokens[i : i + 1], temperature=0.5, top_k=8)[0] for i in range(VOCAB)])
    assert abs(expected.sum() - 1) < 1e-9
    assert 0.5 * np.abs(counts - expected).sum() < 0.06


async def test_seeded_requests_repeat(served: Served) -> None:
    first, second = [await served.ask(prompt(4), max_tokens=16, seed=5) for _ in range(2)]
    other = await served.ask(prompt(4), max_tokens=16, seed=6)
    assert first.ids.tolist() == second.ids.tolist() != other.ids.tolist()


async def test_the_stop_token_is_part_of_the_result(served: Served) -> None:
    stops = tuple(range(0, VOCAB, 4))
    out = await served.ask(prompt(5), max_tokens=100, stop_token_ids=stops, seed=7)
    check_shape(out)
    assert out.finish_reason == "stop" and int(out.ids[-1]) in stops and out.stop_reason == str(int(out.ids[-1]))
    assert not set(out.ids[:-1].tolist()) & set(stops)


async def test_impossible_requests_are_refused(served: Served) -> None:
    for ids, sampling in [
        (np.zeros(0, dtype=np.int32), SamplingConfig()),
        (np.array([VOCAB], dtype=np.int32), SamplingConfig()),
        (prompt(size=200), SamplingConfig(max_tokens=100)),
        (prompt(), SamplingConfig(max_tokens=0)),
        (prompt(), SamplingConfig(top_p=0.0)),
    ]:
        with pytest.raises(RequestRefused):
            await served.engine.generate("bad", ids, sampling)
    task = (await in_flight(served, 1, 100))[0]
    running = asyncio.create_task(served.ask(prompt(), name="twice", max_tokens=100))
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused, match="already in flight"):
        await served.ask(prompt(), name="twice")
    await asyncio.gather(task, running)


async def test_abort_returns_what_there_is(served: Served) -> None:
    running = asyncio.create_task(served.ask(prompt(6), name="victim", max_tokens=200))
    async with asyncio.timeout(60):
        while (await served.engine.load()).running < 1:
            await asyncio.sleep(0.001)
    await served.engine.abort("victim")
    out = await running
    check_shape(out)
    assert out.finish_reason == "abort" and out.ids.size < 200
    await served.engine.abort("nobody")
    cancelled = (await in_flight(served, 1, 200))[0]
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    async with asyncio.timeout(30):
        while (await served.engine.load()).running:
            await asyncio.sleep(0.005)


async def test_sixteen_at_once(served: Served) -> None:
    """Different prompts and lengths batched together: each is what it would be alone."""
    sizes = [5 + 7 * (i % 5) for i in range(32)]
    outs = await asyncio.gather(*[served.ask(prompt(i, sizes[i]), max_tokens=4 + i % 9, seed=i) for i in range(32)])
    for i, out in enumerate(outs):
        check_shape(out)
        assert out.ids.size == 4 + i % 9
    if served.real:
        model = served.reference()
        for i in range(0, 32, 3):
            expected = reference_logprobs(model, prompt(i, sizes[i]), outs[i].ids)
            np.testing.assert_allclose(outs[i].logprobs, expected, atol=TOLERANCE)


async def test_long_prompts_are_prefilled_in_pieces(served: Served) -> None:
    """Together the prompts exceed what one step may compute; seeded requests survive being cut, and come out right."""
    sizes = [120 + 13 * (i % 8) for i in range(12)]
    outs = await asyncio.gather(*[served.ask(prompt(200 + i, sizes[i]), max_tokens=6, seed=i) for i in range(12)])
    model = served.reference() if served.real else None
    for i, out in enumerate(outs):
        check_shape(out)
        if served.real:
            expected = reference_logprobs(model, prompt(200 + i, sizes[i]), out.ids)
            np.testing.assert_allclose(out.logprobs, expected, atol=TOLERANCE)


async def test_a_conversation_reuses_its_prefix(served: Served) -> None:
    ids = prompt(8, 100)
    first = await served.ask(ids, session="talk", max_tokens=40, seed=1)
    longer = np.concatenate([ids, first.ids, prompt(9, 10)])
    second = await served.ask(longer, session="talk", max_tokens=10, seed=1)
    assert first.cached_prompt_tokens == 0
    assert 96 <= second.cached_prompt_tokens < longer.size
    if served.real:
        np.testing.assert_allclose(second.logprobs, reference_logprobs(served.reference(), longer, second.ids), atol=TOLERANCE)


async def test_siblings_share_their_prompt(served: Served) -> None:
    if not served.real:
        pytest.skip("the simulated engine only knows conversations")
    ids = prompt(10, 96)
    outs = await asyncio.gather(*[served.ask(ids, session=f"s{i}", max_tokens=8, seed=i) for i in range(6)])
    assert sum(out.cached_prompt_tokens for out in outs) >= 5 * 64
    model = served.reference()
    for out in outs:
        np.testing.assert_allclose(out.logprobs, reference_logprobs(model, ids, out.ids), atol=TOLERANCE)


async def test_ten_versions_each_read_back_right(served: Served) -> None:
    """Whole tensors and changed elements by turns; each result is that of a fresh load."""
    assert not served.engine.capabilities.whole_tensors
    for seed in range(10):
        await served.move(served.changed(seed), elements=seed % 2 == 1)
        assert await served.engine.weight_digest() == digest_of(served.weights) == served.engine.weights.digest
        assert (served.engine.weights.version, served.engine.weights.incarnation) == (served.version, 2)
    ids = prompt(11)
    out = await served.ask(ids, max_tokens=12)
    assert [span.version for span in out.versions] == [served.version]
    if served.real:
        np.testing.assert_allclose(out.logprobs, reference_logprobs(served.reference(), ids, out.ids), atol=TOLERANCE)


async def test_odd_bits_survive(served: Served) -> None:
    """Negative zero and the smallest numbers are weights like others."""
    bits, shape = served.weights["model.norm.weight"]
    odd = bits.copy()
    odd[:4] = [0x8000, 0x0001, 0x8001, 0x0000]
    before = served.weights["model.norm.weight"]
    await served.move({"model.norm.weight": (odd, shape)}, elements=True)
    assert await served.engine.weight_digest() == digest_of(served.weights)
    await served.move({"model.norm.weight": before})


async def test_a_prefix_is_not_reused_across_versions(served: Served) -> None:
    ids = prompt(12, 100)
    await served.ask(ids, session="old", max_tokens=8)
    warm = await served.ask(ids, session="old", max_tokens=8)
    assert warm.cached_prompt_tokens >= 64
    await served.move(served.changed(20), elements=True)
    cold = await served.ask(ids, session="old", max_tokens=8)
    assert cold.cached_prompt_tokens == 0
    if served.real:
        np.testing.assert_allclose(cold.logprobs, reference_logprobs(served.reference(), ids, cold.ids), atol=TOLERANCE)


async def door_closed(served: Served) -> None:
    """Until new generations wait outside."""
    engine: Any = served.engine
    async with asyncio.timeout(60):
        while engine._switch.gate._open:
            await asyncio.sleep(0)


async def test_finish_old_ends_under_the_old_weights(served: Served) -> None:
    old = served.version
    old_model = served.reference() if served.real else None
    tasks = await in_flight(served, 4, 120)
    switching = asyncio.create_task(served.move(served.changed(30), "finish_old", elements=True))
    await door_closed(served)
    late = asyncio.create_task(served.ask(prompt(), max_tokens=8))
    await switching
    for i, task in enumerate(tasks):
        out = await task
        check_shape(out)
        assert [(s.start, s.end, s.version) for s in out.versions] == [(0, 120, old)]
        if served.real:
            np.testing.assert_allclose(out.logprobs, reference_logprobs(old_model, prompt(i), out.ids), atol=TOLERANCE)
    assert [span.version for span in (await late).versions] == [old + 1]


@pytest.mark.parametrize("elements", [False, True])
@pytest.mark.parametrize("mode", ["continue_keep", "continue_recompute"])
async def test_continue_switches_in_the_middle(served: Served, mode: Mode, elements: bool) -> None:
    """Tokens before the boundary are of the old weights, those after it of the new ones, and each says which."""
    old = served.version
    old_model = served.reference() if served.real else None
    change = served.changed(40)
    tasks = await in_flight(served, 4, 180)
    await served.move(change, mode, elements=elements)
    new_model = served.reference() if served.real else None
    fresh = await served.ask(prompt(0), max_tokens=8)
    switched = 0
    for i, out in enumerate(await asyncio.gather(*tasks)):
        check_shape(out)
        assert out.ids.size == 180 and out.finish_reason == "length"
        versions = [span.version for span in out.versions]
        assert versions in ([old], [old, old + 1], [old + 1])
        if versions != [old, old + 1]:
            continue
        switched += 1
        assert out.weight_digest == served.engine.weights.digest
        at = out.versions[0].end
        assert out.versions[1].incarnation == 2
        if served.real:
            before = reference_logprobs(old_model, prompt(i), out.ids)
            recomputed = reference_logprobs(new_model, prompt(i), out.ids)[at:]
            kept = kept_logprobs(old_model, new_model, prompt(i), out.ids, at)
            expected, other = (kept, recomputed) if mode == "continue_keep" else (recomputed, kept)
            np.testing.assert_allclose(out.logprobs[:at], before[:at], atol=TOLERANCE)
            np.testing.assert_allclose(out.logprobs[at:], expected, atol=TOLERANCE)
            for wrong in (before[at:], other):
                assert np.abs(out.logprobs[at:] - wrong).max() > 10 * TOLERANCE
    assert switched, "no generation was in flight at the switch"
    assert [span.version for span in fresh.versions] == [old + 1]
    if served.real:
        np.testing.assert_allclose(fresh.logprobs, reference_logprobs(new_model, prompt(0), fresh.ids), atol=TOLERANCE)


async def test_waiting_requests_start_under_the_new_weights(served: Served) -> None:
    """More requests than places, a switch in the middle: none that started after it touches KV from before it."""
    tasks = [asyncio.create_task(served.ask(prompt(50, 90), max_tokens=60, session=f"w{i}")) for i in range(40)]
    await in_flight(served, 0, 1)
    async with asyncio.timeout(60):
        while (await served.engine.load()).running < 8:
            await asyncio.sleep(0.001)
    await served.move(served.changed(50), "continue_keep", elements=True)
    outs = await asyncio.gather(*tasks)
    model = served.reference() if served.real else None
    started_after = [out for out in outs if out.versions[0].version == served.version]
    assert started_after and len({out.request_id for out in outs}) == 40
    for out in started_after[:8]:
        if served.real:
            np.testing.assert_allclose(out.logprobs, reference_logprobs(model, prompt(50, 90), out.ids), atol=TOLERANCE)


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
async def test_regenerate_cancels_only_what_outlasts_the_grace(served: Served, grace_s: float) -> None:
    """A generation is whole under one version: the old one if it ended in time, else the new one from its first token on."""
    old = served.version
    old_model = served.reference() if served.real else None
    tasks = await in_flight(served, 4, 150)
    receipt = await served.move(served.changed(41), "regenerate", elements=True, grace_s=grace_s)
    new_model = served.reference() if served.real else None
    for i, out in enumerate(await asyncio.gather(*tasks)):
        check_shape(out)
        assert out.finish_reason == "length" and out.ids.size == 150, "the whole budget, whatever was thrown away"
        (span,) = out.versions
        assert span.version == (old if grace_s else old + 1) and (out.discarded_tokens == 0) == bool(grace_s)
        assert out.discarded_tokens < 150
        if served.real:
            model = old_model if grace_s else new_model
            np.testing.assert_allclose(out.logprobs, reference_logprobs(model, prompt(i), out.ids), atol=TOLERANCE)
    assert (receipt.cut, receipt.drained) == ((0, 4) if grace_s else (4, 0))


async def test_restart_hands_back_what_was_sampled(served: Served) -> None:
    """The requester learns that its episode begins anew; what it gets is labelled and right, but no turn of the new version."""
    old = served.version
    old_model = served.reference() if served.real else None
    tasks = await in_flight(served, 3, 150)
    receipt = await served.move(served.changed(42), "restart", elements=True)
    assert receipt.cut == 3
    for i, out in enumerate(await asyncio.gather(*tasks)):
        check_shape(out)
        assert (out.finish_reason, out.stop_reason) == ("abort", "restart") and 0 < out.ids.size < 150
        assert [span.version for span in out.versions] == [old]
        if served.real:
            np.testing.assert_allclose(out.logprobs, reference_logprobs(old_model, prompt(i), out.ids), atol=TOLERANCE)
    assert [span.version for span in (await served.ask(prompt(), max_tokens=4)).versions] == [old + 1]


@pytest.mark.parametrize("fault", ["breaks off", "unknown name", "wrong shape", "past the end", "not ascending"])
async def test_changes_that_cannot_be_laid_out_leave_the_old_weights_serving(served: Served, fault: str) -> None:
    change = served.changed(71)
    good = served.changes(change)
    odd = good[2]
    wrong = {
        "unknown name": TensorChange("model.layers.9.mlp.up_proj.weight", odd.shape, odd.index, odd.old, odd.new),
        "wrong shape": TensorChange(odd.name, (*odd.shape, 1), odd.index, odd.old, odd.new),
        "past the end": TensorChange(odd.name, odd.shape, odd.index + np.uint32(2**20), odd.old, odd.new),
        "not ascending": TensorChange(odd.name, odd.shape, odd.index[::-1].copy(), odd.old, odd.new),
    }

    def changes() -> Iterator[TensorChange]:
        yield from good[:2]
        if fault == "breaks off":
            raise OSError("the patch file is gone")
        yield wrong[fault]

    update = msgspec.structs.replace(served.update(change, elements=True), changes=changes)
    running = (await in_flight(served, 1, 60))[0]
    with pytest.raises(StagingFailed):
        await served.engine.apply(update, "continue_keep")
    assert served.engine.weights.serviceable
    assert await served.engine.weight_digest() == digest_of(served.weights) == served.engine.weights.digest
    assert (await running).finish_reason == "length"
    assert [span.version for span in (await served.ask(prompt(), max_tokens=4)).versions] == [served.version]
    await served.move(change, elements=True)
    assert await served.engine.weight_digest() == digest_of(served.weights)


async def test_a_base_that_is_not_the_named_one_is_found_before_anything_is_written(served: Served) -> None:
    """A bit that turned over where the change writes: nothing is written on top, and nothing is served any more."""
    change = served.changed(72)
    odd = served.changes(change)[1]
    await served.flip(odd.name, int(odd.index[0]))
    with pytest.raises(StagingFailed, match="not the ones that the change starts from"):
        await served.engine.stage(served.update(change, elements=True))
    with pytest.raises(Unserviceable):
        await served.ask(prompt())
    await served.move(served.weights)
    assert (await served.ask(prompt(), max_tokens=4)).versions[0].version == served.version


async def test_an_audit_finds_a_bit_that_turned_over_where_nothing_was_written(served: Served) -> None:
    await served.engine.audit()
    running = (await in_flight(served, 1, 200))[0]
    await served.flip("model.layers.1.mlp.down_proj.weight", 17)
    with pytest.raises(WeightsRejected, match="reads back as"):
        await served.engine.audit()
    assert (await running).finish_reason == "abort"
    with pytest.raises(Unserviceable):
        await served.ask(prompt())
    await served.move(served.weights)
    await served.engine.audit()


async def test_a_write_that_is_not_whole_takes_the_engine_out_until_rebuilt(served: Served) -> None:
    """What was laid out is lost, or the write breaks off in the middle: no request is served by a mixture."""
    change = served.changed(73)
    update = served.update(change, elements=True)
    await served.engine.stage(update)
    engine: Any = served.engine
    if engine.kind == "simulated":
        engine._weights._words[served.changes(change)[1].name].flags.writeable = False
    elif engine.kind == "transformers":
        engine._running().model.scatter._staged.pop()
    else:
        await engine._workers("headrace_drop")
    tasks = await in_flight(served, 2, 150)
    with pytest.raises(WeightsRejected):
        await served.engine.apply(update, "continue_keep")
    for out in await asyncio.gather(*tasks):
        assert out.finish_reason == "abort" and {span.version for span in out.versions} == {served.version}
    with pytest.raises(Unserviceable):
        await served.ask(prompt())
    await served.move(served.weights)
    assert await served.engine.weight_digest() == digest_of(served.weights)


async def test_laid_out_weights_wait_for_their_switch_and_others_replace_them(served: Served) -> None:
    first, second = served.update(served.changed(74), elements=True), served.changed(75)
    running = (await in_flight(served, 1, 100))[0]
    await served.engine.stage(first)
    await served.engine.stage(first)
    assert await served.engine.weight_digest() == digest_of(served.weights), "nothing is written yet"
    await served.move(second, elements=True)  # overtaken: the first is never shown
    assert await served.engine.weight_digest() == digest_of(served.weights)
    assert (await running).finish_reason == "length"


@pytest.mark.parametrize("mode", ["finish_old", "continue_keep"])
async def test_a_wrong_digest_takes_the_engine_out_until_repaired(served: Served, mode: Mode) -> None:
    old = served.version
    tasks = await in_flight(served, 2, 180)
    change = served.changed(60)
    with pytest.raises(WeightsRejected, match="announced"):
        await served.engine.apply(served.update(change, digest="0" * 64), mode)
    for out in await asyncio.gather(*tasks):
        check_shape(out)
        assert {span.version for span in out.versions} == {old}
        assert out.finish_reason == ("length" if mode == "finish_old" else "abort")
        assert out.weight_digest == digest_of(served.weights)
    state = served.engine.weights
    assert not state.serviceable and "announced" in state.reason and state.version == old
    with pytest.raises(Unserviceable):
        await served.ask(prompt())
    await served.move(served.weights)  # every tensor: nothing of the failed attempt is left
    out = await served.ask(prompt(13), max_tokens=8)
    assert [span.version for span in out.versions] == [served.version]
    if served.real:
        np.testing.assert_allclose(out.logprobs, reference_logprobs(served.reference(), prompt(13), out.ids), atol=TOLERANCE)


@pytest.mark.parametrize("fault", ["breaks off", "unknown name", "wrong shape"])
async def test_a_failed_load_takes_the_engine_out_until_repaired(served: Served, fault: str) -> None:
    change = served.changed(70)

    def load() -> Iterator[CheckpointTensor]:
        for count, (name, (bits, shape)) in enumerate(change.items()):
            if count == 2 and fault == "breaks off":
                raise OSError("the patch file is gone")
            if count == 2 and fault == "unknown name":
                name = "model.layers.9.mlp.up_proj.weight"
            if count == 2 and fault == "wrong shape":
                shape = (*shape, 2)
            yield name, bits, shape

    update = WeightUpdate(version=served.version + 1, digest=digest_of(served.weights | change), load=load)
    with pytest.raises(WeightsRejected):
        await served.engine.apply(update, "continue_keep")
    with pytest.raises(Unserviceable):
        await served.ask(prompt())
    await served.move(served.weights)
    assert (await served.ask(prompt(), max_tokens=4)).versions[0].version == served.version


async def test_a_cancelled_switch_serves_nothing(served: Served) -> None:
    """Cancelled while loading: the weights are a mixture, whatever the caller believes."""
    switching = asyncio.create_task(served.engine.apply(served.update(served.changed(80)), "continue_keep"))
    while served.engine.weights.serviceable and not switching.done():
        await asyncio.sleep(0)
    switching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await switching
    if not switching.cancelled():
        pytest.skip("the switch was faster than its cancellation")
    with pytest.raises(Unserviceable):
        await served.ask(prompt())
    await served.move(served.weights)
    assert (await served.ask(prompt(), max_tokens=4)).finish_reason == "length"


async def test_load_says_what_is_going_on(served: Served) -> None:
    before = await served.engine.load()
    tasks = await in_flight(served, 3, 60)
    during = await served.engine.load()
    assert during.running >= 1 and 0 < during.kv_usage <= 1
    await asyncio.gather(*tasks)
    after = await served.engine.load()
    assert after.running == after.waiting == 0
    assert after.generated_tokens - before.generated_tokens >= 180
    assert after.prefix_queries > before.prefix_queries
