"""What only vLLM has: several ranks, and processes of its own that can die."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from schemas.trajectory import SamplingConfig
from services.engine.changes import TensorChange
from services.engine.checkpoint_files import digest_of, tensors_of
from services.engine.protocol import EngineError, Unserviceable, WeightUpdate
from services.engine.registry import create_engine, vllm_available

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not vllm_available()[0], reason=vllm_available()[1]),
]


def test_weights_that_could_never_be_read_back_are_refused_by_name() -> None:
    """Quantized ones, and loaders that compute."""
    from services.engine.vllm_plugin import WeightWorker

    class Scaling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2, 3))

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                self.weight.data.copy_(tensor * 2)

    worker, model = WeightWorker(), Scaling()
    for quantization, reason in [(None, "parameter weight receives"), ("fp8", r"quantized \(fp8\)")]:
        config = SimpleNamespace(quantization=quantization)
        worker.model_runner = SimpleNamespace(get_model=lambda: model, model_config=config)
        assert re.search(reason, worker.headrace_prepare([("weight", [2, 3])])["refused"])


async def test_two_ranks_hold_one_set_of_weights_and_die_loudly(tmp_path: Path) -> None:
    """Sliced projections, a replicated key head and a sliced, padded vocabulary read back to the same digest as one rank's."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    weights = {name: (np.array(bits), shape) for name, bits, shape in tensors_of(str(tmp_path))}
    options = {"model": str(tmp_path), "max_model_len": 128, "tensor_parallel_size": 2, "kv_cache_bytes": 2**22}
    engine = create_engine("vllm", options)
    await engine.start()
    try:
        random = np.random.default_rng(0)
        assert not engine.capabilities.whole_tensors
        for version in (1, 2, 3):
            changes, base = [], digest_of((name, bits, shape) for name, (bits, shape) in weights.items())
            for name, (bits, shape) in weights.items():
                new = bits ^ random.integers(0, 2, bits.size, dtype=np.uint16)
                index = np.flatnonzero(bits != new).astype(np.uint32)
                changes.append(TensorChange(name, shape, index, bits[index], new[index]))
                weights[name] = (new, shape)
            digest = digest_of((name, bits, shape) for name, (bits, shape) in weights.items())
            whole = [(name, bits, shape) for name, (bits, shape) in weights.items()]
            elements = partial(iter, changes) if version > 1 else None
            update = WeightUpdate(version=version, digest=digest, load=partial(iter, whole), base_digest=base, changes=elements)
            receipt = await engine.apply(update, "finish_old")
            assert receipt.path == ("elements" if version > 1 else "tensors") and receipt.tensors == len(weights)
            assert receipt.digest == digest == await engine.weight_digest()
        reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                bits, shape = weights[name]
                parameter.copy_(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(shape))
        prompt = random.integers(0, 100, 20, dtype=np.int32)
        out = await engine.generate("r", prompt, SamplingConfig(max_tokens=12, temperature=0.8, seed=1))
        with torch.no_grad():
            logits = reference(torch.tensor([prompt.tolist() + out.ids.tolist()])).logits[0, 19:-1]
        for expected, got in [(logits / 0.8, out.logprobs), (logits, out.raw_logprobs)]:
            assert got is not None
            chosen = torch.log_softmax(expected, -1).gather(1, torch.from_numpy(out.ids.astype(np.int64))[:, None])[:, 0]
            np.testing.assert_allclose(got, chosen.numpy(), atol=2e-4)

        running = asyncio.create_task(engine.generate("victim", prompt, SamplingConfig(max_tokens=100)))
        core = engine._llm.engine_core.resources.engine_manager.processes[0].pid  # type: ignore[attr-defined]
        os.kill(core, signal.SIGKILL)
        with pytest.raises(EngineError, match="vLLM"):
            await asyncio.wait_for(running, 60)
        with pytest.raises(Unserviceable):
            await engine.generate("late", prompt, SamplingConfig())
    finally:
        await engine.stop()
