"""The embedded engine's view of a causal language model: next-token logits over a slot cache, weights in checkpoint names."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from param_sync.patch.digest import Entry, state_digest, tensor_digest
from services.engine.protocol import EngineUnavailable
from services.engine.readback import bits_of, copy_bits, round_to_checkpoint
from services.engine.scatter import identity_plan, scatter_of
from services.engine.slot_cache import SlotCache


class CausalModel:
    """Wraps a loaded `transformers` causal model (decoder with rotary full attention and a linear head).

    Raises `EngineUnavailable` for an architecture whose logits or attention this engine would get wrong.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval()
        self.config: Any = module.config
        unsupported = [
            name
            for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")
            if getattr(self.config, name, None) not in (None, 1, 1.0)
        ]
        if unsupported or "sliding_attention" in (getattr(self.config, "layer_types", None) or ()):
            raise EngineUnavailable(
                f"the embedded engine does not support {unsupported or 'sliding-window attention'}; use vllm"
            )
        self.decoder: Any = module.base_model
        self.head: Any = module.get_output_embeddings()  # type: ignore[operator]
        first = next(module.parameters())
        self.device, self.dtype = first.device, first.dtype
        # `parameters()` names a tied tensor once, by its first name: the name a checkpoint has for it
        self._parameters = dict(module.named_parameters())
        self._aliases = {
            name: next(n for n, p in self._parameters.items() if p is parameter)
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if name not in self._parameters
        }
        round_to_checkpoint(self._parameters.values())
        self.scatter, self.whole_tensors = scatter_of(identity_plan(self._parameters))

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    def new_cache(self, rows: int, length: int) -> SlotCache:
        """A slot cache for this model's layers and heads."""
        heads = int(self.config.num_attention_heads)
        return SlotCache(
            layers=int(self.config.num_hidden_layers),
            rows=rows,
            kv_heads=int(getattr(self.config, "num_key_value_heads", None) or heads),
            length=length,
            head_dim=int(getattr(self.config, "head_dim", None) or self.config.hidden_size // heads),
            dtype=self.dtype,
            device=self.device,
        )

    def next_logits(self, cache: SlotCache, rows: list[int], starts: list[int], tokens: list[list[int]]) -> torch.Tensor:
        """Feed `tokens[b]` to row `rows[b]` from column `starts[b]`; logits after each last token, [B, V]."""
        width = max(len(part) for part in tokens)
        padded = torch.tensor([part + [0] * (width - len(part)) for part in tokens], device=self.device)  # [B, width]
        positions, mask = cache.aim(rows, starts, width)
        hidden = self.decoder(
            input_ids=padded, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state  # [B, width, H]
        last = torch.tensor([len(part) - 1 for part in tokens], device=self.device)
        logits: torch.Tensor = self.head(hidden[torch.arange(len(tokens), device=self.device), last])
        return logits

    def load(self, name: str, bits: npt.NDArray[np.uint16], shape: tuple[int, ...]) -> None:
        """Overwrite one tensor. Raises `KeyError` for a name the model does not have, `ValueError` for a wrong shape."""
        name = self._aliases.get(name, name)
        if name not in self._parameters:
            raise KeyError(f"the model has no tensor {name!r}")
        copy_bits(name, self._parameters[name], bits, shape)

    @property
    def names(self) -> list[str]:
        """The parameters, by their names in a checkpoint."""
        return list(self._parameters)

    def entry(self, name: str) -> Entry:
        """One parameter's entry in the state digest, read back from the running model."""
        parameter = self._parameters[name]
        return "bf16", tuple(parameter.shape), tensor_digest(bits_of(name, parameter))

    def digest(self) -> str:
        """State digest of all parameters, read back."""
        return state_digest({name: self.entry(name) for name in self._parameters})
