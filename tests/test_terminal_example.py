"""The terminal example: oracles pass, wrong and tampering solutions fail, resets are exact, splits are disjoint."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.terminal import suite
from examples.terminal.demonstrations import rows
from examples.terminal.shell import run, write_files
from examples.terminal.wordings import SORT_PHRASES, WORDINGS
from rollouter.chat import ChatRenderer, observation_text
from schemas.task import SPLITS, TaskSuite

MODEL = Path("examples/terminal/model")


def grade(task_id: str, state: Path, tmp_path: Path) -> dict[str, Any]:
    """Grades with the grader's own files, in a process as bare as the verifier's."""
    spec = suite.grader(task_id)
    tests = tmp_path / "tests"
    tests.mkdir(exist_ok=True)
    write_files(tests, spec.files)
    done = subprocess.run(
        [sys.executable, *spec.command[1:3], str(tests / "grade.py"), str(state)], capture_output=True, check=True, timeout=20
    )
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert set(verdict) == {"success", "components", "violations"}
    return dict(verdict)


def reset(task_id: str, folder: Path) -> Path:
    folder.mkdir()
    write_files(folder, suite.task(task_id).files)
    return folder


def solve(task_id: str, folder: Path, commands: Sequence[str] | None = None) -> list[str]:
    """Runs the commands (the oracle's by default) and returns what the agent would have seen."""
    seen = []
    for command in suite.oracle(task_id) if commands is None else commands:
        result = run(folder, command)
        seen.append(observation_text(result.stdout, result.stderr, result.exit_code, False))
    return seen


def state_hash(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path}\0{len(files[path])}\0".encode() + files[path])
    return digest.hexdigest()


def one_of_each_template() -> list[str]:
    return sorted({suite.task(task_id).template: task_id for split in SPLITS for task_id in suite.task_ids(split)}.values())


def one_of_each_family() -> list[str]:
    return sorted({suite.task(task_id).family: task_id for task_id in suite.task_ids("heldout_template")}.values())


def test_suite_fits_the_protocol_and_the_required_counts() -> None:
    assert isinstance(suite, TaskSuite)
    templates = {split: {suite.task(i).template for i in suite.task_ids(split)} for split in SPLITS}
    assert len(templates["train"]) >= 48
    assert len(templates["heldout_template"]) >= 16
    assert len(suite.task_ids("heldout_instance")) >= 64
    assert len({suite.task(i).family for i in suite.task_ids("train")}) >= 8
    assert not templates["train"] & templates["heldout_template"]
    assert templates["heldout_instance"] <= templates["train"]
    everything = [task_id for split in SPLITS for task_id in suite.task_ids(split)]
    assert len(set(everything)) == len(everything)
    assert all(re.fullmatch(r"[a-z0-9_-]+", task_id) for task_id in everything)
    for split in SPLITS:
        assert all(suite.task(task_id).split == split for task_id in suite.task_ids(split))


def test_heldout_instances_are_new_states() -> None:
    seen = {(suite.task(i).instruction, state_hash(suite.task(i).files)) for i in suite.task_ids("train")}
    new = {(suite.task(i).instruction, state_hash(suite.task(i).files)) for i in suite.task_ids("heldout_instance")}
    assert not seen & new


def test_heldout_templates_share_no_wording_and_no_layout_pair_with_training() -> None:
    train = [t for t in suite.templates.values() if not t.heldout]
    for held in (t for t in suite.templates.values() if t.heldout):
        family = [t for t in train if t.family == held.family]
        assert held.wording not in {t.wording for t in train}
        assert (held.layout.folder, held.layout.extension) not in {(t.layout.folder, t.layout.extension) for t in family}
        assert (held.layout.folder, held.layout.separator) not in {(t.layout.folder, t.layout.separator) for t in family}


def test_every_heldout_word_occurs_in_training() -> None:
    def words(text: str) -> set[str]:
        return set(re.findall(r"[A-Za-z]+", text))

    known = {word for i in suite.task_ids("train") for word in words(suite.task(i).instruction)}
    for task_id in suite.task_ids("heldout_template"):
        assert words(suite.task(task_id).instruction) <= known, task_id
    for wordings in (*WORDINGS.values(), *SORT_PHRASES.values()):
        assert not set(wordings.train) & set(wordings.heldout)


def test_an_unknown_id_is_a_key_error_that_names_it() -> None:
    for task_id in ("rename-t99-s0001", "nothing", "../etc-t00-s0000"):
        with pytest.raises(KeyError, match=re.escape(task_id)):
            suite.task(task_id)


def test_every_template_resets_to_the_same_state_and_its_oracle_passes(tmp_path: Path) -> None:
    for task_id in one_of_each_template():
        task = suite.task(task_id)
        first = reset(task_id, tmp_path / task_id)
        again = {str(p.relative_to(first)): p.read_bytes() for p in first.rglob("*") if p.is_file()}
        assert state_hash(again) == state_hash(task.files), task_id
        assert not grade(task_id, first, tmp_path)["success"], f"{task_id} is solved before it starts"
        seen = solve(task_id, first)
        assert seen == [output or "ok" for output in suite.case(task_id).outputs], task_id
        verdict = grade(task_id, first, tmp_path)
        assert verdict["success"] and not verdict["violations"], (task_id, verdict)
        assert 1 <= len(seen) <= 3 < task.budget.max_turns


def test_leaving_out_the_last_command_fails(tmp_path: Path) -> None:
    for task_id in one_of_each_family():
        state = reset(task_id, tmp_path / task_id)
        solve(task_id, state, suite.oracle(task_id)[:-1])
        assert not grade(task_id, state, tmp_path)["success"], task_id


def test_collateral_damage_is_named_and_is_no_success(tmp_path: Path) -> None:
    for task_id in one_of_each_family():
        kept = min(set(suite.task(task_id).files) - set(suite.case(task_id).goal))
        state = reset(task_id, tmp_path / f"{task_id}-changed")
        solve(task_id, state, [*suite.oracle(task_id), f"echo more >> {kept}"])
        verdict = grade(task_id, state, tmp_path)
        assert not verdict["success"] and verdict["violations"] == [f"changed:{kept}"]
        state = reset(task_id, tmp_path / f"{task_id}-deleted")
        solve(task_id, state, [*suite.oracle(task_id), f"rm {kept}"])
        verdict = grade(task_id, state, tmp_path)
        assert not verdict["success"] and verdict["violations"] == [f"deleted:{kept}"]


def test_one_scratch_file_is_allowed_and_more_are_not(tmp_path: Path) -> None:
    task_id = suite.task_ids("train")[0]
    state = reset(task_id, tmp_path / "state")
    solve(task_id, state)
    (state / "scratch").write_text("x")
    assert grade(task_id, state, tmp_path)["success"]
    (state / "another").write_text("x")
    assert grade(task_id, state, tmp_path)["violations"] == ["unexpected:another", "unexpected:scratch"]


def test_hostile_states_fail_and_never_hang(tmp_path: Path) -> None:
    task_id = next(i for i in suite.task_ids("train") if i.startswith("replace"))
    target = next(iter(suite.case(task_id).goal))
    outside = tmp_path / "answer"
    outside.write_text(str(suite.case(task_id).goal[target]))

    def link(path: Path) -> None:
        path.symlink_to(outside)

    def pipe(path: Path) -> None:
        os.mkfifo(path)

    def huge(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(1 << 36)

    for name, plant in (("link", link), ("pipe", pipe), ("folder", Path.mkdir), ("huge", huge)):
        state = reset(task_id, tmp_path / name)
        (state / target).unlink()
        plant(state / target)
        assert not grade(task_id, state, tmp_path)["success"], name
    state = reset(task_id, tmp_path / "parent")
    (tmp_path / "moved").mkdir()
    folder = state / target.split("/")[0]
    folder.rename(tmp_path / "moved" / "folder")
    folder.symlink_to(tmp_path / "moved" / "folder")
    assert not grade(task_id, state, tmp_path)["success"]


def test_demonstrations_are_what_the_agent_loop_would_feed() -> None:
    renderer = ChatRenderer(MODEL)
    first = list(rows(MODEL, count=40, seed=7, wrong_share=0.5))
    again = list(rows(MODEL, count=40, seed=7, wrong_share=0.5))
    for row, twin in zip(first, again, strict=True):
        assert np.array_equal(row.ids, twin.ids) and np.array_equal(row.mask, twin.mask)
        assert row.ids.dtype == np.int32 and row.mask.dtype == np.bool_ and row.ids.shape == row.mask.shape
        assert row.mask.any() and not row.mask[0] and len(row.ids) <= 1024
        assert row.mask[-1] and int(row.ids[-1]) in renderer.stop_token_ids


def test_demonstrations_show_no_heldout_instruction() -> None:
    renderer = ChatRenderer(MODEL)
    heldout = [re.escape(t.wording) for t in suite.templates.values() if t.heldout]
    patterns = [re.compile(re.sub(r"\\\{\w+\\\}", r"\\S+", wording)) for wording in heldout]
    for row in rows(MODEL, count=300, seed=11, copy_share=0.0):
        text = renderer.decode(row.ids)
        assert not any(pattern.search(text) for pattern in patterns), text
