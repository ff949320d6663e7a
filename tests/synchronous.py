"""The synchronous trainer in sixty plain lines, written from the formulas: what the asynchronous path must equal at K = 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from param_sync.patch.bits import Bits
from param_sync.patch.snapshot import Snapshot
from schemas.trajectory import Episode
from services.engine.hf_models import load_causal_lm


def model_at(model_dir: str, snapshot: Snapshot) -> torch.nn.Module:
    """The model with exactly the published bits, in float32."""
    model = load_causal_lm(model_dir, "float32", "cpu")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, bits in snapshot.tensors.items():
            words = torch.from_numpy(np.array(bits.data)).view(torch.bfloat16).reshape(bits.shape)
            parameters[name].copy_(words.float())
    return model


def token_logprobs(model: torch.nn.Module, ids: npt.NDArray[np.int32]) -> torch.Tensor:
    """Log-probability of each token given the ones before it, float32 [T]; 0 for the first, which has no context."""
    logits = model(torch.from_numpy(np.array(ids, dtype=np.int64))[None]).logits[0].float()
    scores = torch.log_softmax(logits[:-1], dim=-1)
    picked = scores.gather(1, torch.from_numpy(np.array(ids[1:], dtype=np.int64))[:, None])[:, 0]
    return torch.cat([torch.zeros(1), picked])


class SynchronousTrainer:
    """AdamW on float32 masters; forward on their bfloat16 rounding. RLOO, PPO-clip on behaviour log-probs, episode sum."""

    def __init__(
        self, model_dir: str, start: Snapshot, *, rate: float, clip: float, betas: tuple[float, float], max_norm: float
    ) -> None:
        self.model = model_at(model_dir, start)
        self.names = list(start.tensors)
        parameters = dict(self.model.named_parameters())
        self.served = [parameters[name] for name in self.names]
        self.masters = [parameter.detach().clone() for parameter in self.served]
        self.first = [torch.zeros_like(master) for master in self.masters]
        self.second = [torch.zeros_like(master) for master in self.masters]
        self.rate, self.clip, self.betas, self.max_norm, self.steps = rate, clip, betas, max_norm, 0

    def step(self, groups: Sequence[Sequence[tuple[Episode, float | None]]]) -> tuple[float, float]:
        """One update on groups of (episode, reward); gives (loss, gradient norm before clipping).

        A censored episode has no reward: it is in no baseline, no loss and no count.
        """
        graded = [[(episode, reward) for episode, reward in group if reward is not None] for group in groups]
        episodes = sum(len(group) for group in graded)
        total = torch.zeros(())
        for group in graded:
            rewards = [reward for _, reward in group]
            for episode, reward in group:
                advantage = reward - (sum(rewards) - reward) / (len(rewards) - 1)
                mask = torch.from_numpy(np.array(episode.mask.numpy()))
                behaviour = torch.from_numpy(np.array(episode.logprobs.numpy()))[mask]
                ratio = torch.exp(token_logprobs(self.model, episode.ids.numpy())[mask] - behaviour)
                clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
                total = total - torch.minimum(ratio * advantage, clipped * advantage).sum() / episodes
        gradients = torch.autograd.grad(total, self.served)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        scale = min(1.0, self.max_norm / (float(norm) + 1e-6))
        self.steps += 1
        beta1, beta2 = self.betas
        for index, gradient in enumerate(gradients):
            gradient = gradient * scale
            self.first[index] = beta1 * self.first[index] + (1 - beta1) * gradient
            self.second[index] = beta2 * self.second[index] + (1 - beta2) * gradient**2
            mean = self.first[index] / (1 - beta1**self.steps)
            spread = (self.second[index] / (1 - beta2**self.steps)).sqrt() + 1e-8
            self.masters[index] = self.masters[index] - self.rate * mean / spread
            with torch.no_grad():
                self.served[index].copy_(self.masters[index].to(torch.bfloat16).float())
        return float(total.detach()), float(norm)

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        """The served weights, float32 values that bfloat16 holds exactly."""
        return {name: parameter.detach().numpy().copy() for name, parameter in zip(self.names, self.served, strict=True)}


def floats(bits: Bits) -> npt.NDArray[np.float32]:
    """bfloat16 bits as float32 values."""
    return (np.asarray(bits.data, dtype=np.uint32) << 16).view(np.float32).reshape(bits.shape)
