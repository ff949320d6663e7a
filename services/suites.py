"""From `tasks.suite` to a task suite: a Python object (`module:object`) or a folder of tasks."""

from __future__ import annotations

import importlib
from pathlib import Path

from schemas.task import TaskSuite
from services.task_folder import FolderSuite, SuiteError


def resolve_suite(name: str) -> TaskSuite:
    """The suite that the configuration names. Raises `SuiteError` naming the setting, the value and the fix."""
    if Path(name).is_dir():
        return FolderSuite(Path(name))
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise SuiteError(f"tasks.suite: {name!r} is neither a folder nor `module:object`, e.g. examples.terminal:suite")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise SuiteError(f"tasks.suite: cannot import {module_name!r} ({error}); is it installed, or on PYTHONPATH?") from error
    suite = getattr(module, attribute, None)
    if suite is None:
        raise SuiteError(f"tasks.suite: module {module_name!r} has no {attribute!r}")
    if not isinstance(suite, TaskSuite):
        missing = [part for part in ("name", "task_ids", "task", "grader", "oracle") if not hasattr(suite, part)]
        raise SuiteError(f"tasks.suite: {name!r} is no task suite; it lacks {', '.join(missing)}")
    return suite


def environment_of(suite: TaskSuite) -> str:
    """The environment's name on leases and episodes: the suite's name, and its version if it states one."""
    version = getattr(suite, "version", "")
    return f"{suite.name}@{version}" if version else suite.name
