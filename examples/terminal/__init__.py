"""Deterministic terminal tasks for a very small policy, and that policy.

`suite` is the task suite (`examples.terminal:suite`); `model/` holds the tokenizer, the chat template and the warm-started
weights that `build.py` and the `sft-*.toml` files produce.
"""

from .suite import suite

__all__ = ["suite"]
