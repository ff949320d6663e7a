"""Does a test notice each deliberate bug? `python -m tests.faults.mutants [NAME ...]`; exit code 0 when every one is caught.

Each mutation is made in a copy of the tree below a temporary folder, and its one test runs there. First the same tests run in
an unchanged copy: one that fails without a bug proves nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.faults.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 600.0
_PASSED, _FAILED = 0, 1
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "runs", "shared", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "*.egg-info"
)


def copied(into: Path) -> Path:
    """The tree as it is now."""
    tree = into / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=_LEFT_OUT)
    return tree


def outcome(tree: Path, test: str) -> tuple[int, str]:
    """pytest's exit code for one test in a copy, and the end of what it said."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line", "-m", "", test]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return _FAILED, f"did not end within {_TIMEOUT_S:g} s"
    return done.returncode, "\n".join(done.stdout.splitlines()[-8:])


def trial(mutation: Mutation) -> bool:
    """Make one mutation in a fresh copy and run its test; true when the test fails."""
    with tempfile.TemporaryDirectory(prefix="hr-mutant-") as folder:
        tree = copied(Path(folder))
        mutation.make(tree)
        code, said = outcome(tree, mutation.test)
    caught = code == _FAILED
    print(f"{'caught  ' if caught else 'SURVIVED'}  {mutation.name}  ({mutation.edit.file}; {mutation.test})", flush=True)
    if code not in (_PASSED, _FAILED):
        print(f"          pytest ended with exit code {code}, which says nothing of the bug:\n{said}", flush=True)
    return caught


def sound(chosen: list[Mutation]) -> bool:
    """Do the tests pass without any mutation?"""
    with tempfile.TemporaryDirectory(prefix="hr-mutant-") as folder:
        tree = copied(Path(folder))
        fine = True
        for test in sorted({mutation.test for mutation in chosen}):
            code, said = outcome(tree, test)
            if code != _PASSED:
                print(f"UNSOUND   {test} fails without a bug:\n{said}", flush=True)
                fine = False
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.faults.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without a bug first")
    options = parser.parse_args()
    unknown = set(options.names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"no such bug: {sorted(unknown)}; there are {[mutation.name for mutation in MUTATIONS]}")
    chosen = [mutation for mutation in MUTATIONS if not options.names or mutation.name in options.names]
    unfit = [mutation.name for mutation in chosen if not mutation.edit.fits(ROOT)]
    if unfit:
        parser.error(f"their texts are not exactly once in their files: {unfit}")
    if not options.unchecked and not sound(chosen):
        return 2
    survived = [mutation.name for mutation in chosen if not trial(mutation)]
    print(
        f"{len(chosen) - len(survived)} of {len(chosen)} deliberate bugs were caught"
        + (f"; not: {survived}" if survived else "")
    )
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
