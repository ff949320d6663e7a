"""Typed agent actions: what a parsed turn means.

Producer: the rollouter's action parser. Consumer: the agent loop, the trajectory record, the reports.
An action that does not parse is data too (`InvalidAction`): it costs a step and its error becomes the observation.
"""

from __future__ import annotations

import msgspec

ArgumentValue = str | int | float | bool | None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, tag="tool_call"):
    """Run one declared tool. Example: `ToolCall(name="shell", arguments={"command": "mv a.txt b.txt"})`."""

    name: str
    arguments: dict[str, ArgumentValue]


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """The agent says that the task is done; the terminal state is graded."""

    answer: str = ""


class Abstain(msgspec.Struct, frozen=True, kw_only=True, tag="abstain"):
    """The agent declines the task; the terminal state is graded like any other."""

    reason: str = ""


class InvalidAction(msgspec.Struct, frozen=True, kw_only=True, tag="invalid"):
    """A turn that is no action. `code` is stable (`unterminated`, `unknown_tool`, `malformed`, `empty`)."""

    code: str
    message: str


Action = ToolCall | Finish | Abstain | InvalidAction
