"""What the README shows works: its environment is a suite whose oracle its own grader accepts, and its commands parse."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.task import SPLITS, TaskSuite
from services.cli import parser

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def suite() -> TaskSuite:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code
    names: dict[str, Any] = {}
    exec(compile(code[1], "README.md", "exec"), names)
    assert isinstance(names["suite"], TaskSuite)
    return names["suite"]


def graded(suite: TaskSuite, task_id: str, commands: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """The grader's report on the state that these commands leave, with its two folders at another place."""
    state, tests = folder / "state", folder / "tests"
    state.mkdir()
    tests.mkdir()
    for name, content in suite.task(task_id).files.items():
        (state / name).write_bytes(content)
    for command in commands:
        subprocess.run(command, shell=True, cwd=state, check=True, timeout=10)
    for name, content in suite.grader(task_id).files.items():
        moved = content.replace(b"/state/", f"{state}/".encode()).replace(b"/tests/", f"{tests}/".encode())
        (tests / name).write_bytes(moved)
    run = [sys.executable, str(tests / "grade.py")]
    return dict(json.loads(subprocess.run(run, capture_output=True, check=True, timeout=10).stdout))


def test_the_suites_splits_are_disjoint_and_its_tasks_say_which_they_are_of(suite: TaskSuite) -> None:
    ids = {split: suite.task_ids(split) for split in SPLITS}
    assert len({task_id for split in SPLITS for task_id in ids[split]}) == sum(map(len, ids.values())) == 120
    for split in SPLITS:
        assert {suite.task(task_id).split for task_id in ids[split]} == {split}


@pytest.mark.parametrize("split", SPLITS)
def test_the_suites_oracle_is_right_and_doing_nothing_is_wrong(suite: TaskSuite, split: Any, tmp_path: Path) -> None:
    task_id = suite.task_ids(split)[7]
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    assert graded(suite, task_id, tuple(suite.oracle(task_id)), tmp_path / "right")["success"] is True
    assert graded(suite, task_id, (), tmp_path / "wrong")["success"] is False


def test_the_commands_parse() -> None:
    commands = re.findall(r"^    (?:PYTHONPATH=\. )?(?:\.venv/bin/)?headrace (.*?)(?:\s+#.*)?$", README, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        parser().parse_args(shlex.split(command))
