"""The arguments of `headrace record`, `replay` and `explain`."""

from __future__ import annotations

from argparse import ArgumentParser

_FOLDER = "folder of a run that `headrace up` started, ended ones included"


def add_record(command: ArgumentParser) -> None:
    """`headrace record OUT`."""
    command.add_argument("out", metavar="OUT", help="file to write; must not exist")
    command.add_argument("--run-folder", metavar="DIR", help=_FOLDER)
    command.add_argument("--without-bodies", action="store_true", help="leave out token ids, log-probabilities and outputs")
    command.add_argument("--follow", action="store_true", help="go on recording a running run until Ctrl-C")
    command.add_argument(
        "--steps", default="", metavar="A:B", help="only the groups that these steps trained on or passed over"
    )
    command.add_argument("--since", default="", metavar="TIME", help="only from this time on, e.g. 2026-05-01T12:30:00")
    command.add_argument("--until", default="", metavar="TIME", help="only up to this time")
    command.add_argument(
        "--seq", action="append", default=[], metavar="STREAM=A:B", help="only what belongs to these messages; repeatable"
    )


def add_replay(command: ArgumentParser) -> None:
    """`headrace replay FILE`."""
    command.add_argument("file", metavar="FILE", help="what `headrace record` wrote")
    command.add_argument("--verify", action="store_true", help="decide everything again; exit code 1 at a difference")
    command.add_argument("--sweep", metavar="SECTION.FIELD=A,B,C", help="what would have happened under each value, as a table")
    command.add_argument("--plot", metavar="OUT.svg", help="draw the sweep here as well")
    command.add_argument("--json", metavar="OUT", help="write the result here as well")
    command.add_argument("--into", metavar="URL", help="publish the recording to this server, in the recorded rhythm")
    command.add_argument("--speed", default="1", metavar="N", help="so many times faster, or `max`")
    command.add_argument(
        "--live",
        default="bank,admission",
        metavar="A,B",
        help="services that run live on that server: their output is left out",
    )
    command.add_argument(
        "--break", action="append", default=[], dest="breaks", metavar="KEY=VALUE", help="stop at group=, step= or reason="
    )
    command.add_argument("--once", action="store_true", help="end at the first break instead of waiting for Enter")


def add_explain(command: ArgumentParser) -> None:
    """`headrace explain WHAT NAME`."""
    command.add_argument(
        "what",
        choices=("group", "trajectory", "token", "step"),
        metavar="WHAT",
        help="what to explain: group, trajectory, token or step",
    )
    command.add_argument("name", metavar="NAME", help="g00000042, g00000042/3, g00000042/3/57 (position), or 7")
    command.add_argument("--recording", metavar="FILE", help="look here, and not at a run")
    command.add_argument("--run-folder", metavar="DIR", help=_FOLDER)
    command.add_argument("--json", metavar="OUT", help="write it here as JSON as well")
    command.add_argument("--html", metavar="OUT", help="write it here as a page with a timeline as well")
