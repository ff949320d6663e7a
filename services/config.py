"""The configuration: one typed tree, TOML in, resolved TOML out; every field documented, an unknown key refused with
the nearest."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Split = Literal["train", "heldout_instance", "heldout_template"]


class ConfigError(ValueError):
    """The configuration is refused; the text names field, value, rule and fix."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class Run(_Section):
    """Which run this is and how long it goes."""

    name: str = Field(
        "main", pattern=r"^[a-z0-9][a-z0-9-]{0,11}$", description="Run name; part of every subject and of the run folder"
    )
    folder: str = Field("runs", description="Where run folders are made")
    seed: int = Field(0, ge=0, description="Seed of task order, sampling and initialisation")
    max_steps: int = Field(0, ge=0, description="Batches to train on; 0: until stopped")
    evaluate_only: bool = Field(False, description="Only evaluate the starting policy, train nothing")


class Nats(_Section):
    """The queue server."""

    url: str = Field("", description="Server URL(s), comma-separated; empty: `headrace up` starts an embedded server")
    store_bytes: int = Field(8 * 2**30, ge=64 * 2**20, description="Bytes that this run's streams may hold together")
    nodes: Literal[1, 3, 5] = Field(1, description="Servers that `headrace up` starts; 3 or 5: a cluster that may lose some")
    replicas: int = Field(1, ge=1, le=5, description="Stream replicas; on a cluster that `headrace up` starts at least 3")
    embedded_keys: bool = Field(True, description="The embedded server knows each service by a key of its own")
    nkey_seed_file: str = Field("", description="File with this service's nkey seed; empty: look in nkey_folder")
    nkey_folder: str = Field(
        "", description="Folder with `<role>.nk`, of which a service takes its own; empty: no authentication"
    )
    joining: tuple[str, ...] = Field(
        (), description="Further names that engines and executors may join under, with keys; `*`: any, with less separation"
    )
    admin_seed_file: str = Field(
        "", description="nkey seed that may create streams; empty: `admin.nk` in nkey_folder, if there"
    )
    tls_ca_file: str = Field("", description="CA certificate of the server; empty: no TLS")
    connect_timeout_s: float = Field(30.0, gt=0, description="Bound on the first connection")


class Policy(_Section):
    """The model that is trained."""

    model: str = Field(
        "examples/terminal/model", description="Folder with config.json, safetensors, tokenizer.json, chat template"
    )
    max_context_tokens: int = Field(512, ge=16, description="Tokens of one trajectory, prompt included")


class Tasks(_Section):
    """What the agent is trained on."""

    suite: str = Field("examples.terminal:suite", description="`module:object` of a task suite, or a folder of tasks")
    parser: Literal["tokens", "json_tool_call"] = Field("tokens", description="How a turn becomes a typed action")
    pool: int = Field(0, ge=0, description="Use only the first N training tasks; 0: all")


class Window(_Section):
    """Candidate groups in flight."""

    max_groups: int = Field(20, ge=1, description="Leased and not yet closed groups, at every instant")


class Rollout(_Section):
    """The sibling episodes of a lease."""

    group_size: int = Field(8, ge=1, description="Siblings per group")
    max_groups: int = Field(16, ge=1, description="Groups that one rollouter runs at a time")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1: off")
    top_k: int = Field(0, ge=0, description="Top-k sampling; 0: off")
    slot_retries: int = Field(2, ge=0, description="Times that a slot is retried after an infrastructure abort")
    generate_timeout_s: float = Field(
        120.0, gt=0, description="Wait for one turn's tokens before it is issued to another engine"
    )
    sandbox_timeout_s: float = Field(
        120.0, gt=0, description="Wait for one sandbox result before the episode is an infrastructure abort"
    )
    sandbox_silent_s: float = Field(
        10.0, gt=0, description="Silence of a sandbox host after which nobody waits for it any more; at least three heartbeats"
    )
    observation_chars: int = Field(160, ge=16, description="Characters of a command's output that the agent sees")
    inline_state_bytes: int = Field(
        512 * 1024, ge=0, description="Terminal states up to this size travel inline, larger by reference"
    )


