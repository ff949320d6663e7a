"""Action parsers: from one sampled turn to a typed action, or to the reason why it is none.

Nothing is repaired. A turn that breaks the format is `InvalidAction` with a stable code, it costs a step, and `error_text` is
what the agent reads of it. A parser is part of the manifest: `version` names its rules.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from typing import Protocol

from schemas.actions import Abstain, Action, ArgumentValue, Finish, InvalidAction, ToolCall
from schemas.task import ToolSpec

from .chat import ChatRenderer, Ids


class ActionParser(Protocol):
    """Parses the complete output of one turn, once."""

    name: str
    version: str  # `name/sha256` of the rules, for the manifest

    def parse(self, text: str, sampled_ids: Sequence[int] | Ids, finish_reason: str) -> Action:
        """`text` is the decoded output with special tokens spelled out; `finish_reason` is the engine's."""
        ...


def error_text(error: InvalidAction) -> str:
    """The observation that follows an invalid action; short, because a small policy must be able to read it."""
    return f"invalid {error.code}: {error.message}"


class TokensParser:
    """`<|shell|>COMMAND<|end|>`, `<|finish|>ANSWER<|end|>` or `<|abstain|>REASON<|end|>`.

    The marks count by token id and not by spelling: a command that spells `<|end|>` in plain letters is only a command.
    """

    name = "tokens"

    def __init__(self, renderer: ChatRenderer, tools: Sequence[ToolSpec]) -> None:
        self._renderer = renderer
        self._stops = frozenset(renderer.stop_token_ids)
        self._finish, self._abstain = renderer.token_id("<|finish|>"), renderer.token_id("<|abstain|>")
        self._tools = {renderer.token_id(f"<|{tool.name}|>"): (tool.name, _only_parameter(tool)) for tool in tools}
        self._marks = renderer.special_token_ids
        self.version = _version(self.name, type(self))

    def parse(self, text: str, sampled_ids: Sequence[int] | Ids, finish_reason: str) -> Action:
        ids = [int(token) for token in sampled_ids]
        if not ids:
            return InvalidAction(code="empty", message="nothing was said")
        if finish_reason != "stop" or ids[-1] not in self._stops:
            return InvalidAction(code="unterminated", message="no end")
        first, body = ids[0], ids[1:-1]
        if len(ids) == 1:
            return InvalidAction(code="empty", message="nothing was said")
        if any(token in self._marks for token in body):
            return InvalidAction(code="malformed", message="one action only")
        content = self._renderer.decode(body)
        if "\ufffd" in content:
            return InvalidAction(code="malformed", message="broken text")
        if first == self._finish:
            return Finish(answer=content)
        if first == self._abstain:
            return Abstain(reason=content)
        if first not in self._tools:
            if first in self._marks:
                return InvalidAction(code="unknown_tool", message="no such tool")
            return InvalidAction(code="malformed", message="no action")
        if not content.strip():
            return InvalidAction(code="empty", message="no command")
        name, parameter = self._tools[first]
        return ToolCall(name=name, arguments={parameter: content})


class JsonToolCallParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with `finish` and `abstain` as tools.

    Text around the one call is allowed (models think aloud); a second call, another shape or an undeclared argument is not.
    """

    name = "json_tool_call"
    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, renderer: ChatRenderer, tools: Sequence[ToolSpec]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._stops = tuple(renderer.decode([stop]) for stop in renderer.stop_token_ids)
        self.version = _version(self.name, type(self))

    def parse(self, text: str, sampled_ids: Sequence[int] | Ids, finish_reason: str) -> Action:
        said = text
        for stop in self._stops:
            said = said.removesuffix(stop)
        if not said.strip():
            return InvalidAction(code="empty", message="nothing was said")
        if finish_reason != "stop":
            return InvalidAction(code="unterminated", message="the turn was cut off")
        if said.count(self.OPEN) != 1 or said.count(self.CLOSE) > 1:
            return InvalidAction(code="malformed", message=f"write exactly one {self.OPEN}...{self.CLOSE}")
        inner, closed, _ = said.partition(self.OPEN)[2].partition(self.CLOSE)
        if not closed:
            return InvalidAction(code="unterminated", message=f"{self.CLOSE} is missing")
        try:
            call = json.loads(inner, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError):
            return InvalidAction(code="malformed", message="the call is no valid JSON")
        if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
            return InvalidAction(code="malformed", message='the call needs "name" and "arguments", nothing else')
        return self._typed(call["name"], call["arguments"])

    def _typed(self, name: object, arguments: object) -> Action:
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return InvalidAction(code="malformed", message="name is a string, arguments an object")
        if name == "finish":
            answer = _only_text(arguments, "answer")
            return Finish(answer=answer) if isinstance(answer, str) else answer
        if name == "abstain":
            reason = _only_text(arguments, "reason")
            return Abstain(reason=reason) if isinstance(reason, str) else reason
        tool = self._tools.get(name)
        if tool is None:
            return InvalidAction(code="unknown_tool", message=f"tools: {', '.join([*self._tools, 'finish', 'abstain'])}")
        if problem := _argument_problem(tool, arguments):
            return InvalidAction(code="malformed", message=problem)
        typed: dict[str, ArgumentValue] = dict(arguments)
        return ToolCall(name=name, arguments=typed)


PARSERS: dict[str, type[TokensParser | JsonToolCallParser]] = {
    TokensParser.name: TokensParser,
    JsonToolCallParser.name: JsonToolCallParser,
}


def make_parser(name: str, renderer: ChatRenderer, tools: Sequence[ToolSpec]) -> ActionParser:
    """The parser of this name for one set of tools. Raises `ValueError` naming the known ones."""
    if name not in PARSERS:
        raise ValueError(f"unknown action parser {name!r}: choose one of {sorted(PARSERS)}")
    return PARSERS[name](renderer, tools)


def json_tool_prompt(tools: Sequence[ToolSpec]) -> str:
    """System text that declares the tools to a model whose template has no place for them."""
    declared = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools]
    finish = {"name": "finish", "description": "The task is done.", "parameters": {"answer": "string, may be left out"}}
    abstain = {"name": "abstain", "description": "The task cannot be done.", "parameters": {"reason": "string"}}
    listed = "\n".join(json.dumps(tool) for tool in [*declared, finish, abstain])
    return (
        "You solve tasks with tools. Tools:\n"
        f"{listed}\n"
        "In each turn write one call and nothing else:\n"
        '<tool_call>{"name": "...", "arguments": {...}}</tool_call>\n'
        "When the task is done, call finish."
    )


def _only_parameter(tool: ToolSpec) -> str:
    properties = tool.parameters.get("properties")
    if not isinstance(properties, dict) or len(properties) != 1:
        raise ValueError(f"the tokens parser needs tools with exactly one parameter, and {tool.name!r} declares {properties!r}")
    return str(next(iter(properties)))


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def _argument_problem(tool: ToolSpec, arguments: dict[str, object]) -> str | None:
    """Why these arguments do not fit the tool's schema; None if they do."""
    properties, required = tool.parameters.get("properties", {}), tool.parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise TypeError(f"the schema of tool {tool.name!r} needs an object of properties and a list of required names")
    if missing := [name for name in required if name not in arguments]:
        return f"missing argument {missing[0]}"
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument {name}"
        allowed = _JSON_TYPES.get(str(properties[name].get("type")))
        if allowed is None or not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            return f"argument {name} must be {properties[name].get('type')}"
    return None


def _only_text(arguments: dict[str, object], name: str) -> str | InvalidAction:
    """The one optional string argument of `finish` and `abstain`."""
    value = arguments.get(name, "")
    if set(arguments) - {name} or not isinstance(value, str):
        return InvalidAction(code="malformed", message=f"the only argument is {name}, a string")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("a key appears twice")
    return keys


def _version(name: str, rules: type) -> str:
    return f"{name}/{hashlib.sha256(inspect.getsource(rules).encode()).hexdigest()[:16]}"
