"""The policy manifest, for the rollout's side; the trainer's side builds the same one for its demands."""

from __future__ import annotations

from services.policy_manifest import policy_manifest

__all__ = ["policy_manifest"]
