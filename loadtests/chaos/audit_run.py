"""`headrace audit` on the folder of a run that has ended: the very command that a user gives, and what it must say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.chaos.settings import ROOT

_TIMEOUT_S = 1800.0
_LINES = 40


@dataclass
class Audit:
    """Exit code and output of the command; `findings` as `(check, place)`."""

    code: int
    output: str
    findings: list[tuple[str, str]] = field(default_factory=list)

    def problems(self, torn: Collection[str] = ()) -> list[str]:
        """Empty when it found nothing, or exactly checkpoints that a fault of ours has torn (their folders' names)."""
        if self.code == 0:
            return []
        ours = self.code == 1 and bool(self.findings)
        ours = ours and all(check == "checkpoints" and Path(at).name in torn for check, at in self.findings)
        return [] if ours else [f"headrace audit ends with exit code {self.code}:\n{self.output}"]


def headrace_audit(folder: Path) -> Audit:
    """Run the command. The folder must not be in use."""
    with tempfile.TemporaryDirectory(prefix="hr-audit-") as aside:
        out = Path(aside) / "audit.json"
        done = subprocess.run(
            [sys.executable, "-m", "services.cli", "audit", "--run-folder", str(folder), "--json", str(out)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        said: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {"checks": []}
    findings = [(check["name"], finding["at"]) for check in said["checks"] for finding in check["findings"]]
    return Audit(done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-_LINES:]), findings)
