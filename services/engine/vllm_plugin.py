"""What runs inside vLLM's worker processes: plain linears on CPU, both log-probabilities, and verified weights.

Loaded through the entry point `headrace` of group `vllm.general_plugins`, and again (idempotent) when a worker resolves its
extension class, so that it also works where the package is not installed. Beside `vllm_engine` the only file that knows vLLM.
"""

from __future__ import annotations

import contextlib
import functools
import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from param_sync.patch.digest import tensor_digest
from services.engine.changes import ChangeError
from services.engine.load_plan import LoadPlan, PlanError, record
from services.engine.readback import round_to_checkpoint, tensor_of
from services.engine.scatter import Scatter, scatter_of
from services.engine.staging import Placed, changes_in

_UNREAD = -1  # marks elements of a checkpoint tensor that no rank holds


def register() -> None:
    """Patch this process's vLLM. Calling it again changes nothing."""
    _keep_plain_linears()
    _return_both_logprobs()
    _keep_seeded_rows_on_cpu()


def _keep_plain_linears() -> None:
    """On CPU, compute linears from their own weight.

    vLLM prepacks them for oneDNN and empties `weight`: an update then fails half-way while the packed copy goes on serving.
    """
    from vllm.model_executor.layers import utils

    if getattr(utils.dispatch_cpu_unquantized_gemm, "plain", False):
        return
    original = utils.dispatch_cpu_unquantized_gemm

    @functools.wraps(original)
    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            original(layer, remove_weight)

    dispatch.plain = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch


def _return_both_logprobs() -> None:
    _patch_first_runner()
    if find_spec("triton") is not None:
        with contextlib.suppress(ImportError):  # the second runner's kernels need a Triton that has this device
            _patch_second_runner()


