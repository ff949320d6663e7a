"""The task suite that the configuration names, for the agent's side; the verifier resolves the same one for its graders."""

from __future__ import annotations

from services.suites import environment_of, resolve_suite
from services.task_folder import FolderSuite, SuiteError

__all__ = ["FolderSuite", "SuiteError", "environment_of", "resolve_suite"]
