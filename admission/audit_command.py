"""`headrace audit`: read a run's logs and checkpoints, hold them against each other, and print what does not agree."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from admission.audit import Check, audit
from schemas.table import Role
from services.audit import CheckpointFact, Evidence, gather
from services.config import Config
from services.runtime import connect
from services.stopped_run import served

EXIT_HOLDS, EXIT_BROKEN = 0, 1
_SHOWN = 20  # findings of one check on the terminal; the JSON has all


async def run_audit(config: Config, folder: Path | None, verify: Callable[[Path], Any], out: Path | None) -> int:
    """Audit a run that goes on or has ended; gives the exit code. `verify` reads one checkpoint folder.

    Raises `BusError` when the run cannot be reached, and `RunFolderError` when its folder is taken.
    """
    begun = time.monotonic()
    async with served(config, folder) as reachable:
        bus = await connect(reachable, Role.OBSERVER, f"audit-{os.getpid()}")
        try:
            found = await gather(bus)
        finally:
            await bus.close()
    found.checkpoints += checkpoint_facts((folder or config.run_folder()) / "checkpoints", verify)
    checks = audit(found)
    seconds = time.monotonic() - begun
    console = Console(highlight=False, markup=False, emoji=False)
    for line in report(found, checks, seconds):
        console.print(line, soft_wrap=True)
    if out is not None:
        out.write_text(json.dumps(as_json(found, checks, seconds), indent=1) + "\n", encoding="utf-8")
    return EXIT_HOLDS if all(check.holds for check in checks) else EXIT_BROKEN


def checkpoint_facts(root: Path, verify: Callable[[Path], Any]) -> list[CheckpointFact]:
    """Every checkpoint under `root`, each byte of it checked."""
    facts = []
    for folder in sorted(path for path in root.glob("step-*") if path.is_dir()):
        found = verify(folder)
        if not hasattr(found, "commit"):
            facts.append(CheckpointFact(str(folder), damage=str(found.reason)))
            continue
        record = found.commit
        facts.append(
            CheckpointFact(
                path=str(folder),
                step=record.step,
                version=record.version,
                incarnation=record.incarnation,
                digest=record.digest,
                consumed=tuple(record.consumed_group_ids),
                ledger_position=record.ledger_position,
            )
        )
    return facts


def report(found: Evidence, checks: Iterable[Check], seconds: float) -> list[str]:
    """One line for each check, its findings below it, then the dead letters and the verdict."""
    lines: list[str] = []
    broken = 0
    for check in checks:
        broken += len(check.findings)
        state = "ok" if check.holds else f"BROKEN by {len(check.findings)}"
        lines.append(f"{check.name:<32} {state:<14} {check.looked_at:>8} looked at{'; ' + check.note if check.note else ''}")
        lines += [f"    {finding}" for finding in check.findings[:_SHOWN]]
        if len(check.findings) > _SHOWN:
            lines.append(f"    and {len(check.findings) - _SHOWN} more; --json OUT lists all")
    for seq, letter in found.letters:
        lines.append(
            f"dead letter {seq}: {letter.stream} {letter.seq} ({letter.subject}), {letter.reason}: {letter.detail[:120]}"
        )
    verdict = "everything agrees" if not broken else f"{broken} finding(s)"
    lines.append(f"audit of run {found.run}: {verdict}; {sum(found.messages.values())} messages in {seconds:.1f} s")
    return lines


def as_json(found: Evidence, checks: Iterable[Check], seconds: float) -> dict[str, Any]:
    """The same for programs."""
    listed = list(checks)
    return {
        "run": found.run,
        "holds": all(check.holds for check in listed),
        "seconds": seconds,
        "messages": {str(stream): count for stream, count in found.messages.items()},
        "checks": [
            {
                "name": check.name,
                "holds": check.holds,
                "looked_at": check.looked_at,
                "note": check.note,
                "findings": [{"item": f.item, "at": f.at, "problem": f.problem} for f in check.findings],
            }
            for check in listed
        ],
        "dead_letters": [
            {"seq": seq, "stream": d.stream, "of": d.seq, "subject": d.subject, "reason": str(d.reason), "detail": d.detail}
            for seq, d in found.letters
        ],
    }
