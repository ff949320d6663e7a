"""The trainer's settings: one frozen typed tree, each field documented, contradictions refused by `checked`."""

from __future__ import annotations

from typing import Literal

import msgspec

from trainer.learning_rate import Schedule


class ConfigError(ValueError):
    """A setting is out of its range or contradicts another; the text names the field, the value and the rule."""


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW and its learning rate."""

    learning_rate: float = 1e-6
    """Peak rate."""
    schedule: Schedule = "constant"
    """Shape after the warm-up: `constant`, `linear` or `cosine`."""
    steps: int = 0
    """Optimizer steps of the whole schedule, warm-up included; not used by `constant`."""
    final: float = 0.0
    """Share of the peak rate that `linear` and `cosine` end at."""
    warmup_steps: int = 0
    """Optimizer steps of linear rise from zero."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices (embeddings too); norms and biases do not decay."""


class ObjectiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is optimised. Behaviour, proximal and reference policy never stand in for one another silently."""

    name: Literal["ppo_clip", "reinforce_kl"] = "ppo_clip"
    """`ppo_clip`: clipped ratio objective; `reinforce_kl`: weighted log-likelihood with a KL penalty."""
    reduction: Literal["episode_sum", "length_normalized", "token_mean", "turn_mass_conserving"] = "episode_sum"
    """How per-token losses become one number; see `trainer.reductions`."""
    epsilon_low: float = 0.2
    """`ppo_clip`: the ratio is clipped below at `1 - epsilon_low`."""
    epsilon_high: float = 0.2
    """`ppo_clip`: the ratio is clipped above at `1 + epsilon_high`."""
    proximal: Literal["behaviour", "batch_start"] = "behaviour"
    """Denominator of the update ratio: the sampler's log-probs, or the trainer's own at the start of the batch (decoupled)."""
    weight_max: float | None = None
    """Cap of the off-policy weight `exp(proximal - behaviour)`, kept apart from the clip; None leaves the weight uncapped."""
    kl: Literal["none", "behaviour", "reference"] = "none"
    """`reinforce_kl`: the policy that the penalty pulls towards."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """Per-token estimator of the penalty. It is evaluated on the sampled (possibly stale) tokens."""
    kl_coefficient: float = 0.0
    """Weight of the penalty."""


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that `DeepSpeedTrainer` needs besides the device."""

    model_dir: str
    """Checkpoint directory (transformers layout) that training starts from."""
    reference_dir: str = ""
    """Checkpoint directory of the frozen reference policy; only read when the objective's `kl` is `reference`."""
    seed: int = 0
    """Seeds torch, numpy and Python's random; each rank adds its number."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage: what is partitioned over ranks (0 nothing, 1 optimizer, 2 gradients, 3 weights)."""
    gradient_clipping: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    micro_batch_tokens: int = 4096
    """Largest padded size of one forward, tokens."""
    temperature: float = 1.0
    """Sampling temperature whose distribution the log-probabilities are of; must equal the sampler's."""
    activation_checkpointing: bool = False
    """Recompute layer activations in the backward: about a third more arithmetic for much less memory."""
    lora_rank: int = 0
    """Reserved; only 0 (train all weights) is supported."""
    skip_zero_advantage: bool = False
    """Do not compute rows whose advantage is 0 (groups without signal). They stay in the normalisation, so the gradient is the
    same, but the token metrics no longer see them. Refused with a KL penalty, which acts on every row."""
    shared_memory_collectives: bool = False
    """CPU only: compile DeepSpeed's shared-memory collectives (needs a C++ compiler and ninja) instead of using gloo."""
    collective_timeout_s: float = 600.0
    """Longest wait for the other ranks in one collective."""
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()

    def checked(self) -> TrainerConfig:
        """Itself. Raises `ConfigError` for a value outside its range or a combination that cannot work."""
        objective, optimizer = self.objective, self.optimizer
        rules = (
            (self.lora_rank == 0, f"lora_rank: {self.lora_rank}; adapters are not supported yet, use 0"),
            (self.micro_batch_tokens >= 2, f"micro_batch_tokens: {self.micro_batch_tokens} must be at least 2"),
            (self.temperature > 0, f"temperature: {self.temperature} must be positive; greedy sampling has no policy gradient"),
            (self.gradient_clipping >= 0, f"gradient_clipping: {self.gradient_clipping} must not be negative"),
            (optimizer.learning_rate >= 0, f"optimizer.learning_rate: {optimizer.learning_rate} must not be negative"),
            (0 <= objective.epsilon_low < 1, f"objective.epsilon_low: {objective.epsilon_low} must be in [0, 1)"),
            (objective.epsilon_high >= 0, f"objective.epsilon_high: {objective.epsilon_high} must not be negative"),
            (
                objective.weight_max is None or objective.weight_max > 0,
                f"objective.weight_max: {objective.weight_max} must be positive",
            ),
            (objective.kl_coefficient >= 0, f"objective.kl_coefficient: {objective.kl_coefficient} must not be negative"),
            (
                objective.kl == "none" or objective.name == "reinforce_kl",
                f"objective.kl: {objective.kl!r} is only used by reinforce_kl; with {objective.name} use 'none'",
            ),
            (
                not self.skip_zero_advantage or objective.kl == "none" or objective.kl_coefficient == 0,
                "skip_zero_advantage: true would drop the KL penalty of those rows; set it to false or kl to 'none'",
            ),
            (
                objective.kl != "reference" or bool(self.reference_dir),
                "reference_dir: empty, but objective.kl is 'reference'; name the frozen policy's checkpoint",
            ),
            (
                optimizer.schedule == "constant" or optimizer.steps > optimizer.warmup_steps,
                f"optimizer.steps: {optimizer.steps} must exceed warmup_steps for a {optimizer.schedule} schedule",
            ),
        )
        for holds, message in rules:
            if not holds:
                raise ConfigError(message)
        return self