class Engine(_Section):
    """Serving engines."""

    kind: Literal["auto", "vllm", "transformers", "simulated"] = Field("auto", description="auto: vllm where it is installed")
    names: tuple[str, ...] = Field(("e0", "e1"), min_length=1, description="One engine service per name")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where engines run")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Compute type; auto: float32 on CPU, bfloat16 on GPU"
    )
    max_running: int = Field(64, ge=1, description="Generations that one engine runs at a time")
    cpu_threads: int = Field(1, ge=1, description="Compute threads of one engine on CPU")
    cpu_list: str = Field("", description="Cores of the engines, by engine, separated by `;`, e.g. `0;1`; empty: not pinned")
    audit_every: int = Field(
        8, ge=0, description="Weight changes after which all weights are read back again, while serving; 0: never"
    )
    simulated: dict[str, Any] = Field(
        default_factory=dict, description="The simulated engine's service model, for load tests: step_s, mean_tokens, …"
    )
    vllm: dict[str, Any] = Field(
        default_factory=dict, description="Passed through to vLLM: tensor_parallel_size, kv_cache_dtype, …"
    )


class Sandbox(_Section):
    """Executor lanes."""

    names: tuple[str, ...] = Field(("x0",), min_length=1, description="One executor service per name")
    root: str = Field("", description="Folder for workspaces; empty: below the run folder")
    reset: int = Field(4, ge=1, description="Concurrent resets")
    command: int = Field(4, ge=1, description="Concurrent ordinary commands")
    package: int = Field(2, ge=1, description="Concurrent package-heavy commands")
    verify: int = Field(2, ge=1, description="Concurrent gradings")
    cleanup: int = Field(2, ge=1, description="Concurrent clean-ups")
    max_sandboxes: int = Field(512, ge=1, description="Living sandboxes of one executor")
    memory_bytes: int = Field(512 * 2**20, ge=2**20, description="Memory of one sandbox")
    processes: int = Field(128, ge=4, description="Processes of one sandbox")
    disk_bytes: int = Field(64 * 2**20, ge=2**16, description="Files of one sandbox")
    output_bytes: int = Field(64 * 1024, ge=256, description="Output kept of one command, head and tail")


class Verifier(_Section):
    """Grading of sealed terminal states."""

    concurrency: int = Field(4, ge=1, description="Concurrent gradings of one verifier")


class Admission(_Section):
    """Which ready groups make a batch."""

    groups_per_batch: int = Field(8, ge=1, description="Groups per batch")
    max_lag: int = Field(
        2, ge=0, description="K: largest (version about to be updated) - (oldest sampled version); 0 is synchronous"
    )
    versions: Literal["mixed", "homogeneous"] = Field("mixed", description="May one group span several policy versions?")
    zero_variance: Literal["keep", "skip"] = Field("keep", description="What to do with groups whose rewards are all equal")
    min_rewards: int = Field(2, ge=1, description="Rewarded siblings that a group needs")


class Trainer(_Section):
    """The optimizer."""

    ranks: int = Field(1, ge=1, description="Data-parallel ranks started on this machine")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the trainer runs")
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Forward and backward type; weights are bf16"
    )
    zero_stage: int = Field(1, ge=0, le=3, description="DeepSpeed ZeRO stage")
    threads: int = Field(1, ge=1, description="Compute threads of one rank on CPU")
    learning_rate: float = Field(1e-4, ge=0, description="Adam learning rate; 0 freezes the policy")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Adam betas")
    eps: float = Field(1e-8, gt=0, description="Adam epsilon")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay")
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up steps")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient clipping by global norm")
    activation_checkpointing: bool = Field(False, description="Recompute activations in the backward pass")
    micro_batch_tokens: int = Field(8192, ge=64, description="Padded tokens of one micro-batch")
    credit: Literal["rloo", "grpo", "dr_grpo"] = Field("rloo", description="Advantage within a group")
    group_scale: Literal["none", "std"] = Field("none", description="Scaling of advantages by the group's deviation")
    reduction: Literal["episode_sum", "length_normalized", "token_mean", "turn_mass_conserving"] = Field(
        "episode_sum", description="How per-token losses become one number"
    )
    objective: Literal["ppo_clip", "reinforce_kl"] = Field("ppo_clip", description="The policy-gradient objective")
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower clip of the update ratio")
    clip_high: float = Field(0.2, gt=0, description="Upper clip of the update ratio")
    proximal: Literal["behaviour", "batch_start"] = Field(
        "behaviour", description="ppo_clip: denominator of the update ratio, the sampler's log-probs or the trainer's own"
    )
    weight_max: float = Field(0.0, ge=0, description="Cap of the off-policy weight beside the clip; 0: none")
    kl: Literal["none", "behaviour"] = Field("none", description="reinforce_kl: the policy that the penalty pulls towards")
    kl_estimator: Literal["k2", "k3"] = Field("k3", description="Estimator of the penalty, on the sampled tokens")
    kl_coefficient: float = Field(0.0, ge=0, description="Weight of the penalty")
    mini_batch_groups: int = Field(0, ge=0, description="Source prompts of one optimizer step; 0: the whole batch")
    epochs: int = Field(1, ge=1, description="Passes over a batch")
    checkpoint_every: int = Field(10, ge=1, description="Steps between checkpoints; the ledger is the log between them")
    keep_checkpoints: int = Field(3, ge=1, description="Checkpoints kept")
    shuffle_rewards: bool = Field(False, description="Control: permute rewards within each group before credit")
    demand_ahead: int = Field(0, ge=0, le=1, description="Batches asked for ahead of the step in work")