def _patch_first_runner() -> None:
    """Where one top log-probability is asked for, return the sampled token's raw one in its place.

    vLLM returns either raw or processed log-probabilities. With `logprobs=1` a position has two columns: the sampled token and
    the best token. The second becomes (sampled token, raw log-probability); the engine reads it as such. The best token and
    the rank are then not computed: on CPU they cost a pass over the vocabulary and, once, a compiler run of several seconds.
    """
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.sampler import Sampler

    if getattr(Sampler.forward, "both", False):
        return
    forward, gather = Sampler.forward, Sampler.gather_logprobs

    @functools.wraps(gather)
    def gather_sampled(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        if num_logprobs > 1:
            return gather(logprobs, num_logprobs, token_ids)
        columns = token_ids[:, None].expand(-1, num_logprobs + 1)
        unranked = torch.zeros_like(token_ids)
        return LogprobsTensors(columns.to(torch.int32), logprobs.gather(-1, columns), unranked)

    @functools.wraps(forward)
    def both(self: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = (
            sampling_metadata.max_num_logprobs == 1 and self.logprobs_mode == "processed_logprobs" and not args and not kwargs
        )
        raw = torch.log_softmax(logits, dim=-1, dtype=torch.float32) if wanted else None  # before the in-place transforms
        out = forward(self, logits, sampling_metadata, *args, **kwargs)
        if raw is not None and out.logprobs_tensors is not None:
            sampled = out.sampled_token_ids.long()  # [B, 1]
            out.logprobs_tensors.logprobs[:, 1:2] = raw.gather(-1, sampled)
        return out

    both.both = True  # type: ignore[attr-defined]
    Sampler.forward = both  # type: ignore[method-assign]
    Sampler.gather_logprobs = staticmethod(gather_sampled)  # type: ignore[method-assign]


def _keep_seeded_rows_on_cpu() -> None:
    """Let requests with a seed survive a prompt that is prefilled in several pieces on CPU.

    vLLM turns a request's generator back after a draw that it discards, by an offset that CPU generators do not have: the
    engine dies. Here the discarded draw stays drawn, so on CPU a seed repeats a generation only under the same split of its
    prompt.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._bookkeeping_sync
    if getattr(original, "keeps_seeded", False):
        return

    @functools.wraps(original)
    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cpu":
            return original(self, *args, **kwargs)
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return original(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    bookkeeping.keeps_seeded = True  # type: ignore[attr-defined]
    GPUModelRunner._bookkeeping_sync = bookkeeping  # type: ignore[method-assign]


def _patch_second_runner() -> None:
    """The same for the sampler of vLLM's newer model runner, which transforms a copy and leaves `logits` as they were."""
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    if getattr(Sampler.__call__, "both", False):
        return
    call = Sampler.__call__

    @functools.wraps(call)
    def both(self: Any, logits: torch.Tensor, input_batch: Any) -> Any:
        wanted = self.logprobs_mode == "processed_logprobs" and self.get_logprobs_dims(input_batch.idx_mapping_np) == (1, 0)
        out = call(self, logits, input_batch)
        if wanted and out.logprobs_tensors is not None:
            sampled = out.sampled_token_ids.long()  # [B, 1]
            out.logprobs_tensors.logprob_token_ids[:, 1:2] = sampled
            out.logprobs_tensors.logprobs[:, 1:2] = compute_token_logprobs(logits, sampled)
        return out

    both.both = True  # type: ignore[attr-defined]
    Sampler.__call__ = both  # type: ignore[method-assign]


class WeightWorker:
    """Worker extension: called on every rank through `collective_rpc`. Names start with `headrace_` to collide with nothing."""

    model_runner: Any
    rank: int

    def headrace_prepare(self, tensors: list[tuple[str, list[int]]]) -> dict[str, Any]:
        """Record where the checkpoint's tensors (name, shape) land, round the weights to the checkpoint's precision.

        Returns `names` of the tensors that this rank holds parts of, `whole_tensors`: why the model does not take single
        elements, if so, `both_logprobs`: whether the sampler in use is ours, and `refused`: why nothing of it can be read back.
        """
        quantization = self.model_runner.model_config.quantization
        if quantization is not None:
            return {"refused": f"its weights are quantized ({quantization}), which no checkpoint's bits can be compared with"}
        model = self.model_runner.get_model()
        parameters = dict(model.named_parameters())  # a tied one appears once
        shapes = [(name, tuple(shape)) for name, shape in tensors]
        try:
            self._headrace_plan: LoadPlan = record(parameters, model.load_weights, shapes)
        except PlanError as error:
            return {"refused": f"its loader computes instead of copying: {error}"}
        self._headrace_scatter, whole_tensors = scatter_of(self._headrace_plan)
        round_to_checkpoint(parameters.values())
        sampler = type(getattr(self.model_runner, "sampler", None))
        both = any(getattr(getattr(sampler, method, None), "both", False) for method in ("forward", "__call__"))
        return {"refused": "", "names": self._headrace_plan.names, "whole_tensors": whole_tensors, "both_logprobs": both}

    def headrace_stage(self, path: str, digest: bytes, changes: list[Placed]) -> tuple[str, str, int]:
        """Lay this rank's part of changed elements out beside the weights.

        Gives what is wrong with them, as kind and text, and how many elements are laid out by now.
        """
        scatter = self._scatter()
        try:
            for change in changes_in(path, digest, changes):
                scatter.stage(change)
        except ChangeError as error:  # exceptions lose their type on the way out of a worker
            return type(error).__name__, str(error), scatter.staged_elements
        return "", "", scatter.staged_elements

    def headrace_drop(self) -> None:
        """Forget what is laid out."""
        self._scatter().drop()

    def headrace_commit(self) -> tuple[int, int, int]:
        """Write what is laid out, read it back, compare; (elements, tensors, bytes)."""
        scatter = self._scatter()
        report = scatter.staged_elements, scatter.staged_tensors, scatter.staged_bytes
        scatter.commit()
        return report

    def _scatter(self) -> Scatter:
        if self._headrace_scatter is None:
            raise RuntimeError("this model takes whole tensors only")
        return self._headrace_scatter

    def headrace_load(self, path: str, tensors: list[tuple[str, list[int], int]]) -> int:
        """Load (name, shape, byte offset) from the staged file through the model's own loader; how many tensors it took."""
        words = np.memmap(path, dtype=np.uint16, mode="r")
        weights = []
        for name, shape, offset in tensors:
            count = int(np.prod(shape, dtype=np.int64))
            if name not in self._headrace_plan.shapes or tuple(shape) != self._headrace_plan.shapes[name]:
                raise KeyError(f"tensor {name} of shape {tuple(shape)} is not in the checkpoint that this engine serves")
            weights.append((name, tensor_of(words[offset // 2 : offset // 2 + count], tuple(shape))))
        with torch.no_grad():
            self.model_runner.get_model().load_weights(iter(weights))
        return len(weights)

    def headrace_entries(self, names: list[str]) -> dict[str, tuple[str, list[int], bytes]]:
        """Read tensors back into checkpoint coordinates, gathering the slices of all ranks; (dtype, shape, digest) of each."""
        from vllm.distributed.parallel_state import get_world_group

        plan, group = self._headrace_plan, get_world_group()
        entries = {}
        for name in names:  # the same order on every rank: each tensor is a collective
            bits = _gathered(plan, name, group, self.model_runner.device) if group.world_size > 1 else _local(plan, name)
            if bits is not None:
                entries[name] = ("bf16", list(plan.shapes[name]), tensor_digest(bits))
        return entries


def _local(plan: LoadPlan, name: str) -> npt.NDArray[np.uint16] | None:
    """A tensor held by this one worker; None for one that the model does not use (a tied head stored twice)."""
    if not plan.landings.get(name):
        return None
    if not plan.complete(name):
        raise RuntimeError(f"tensor {name}: the model holds only a part of it")
    return plan.bits(name)


def _gathered(plan: LoadPlan, name: str, group: Any, device: torch.device) -> npt.NDArray[np.uint16] | None:
    """A tensor whose slices lie on several ranks; None when no rank holds any of it."""
    words = torch.full((math.prod(plan.shapes[name]),), _UNREAD, dtype=torch.int32)
    plan.read(name, words)
    words = words.to(device)
    lowest = words.clone()
    torch.distributed.all_reduce(words, op=torch.distributed.ReduceOp.MAX, group=group.device_group)
    host = words.cpu().numpy()
    if not host.size or int(host.max()) < 0:
        return None
    if int(host.min()) < 0:
        raise RuntimeError(f"tensor {name}: {int((host < 0).sum())} element(s) are held by no rank")
    lowest[lowest == _UNREAD] = 0x10000
    torch.distributed.all_reduce(lowest, op=torch.distributed.ReduceOp.MIN, group=group.device_group)
    if not torch.equal(lowest, words):
        raise RuntimeError(f"tensor {name}: ranks that hold the same elements disagree")
    return host.astype(np.uint16)


register()  # a worker that resolves `WeightWorker` without the entry point is patched here, before its model is built
