"""AdamW with float32 masters inside the optimizer, for the one case where DeepSpeed keeps none: ZeRO 0 in float32."""

from __future__ import annotations

from typing import Any

import torch


class RoundedAdamW(torch.optim.AdamW):
    """AdamW that steps float32 masters and leaves their bfloat16 rounding in the parameters.

    The masters live in `state[parameter]["master"]`, so they are saved and restored with the optimizer.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update. `closure` is not supported."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            master = self.state[parameter].get("master")
            if master is not None:
                parameter.data.copy_(master)
        fresh = [self.state[p].pop("master", None) for p in parameters]
        super().step()
        for parameter, master in zip(parameters, fresh, strict=True):
            kept = torch.empty_like(parameter) if master is None else master
            kept.copy_(parameter)
            self.state[parameter]["master"] = kept
            parameter.data.copy_(parameter.data.bfloat16())
