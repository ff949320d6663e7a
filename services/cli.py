"""The `headrace` command. Mistakes of the user are one clear line on standard error and exit code 2, never a traceback."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from schemas.table import Role
from services.child import follow_lifeline
from services.config import Config, ConfigError, load, to_toml
from services.identity import run_keys, seed_path
from services.items import BusError
from services.logs import start_logging
from services.nats_server import ServerError
from services.recording import RecordingError
from services.registry import SERVE, load_serve
from services.replay_arguments import explain_arguments, record_arguments, replay_arguments
from services.run_folder import RunFolderError, is_in_use, url_file

EXIT_OK, EXIT_FAILED, EXIT_USER_ERROR, EXIT_HARD = 0, 1, 2, 130
Command = Callable[[argparse.Namespace], int]


class UsageError(ValueError):
    """A command line that cannot be carried out; the text says what to give instead."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command and give its exit code."""
    options = parser().parse_args(arguments)
    command: Command = options.command
    try:
        return command(options)
    except (ConfigError, UsageError, BusError, ServerError, RunFolderError, RecordingError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BaseExceptionGroup as group:
        _, rest = group.split(BusError)
        if rest is not None:
            raise
        print(f"headrace: {_first(group)}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_HARD


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(prog="headrace", description="Asynchronous streaming RL for language-model agents.")
    top.add_argument("--version", action="version", version=f"headrace {_version()}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    up = _command(commands, "up", _up, "run everything on this machine")
    up.add_argument("--max-steps", type=int, metavar="N", help="stop after N batches (run.max_steps); 0: until stopped")
    up.add_argument("--fresh", action="store_true", help="move an older run folder of this name aside and begin anew")
    up.add_argument("--nats-nodes", type=int, metavar="N", help="start a cluster of N servers: 1, 3 or 5 (nats.nodes)")

    run = _command(commands, "run", _run, "run one service")
    run.add_argument("service", choices=[str(role) for role in SERVE], metavar="SERVICE", help=", ".join(SERVE))
    run.add_argument("--instance", default="0", metavar="NAME", help="name of this replica; for an engine, its engine name")
    run.add_argument("--health-port", type=int, default=0, metavar="PORT", help="serve /healthz and /status here")

    init = _command(commands, "init", _init, "make keys and server configuration for a run")
    init.add_argument("--run", metavar="NAME", help="name of the run (run.name)")
    init.add_argument("--out", metavar="DIR", required=True, help="folder to make; must not exist")
    init.add_argument("--nodes", type=int, default=1, choices=(1, 3, 5), metavar="N", help="servers: 1, or a cluster of 3 or 5")
    init.add_argument("--hosts", metavar="A,B,C", help="where services and the other nodes reach each node; default nats-1,...")
    init.add_argument("--tls", action="store_true", help="make a CA and a server certificate; clients must then use TLS")
    init.add_argument(
        "--at", metavar="PATH", help="where the server finds DIR, in a container for example; default: where it is"
    )
    init.add_argument("--store", metavar="PATH", help="where each server keeps its data; default: a folder below DIR")

    _command(commands, "provision", _provision, "create a run's streams under the admin's key, or raise their limits")

    _command(commands, "check", _check, "print the resolved configuration, or say what is wrong with it")

    status = _command(commands, "status", _status, "show services, what they wait for, engines and group counts")
    status.add_argument("--run-folder", metavar="DIR", help="folder of a run that `headrace up` started")

    dead = _command(commands, "dead-letters", _dead_letters, "show messages that could not be used, or give one back")
    dead.add_argument("action", choices=("list", "show", "redrive"), help="list all, show one, or publish one again")
    dead.add_argument("seq", type=int, nargs="?", metavar="SEQ", help="the letter's number in the list")
    dead.add_argument("--run-folder", metavar="DIR", help="folder of a run that `headrace up` started")

    audit = _command(commands, "audit", _audit, "check a run's streams and checkpoints against each other")
    audit.add_argument("--run-folder", metavar="DIR", help="folder of a run that `headrace up` started, ended ones included")
    audit.add_argument("--json", metavar="OUT", help="write the findings here as well")

    report = _command(
        commands, "report", _report, "say what was not trained on and why, and how the trained differ from the leased"
    )
    report.add_argument("--run-folder", metavar="DIR", help="folder of a run that `headrace up` started, ended ones included")
    report.add_argument(
        "--json", metavar="OUT", default="", help="write the whole report here as well; -: to the terminal, alone"
    )

    record_arguments(_command(commands, "record", _record, "write a run's streams to one portable file"))
    replay_arguments(_command(commands, "replay", _replay, "decide a recording again, as it was or with other settings"))
    explain_arguments(_command(commands, "explain", _explain, "show the life of a group, trajectory, step or token"))

    watch = _command(commands, "watch", _watch, "show the progress of a run on an existing NATS, and write its metrics")
    watch.add_argument("--run-folder", metavar="DIR", help="folder of a run that `headrace up` started")

    evaluate = _command(commands, "eval", _eval, "evaluate the starting policy on both held-out splits")
    evaluate.add_argument("--attempts", type=int, metavar="N", help="attempts on each split")
    evaluate.add_argument("--json", metavar="OUT", help="write the result here as well")

    _add_patch(commands)

    _command(commands, "sft", _sft, "train the example's warm start on demonstrations")
    return top


def _add_patch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "make, apply or read a weight patch between two checkpoint files"
    patch = commands.add_parser("patch", help=text, description=text[0].upper() + text[1:] + ".")
    actions = patch.add_subparsers(required=True, metavar="ACTION")
    diff = actions.add_parser("diff", help="write the patch that makes NEW of OLD")
    diff.add_argument("old", metavar="OLD", help="checkpoint (safetensors)")
    diff.add_argument("new", metavar="NEW", help="checkpoint (safetensors)")
    diff.add_argument("--level", type=int, default=1, choices=(1, 2), help="2: a quarter smaller, half as slow again")
    apply = actions.add_parser("apply", help="write the checkpoint that a patch makes of OLD")
    apply.add_argument("old", metavar="OLD", help="checkpoint (safetensors)")
    apply.add_argument("patch", metavar="PATCH")
    inspect = actions.add_parser("inspect", help="say what a patch changes, and check its sums")
    inspect.add_argument("patch", metavar="PATCH")
    for action in (diff, apply):
        action.add_argument(
            "-o", "--out", required=True, metavar="OUT", help="file to write; whole and verified, or not at all"
        )
        action.add_argument("--workers", type=int, default=1, metavar="N", help="threads")
    for name, action in (("diff", diff), ("apply", apply), ("inspect", inspect)):
        action.add_argument("--json", action="store_true", help="print the report as JSON")
        action.set_defaults(command=_patch, action=name)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("--config", metavar="FILE", help="configuration (TOML)")
    command.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="override one setting; repeatable"
    )
    command.add_argument("--nats", metavar="URL", help="NATS server(s), comma-separated (nats.url)")
    command.set_defaults(command=run)
    return command


def _config(options: argparse.Namespace, *more: str) -> Config:
    overrides = list(options.set) + list(more)
    if options.nats:
        overrides.append(f'nats.url="{options.nats}"')
    return load(options.config, overrides)


def _up(options: argparse.Namespace) -> int:
    from services.stack import up

    more = [] if options.max_steps is None else [f"run.max_steps={options.max_steps}"]
    more += [] if options.nats_nodes is None else [f"nats.nodes={options.nats_nodes}"]
    return asyncio.run(up(_config(options, *more), fresh=options.fresh))


def _run(options: argparse.Namespace) -> int:
    follow_lifeline()
    config = _config(options)
    if not config.nats.url:
        raise UsageError("no server given; pass --nats URL or set nats.url (`headrace up` starts an embedded one)")
    from services.runtime import leave, run_service

    role = Role(options.service)
    leave(run_service(role, options.instance, config, load_serve(role), health_port=options.health_port))


def _init(options: argparse.Namespace) -> int:
    from services.init_folder import Layout, init

    config = _config(options, *([f'run.name="{options.run}"'] if options.run else []))
    layout = Layout(
        out=Path(options.out),
        nodes=options.nodes,
        hosts=tuple(options.hosts.split(",")) if options.hosts else (),
        tls=options.tls,
        at=options.at or "",
        store=options.store or "",
    )
    for line in init(config, layout):
        print(line)
    return EXIT_OK


def _provision(options: argparse.Namespace) -> int:
    from services.provision_run import provision_run

    _quiet_logs()
    config = _config(options)
    for line in asyncio.run(provision_run(config)):
        print(f"more room: {line}")
    print(f"the streams of run {config.run.name} are there, as the table says")
    return EXIT_OK


def _check(options: argparse.Namespace) -> int:
    print(to_toml(_config(options)), end="")
    return EXIT_OK


def _status(options: argparse.Namespace) -> int:
    from services.status import show

    _quiet_logs()
    config = _existing(options)
    return asyncio.run(show(config, _folder(options)))


def _dead_letters(options: argparse.Namespace) -> int:
    from services import dead_letters_command as letters

    _quiet_logs()
    config = _existing(options)
    if options.action == "list":
        return asyncio.run(letters.show_list(config, _folder(options)))
    if options.seq is None:
        raise UsageError(f"`headrace dead-letters {options.action}` needs the letter's SEQ, as `dead-letters list` shows it")
    one = letters.show_one if options.action == "show" else letters.redrive
    return asyncio.run(one(config, _folder(options), options.seq))


def _audit(options: argparse.Namespace) -> int:
    _quiet_logs()
    config = _existing(options)
    verify = importlib.import_module("trainer.checkpoint").verify
    audit: Callable[..., Coroutine[None, None, int]] = importlib.import_module("admission.audit_command").run_audit
    return asyncio.run(audit(config, _folder(options), verify, Path(options.json) if options.json else None))


def _report(options: argparse.Namespace) -> int:
    _quiet_logs()
    config = _existing(options)
    run: Callable[..., Coroutine[None, None, int]] = importlib.import_module("admission.report_command").run_report
    return asyncio.run(run(config, _folder(options), options.json))


def _record(options: argparse.Namespace) -> int:
    _quiet_logs()
    config = _existing(options)
    command = importlib.import_module("admission.record_command")
    asked = command.asked_for(options.seq, options.since, options.until, options.from_step, options.to_step)
    run: Coroutine[None, None, int] = command.run_record(
        config, _folder(options), Path(options.out), asked, bodies=options.bodies
    )
    return asyncio.run(run)


def _replay(options: argparse.Namespace) -> int:
    _quiet_logs()
    run: Command = importlib.import_module("admission.replay_command").run_replay
    return run(options)


def _explain(options: argparse.Namespace) -> int:
    _quiet_logs()
    config = None if options.recording else _existing(options)
    run: Callable[..., int] = importlib.import_module("admission.explain_command").run_explain
    return run(options, config, _folder(options))


def _watch(options: argparse.Namespace) -> int:
    from services.watch import watch

    _quiet_logs()
    config = _existing(options)
    # in its own folder `headrace up` writes
    return asyncio.run(watch(config, record=not (options.run_folder or is_in_use(config.run_folder()))))


def _eval(options: argparse.Namespace) -> int:
    from services.evaluation import evaluate

    return asyncio.run(evaluate(_config(options), options.attempts, Path(options.json) if options.json else None))


def _patch(options: argparse.Namespace) -> int:
    from param_sync.patch.errors import PatchError
    from services import checkpoint_patch as files

    try:
        if options.action == "diff":
            paths = Path(options.old), Path(options.new), Path(options.out)
            report = files.diff(*paths, level=options.level, workers=options.workers)
        elif options.action == "apply":
            report = files.apply(Path(options.old), Path(options.patch), Path(options.out), workers=options.workers)
        else:
            report = files.describe(Path(options.patch))
    except (files.CheckpointError, PatchError) as error:
        raise UsageError(str(error)) from error
    if options.json:
        print(json.dumps(report, indent=2))
    elif options.action == "apply":
        print(f"{report['out']}: {report['tensors']} tensors, {report['changed']} of them changed, state {report['digest']}")
    else:
        print("\n".join(files.lines(report)))
    return EXIT_OK


def _sft(options: argparse.Namespace) -> int:
    if not options.config:
        raise UsageError("`headrace sft` needs --config FILE with an [sft] table")
    run: Callable[[list[str]], int] = importlib.import_module("trainer.sft").main
    return run(["--config", options.config])


def _folder(options: argparse.Namespace) -> Path | None:
    """The run folder that was given or found."""
    return Path(options.run_folder) if options.run_folder else None


def _existing(options: argparse.Namespace) -> Config:
    """The configuration of a run that goes on elsewhere: from its folder, or from --config with --nats."""
    if not options.run_folder:
        config = _config(options)
        if config.nats.url:
            return config
        options.run_folder = str(config.run_folder())
    folder = Path(options.run_folder)
    options.config = options.config or str(folder / "config.toml")
    config = _config(options)
    if config.nats.url:
        return config
    if not url_file(folder).is_file():
        raise UsageError(f"no run is known at {folder}; pass --run-folder DIR or --nats URL")
    known = [f'nats.url="{url_file(folder).read_text(encoding="ascii").strip()}"']
    key = seed_path(run_keys(folder), Role.OBSERVER)
    return _config(options, *known, *([f'nats.nkey_seed_file="{key}"'] if key.is_file() else []))


def _quiet_logs() -> None:
    """What a person asks for goes to the terminal; of the rest, errors alone."""
    start_logging("cli", "0", "error")


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
