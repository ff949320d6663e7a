"""`headrace up` for chaos runs, as a process of its own: the same stack with a shorter patience of its supervisor.

Differences from `headrace up`, all of them by public seams: some services run twice, some reach the server through a proxy,
some get environment variables more, one more key may look at everything, and the pause before a restart stays short although
the same child ends again and again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from loadtests.chaos.observer_key import admit
from services.child import ChildSpec, follow_lifeline
from services.config import Config, load
from services.local_plan import label_of, service_plan
from services.run_folder import RunFolder
from services.stack import printer, run_stack
from services.supervisor import Limits

PATIENCE = Limits(first_backoff_s=0.25, last_backoff_s=1.0, settled_s=5.0, drain_s=120.0)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="loadtests.chaos.stack", description=__doc__)
    top.add_argument("--config", type=Path, required=True)
    top.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    top.add_argument("--double", action="append", default=[], metavar="ROLE", help="run a second instance, named 1")
    top.add_argument("--proxy", action="append", default=[], metavar="LABEL=PORT", help="reach the server through this port")
    top.add_argument("--env", action="append", default=[], metavar="LABEL:NAME=VALUE", help="environment of one service")
    top.add_argument("--observer", default="", metavar="KEY", help="public nkey of somebody who may see and say everything")
    return top


def plan(options: argparse.Namespace, config: Config, folder: RunFolder, url: str, lifeline: int) -> list[ChildSpec]:
    """The local plan with doubles, proxies and environments. Asked for when the server runs and no service yet does."""
    if options.observer:
        admit(folder.path, config.run.name, options.observer)
    specs = service_plan(config, folder, url, lifeline)
    for role in options.double:
        first = next(spec for spec in specs if spec.label == label_of(role, "0"))
        label = label_of(role, "1")
        argv = _with_option(first.argv, "--instance", "1")
        specs.append(replace(first, label=label, argv=argv, log=folder.log(label)))
    ports = dict(pair.split("=", 1) for pair in options.proxy)
    more: dict[str, dict[str, str]] = {}
    for pair in options.env:
        label, _, setting = pair.partition(":")
        name, _, value = setting.partition("=")
        more.setdefault(label, {})[name] = value
    unknown = (ports.keys() | more.keys()) - {spec.label for spec in specs}
    if unknown:
        raise SystemExit(f"no such service: {', '.join(sorted(unknown))}; there are {', '.join(spec.label for spec in specs)}")
    return [_changed(spec, ports.get(spec.label, ""), more.get(spec.label, {})) for spec in specs]


def _changed(spec: ChildSpec, port: str, more: dict[str, str]) -> ChildSpec:
    argv = _with_option(spec.argv, "--nats", f"nats://127.0.0.1:{port}") if port else spec.argv
    return replace(spec, argv=argv, environment={**spec.environment, **more})


def _with_option(argv: Sequence[str], option: str, value: str) -> tuple[str, ...]:
    at = list(argv).index(option) + 1
    return (*argv[:at], value, *argv[at + 1 :])


def main() -> int:
    follow_lifeline()
    options = parser().parse_args()
    config = load(options.config, options.set)
    outcome = asyncio.run(run_stack(config, fresh=False, say=printer(), plan=partial(plan, options), limits=PATIENCE))
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
