"""Grouped-query attention over a slot cache, without repeating keys and values per query head.

`transformers` repeats them whenever there is a mask, which copies the whole cache in every layer of every decode step; that is
three times the cost of the attention itself.
"""

from __future__ import annotations

from typing import Any

import torch

NAME = "headrace_slots"


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, heads, Q, D]
    key: torch.Tensor,  # [B, kv_heads, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor,  # bool [B, 1, Q, T]
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The signature of a `transformers` attention function; returns `[B, Q, heads, D]`."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=0.0, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None
