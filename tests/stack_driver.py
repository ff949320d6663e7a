"""Runs `run_stack` with a stand-in for the services, as its own process, so that tests can signal and kill it.

Run as `python tests/stack_driver.py FOLDER STEPS PAUSE_S [fresh] [SECTION.FIELD=VALUE ...]`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from services.child import LIFELINE, ChildSpec
from services.config import Config, load
from services.local_plan import label_of
from services.run_folder import RunFolder
from services.stack import printer, run_stack

STANDIN = Path(__file__).with_name("standin_run.py")


def plan(config: Config, folder: RunFolder, url: str, lifeline: int) -> list[ChildSpec]:
    """One child that stands in for every service."""
    return [
        ChildSpec(
            label=label_of("trainer", "0"),
            argv=(sys.executable, str(STANDIN), str(folder.path / "config.toml"), url, sys.argv[3]),
            log=folder.log("trainer-0"),
            environment={LIFELINE: str(lifeline), "PYTHONPATH": str(STANDIN.parent.parent)},
            inherit=(lifeline,),
        )
    ]


if __name__ == "__main__":
    config = load(
        None,
        [
            "run.name=demo",
            f'run.folder="{sys.argv[1]}"',
            f"run.max_steps={sys.argv[2]}",
            "engine.kind=simulated",
            f"nats.store_bytes={2**28}",
            "nats.embedded_keys=false",  # one process writes what many identities write otherwise
            f'policy.model="{STANDIN.parent.parent / "examples/terminal/model"}"',
            *(word for word in sys.argv[4:] if "=" in word),
        ],
    )
    sys.exit(asyncio.run(run_stack(config, fresh="fresh" in sys.argv[4:], say=printer(), plan=plan)).code)
