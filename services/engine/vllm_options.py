"""Settings of the vLLM engine, typed, without importing vLLM; what is not named here goes through `extra_args` unchanged."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

MIB = 2**20


class VllmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM engine. The defaults are for a small model on a few CPU cores; a GPU deployment sets `device` and sizes."""

    model: str  # folder of the checkpoint
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"  # float32 on CPU: exact against the trainer, and no slower
    max_model_len: int = 1024
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 0  # 0: vLLM's default
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    kv_cache_dtype: str = "auto"  # e.g. fp8
    kv_cache_bytes: int = 256 * MIB  # per worker; 0: whatever `gpu_memory_utilization` leaves
    gpu_memory_utilization: float = 0.9
    block_size: int = 0  # tokens; 0: vLLM's default on GPU, 32 on CPU
    prefix_cache: bool = True
    chunked_prefill: bool = True
    enforce_eager: bool | None = None  # None: eager on CPU, graphs on GPU
    speculative: dict[str, Any] | None = None  # vLLM's `speculative_config`
    return_routed_experts: bool = False
    seed: int | None = None  # of requests without one; None: drawn, so that no two engines sample alike
    cpu_threads: int = 1  # compute threads of each CPU worker
    cpu_list: str = ""  # cores of the CPU workers, one list per worker: `0-3|4-7`; empty leaves it to the kernel
    staging_dir: str = ""  # where new weights wait for the workers; empty: shared memory; several hosts need a shared folder
    staging_chunk_bytes: int = 1024 * MIB
    audit_every: int = 8  # switches of changed elements after which all weights are read back, while serving; 0: never
    audit_slice_bytes: int = 64 * MIB  # read back between two steps; a tensor is never split
    initial_version: int = 0
    initial_incarnation: int = 0
    verify_checkpoint: bool = True  # at start, compare the read-back with the checkpoint files
    start_timeout_s: float = 600.0
    drain_timeout_s: float = 600.0
    weights_timeout_s: float = 600.0
    stop_grace_s: float = 0.0  # then vLLM's processes are killed; 0: 2 s for one worker, 30 s for several, which share memory
    log_level: str = "ERROR"
    extra_args: dict[str, Any] = {}  # further `AsyncEngineArgs` by name

    def environment(self) -> dict[str, str]:
        """Variables that must be set while vLLM is imported and its processes start."""
        out = {
            "VLLM_LOGGING_LEVEL": self.log_level,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS", "headrace"),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore",  # of vLLM's processes
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        if self.device == "cpu":
            out["OMP_NUM_THREADS"] = str(max(1, self.cpu_threads))
            # A single worker lives in the engine-core process (executor `uni`): one process less, no shared-memory ring that
            # spins. vLLM refuses that on CPU unless this variable is 0, because it then cannot bind the threads; we do it here.
            out["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if self.one_worker else "1"
            out["VLLM_CPU_OMP_THREADS_BIND"] = "nobind" if self.one_worker or not self.cpu_list else self.cpu_list
            if self.one_worker and self.cpu_list:
                out["GOMP_CPU_AFFINITY"] = self.cpu_list.replace(",", " ")
        return out

    @property
    def one_worker(self) -> bool:
        return self.tensor_parallel_size == 1 and int(self.extra_args.get("pipeline_parallel_size", 1)) == 1

    @property
    def both_logprobs(self) -> bool:
        """Raw beside behaviour log-probabilities; not while drafts are verified, which happens outside the sampler."""
        return self.speculative is None

    def engine_args(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's `AsyncEngineArgs`."""
        cpu = self.device == "cpu"
        out: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "tensor_parallel_size": self.tensor_parallel_size,
            "data_parallel_size": self.data_parallel_size,
            "enable_expert_parallel": self.enable_expert_parallel,
            "kv_cache_dtype": self.kv_cache_dtype,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enable_prefix_caching": self.prefix_cache,
            "enable_chunked_prefill": self.chunked_prefill,
            "enforce_eager": cpu if self.enforce_eager is None else self.enforce_eager,
            "seed": secrets.randbits(31) if self.seed is None else self.seed,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "enable_log_requests": False,
            "use_tqdm_on_load": False,
            "worker_extension_cls": "services.engine.vllm_plugin.WeightWorker",
        }
        if self.kv_cache_bytes:
            out["kv_cache_memory_bytes"] = self.kv_cache_bytes
        if self.max_num_batched_tokens:
            out["max_num_batched_tokens"] = self.max_num_batched_tokens
        if self.block_size or cpu:
            out["block_size"] = self.block_size or 32
        if self.speculative is not None:
            out["speculative_config"] = self.speculative
        if self.return_routed_experts:
            out["enable_return_routed_experts"] = True
        if cpu and self.one_worker:
            out["distributed_executor_backend"] = "uni"
        return out | self.extra_args

    def staging_folder(self) -> str:
        if self.staging_dir:
            return self.staging_dir
        return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the block; afterwards the environment is as before, vLLM's own additions included."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
