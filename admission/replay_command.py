"""`headrace replay`: decide a recording again, ask it what would have happened, or publish it again."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console

from admission.republish import run_republish
from admission.verify import AdmissionCheck, BankCheck, BankDifference, Verified, verify
from admission.what_if_command import run_what_if
from schemas.message import Message
from services.config import ConfigError
from services.recording_reader import RecordingReader
from services.replay_arguments import write_out

EXIT_SAME, EXIT_DIFFERENT = 0, 1
_SHOWN = 20  # entries in part taken from the record; the JSON has all


def run_replay(options: argparse.Namespace) -> int:
    """Carry the command out; gives the exit code. Raises `RecordingError` for a file that is no whole recording, `ConfigError`
    for words that do not go together."""
    ways = {
        "--verify": options.verify,
        "--set and --sweep": bool(options.set or options.sweep),
        "--into and --break": bool(options.into or options.breaks),
    }
    if len(asked := [name for name, given in ways.items() if given]) > 1:
        raise ConfigError(f"{asked[0]} does not go with {asked[1]}; give one of them at a time")
    with RecordingReader(options.file) as reader:
        if options.into or options.breaks:
            return run_republish(reader, options)
        if options.set or options.sweep:
            return run_what_if(reader, options)
        return _verify(reader, options)


def _verify(reader: RecordingReader, options: argparse.Namespace) -> int:
    begun = time.monotonic()
    with collected_once():
        found = verify(reader)
    seconds = time.monotonic() - begun
    console = Console(highlight=False, markup=False, emoji=False)
    for line in report(reader, found, seconds):
        console.print(line, soft_wrap=True)
    if options.json:
        write_out("--json", options.json, json.dumps(as_json(found, seconds), indent=1) + "\n")
    return EXIT_SAME if found.same else EXIT_DIFFERENT


@contextmanager
def collected_once() -> Iterator[None]:
    """Millions of messages that all stay are no garbage; looking through them again and again would take most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def report(reader: RecordingReader, found: Verified, seconds: float) -> list[str]:
    """What came out, in aligned lines; a difference with what it was decided from."""
    made, banked, admitted = reader.manifest, found.bank, found.admission
    lines = [
        f"recording  run {made.run}, {'with' if made.bodies else 'without'} bodies, {made.asked}, by headrace {made.headrace}"
    ]
    if made.generated:
        lines.append("           GENERATED: no run made it")
    lines += [f"gone       {stream} {runs}: the store no longer had them" for stream, runs in found.gone.items()]
    lines.append(f"bank       {_state(banked.difference)} {banked.groups:>8} ready groups{_unchecked(banked)}")
    if banked.difference is not None:
        lines += _bank_difference(banked.difference)
    trusted = f"; {len(admitted.trusted)} in part taken from the record" if admitted.trusted else ""
    lines.append(f"admission  {_state(admitted.difference)} {admitted.entries:>8} ledger entries{trusted}")
    lines += [f"  LEDGER {seq}: {why}" for seq, why in admitted.trusted[:_SHOWN]]
    if len(admitted.trusted) > _SHOWN:
        lines.append(f"  and {len(admitted.trusted) - _SHOWN} more; --json OUT lists all")
    for settings in admitted.settings:
        lines.append(
            f"settings   {settings.hash()}  max_lag {settings.max_lag}, versions {settings.versions}, "
            f"zero_variance {settings.zero_variance}, min_rewards {settings.min_rewards}"
        )
    lines += [f"settings   {name}  not found: no settings of this build give this hash" for name in admitted.unknown_settings]
    if admitted.difference is not None:
        lines += _admission_difference(admitted)
    every = "every recorded decision" if found.whole else "every decision of which the recording holds all that it came from"
    verdict = f"{every} comes out again, bit for bit" if found.same else "a decision comes out otherwise"
    lines.append(f"replay     {verdict}; {seconds:.1f} s")
    return lines


def _unchecked(banked: BankCheck) -> str:
    parts = [f"{banked.lost} not checked, since the store has lost items of theirs"] if banked.lost else []
    parts += [f"{banked.outside} not checked, since the range leaves items of theirs out"] if banked.outside else []
    parts += [f"{banked.unfinished} whole and not in READY yet"] if banked.unfinished else []
    return "".join(f"; {part}" for part in parts)


def _state(difference: object) -> str:
    return "same     " if difference is None else "DIFFERENT"


def _bank_difference(found: BankDifference) -> list[str]:
    lines = [f"  READY {found.seq}: {found.recorded.group}: {found.why}", "  decided from:"]
    lines += [f"    {fact}" for fact in found.inputs]
    return [*lines, *_both(found.recorded, found.replayed)]


def _admission_difference(admitted: AdmissionCheck) -> list[str]:
    found = admitted.difference
    assert found is not None
    lines = [f"  LEDGER {found.seq}: {_name(found.recorded)}: {found.why}", "  decided from:"]
    lines += [f"    {place:<12} {_json(message)}" for place, message in admitted.inputs]
    return [*lines, *_both(found.recorded, found.replayed)]


def _both(recorded: Message, replayed: Message | None) -> list[str]:
    again = "nothing" if replayed is None else _json(replayed)
    return [f"  recorded: {_json(recorded)}", f"  replayed: {again}"]


def _name(entry: Message) -> str:
    step = getattr(entry, "step", None)
    return f"batch {step}" if hasattr(entry, "groups") else f"{getattr(entry, 'group', '')} ({getattr(entry, 'reason', '')})"


def _json(message: Message) -> str:
    return msgspec.json.encode(message).decode()


def as_json(found: Verified, seconds: float) -> dict[str, Any]:
    """The same for programs."""
    bank, gates = found.bank.difference, found.admission.difference
    return {
        "same": found.same,
        "whole": found.whole,
        "seconds": seconds,
        "gone": found.gone,
        "bank": {
            "groups": found.bank.groups,
            "lost": found.bank.lost,
            "outside": found.bank.outside,
            "unfinished": found.bank.unfinished,
            "difference": None if bank is None else {"ready_seq": bank.seq, "group": bank.recorded.group, "why": bank.why},
        },
        "admission": {
            "entries": found.admission.entries,
            "settings": [msgspec.to_builtins(item) | {"hash": item.hash()} for item in found.admission.settings],
            "unknown_settings": list(found.admission.unknown_settings),
            "trusted": [{"ledger_seq": seq, "why": why} for seq, why in found.admission.trusted],
            "difference": None
            if gates is None
            else {
                "ledger_seq": gates.seq,
                "why": gates.why,
                "recorded": msgspec.to_builtins(gates.recorded),
                "replayed": None if gates.replayed is None else msgspec.to_builtins(gates.replayed),
                "inputs": [{"at": place, "message": msgspec.to_builtins(message)} for place, message in found.admission.inputs],
            },
        },
    }
