"""Tasks as folders that people already have, in the layout of terminal benchmarks.

    suite/
      suite.toml              optional: name, version
      count-lines/            one folder per task; its name is the task id
        task.toml             [task]: family, template, split, tools, max_turns, max_action_tokens, command_timeout_s
        instruction.md        what the agent is told
        environment/          initial files of the workspace
        tests/grade.py        the hidden grader and its files, mounted at /tests; `[grader] command` and `timeout_s` override
        solution/solve.sh     optional: shell commands that solve it

Everything is read at once, so that a running service never sees a half-edited task.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from schemas.task import SPLITS, GraderSpec, Split, Task, TaskBudget, ToolSpec
from services.config import ConfigError

MAX_FILE_BYTES = 4 * 2**20
_TASK_ID = re.compile(r"[a-z0-9_-]{1,48}")
_SHELL = ToolSpec(
    name="shell",
    description="Run a shell command in the task's folder.",
    parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)


class SuiteError(ConfigError):
    """A task suite cannot be used; the text names the file or setting, what is wrong, and the rule."""


class _TaskTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    family: str = ""
    template: str = ""
    split: Split = "train"
    system_prompt: str = ""
    max_turns: int = TaskBudget().max_turns
    max_action_tokens: int = TaskBudget().max_action_tokens
    command_timeout_s: float = TaskBudget().command_timeout_s


class _GraderTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: tuple[str, ...] = ("python3", "-I", "-S", "/tests/grade.py")
    timeout_s: float = 20.0


class _TaskFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    task: _TaskTable = _TaskTable()
    grader: _GraderTable = _GraderTable()


class _SuiteFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class _Loaded:
    task: Task
    grader: GraderSpec
    oracle: tuple[str, ...]


class FolderSuite:
    """See `schemas.task.TaskSuite`. Raises `SuiteError` when a task folder is not as the module says."""

    def __init__(self, folder: Path) -> None:
        described = _toml(folder / "suite.toml", _SuiteFile) if (folder / "suite.toml").exists() else _SuiteFile()
        self.name = described.name or folder.resolve().name
        self.version = described.version
        paths = sorted(path for path in folder.iterdir() if path.is_dir() and (path / "task.toml").exists())
        if not paths:
            raise SuiteError(f"tasks.suite: {folder} holds no task; a task is a folder with task.toml and instruction.md")
        self._tasks: Mapping[str, _Loaded] = {path.name: _load(path) for path in paths}
        _check_disjoint(loaded.task for loaded in self._tasks.values())

    def task_ids(self, split: Split) -> Sequence[str]:
        """Ids of one split, sorted."""
        return [task_id for task_id, loaded in self._tasks.items() if loaded.task.split == split]

    def task(self, task_id: str) -> Task:
        return self._find(task_id).task

    def grader(self, task_id: str) -> GraderSpec:
        return self._find(task_id).grader

    def oracle(self, task_id: str) -> Sequence[str]:
        return self._find(task_id).oracle

    def _find(self, task_id: str) -> _Loaded:
        if task_id not in self._tasks:
            raise KeyError(f"suite {self.name} has no task {task_id!r}")
        return self._tasks[task_id]


def _load(folder: Path) -> _Loaded:
    if not _TASK_ID.fullmatch(folder.name):
        raise SuiteError(f"{folder}: a task id is 1 to 48 of a-z 0-9 _ -")
    described = _toml(folder / "task.toml", _TaskFile)
    instruction = folder / "instruction.md"
    if not instruction.exists():
        raise SuiteError(f"{instruction}: missing; it holds what the agent is told")
    tests = _files(folder / "tests")
    if not tests:
        raise SuiteError(f"{folder / 'tests'}: missing or empty; it holds the hidden grader, e.g. tests/grade.py")
    if described.grader.command == _GraderTable().command and "grade.py" not in tests:
        raise SuiteError(f"{folder / 'tests' / 'grade.py'}: missing; add it, or set [grader] command in task.toml")
    table = described.task
    task = Task(
        task_id=folder.name,
        family=table.family or folder.name,
        template=table.template or table.family or folder.name,
        split=table.split,
        instruction=instruction.read_text(encoding="utf-8").strip(),
        files=_files(folder / "environment"),
        system_prompt=table.system_prompt,
        tools=(_SHELL,),
        budget=TaskBudget(
            max_turns=table.max_turns, max_action_tokens=table.max_action_tokens, command_timeout_s=table.command_timeout_s
        ),
    )
    solution = folder / "solution" / "solve.sh"
    oracle = (solution.read_text(encoding="utf-8"),) if solution.exists() else ()
    return _Loaded(
        task, GraderSpec(files=tests, command=described.grader.command, timeout_s=described.grader.timeout_s), oracle
    )


def _toml(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), kind)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path}: {error}; splits are {', '.join(SPLITS)}") from error


def _files(folder: Path) -> dict[str, bytes]:
    """Relative POSIX path to content, of every file below; a link is refused, because what it names is not in the folder."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise SuiteError(f"{path}: only files and folders may stand in a task, no links or devices")
        if path.is_file():
            if path.stat().st_size > MAX_FILE_BYTES:
                raise SuiteError(f"{path}: {path.stat().st_size} bytes exceed the limit of {MAX_FILE_BYTES} for a task's file")
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def _check_disjoint(tasks: Any) -> None:
    """Training and `heldout_template` must differ by template, not by number."""
    splits: dict[str, set[Split]] = {}
    for task in tasks:
        splits.setdefault(task.template, set()).add(task.split)
    for template, found in splits.items():
        if {"train", "heldout_template"} <= found:
            raise SuiteError(f"template {template!r} is in train and in heldout_template; held-out templates must be unseen")
