"""The terminal suite: templates, splits, and tasks as pure functions of their ids.

A task id is `family-tNN-sNNNN`: a template of a family, and the seed of an instance. Training and held-out templates share
neither a wording nor a layout. Held-out instances are training templates with seeds that the training pool never uses.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from schemas.task import GraderSpec, Split, Task, TaskBudget, ToolSpec

from .families import FAMILIES, Case
from .layouts import Layout, family_layouts
from .wordings import WORDINGS

TRAIN_TEMPLATES = 12  # of each family
HELDOUT_TEMPLATES = 2  # of each family
TRAIN_SEEDS = range(40)  # of each training template
HELDOUT_INSTANCE_SEEDS = range(9000, 9001)
HELDOUT_TEMPLATE_SEEDS = range(9000, 9006)
EXTRA_FILES_ALLOWED = 1  # a scratch file is untidy, several are collateral damage

SHELL = ToolSpec(
    name="shell",
    description="Run a shell command in the task's folder.",
    parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)
BUDGET = TaskBudget(max_turns=8, max_action_tokens=48, command_timeout_s=5.0)
GRADE = Path(__file__).parent / "grading" / "grade.py"
TASK_ID = re.compile(r"(?P<family>[a-z]+)-t(?P<template>\d\d)-s(?P<seed>\d{4})")


@dataclass(frozen=True, kw_only=True)
class Template:
    family: str
    name: str  # unique in the suite, such as `rename-t03`
    wording: str
    layout: Layout
    heldout: bool

    def case(self, seed: int) -> Case:
        return FAMILIES[self.family](self.layout, random.Random(f"{self.name}-s{seed:04d}"), self.heldout)


def _templates() -> dict[str, Template]:
    templates: dict[str, Template] = {}
    for family in FAMILIES:
        wordings = WORDINGS[family]
        train, heldout = family_layouts(family, TRAIN_TEMPLATES, HELDOUT_TEMPLATES)
        pairs = [(wordings.train[k % len(wordings.train)], layout, False) for k, layout in enumerate(train)]
        pairs += [(wordings.heldout[k], layout, True) for k, layout in enumerate(heldout)]
        for k, (wording, layout, held) in enumerate(pairs):
            name = f"{family}-t{k:02d}"
            templates[name] = Template(family=family, name=name, wording=wording, layout=layout, heldout=held)
    return templates


class TerminalSuite:
    """See `schemas.task.TaskSuite`."""

    name = "terminal"

    def __init__(self) -> None:
        self.templates = _templates()

    def task_ids(self, split: Split) -> Sequence[str]:
        """Seeds outermost and families innermost, so that any first part of a split is a balanced one."""
        heldout = split == "heldout_template"
        seeds = {
            "train": TRAIN_SEEDS,
            "heldout_instance": HELDOUT_INSTANCE_SEEDS,
            "heldout_template": HELDOUT_TEMPLATE_SEEDS,
        }[split]
        names = sorted(
            (t.name for t in self.templates.values() if t.heldout == heldout), key=lambda name: name.split("-")[::-1]
        )
        return [f"{name}-s{seed:04d}" for seed in seeds for name in names]

    def task(self, task_id: str) -> Task:
        template, seed = self._locate(task_id)
        case = self.case(task_id)
        split: Split = "heldout_template" if template.heldout else "train" if seed in TRAIN_SEEDS else "heldout_instance"
        return Task(
            task_id=task_id,
            family=template.family,
            template=template.name,
            split=split,
            instruction=template.wording.format_map(dict(case.slots)),
            files={path: content.encode() for path, content in case.files.items()},
            tools=(SHELL,),
            budget=BUDGET,
        )

    def grader(self, task_id: str) -> GraderSpec:
        case = self.case(task_id)
        expected = {
            "goal": case.goal,
            "keep": {path: content for path, content in case.files.items() if path not in case.goal},
            "extra_allowed": EXTRA_FILES_ALLOWED,
        }
        files = {"grade.py": GRADE.read_bytes(), "expected.json": json.dumps(expected, sort_keys=True).encode()}
        return GraderSpec(files=files, command=("python3", "-I", "-S", "/tests/grade.py"))

    def oracle(self, task_id: str) -> Sequence[str]:
        return self.case(task_id).oracle

    def case(self, task_id: str) -> Case:
        """The whole truth about one task, for graders, demonstrations and tests."""
        template, seed = self._locate(task_id)
        return _case(template, seed)

    def _locate(self, task_id: str) -> tuple[Template, int]:
        match = TASK_ID.fullmatch(task_id)
        template = self.templates.get(f"{match['family']}-t{match['template']}") if match else None
        if match is None or template is None:
            raise KeyError(f"unknown terminal task {task_id!r}: ids look like 'rename-t03-s0017'")
        return template, int(match["seed"])


@lru_cache(maxsize=4096)
def _case(template: Template, seed: int) -> Case:
    return template.case(seed)


suite = TerminalSuite()
