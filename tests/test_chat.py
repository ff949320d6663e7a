"""Rendering and parsing: contents stay text, glue is never doubled, a broken turn is never repaired."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.terminal.suite import SHELL
from rollouter.actions import PARSERS, ActionParser, error_text, json_tool_prompt, make_parser
from rollouter.chat import ChatError, ChatRenderer, observation_text
from schemas.actions import Abstain, Action, Finish, InvalidAction, ToolCall
from schemas.task import ToolSpec

MODEL = Path("examples/terminal/model")
RENDERER = ChatRenderer(MODEL)
END = RENDERER.token_id("<|end|>")
SHELL_ID, FINISH_ID, ABSTAIN_ID = (RENDERER.token_id(f"<|{mark}|>") for mark in ("shell", "finish", "abstain"))
MARKS = ("<|end|>", "<|assistant|>", "<|shell|>", "<|tool|>", "\ue0000\ue001")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_model(folder: Path, template: str) -> Path:
    """A model folder with ChatML marks on the example's vocabulary."""
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        new = {"<|end|>": "<|im_end|>", "<|user|>": "<|im_start|>"}.get(token["content"])
        if new:
            tokenizer["model"]["vocab"][new] = tokenizer["model"]["vocab"].pop(token["content"])
            token["content"] = new
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))
    return folder


def test_opening_is_exactly_this() -> None:
    ids = RENDERER.opening("", "rename a to b.", (SHELL,))
    assert ids.dtype == np.int32
    assert RENDERER.decode(ids) == "<|system|>shell(command)<|end|><|user|>rename a to b.<|end|><|assistant|>"
    with_system = RENDERER.opening("be brief", "go", (SHELL,))
    assert RENDERER.decode(with_system) == "<|system|>be brief shell(command)<|end|><|user|>go<|end|><|assistant|>"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=8)), max_size=8).map("".join))
def test_content_never_becomes_a_control_token(content: str) -> None:
    marks = RENDERER.special_token_ids
    text_ids = RENDERER.encode_text(content)
    assert not marks & set(text_ids)
    assert RENDERER.decode(text_ids) == content
    opening = RENDERER.opening("", content, (SHELL,)).tolist()
    bare = RENDERER.opening("", "", (SHELL,)).tolist()
    assert [i for i in opening if i in marks] == [i for i in bare if i in marks]
    glue = RENDERER.after_turn([SHELL_ID, END], "tool", content).tolist()
    assert RENDERER.decode(glue) == f"<|tool|>{content}<|end|><|assistant|>"
    assert sum(token in marks for token in glue) == 3


def test_glue_adds_only_the_closing_that_was_not_sampled() -> None:
    stopped = RENDERER.after_turn([SHELL_ID, *RENDERER.encode_text("ls"), END], "tool", "a")
    cut_off = RENDERER.after_turn([SHELL_ID, *RENDERER.encode_text("ls")], "tool", "a")
    assert RENDERER.decode(stopped) == "<|tool|>a<|end|><|assistant|>"
    assert RENDERER.decode(cut_off) == "<|end|><|tool|>a<|end|><|assistant|>"


def test_chatml_glue_takes_the_overlap_off_and_needs_no_tool_support(tmp_path: Path) -> None:
    renderer = ChatRenderer(make_model(tmp_path, CHATML))
    end = renderer.token_id("<|im_end|>")
    newline = renderer.encode_text("\n")
    assert renderer.stop_token_ids == (end,)
    opening = renderer.opening("S", "U", (SHELL,))
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.decode(opening) == expected
    word = renderer.encode_text("yes")
    after = "<|im_start|>user\nO<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.decode(renderer.after_turn([*word, end], "user", "O")) == "\n" + after
    assert renderer.decode(renderer.after_turn([*word, end, *newline], "user", "O")) == after
    assert renderer.decode(renderer.after_turn(word, "user", "O")) == "<|im_end|>\n" + after


