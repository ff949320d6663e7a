"""Draw one token per row from the transformed distribution, and say what its log-probability was.

One uniform number per token from the request's own generator (inverse CDF), so a seeded request draws the same numbers whatever
shares its batch. The transforms are vLLM's, in vLLM's order: temperature, then top-k, then top-p over what is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from schemas.trajectory import SamplingConfig
from services.engine.contract import is_greedy, is_identity

RANKED = 512  # tokens ranked at first for top-k and top-p; all are ranked only where these do not decide
_ALMOST_ONE = 1.0 - 2.0**-24


def transformed(logits: torch.Tensor, samplings: Sequence[SamplingConfig]) -> torch.Tensor:
    """Log-probabilities of the sampling distribution, float32 [B, V]; -inf outside its support; greedy rows unchanged."""
    logits = logits.float()
    if all(is_identity(s) or is_greedy(s) for s in samplings):
        return torch.log_softmax(logits, dim=-1)
    size = logits.shape[-1]
    device = logits.device
    temperature = torch.tensor([1.0 if is_greedy(s) else s.temperature for s in samplings], device=device)
    logits = logits / temperature[:, None]
    filtered = [b for b, s in enumerate(samplings) if not is_greedy(s) and (s.top_p < 1.0 or 0 < s.top_k < size)]
    if filtered:
        rows = torch.tensor(filtered, device=device)
        logits[rows] = _filtered(logits[rows], [samplings[b] for b in filtered])
    return torch.log_softmax(logits, dim=-1)


def _filtered(logits: torch.Tensor, samplings: Sequence[SamplingConfig]) -> torch.Tensor:
    """Top-k, then top-p over what is left: -inf for every token that is cut. Ranks only as many tokens as are needed."""
    size, device = logits.shape[-1], logits.device
    kept = torch.tensor([min(s.top_k or size, size) for s in samplings], device=device)
    limit = torch.tensor([s.top_p for s in samplings], device=device)
    whole = torch.logsumexp(logits, dim=-1, keepdim=True)
    for head in (min(size, RANKED), size):
        values, order = logits.topk(head, dim=-1)  # [F, head], descending
        values = values.masked_fill(torch.arange(head, device=device)[None, :] >= kept[:, None], -torch.inf)
        known = kept <= head  # then the head holds all that top-k leaves, else the total is that of the whole row
        total = torch.where(known[:, None], torch.logsumexp(values, dim=-1, keepdim=True), whole)
        mass = torch.exp(values - total)
        covered = mass.cumsum(dim=-1)
        decided = known | ((kept == size) & (limit < 1.0) & (covered[:, -1] >= limit))
        if head == size or bool(decided.all()):
            break
    cut = (covered - mass >= limit[:, None]) & (limit[:, None] < 1.0)
    cut[:, 0] = False  # the best token always stays
    return torch.full_like(logits, -torch.inf).scatter_(1, order, values.masked_fill(cut, -torch.inf))


def draw(
    logits: torch.Tensor, samplings: Sequence[SamplingConfig], generators: Sequence[np.random.Generator]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """`logits` [B, V] → token ids, behaviour log-probabilities (0 for greedy rows), raw log-probabilities, each [B]."""
    raw = torch.log_softmax(logits.float(), dim=-1)
    plain = all(is_identity(s) or is_greedy(s) for s in samplings)
    behaviour = raw if plain else transformed(logits, samplings)
    greedy = torch.tensor([is_greedy(s) for s in samplings], device=logits.device)
    cumulative = behaviour.exp().cumsum(dim=-1)
    uniform = torch.tensor([min(g.random(), _ALMOST_ONE) for g in generators], dtype=cumulative.dtype, device=logits.device)
    target = (uniform.clamp(max=_ALMOST_ONE)[:, None] * cumulative[:, -1:]).contiguous()
    sampled = torch.searchsorted(cumulative, target, right=True).clamp(max=logits.shape[-1] - 1)[:, 0]
    if bool(greedy.any()):
        sampled = torch.where(greedy, logits.argmax(dim=-1), sampled)
    chosen = sampled[:, None]
    taken = behaviour.gather(1, chosen)[:, 0].masked_fill(greedy, 0.0)
    untransformed = raw.gather(1, chosen)[:, 0]
    return sampled.cpu().numpy(), taken.cpu().numpy(), untransformed.cpu().numpy()