class ParamSync(_Section):
    """Publication of weights."""

    mode: Literal["finish_old", "continue_keep", "continue_recompute", "regenerate", "restart"] = Field(
        "continue_keep",
        description="Generations in flight: end under the old weights, go on under the new ones with their KV kept or "
        "recomputed, start their turn over if they outlast the grace, or start their episode over",
    )
    grace_s: float = Field(5.0, ge=0, description="regenerate: seconds in which a generation may still end as it began")
    max_unavailable: int | Literal["all"] = Field(
        1, description="Engines that may leave service at a time; `all` pauses the fleet for each version"
    )
    anchor_every: int = Field(20, ge=1, description="Versions between full snapshots")
    keep_anchors: int = Field(
        3,
        ge=0,
        description="Full snapshots kept with all patches after them; what no engine needs of the older is removed; 0: all",
    )
    apply_timeout_s: float = Field(120.0, gt=0, description="Bound on one engine's change before it is named and passed over")


class Fencing(_Section):
    """Services of which one may work at a time: admission, trainer, param_sync. A second one waits."""

    renew_s: float = Field(1.0, gt=0, description="Seconds between the owner's renewals")
    ttl_s: float = Field(3.0, gt=0, description="Silence of the owner after which a second takes over; at least 2 renewals")
    trainer_ttl_s: float = Field(
        15.0, gt=0, description="The same for the trainer, whose interpreter can be busy for seconds, as while it loads"
    )
    cut_off_s: float = Field(30.0, gt=0, description="An owner that gets no answer from the server for this long ends itself")


class Eval(_Section):
    """Held-out evaluation."""

    every_steps: int = Field(10, ge=0, description="Steps between evaluations while training; 0: none")
    at_start: bool = Field(True, description="Evaluate version 0 before training")
    at_end: bool = Field(True, description="Evaluate the last version after training")
    instance_attempts: int = Field(240, ge=0, description="Attempts on new instances at start and end")
    template_attempts: int = Field(240, ge=0, description="Attempts on new templates at start and end")
    interim_attempts: int = Field(64, ge=0, description="Attempts per split at evaluations while training")
    seed: int = Field(0, ge=0, description="Added to the sampling seeds of evaluations, for independent repeats")


