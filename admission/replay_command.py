"""`headrace replay`: decide a recording again, ask it what would have happened, or publish it again."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from admission.republish import run_republish
from admission.verify import AdmissionCheck, BankCheck, verify_admission, verify_bank
from admission.what_if_command import run_what_if
from schemas.message import Message
from services.recording_reader import RecordingReader

EXIT_SAME, EXIT_DIFFERENT = 0, 1


def run_replay(options: argparse.Namespace) -> int:
    """Carry the command out; gives the exit code. Raises `RecordingError` for a file that is no whole recording."""
    with RecordingReader(options.file) as reader:
        if options.into or options.breaks:
            return run_republish(reader, options)
        if options.set or options.sweep:
            return run_what_if(reader, options)
        return _verify(reader, options)


def _verify(reader: RecordingReader, options: argparse.Namespace) -> int:
    begun = time.monotonic()
    with collected_once():
        admitted = verify_admission(reader)
        banked = verify_bank(reader)
    seconds = time.monotonic() - begun
    console = Console(highlight=False, markup=False, emoji=False)
    for line in report(reader, banked, admitted, seconds):
        console.print(line, soft_wrap=True)
    same = banked.difference is None and admitted.difference is None
    if options.json:
        Path(options.json).write_text(json.dumps(as_json(banked, admitted, seconds), indent=1) + "\n", encoding="utf-8")
    return EXIT_SAME if same else EXIT_DIFFERENT


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


def report(reader: RecordingReader, banked: BankCheck, admitted: AdmissionCheck, seconds: float) -> list[str]:
    """What came out, in aligned lines; a difference with what it was decided from."""
    made = reader.manifest
    lines = [
        f"recording  run {made.run}, {'with' if made.bodies else 'without'} bodies, {made.asked}, by headrace {made.headrace}"
    ]
    if made.generated:
        lines.append("           GENERATED: no run made it")
    unchecked = f"; {banked.unchecked} not checked, their items are outside of the range" if banked.unchecked else ""
    lines.append(f"bank       {_state(banked.difference)} {banked.groups:>8} ready groups{unchecked}")
    if banked.difference is not None:
        lines += _bank_difference(banked)
    lines.append(f"admission  {_state(admitted.difference)} {admitted.entries:>8} ledger entries")
    for settings in admitted.settings:
        lines.append(
            f"settings   {settings.hash()}  max_lag {settings.max_lag}, versions {settings.versions}, "
            f"zero_variance {settings.zero_variance}, min_rewards {settings.min_rewards}"
        )
    lines += [f"settings   {name}  not found: no settings of this build give this hash" for name in admitted.unknown_settings]
    if admitted.difference is not None:
        lines += _admission_difference(admitted)
    same = banked.difference is None and admitted.difference is None
    every = "every decision whose items were recorded" if banked.unchecked else "every recorded decision"
    verdict = f"{every} comes out again, bit for bit" if same else "a decision comes out otherwise"
    lines.append(f"replay     {verdict}; {seconds:.1f} s")
    return lines


def _state(difference: object) -> str:
    return "same     " if difference is None else "DIFFERENT"


def _bank_difference(banked: BankCheck) -> list[str]:
    found = banked.difference
    assert found is not None
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


def as_json(banked: BankCheck, admitted: AdmissionCheck, seconds: float) -> dict[str, Any]:
    """The same for programs."""
    bank, gates = banked.difference, admitted.difference
    return {
        "same": bank is None and gates is None,
        "seconds": seconds,
        "bank": {
            "groups": banked.groups,
            "unchecked": banked.unchecked,
            "difference": None if bank is None else {"ready_seq": bank.seq, "group": bank.recorded.group, "why": bank.why},
        },
        "admission": {
            "entries": admitted.entries,
            "settings": [msgspec.to_builtins(item) | {"hash": item.hash()} for item in admitted.settings],
            "unknown_settings": list(admitted.unknown_settings),
            "difference": None
            if gates is None
            else {
                "ledger_seq": gates.seq,
                "why": gates.why,
                "recorded": msgspec.to_builtins(gates.recorded),
                "replayed": None if gates.replayed is None else msgspec.to_builtins(gates.replayed),
                "inputs": [{"at": place, "message": msgspec.to_builtins(message)} for place, message in admitted.inputs],
            },
        },
    }
