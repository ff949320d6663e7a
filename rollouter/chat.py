"""Chat rendering: from messages to token ids, without ever tokenizing what was sampled.

A history is a line of ids: `opening ++ sampled ++ glue ++ sampled ++ glue ...`. The opening and the glue come from the model
folder's own Jinja template. The template is rendered with sentinels where the contents belong, the text is cut at the
sentinels, the template's pieces are encoded with special tokens, and the contents are encoded as plain text: a file that
spells `<|end|>` never becomes the control token.

Cost per turn follows the new text and not the history, because the glue of a role is rendered and encoded once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from schemas.task import ToolSpec

Ids = npt.NDArray[np.int32]
Message = Mapping[str, Any]  # OpenAI shape: role, content, and for an assistant perhaps tool_calls

# Private-use characters: no template spells them, and any escaping of contents (`tojson`, `urlencode`) breaks them visibly.
_OPEN, _CLOSE = "\ue000", "\ue001"
DEFAULT_OBSERVATION_CHARS = 400


class ChatError(ValueError):
    """The template, or what it was asked to render, does not fit the rules of this renderer."""


def observation_text(
    stdout: bytes, stderr: bytes, exit_code: int | None, timed_out: bool, limit_chars: int = DEFAULT_OBSERVATION_CHARS
) -> str:
    """What the agent sees of one command: its output, cut at the end, and `[exit N]` where it failed.

    `exit_code` None means that the command was killed by a signal or never ran. Silence reads `ok`, because an empty
    message teaches a small policy nothing.
    """
    text = (stdout + stderr).decode("utf-8", "replace").rstrip("\n")
    dropped = len(text) - limit_chars
    if dropped > 0:
        text = f"{text[:limit_chars]}[{dropped} more]"
    if timed_out:
        status = "[timeout]"
    elif exit_code is None:
        status = "[killed]"
    else:
        status = f"[exit {exit_code}]" if exit_code else ""
    return "\n".join(part for part in (text, status) if part) or "ok"


@dataclass(frozen=True, kw_only=True)
class _Glue:
    """What stands between a sampled turn and the next one, for one observation role."""

    close: tuple[int, ...]  # the assistant's closing tokens, of which the sampled ids may hold a first part
    head: tuple[int, ...]  # opening of the new message
    tail: tuple[int, ...]  # closing of the new message and opening of the next assistant turn


class ChatRenderer:
    """Renders for one model folder (`tokenizer.json`, `chat_template.jinja`, `generation_config.json`).

    Thread-safe after construction. Raises `ChatError` where a template cannot be rendered faithfully.
    """

    def __init__(self, model_dir: str | Path) -> None:
        folder = Path(model_dir)
        tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
        template = _template_text(folder)
        self.tokenizer_sha256 = hashlib.sha256(tokenizer_json.encode()).hexdigest()
        self.template_sha256 = hashlib.sha256(template.encode()).hexdigest()
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._text_tokenizer = Tokenizer.from_str(_without_added_tokens(tokenizer_json))
        self._special = tuple(token.content for token in self._tokenizer.get_added_tokens_decoder().values())
        self._special_variables, self.stop_token_ids = _special_tokens(folder, self._tokenizer)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _tojson
        self._template = environment.from_string(template)
        self._glue = lru_cache(maxsize=8)(self._make_glue)

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows; the model's embedding may be padded beyond it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that no plain text encodes to: the marks that only templates and policies write."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    def token_id(self, token: str) -> int:
        """The id of one token. Raises `ChatError` if the tokenizer lacks it."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ChatError(f"the tokenizer has no token {token!r}; choose the action parser that fits this model")
        return int(found)

    def opening(self, system_prompt: str, instruction: str, tools: Sequence[ToolSpec] = ()) -> Ids:
        """Prompt ids up to and including the assistant's opening. [T]"""
        messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages.append({"role": "user", "content": instruction})
        return self.render(messages, tools, add_generation_prompt=True)

    def after_turn(self, sampled_ids: Sequence[int] | Ids, observation_role: str, observation_text: str) -> Ids:
        """The ids to feed after one sampled turn: rest of its closing, the observation, the next assistant opening. [T]"""
        glue = self._glue(observation_role)
        close = glue.close[_overlap(sampled_ids, glue.close) :]
        return np.asarray([*close, *glue.head, *self.encode_text(observation_text), *glue.tail], dtype=np.int32)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, add_generation_prompt: bool) -> Ids:
        """Ids of whole messages. [T] Contents become plain text; only the template makes special tokens."""
        contents: list[str] = []
        text = self._render(_with_sentinels(messages, contents), tools, add_generation_prompt)
        ids: list[int] = []
        for piece, index in _cut(text, len(contents)):
            ids += self._encode_template(piece)
            if index is not None:
                ids += self.encode_text(contents[index])
        return np.asarray(ids, dtype=np.int32)

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, in which no control token can appear."""
        return list(self._text_tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Text of ids, special tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))

    def _encode_template(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], add_generation_prompt: bool) -> str:
        functions = [
            {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
            for t in tools
        ]
        spelled = json.dumps(functions, ensure_ascii=False)
        for token in self._special:
            if token in spelled:
                raise ChatError(f"a tool's schema spells the special token {token!r}; tool schemas are rendered as template")
        try:
            return self._template.render(
                messages=messages,
                tools=functions or None,
                add_generation_prompt=add_generation_prompt,
                **self._special_variables,
            )
        except TemplateError as error:
            raise ChatError(f"the chat template refused these messages: {error}") from error

    def _make_glue(self, role: str) -> _Glue:
        """Cuts the glue out of a probe conversation; nothing of the real history is rendered."""
        probe: list[Message] = [
            {"role": "system", "content": _sentinel(0)},
            {"role": "user", "content": _sentinel(1)},
            {"role": "assistant", "content": _sentinel(2)},
        ]
        close = self._render(probe, (), False).partition(_sentinel(2))[2]
        after = self._render([*probe, {"role": role, "content": _sentinel(3)}], (), True).partition(_sentinel(2))[2]
        if not after.startswith(close):
            raise ChatError(f"the chat template closes an assistant turn differently once a {role!r} message follows it")
        head, found, tail = after[len(close) :].partition(_sentinel(3))
        if not found:
            raise ChatError(f"the chat template drops or rewrites the content of a {role!r} message")
        return _Glue(
            close=tuple(self._encode_template(close)),
            head=tuple(self._encode_template(head)),
            tail=tuple(self._encode_template(tail)),
        )


def _overlap(sampled: Sequence[int] | Ids, close: tuple[int, ...]) -> int:
    """Length of the longest first part of `close` that `sampled` ends with: a kept stop token is not fed twice."""
    for size in range(min(len(sampled), len(close)), 0, -1):
        if tuple(int(token) for token in sampled[-size:]) == close[:size]:
            return size
    return 0


def _sentinel(index: int) -> str:
    return f"{_OPEN}{index}{_CLOSE}"


def _with_sentinels(messages: Sequence[Message], contents: list[str]) -> list[dict[str, Any]]:
    """Copies the messages with each content and string argument replaced by a sentinel; collects the contents."""

    def hide(text: str) -> str:
        contents.append(text)
        return _sentinel(len(contents) - 1)

    hidden: list[dict[str, Any]] = []
    for message in messages:
        copy = dict(message)
        if isinstance(content := copy.get("content"), str):
            copy["content"] = hide(content)
        if calls := copy.get("tool_calls"):
            copy["tool_calls"] = [_hide_arguments(call, hide) for call in calls]
        hidden.append(copy)
    return hidden


def _hide_arguments(call: Mapping[str, Any], hide: Any) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    function["arguments"] = {
        name: hide(value) if isinstance(value, str) else value for name, value in dict(arguments or {}).items()
    }
    return {**call, "function": function}


def _cut(text: str, count: int) -> list[tuple[str, int | None]]:
    """Cuts rendered text into (template piece, index of the content after it). Every content must appear exactly once."""
    pieces: list[tuple[str, int | None]] = []
    seen: list[int] = []
    rest = text
    while True:
        piece, found, rest = rest.partition(_OPEN)
        if not found:
            pieces.append((piece, None))
            break
        number, _, rest = rest.partition(_CLOSE)
        index = int(number)
        seen.append(index)
        pieces.append((piece, index))
    if missing := sorted(set(range(count)) - set(seen)):
        raise ChatError(f"the chat template drops or rewrites the content of message contents {missing}")
    return pieces


def _template_text(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    config = _read_json(folder / "tokenizer_config.json")
    template = config.get("chat_template")
    if not isinstance(template, str):
        raise ChatError(f"{folder} has neither chat_template.jinja nor a chat_template in tokenizer_config.json")
    return template


def _without_added_tokens(tokenizer_json: str) -> str:
    """The same tokenizer without its added tokens: it cannot produce one, whatever the text spells."""
    parsed = json.loads(tokenizer_json)
    parsed["added_tokens"] = []
    parsed["post_processor"] = None
    return json.dumps(parsed)


def _special_tokens(folder: Path, tokenizer: Tokenizer) -> tuple[dict[str, str], tuple[int, ...]]:
    """`bos_token` and the like for the template, and the ids that end a turn."""
    config = _read_json(folder / "tokenizer_config.json")
    variables: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            variables[name] = value
    stops = _read_json(folder / "generation_config.json").get("eos_token_id")
    if stops is None and "eos_token" in variables:
        stops = tokenizer.token_to_id(variables["eos_token"])
    if stops is None:
        raise ChatError(f"{folder} names no end token: set eos_token_id in generation_config.json")
    return variables, tuple(int(stop) for stop in (stops if isinstance(stops, list) else [stops]))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    parsed = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(parsed, dict):
        raise ChatError(f"{path} holds no JSON object")
    return parsed


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: object, **options: Any) -> str:
    """JSON as the reference implementation of chat templates writes it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=options.get("ensure_ascii", True), indent=options.get("indent"))
