"""The terminal tasks as a pretrained instruct model sees them: tools described in the system prompt, JSON calls,
more tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from examples.terminal import suite as terminal
from schemas.task import GraderSpec, Split, Task, TaskBudget

_SYSTEM = (
    "You are a careful command-line agent. Work in the current folder with one tool call per turn, and nothing else, as\n"
    '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call>\n'
    "When the task is done, answer\n"
    '<tool_call>{"name": "finish", "arguments": {}}</tool_call>'
)


class SmolLMSuite:
    """The terminal suite under another prompt and budget; tasks, graders and oracles are the same."""

    name = "smollm-terminal"

    def task_ids(self, split: Split) -> Sequence[str]:
        return terminal.task_ids(split)

    def task(self, task_id: str) -> Task:
        return msgspec.structs.replace(
            terminal.task(task_id),
            system_prompt=_SYSTEM,
            budget=TaskBudget(max_turns=4, max_action_tokens=64, command_timeout_s=10.0),
        )

    def grader(self, task_id: str) -> GraderSpec:
        return terminal.grader(task_id)

    def oracle(self, task_id: str) -> Sequence[str]:
        return terminal.oracle(task_id)


suite = SmolLMSuite()
