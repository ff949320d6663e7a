"""Tasks as data, and the protocol by which services reach a task suite.

A suite is named in the configuration by a Python path (`examples.terminal:suite`) or by a folder of tasks. The rollouter sees
`Task` only; the grader's files reach the verifier alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

Split = Literal["train", "heldout_instance", "heldout_template"]
SPLITS: tuple[Split, ...] = ("train", "heldout_instance", "heldout_template")


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tool that the agent may call, as a JSON schema of its parameters."""

    name: str
    description: str
    parameters: dict[str, object]


class TaskBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The task's own limits. Reaching one ends the episode as `TASK_BUDGET`, which is graded (it is no truncation)."""

    max_turns: int = 8
    max_action_tokens: int = 64  # sampled tokens of one turn; an action cut off here is `InvalidAction("unterminated")`
    command_timeout_s: float = 10.0


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent's side may know of a task."""

    task_id: str  # unique in the suite, subject-safe: [a-z0-9_-]+
    family: str
    template: str
    split: Split
    instruction: str
    files: Mapping[str, bytes]  # initial state: relative POSIX path -> content
    system_prompt: str = ""
    tools: tuple[ToolSpec, ...] = ()
    budget: TaskBudget = TaskBudget()


class GraderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the verifier alone knows: files mounted read-only at /tests, and the command that grades /state.

    The command runs in a clean sandbox with the sealed terminal state read-only at /state, and prints one JSON object on
    its last line: `{"success": bool, "components": {name: number}, "violations": [str]}`.
    """

    files: Mapping[str, bytes]
    command: Sequence[str]
    timeout_s: float = 20.0


@runtime_checkable
class TaskSuite(Protocol):
    """A set of tasks with hidden graders. Everything is a pure function of the task id."""

    name: str

    def task_ids(self, split: Split) -> Sequence[str]:
        """The ids of one split, in a fixed order."""
        ...

    def task(self, task_id: str) -> Task:
        """Raises `KeyError` naming the id if it is unknown."""
        ...

    def grader(self, task_id: str) -> GraderSpec:
        """The hidden grader of one task; called by the verifier only."""
        ...

    def oracle(self, task_id: str) -> Sequence[str]:
        """Shell commands that solve the task; used by tests and demonstrations only."""
        ...
