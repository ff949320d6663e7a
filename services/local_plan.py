"""What a local run starts: one process per service, as command lines with their environments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from schemas.table import Role
from services.child import LIFELINE, ChildSpec
from services.config import Config
from services.engine.registry import vllm_available
from services.identity import seed_file
from services.registry import instances
from services.run_folder import RunFolder

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS")
_FIRST_TO_STOP = (Role.SAMPLER, Role.ROLLOUTER)  # while what they wait for still answers


def label_of(role: Role | str, instance: str) -> str:
    """Name of a service process in logs and messages."""
    return f"{role}-{instance}"


def service_plan(config: Config, folder: RunFolder, url: str, lifeline: int) -> list[ChildSpec]:
    """One process per service instance, all reading the run folder's resolved configuration, each told of its own key alone."""
    return [
        ChildSpec(
            label=label_of(role, instance),
            argv=(
                *(sys.executable, "-m", "services.cli", "run", str(role), "--instance", instance),
                *("--config", str(folder.path / "config.toml"), "--nats", url, *_key(config, role)),
            ),
            log=folder.log(label_of(role, instance)),
            environment={**_environment(config, role), LIFELINE: str(lifeline)},
            inherit=(lifeline,),
            stage=0 if role in _FIRST_TO_STOP else 1,
        )
        for role, instance in instances(config)
    ]


def _key(config: Config, role: Role) -> tuple[str, ...]:
    path = seed_file(config.nats, role)
    if path is None:
        return ()
    return ("--set", f'nats.nkey_seed_file="{path}"', "--set", 'nats.nkey_folder=""', "--set", 'nats.admin_seed_file=""')


def _environment(config: Config, role: Role) -> dict[str, str]:
    """Compute threads as configured and one elsewhere: a library that takes every core starves the other services."""
    threads = {Role.ENGINE: config.engine.cpu_threads, Role.TRAINER: config.trainer.threads}.get(role, 1)
    environment = dict.fromkeys(_THREAD_VARIABLES, str(threads)) | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if role is Role.TRAINER and config.trainer.device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    return environment


def engine_kind(config: Config) -> Literal["vllm", "transformers", "simulated"]:
    """The engine kind of this run, `auto` settled once for all engines."""
    if config.engine.kind != "auto":
        return config.engine.kind
    available, _ = vllm_available()
    return "vllm" if available else "transformers"


def check_model(config: Config) -> str:
    """Empty when the model folder looks complete, else what is missing and what to do."""
    folder = Path(config.policy.model)
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not missing:
        return ""
    return f"policy.model: {folder} has no {' and no '.join(missing)}; give a model folder, relative to the present folder"
