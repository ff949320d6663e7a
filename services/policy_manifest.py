"""Building the policy manifest: the fixed parts of the behaviour, read once at start; its hash binds what is made under it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import msgspec

from schemas.manifest import PolicyManifest
from schemas.task import SPLITS, Task, TaskSuite
from services.config import Config, ConfigError

_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def policy_manifest(config: Config, suite: TaskSuite) -> PolicyManifest:
    """The manifest of this configuration. Reads the model folder and every task, so call it in a thread.

    Raises `ConfigError` naming the file that the model folder lacks. A run of simulated engines needs no model folder.
    """
    folder = Path(config.policy.model)
    simulated = config.engine.kind == "simulated"
    if not folder.is_dir() and not simulated:
        raise ConfigError(
            f"policy.model: {str(folder)!r} is no folder; give one with config.json, safetensors and tokenizer.json"
        )
    tasks = [suite.task(task_id) for split in SPLITS for task_id in suite.task_ids(split)]
    if not tasks:
        raise ConfigError(f"tasks.suite: suite {suite.name!r} has no task")
    rollout = config.rollout
    return PolicyManifest(
        model=folder.name,
        base_digest=_weights_digest(folder),
        tokenizer_sha256=_file_digest(folder / "tokenizer.json", optional=simulated),
        template_sha256=_template_digest(folder),
        system_prompt_sha256=_digest_of_set(task.system_prompt.encode() for task in tasks),
        tool_schemas_sha256=_digest_of_set(_tools(task) for task in tasks),
        parser=config.tasks.parser,
        max_turns=max(task.budget.max_turns for task in tasks),
        max_action_tokens=max(task.budget.max_action_tokens for task in tasks),
        max_context_tokens=config.policy.max_context_tokens,
        sampling=f"temperature={rollout.temperature!r} top_p={rollout.top_p!r} top_k={rollout.top_k}",
    )


def _tools(task: Task) -> bytes:
    return json.dumps(msgspec.to_builtins(task.tools), sort_keys=True, separators=(",", ":")).encode()


def _digest_of_set(values: Iterable[bytes]) -> str:
    """One digest of the distinct values; neither order nor multiplicity matters."""
    return hashlib.sha256(b"".join(sorted({hashlib.sha256(value).digest() for value in values}))).hexdigest()


def _file_digest(path: Path, *, optional: bool) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        if optional:
            return ""
        raise ConfigError(f"policy.model: {path} is missing; the model folder needs it") from error


def _template_digest(folder: Path) -> str:
    """The chat template's own file, or the one inside tokenizer_config.json; empty when the model has none."""
    for name in _TEMPLATE_FILES:
        if (folder / name).exists():
            return _file_digest(folder / name, optional=False)
    configured = folder / "tokenizer_config.json"
    if not configured.exists():
        return ""
    template = json.loads(configured.read_text(encoding="utf-8")).get("chat_template")
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest() if template else ""


def _weights_digest(folder: Path) -> str:
    """Digest of config.json and the starting weights, file by file in the order of their names; empty without any."""
    digest = hashlib.sha256()
    paths = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    present = [path for path in paths if path.exists()]
    for path in present:
        digest.update(f"{path.name} {_file_digest(path, optional=False)}\n".encode())
    return digest.hexdigest() if present else ""
