"""What is run under faults: the terminal example, small, without evaluations, and as fast as two cores make it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples/terminal/run.toml"
_SMALL = (
    "engine.kind=transformers",
    "rollout.group_size=4",
    "rollout.max_groups=8",
    "rollout.sandbox_timeout_s=60",
    "rollout.generate_timeout_s=60",
    "param_sync.apply_timeout_s=30",
    "telemetry.heartbeat_s=0.5",
    "eval.every_steps=0",
    "eval.at_start=false",
    "eval.at_end=false",
)
# Many groups on their way at any time, so that whatever is hit is at work, and the others go on meanwhile.
FLOWING = (
    *_SMALL,
    "admission.groups_per_batch=2",
    "admission.max_lag=4",
    "window.max_groups=12",
    "trainer.checkpoint_every=5",
    "param_sync.anchor_every=4",  # so that a spoiled patch has an anchor beside it often enough
)
# The whole run is a function of its seed, whichever process is killed when, as long as no attempt at an episode is lost:
# K = 0 and one group per batch fix which groups a step trains on and in what order; with the trainer's own log-probabilities
# as the proximal policy and an off-policy weight that is always at its cap, the loss depends on the sampled token ids alone,
# and not on the last bits of behaviour log-probabilities, which depend on what shared a forward pass.
DETERMINISTIC = (
    *_SMALL,
    "admission.groups_per_batch=1",
    "admission.max_lag=0",
    "window.max_groups=2",
    "trainer.checkpoint_every=2",
    "trainer.proximal=batch_start",
    "trainer.weight_max=0.5",
)


def overrides(base: tuple[str, ...], name: str, folder: Path, *more: str) -> list[str]:
    """Settings of one run."""
    return [*base, f"run.name={name}", f'run.folder="{folder}"', *more]
