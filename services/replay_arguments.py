"""The command lines of `headrace record`, `replay`, `explain` and `quarantine`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path

from services.config import ConfigError


def write_out(option: str, path: str, text: str) -> None:
    """Write what a command was asked to write. Raises `ConfigError` naming the option where that cannot be."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: cannot be written: {error.strerror}; give a file in a folder that is there"
        ) from error


def nearest(word: str, known: Sequence[str]) -> str:
    """What to write instead of a word that is none of those that are known."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"none of {', '.join(known)}" + (f"; did you mean {found[0]}?" if found else "")


def record_arguments(command: argparse.ArgumentParser) -> None:
    """`headrace record`."""
    command.add_argument("out", metavar="FILE", help="the recording to write, e.g. run.hrrec")
    command.add_argument("--run-folder", metavar="DIR", help="folder of a run that `headrace up` started, ended ones included")
    command.add_argument("--bodies", action="store_true", help="keep tokens, log-probabilities, observations and states")
    command.add_argument(
        "--seq", action="append", default=[], metavar="STREAM=A-B", help="only these sequences of a stream; repeatable"
    )
    command.add_argument("--since", metavar="TIME", help="turns and episodes from this time on, e.g. 2026-01-31T12:00:00")
    command.add_argument("--until", metavar="TIME", help="everything up to this time")
    command.add_argument("--from-step", type=int, metavar="N", help="turns and episodes of the groups from this step on")
    command.add_argument("--to-step", type=int, metavar="N", help="everything up to this step")


def replay_arguments(command: argparse.ArgumentParser) -> None:
    """`headrace replay`. `--set` of every command has here the settings to try."""
    command.add_argument("file", metavar="FILE", help="a recording that `headrace record` wrote")
    command.add_argument("--verify", action="store_true", help="decide everything again, and show the first difference")
    command.add_argument(
        "--sweep", action="append", default=[], metavar="SETTING=A,B,C", help="try several values, in a table; repeatable"
    )
    command.add_argument("--svg", metavar="OUT", help="plot a sweep here; default: FILE with .svg")
    command.add_argument("--json", metavar="OUT", help="write the result here as well")
    command.add_argument("--into", metavar="URL", help="publish the recording again on this NATS, with its original timing")
    command.add_argument("--as-run", metavar="NAME", help="run name to publish under; default: the recorded one")
    command.add_argument("--streams", metavar="A,B,C", help="publish these streams alone, e.g. TASKS,READY,TRAIN; default: all")
    command.add_argument("--speed", type=float, default=1.0, metavar="N", help="so many times faster; 0: as fast as it goes")
    command.add_argument(
        "--break",
        dest="breaks",
        action="append",
        default=[],
        metavar="WHAT=VALUE",
        help="stop there: group=g00000042, step=7, reason=stale, stream=LEDGER; repeatable",
    )
    command.add_argument("--once", action="store_true", help="end at the first breakpoint instead of waiting for Enter")


def explain_arguments(command: argparse.ArgumentParser) -> None:
    """`headrace explain`."""
    command.add_argument("what", metavar="WHAT", help="group, trajectory, step, or token")
    command.add_argument(
        "item", nargs="+", metavar="ITEM", help="g00000042; g00000042/3; 7; g00000042/3@17 (position 17 of its tokens)"
    )
    command.add_argument("--recording", metavar="FILE", help="look in this recording instead of a run")
    command.add_argument("--run-folder", metavar="DIR", help="folder of a run that `headrace up` started, ended ones included")
    command.add_argument("--json", metavar="OUT", help="write it here as JSON; -: to the terminal, instead of the text")
    command.add_argument("--html", metavar="OUT", help="write one page with a timeline here as well")


def quarantine_arguments(command: argparse.ArgumentParser) -> None:
    """`headrace quarantine`."""
    command.add_argument("action", choices=("list", "show"), help="list all, or show one with its trajectories")
    command.add_argument("group", nargs="?", metavar="GROUP", help="the group to show, e.g. g00000042")
    command.add_argument("--reason", metavar="REASON", help="list those of this reason alone, e.g. stale")
    command.add_argument("--family", metavar="FAMILY", help="list those of this task family alone")
    command.add_argument("--recording", metavar="FILE", help="look in this recording instead of a run")
    command.add_argument("--run-folder", metavar="DIR", help="folder of a run that `headrace up` started, ended ones included")
    command.add_argument("--json", metavar="OUT", help="write the result here as well")
