"""Task suites: a Python object or a folder of tasks, with errors that name file, rule and fix; and the policy manifest."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rollouter.manifest import policy_manifest
from rollouter.suites import FolderSuite, SuiteError, environment_of, resolve_suite
from schemas.task import TaskSuite
from services.config import Config, ConfigError, check

MODEL = Path("examples/terminal/model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A suite of two tasks."""
    for name, split in (("count-lines", "train"), ("count-words", "heldout_template")):
        task = tmp_path / "suite" / name
        for part in ("environment/data", "tests", "solution"):
            (task / part).mkdir(parents=True)
        (task / "task.toml").write_text(
            f'[task]\nfamily = "count"\ntemplate = "{name}"\nsplit = "{split}"\nmax_turns = 5\ncommand_timeout_s = 3\n'
            "[grader]\ntimeout_s = 7.5\n"
        )
        (task / "instruction.md").write_text("Count them.\n")
        (task / "environment/data/in.txt").write_bytes(b"a\nb\n\xff")
        (task / "tests/grade.py").write_text("print('{}')")
        (task / "solution/solve.sh").write_text("wc -l data/in.txt > out.txt\n")
    return tmp_path / "suite"


def test_a_folder_is_a_task_suite(folder: Path) -> None:
    (folder / "suite.toml").write_text('name = "counting"\nversion = "2"\n')
    suite = resolve_suite(str(folder))
    assert isinstance(suite, TaskSuite)
    assert environment_of(suite) == "counting@2"
    assert list(suite.task_ids("train")) == ["count-lines"]
    assert list(suite.task_ids("heldout_template")) == ["count-words"]
    task = suite.task("count-lines")
    assert (task.family, task.template, task.split) == ("count", "count-lines", "train")
    assert task.instruction == "Count them."
    assert task.files == {"data/in.txt": b"a\nb\n\xff"}
    assert (task.budget.max_turns, task.budget.command_timeout_s) == (5, 3.0)
    assert [tool.name for tool in task.tools] == ["shell"]
    grader = suite.grader("count-lines")
    assert grader.files == {"grade.py": b"print('{}')"}
    assert (grader.command[-1], grader.timeout_s) == ("/tests/grade.py", 7.5)
    assert suite.oracle("count-lines") == ("wc -l data/in.txt > out.txt\n",)
    with pytest.raises(KeyError, match="nope"):
        suite.task("nope")


def test_the_agents_side_never_sees_the_graders_files(folder: Path) -> None:
    """Invariant 8."""
    task = resolve_suite(str(folder)).task("count-lines")
    assert not any("grade" in path or "solve" in path for path in task.files)


def test_a_python_object_is_a_task_suite() -> None:
    assert resolve_suite("examples.terminal:suite").name == "terminal"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no-such-folder", "neither a folder nor `module:object`"),
        ("examples.nowhere:suite", "cannot import 'examples.nowhere'"),
        ("examples.terminal:nothing", "has no 'nothing'"),
        ("json:dumps", "lacks name, task_ids, task, grader, oracle"),
    ],
)
def test_a_name_that_leads_nowhere_says_why(name: str, text: str) -> None:
    with pytest.raises(SuiteError, match=text):
        resolve_suite(name)


def break_unknown(task: Path) -> None:
    (task / "task.toml").write_text("[task]\nmax_turn = 5\n")


def break_split(task: Path) -> None:
    (task / "task.toml").write_text('[task]\nsplit = "test"\n')


def break_toml(task: Path) -> None:
    (task / "task.toml").write_text("[task\n")


def break_link(task: Path) -> None:
    (task / "environment/secret").symlink_to("/etc/passwd")


def break_template(task: Path) -> None:
    (task / "task.toml").write_text('[task]\ntemplate = "count-words"\n')


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda task: (task / "instruction.md").unlink(), "instruction.md: missing"),
        (lambda task: shutil.rmtree(task / "tests"), "missing or empty"),
        (lambda task: (task / "tests/grade.py").rename(task / "tests/other.py"), "grade.py: missing"),
        (lambda task: task.rename(task.parent / "Count Lines"), "a task id is"),
        (break_unknown, "max_turn"),
        (break_split, "heldout_instance"),
        (break_toml, "task.toml"),
        (break_link, "no links or devices"),
        (break_template, "held-out templates must be unseen"),
    ],
)
def test_a_damaged_task_names_its_file_and_the_rule(folder: Path, damage, text: str) -> None:  # type: ignore[no-untyped-def]
    damage(folder / "count-lines")
    with pytest.raises(SuiteError, match=text):
        FolderSuite(folder)


def test_an_empty_folder_is_no_suite(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="holds no task"):
        resolve_suite(str(tmp_path))


def configuration(model: Path, **changes: object) -> Config:
    return check({"policy": {"model": str(model)}, **changes})


def test_the_manifest_hash_names_every_fixed_part_of_the_behaviour(folder: Path, tmp_path: Path) -> None:
    """T11: what changes the behaviour changes the hash, what does not leaves it."""
    suite = resolve_suite(str(folder))
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    base = policy_manifest(configuration(model), suite)
    assert base.hash() == policy_manifest(configuration(model), suite).hash()
    assert base.hash() == policy_manifest(configuration(model, run={"seed": 9}, window={"max_groups": 30}), suite).hash()
    hashes = {base.hash()}
    for changes in (
        {"rollout": {"temperature": 0.7}},
        {"rollout": {"top_k": 5}},
        {"tasks": {"parser": "json_tool_call"}},
        {"policy": {"model": str(model), "max_context_tokens": 600}},
    ):
        hashes.add(policy_manifest(configuration(model, **changes), suite).hash())
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        (model / name).write_bytes((model / name).read_bytes() + b" ")
        hashes.add(policy_manifest(configuration(model), suite).hash())
    (folder / "count-lines/task.toml").write_text('[task]\nsystem_prompt = "Be brief."\n')
    hashes.add(policy_manifest(configuration(model), resolve_suite(str(folder))).hash())
    assert len(hashes) == 9


def test_the_manifest_names_what_the_model_folder_lacks(folder: Path, tmp_path: Path) -> None:
    suite = resolve_suite(str(folder))
    with pytest.raises(ConfigError, match=r"policy.model: .* is no folder"):
        policy_manifest(configuration(tmp_path / "nothing"), suite)
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing"):
        policy_manifest(configuration(tmp_path / "model"), suite)
    assert policy_manifest(configuration(tmp_path / "model", engine={"kind": "simulated"}), suite).tokenizer_sha256 == ""
