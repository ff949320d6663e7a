"""The embedded engine's own machinery: prefix reuse, rows, and a model that breaks. And a simulated engine under load."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from schemas.trajectory import SamplingConfig
from services.engine.protocol import EngineError, Unserviceable, WeightUpdate
from services.engine.simulated_engine import SimulatedEngine
from services.engine.simulated_engine_options import SimulatedOptions
from services.engine.transformers_engine import TransformersEngine
from services.engine.transformers_engine_options import TransformersOptions

VOCAB = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama: no biases, three query heads per key head, an output head of its own."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def reference(folder: Path, ids: list[int], sampled: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids + sampled])).logits[0, len(ids) - 1 : -1]
    out: np.ndarray[Any, np.dtype[np.float32]] = (
        torch.log_softmax(logits, -1).gather(1, torch.tensor(sampled)[:, None])[:, 0].numpy()
    )
    return out


async def test_random_conversations_keep_their_kv_straight(folder: Path) -> None:
    """Few rows, many conversations that branch, repeat and share prefixes: rows are parked, moved, copied and overwritten."""
    engine = TransformersEngine(TransformersOptions(model=str(folder), max_model_len=128, max_num_seqs=5, threads=1))
    await engine.start()
    random = np.random.default_rng(0)
    roots = [random.integers(0, VOCAB, 20).tolist() for _ in range(3)]
    histories = [list(roots[i % 3]) for i in range(12)]
    for turn in range(3):
        asked = [history + random.integers(0, VOCAB, int(random.integers(1, 9))).tolist() for history in histories]
        outs = await asyncio.gather(
            *[
                engine.generate(
                    f"{turn}.{i}", np.array(ids, dtype=np.int32), SamplingConfig(max_tokens=3 + i % 7, seed=i), f"s{i}"
                )
                for i, ids in enumerate(asked)
            ]
        )
        for i, out in enumerate(outs):
            np.testing.assert_allclose(out.logprobs, reference(folder, asked[i], out.ids.tolist()), atol=2e-4)
            histories[i] = asked[i] + out.ids.tolist() if random.random() < 0.8 else list(roots[i % 3])
    load = await engine.load()
    assert load.prefix_hits > 0.3 * load.prefix_queries
    await engine.stop()
    await engine.stop()


async def test_a_broken_model_fails_everyone_and_nobody_hangs(folder: Path) -> None:
    engine = TransformersEngine(TransformersOptions(model=str(folder), max_model_len=128, max_num_seqs=4, threads=1))
    await engine.start()
    loop = engine._running()
    works, steps = loop.model.next_logits, iter(range(100))

    def breaks(*args: Any) -> torch.Tensor:
        if next(steps) > 5:
            raise RuntimeError("the device is gone")
        return works(*args)

    loop.model.next_logits = breaks  # type: ignore[method-assign]
    prompt = np.arange(10, dtype=np.int32)
    tasks = [asyncio.create_task(engine.generate(f"r{i}", prompt, SamplingConfig(max_tokens=50))) for i in range(6)]
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, EngineError) and "the device is gone" in str(outcome)
    with pytest.raises(Unserviceable, match="the device is gone"):
        await engine.generate("after", prompt, SamplingConfig())
    await engine.stop()


async def test_bfloat16_serves_and_reads_back(folder: Path) -> None:
    engine = TransformersEngine(TransformersOptions(model=str(folder), dtype="bfloat16", max_model_len=64, threads=1))
    await engine.start()
    single = TransformersEngine(TransformersOptions(model=str(folder), max_model_len=64, threads=1))
    await single.start()
    assert engine.weights.digest == single.weights.digest
    out = await engine.generate("r", np.arange(10, dtype=np.int32), SamplingConfig(max_tokens=10))
    assert out.ids.size == 10
    await engine.stop()
    await single.stop()


async def test_a_thousand_simulated_turns() -> None:
    """The simulated engine keeps its service model's time and its order, with no model at all."""
    replies = ((5, 6, 7, 1), (9, 1))
    options = SimulatedOptions(max_num_seqs=128, step_s=0.002, sequence_s=0.0, prefill_token_s=0.0, replies=replies)
    engine = SimulatedEngine(options)
    await engine.start()
    sampling = SamplingConfig(max_tokens=16, stop_token_ids=(1,))
    began = time.monotonic()
    outs = await asyncio.gather(*[engine.generate(f"r{i}", np.arange(4, dtype=np.int32), sampling) for i in range(1000)])
    assert time.monotonic() - began >= 1000 / 128 * 2 * options.step_s
    assert {tuple(out.ids.tolist()) for out in outs} == set(replies)
    assert all(out.finish_reason == "stop" for out in outs)
    update = WeightUpdate(version=1, digest=engine.weights.digest, load=lambda: iter([]))
    assert (await engine.apply(update, "finish_old")).version == 1
    assert (await engine.load()).generated_tokens == sum(out.ids.size for out in outs)
    await engine.stop()