class Telemetry(_Section):
    """What is written where."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged")
    traces: bool = Field(False, description="Write spans to `traces/` in the run folder")
    otlp_endpoint: str = Field("", description="OTLP/HTTP endpoint for spans, e.g. http://collector:4318/v1/traces")
    heartbeat_s: float = Field(2.0, gt=0, description="Seconds between service heartbeats")
    trajectories_per_step: int = Field(2, ge=0, description="Sampled trajectories written to the run folder per step")


class Config(_Section):
    """Everything."""

    run: Run = Run()
    nats: Nats = Nats()
    policy: Policy = Policy()
    tasks: Tasks = Tasks()
    window: Window = Window()
    rollout: Rollout = Rollout()
    engine: Engine = Engine()
    sandbox: Sandbox = Sandbox()
    verifier: Verifier = Verifier()
    admission: Admission = Admission()
    trainer: Trainer = Trainer()
    param_sync: ParamSync = ParamSync()
    fencing: Fencing = Fencing()
    eval: Eval = Eval()
    telemetry: Telemetry = Telemetry()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.window.max_groups < self.admission.groups_per_batch:
            raise ValueError(
                f"window.max_groups: {self.window.max_groups} is smaller than admission.groups_per_batch "
                f"({self.admission.groups_per_batch}), so no batch could ever fill; raise the window"
            )
        if self.trainer.mini_batch_groups and self.admission.groups_per_batch % self.trainer.mini_batch_groups:
            raise ValueError(
                f"trainer.mini_batch_groups: {self.trainer.mini_batch_groups} does not divide admission.groups_per_batch "
                f"({self.admission.groups_per_batch})"
            )
        if self.admission.min_rewards > self.rollout.group_size:
            raise ValueError(
                f"admission.min_rewards: {self.admission.min_rewards} exceeds rollout.group_size ({self.rollout.group_size})"
            )
        for field, ttl_s in (("ttl_s", self.fencing.ttl_s), ("trainer_ttl_s", self.fencing.trainer_ttl_s)):
            if ttl_s < 2 * self.fencing.renew_s:
                raise ValueError(
                    f"fencing.{field}: {ttl_s:g} leaves no room for two renewals of {self.fencing.renew_s:g} s; raise it"
                )
        if self.param_sync.max_unavailable != "all" and self.param_sync.max_unavailable < 1:
            raise ValueError(f"param_sync.max_unavailable: {self.param_sync.max_unavailable} lets no engine change; at least 1")
        for field, names in (("engine.names", self.engine.names), ("sandbox.names", self.sandbox.names)):
            if len(set(names)) != len(names):
                raise ValueError(f"{field}: {list(names)} names one service twice; give each its own name")
        if self.trainer.credit == "rloo" and self.rollout.group_size < 2 and not self.run.evaluate_only:
            raise ValueError("rollout.group_size: rloo needs at least 2 siblings; raise it or set run.evaluate_only")
        return self

    def run_folder(self) -> Path:
        """`<run.folder>/<run.name>`."""
        return Path(self.run.folder) / self.run.name


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read TOML, apply `section.field=value` overrides, check everything. Raises `ConfigError`."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"no configuration file at {path}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read as a TOML file: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
        tree.pop("sft", None)  # the warm start's own table may live in the same file
    for override in overrides:
        _apply(tree, override)
    return check(tree)


def check(tree: Mapping[str, Any]) -> Config:
    """Validate a parsed tree. Raises `ConfigError` naming each wrong field."""
    _refuse_unknown(Config, tree, "")
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            where, said = ".".join(str(part) for part in item["loc"]), item["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: {said} (got {item['input']!r})"[:400] if where else said)
        raise ConfigError("\n".join(lines)) from error


def _refuse_unknown(model: type[BaseModel], tree: Mapping[str, Any], prefix: str) -> None:
    for key, value in tree.items():
        if key not in model.model_fields:
            nearest = difflib.get_close_matches(key, model.model_fields, n=1)
            hint = f"; did you mean {prefix}{nearest[0]}?" if nearest else f"; known here: {', '.join(model.model_fields)}"
            raise ConfigError(f"{prefix}{key}: unknown setting{hint}")
        annotation = model.model_fields[key].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{key}: is a table of settings, not {value!r}")
            _refuse_unknown(annotation, value, f"{prefix}{key}.")


def _apply(tree: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or len(keys) < 2:
        raise ConfigError(f"{override!r}: an override looks like section.field=value, e.g. admission.max_lag=1")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    node = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
    node[keys[-1]] = value


def to_toml(config: Config) -> str:
    """The resolved configuration as TOML, each field's documentation above it. `load` reads it back to the same value."""
    lines: list[str] = []
    for name, field in Config.model_fields.items():
        section = getattr(config, name)
        lines.append(f"# {(field.annotation.__doc__ or '').strip() if isinstance(field.annotation, type) else ''}")
        lines.append(f"[{name}]")
        for key, info in type(section).model_fields.items():
            lines.append(f"# {info.description}")
            lines.append(f"{key} = {_toml_value(getattr(section, key))}")
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml_value(v)}" for k, v in value.items()) + "}"
    raise ConfigError(f"cannot write {value!r} as TOML")
