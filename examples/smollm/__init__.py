"""The same loop on a pretrained model: SmolLM2-135M-Instruct on the terminal tasks, with JSON tool calls."""

from examples.smollm.suite import suite

__all__ = ["suite"]
