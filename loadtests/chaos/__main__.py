"""`python -m loadtests.chaos`: one run under faults from a seed; exit code 0 when every promise was kept."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import cast, get_args

from loadtests.chaos.campaign import Campaign, carry_out
from loadtests.chaos.points import POINTS
from loadtests.chaos.report import rendered
from loadtests.chaos.schedule import KINDS, Kind
from services.logs import start_logging


def main() -> int:
    parser = argparse.ArgumentParser(prog="loadtests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=35.0, help="how long faults are injected")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="where the result is written")
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"), help="the run folder is made below it")
    parser.add_argument("--every", type=float, default=3.5, metavar="S", help="least seconds between two faults")
    parser.add_argument("--at-once", type=int, default=3, metavar="N", help="most new faults at work at a time")
    parser.add_argument(
        "--least", type=int, default=0, metavar="N", help="so many shall strike; alone, unless they fall behind"
    )
    parser.add_argument("--most", type=int, default=10**9, metavar="N", help="stop after so many faults")
    parser.add_argument("--kinds", nargs="+", choices=get_args(Kind), metavar="KIND", help=f"only these of: {', '.join(KINDS)}")
    parser.add_argument(
        "--avoid", nargs="+", default=[], choices=[each.name for each in POINTS], metavar="POINT", help="not there"
    )
    parser.add_argument("--faketime", type=Path, metavar="LIBRARY", help="libfaketimeMT.so.1, for clocks that jump")
    parser.add_argument("--disk-mib", type=int, default=0, metavar="N", help="store on a file system of this size, to fill it")
    parser.add_argument("--no-keys", action="store_true", help="a server that asks nobody for a key")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="further settings of the run")
    options = parser.parse_args()
    kinds = {cast(Kind, kind): KINDS[cast(Kind, kind)] for kind in options.kinds} if options.kinds else None
    campaign = Campaign(
        seed=options.seed,
        minutes=options.minutes,
        folder=options.folder.resolve(),
        every_s=options.every,
        at_once=options.at_once,
        least=options.least,
        most=options.most,
        kinds=kinds,
        avoid=tuple(options.avoid),
        settings=(*(["nats.embedded_keys=false"] if options.no_keys else []), *options.set),
        faketime=options.faketime,
        disk_bytes=options.disk_mib * 2**20,
    )
    start_logging("chaos", "0", "error")
    result = asyncio.run(carry_out(campaign, lambda line: print(line, flush=True)))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(rendered(result))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