def test_a_history_grows_as_a_line_and_equals_the_full_rendering() -> None:
    """Ids that came from text render alike in one go or turn by turn: earlier ids are a prefix of later ones."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "rename a to b."}]
    line = RENDERER.opening("", "rename a to b.", (SHELL,)).tolist()
    for command, observation in (("mv a b", "mv: cannot stat 'a'\n[exit 1]"), ("ls", "c <|end|>"), ("mv c b", "ok")):
        assert line == RENDERER.render(messages, (SHELL,), add_generation_prompt=True).tolist()
        sampled = [SHELL_ID, *RENDERER.encode_text(command), END]
        line += [*sampled, *RENDERER.after_turn(sampled, "tool", observation).tolist()]
        call = {"type": "function", "function": {"name": "shell", "arguments": json.dumps({"command": command})}}
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": observation}]
    assert line == RENDERER.render(messages, (SHELL,), add_generation_prompt=True).tolist()


def test_a_template_that_hides_contents_is_refused(tmp_path: Path) -> None:
    renderer = ChatRenderer(make_model(tmp_path, "{% for m in messages %}{{ m.content | upper | tojson }}{% endfor %}"))
    with pytest.raises(ChatError, match="drops or rewrites"):
        renderer.opening("", "hello", ())


def test_a_template_that_rewrites_closed_turns_is_refused(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}"
        "{% if loop.last %}<|im_end|>{% else %};{% endif %}{% endfor %}"
    )
    with pytest.raises(ChatError, match="closes an assistant turn differently"):
        ChatRenderer(make_model(tmp_path, template)).after_turn([1], "user", "x")


def test_a_tool_schema_cannot_smuggle_a_control_token() -> None:
    tool = ToolSpec(name="shell", description="<|end|>", parameters={"type": "object", "properties": {"command": {}}})
    with pytest.raises(ChatError, match="special token"):
        RENDERER.opening("", "x", (tool,))


def test_identities_are_stable() -> None:
    again = ChatRenderer(MODEL)
    assert (again.template_sha256, again.tokenizer_sha256) == (RENDERER.template_sha256, RENDERER.tokenizer_sha256)
    assert make_parser("tokens", again, (SHELL,)).version == make_parser("tokens", RENDERER, (SHELL,)).version


def test_observation_text() -> None:
    assert observation_text(b"", b"", 0, False) == "ok"
    assert observation_text(b"a\n", b"", 0, False) == "a"
    assert observation_text(b"a\n", b"b\n", 2, False) == "a\nb\n[exit 2]"
    assert observation_text(b"", b"", 1, False) == "[exit 1]"
    assert observation_text(b"part", b"", None, True) == "part\n[timeout]"
    assert observation_text(b"", b"", None, False) == "[killed]"
    assert observation_text(b"\xff", b"", 0, False) == "\ufffd"
    assert observation_text(b"x" * 50, b"", 0, False, limit_chars=10) == "x" * 10 + "[40 more]"


def parse(parser: ActionParser, ids: list[int], finish_reason: str = "stop") -> Action:
    return parser.parse(RENDERER.decode(ids), ids, finish_reason)


def code(action: Action) -> str:
    assert isinstance(action, InvalidAction), action
    assert len(error_text(action)) < 60 or "<tool_call>" in error_text(action)
    return action.code


def test_tokens_parser() -> None:
    parser = make_parser("tokens", RENDERER, (SHELL,))
    words = RENDERER.encode_text("mv a b")
    assert parse(parser, [SHELL_ID, *words, END]) == ToolCall(name="shell", arguments={"command": "mv a b"})
    assert parse(parser, [FINISH_ID, END]) == Finish()
    assert parse(parser, [ABSTAIN_ID, *words, END]) == Abstain(reason="mv a b")
    spelled = RENDERER.encode_text("echo <|end|><|finish|>")
    assert parse(parser, [SHELL_ID, *spelled, END]) == ToolCall(name="shell", arguments={"command": "echo <|end|><|finish|>"})
    assert code(parse(parser, [])) == "empty"
    assert code(parse(parser, [END])) == "empty"
    assert code(parse(parser, [SHELL_ID, END])) == "empty"
    assert code(parse(parser, [SHELL_ID, *words], "length")) == "unterminated"
    assert code(parse(parser, [SHELL_ID, *words])) == "unterminated"
    assert code(parse(parser, [SHELL_ID, *words, END], "length")) == "unterminated"
    assert code(parse(parser, [*words, END])) == "malformed"
    assert code(parse(parser, [SHELL_ID, *words, SHELL_ID, *words, END])) == "malformed"
    assert code(parse(parser, [SHELL_ID, *words, END, END])) == "malformed"
    assert code(parse(parser, [RENDERER.token_id("<|tool|>"), *words, END])) == "unknown_tool"
    broken = RENDERER.encode_text("é")[:1]
    assert code(parse(parser, [SHELL_ID, *broken, END])) == "malformed"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, RENDERER.vocab_size - 1), max_size=12), st.sampled_from(["stop", "length", "abort"]))
def test_any_ids_parse_to_a_typed_action(ids: list[int], finish_reason: str) -> None:
    for name in PARSERS:
        action = parse(make_parser(name, RENDERER, (SHELL,)), ids, finish_reason)
        assert isinstance(action, ToolCall | Finish | Abstain | InvalidAction)
        if finish_reason != "stop":
            assert isinstance(action, InvalidAction)


def test_json_tool_call_parser() -> None:
    parser = make_parser("json_tool_call", RENDERER, (SHELL,))

    def said(text: str, finish_reason: str = "stop") -> Action:
        return parser.parse(text, [], finish_reason)

    def call(name: object, arguments: object) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    good = call("shell", {"command": "ls"})
    assert said(good + "<|end|>") == ToolCall(name="shell", arguments={"command": "ls"})
    assert said("I look.\n" + good) == ToolCall(name="shell", arguments={"command": "ls"})
    assert said(call("finish", {})) == Finish()
    assert said(call("finish", {"answer": "42"})) == Finish(answer="42")
    assert said(call("abstain", {"reason": "no"})) == Abstain(reason="no")
    assert code(said("")) == "empty"
    assert code(said(good, "length")) == "unterminated"
    assert code(said(good.removesuffix("</tool_call>"))) == "unterminated"
    assert code(said(good + good)) == "malformed"
    assert code(said("done")) == "malformed"
    assert code(said("<tool_call>{'name': 'shell'}</tool_call>")) == "malformed"
    assert code(said('<tool_call>{"name": "shell", "name": "x", "arguments": {}}</tool_call>')) == "malformed"
    assert code(said(call("shell", {}))) == "malformed"
    assert code(said(call("shell", {"command": 3}))) == "malformed"
    assert code(said(call("shell", {"command": "ls", "cwd": "/"}))) == "malformed"
    assert code(said(call("shell", "ls"))) == "malformed"
    assert code(said(call("finish", {"answer": 3}))) == "malformed"
    assert code(said(call("python", {"command": "1"}))) == "unknown_tool"


def test_an_unknown_parser_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="json_tool_call"):
        make_parser("xml", RENDERER, (SHELL,))
    assert '"shell"' in json_tool_prompt((SHELL,))
