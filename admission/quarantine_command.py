"""`headrace quarantine`: the groups that were turned away whole, why, and by which numbers; from a recording or a run.

A quarantined group stays where it is: READY has its entry, EPISODES its trajectories, LEDGER the decision. Nothing gives it
back to training: a group is closed once, and its lag only grows. To use such groups, change the setting that refused them;
those leased from then on are decided under it, and `headrace replay --set` says beforehand what that would have done.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from admission import recorded
from admission.explain import OF_GROUP, Question, explain
from admission.explain_command import clock, gather, read, table
from admission.life import Told, Unexplained, told_of_group
from schemas.codec import CodecError, decode_any
from schemas.ledger import QuarantineEntry, QuarantineReason
from schemas.table import Role, Stream
from services.config import Config, ConfigError
from services.recording_reader import RecordingReader
from services.replay_arguments import nearest, write_out
from services.runtime import connect
from services.stopped_run import served

EXIT_OK = 0
Found = tuple[int, int, QuarantineEntry]  # LEDGER sequence, the server's time in ns, entry


def run_quarantine(options: argparse.Namespace, config: Config | None, folder: Path | None) -> int:
    """Carry the command out; gives the exit code. Raises `ConfigError` for words that are wrong, `Unexplained` for a group that
    was not quarantined."""
    if options.action == "show":
        if not options.group:
            raise ConfigError("`headrace quarantine show` needs a group; `headrace quarantine list` shows them")
        told = _told(options, config, folder)
        lines, result = shown(options.group, told)
    else:
        if options.group:
            raise ConfigError(f"`headrace quarantine list` takes no group; write `headrace quarantine show {options.group}`")
        check_reason(options.reason)
        lines, result = listed(_entries(options, config, folder), options.reason, options.family)
    if options.json:
        write_out("--json", options.json, json.dumps(result, indent=1) + "\n")
    console = Console(highlight=False, markup=False, emoji=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    return EXIT_OK


def check_reason(reason: str | None) -> None:
    """Raises `ConfigError` naming the nearest reason."""
    known = [str(one) for one in QuarantineReason]
    if reason and reason not in known:
        raise ConfigError(f"--reason {reason}: {nearest(reason, known)}")


def listed(entries: Iterable[Found], reason: str | None = None, family: str | None = None) -> tuple[list[str], Any]:
    """A line for each group in the ledger's order, and how many of each reason and family; the same for programs."""
    rows = [
        {
            "group": entry.group,
            "reason": str(entry.reason),
            "lag": entry.lag,
            "at_version": entry.at_version,
            "oldest_version": entry.oldest_version,
            "mean_reward": entry.mean_reward,
            "tokens": entry.sampled_tokens,
            "family": entry.family,
            "ledger_seq": seq,
            "at": clock(at),
            "detail": entry.detail,
        }
        for seq, at, entry in entries
        if reason in (None, str(entry.reason)) and family in (None, entry.family)
    ]
    counts = Counter((str(row["reason"]), str(row["family"])) for row in rows)
    lines = table(rows) if rows else []
    lines += ["", *(f"{reason}, {family}: {n}" for (reason, family), n in sorted(counts.items()))] if rows else []
    return [*lines, f"{len(rows)} groups in quarantine"], rows


def shown(group: str, told: list[Told]) -> tuple[list[str], Any]:
    """The decision with its numbers, each trajectory, and whether it can still be read."""
    found = told_of_group(group, told)
    entry = next(((seq, at, e) for seq, at, e in found.decisions if isinstance(e, QuarantineEntry)), None)
    if entry is None:
        life = explain(Question("group", group), lambda names, streams: [t for t in told if t[0] in tuple(streams)])
        raise Unexplained(f"group {group} is not in quarantine: {life.answer}; `headrace quarantine list` shows those that are")
    lines, decision = listed([entry])
    stands = {record.seq: record.digest for stream, record in told if stream is Stream.EPISODES}
    siblings = []
    for s in found.ready[2].siblings_by_slot() if found.ready is not None else ():
        whole = stands.get(s.episode_seq) == s.episode_digest and stands.get(s.verdict_seq) == s.verdict_digest
        siblings.append(
            {
                "slot": s.slot,
                "termination": str(s.termination),
                "status": s.status,
                "reward": s.reward,
                "oldest_version": s.oldest_version,
                "newest_version": s.newest_version,
                "tokens": s.sampled_tokens,
                "turns": s.turns,
                "episode": f"EPISODES {s.episode_seq}",
                "verdict": f"EPISODES {s.verdict_seq}",
                "readable": "yes" if whole else "no: an item is gone",
            }
        )
    lines = [*lines[:-1], "", *(table(siblings) if siblings else ["its ready entry is gone"])]
    return lines, {"decision": decision[0], "siblings": siblings}


def _entries(options: argparse.Namespace, config: Config | None, folder: Path | None) -> list[Found]:
    if config is not None:
        return asyncio.run(_of_run(config, folder))
    with RecordingReader(options.recording) as reader:
        times = {record.seq: record.time_ns for record in reader.records(Stream.LEDGER)}
        return [(seq, times[seq], entry) for seq, entry in recorded.ledger(reader) if isinstance(entry, QuarantineEntry)]


def _told(options: argparse.Namespace, config: Config | None, folder: Path | None) -> list[Told]:
    if config is not None:
        return asyncio.run(_told_of_run(config, folder, options.group))
    with RecordingReader(options.recording) as reader:
        return list(reader.about([options.group], OF_GROUP))


async def _of_run(config: Config, folder: Path | None) -> list[Found]:
    async with served(config, folder) as reachable:
        bus = await connect(reachable, Role.OBSERVER, f"quarantine-{os.getpid()}")
        try:
            told = await read(bus, Stream.LEDGER, "ledger.quarantine.*")
        finally:
            await bus.close()
    out: list[Found] = []
    for _, record in told:
        try:
            entry = decode_any(record.data)
        except CodecError as error:
            raise Unexplained(f"LEDGER {record.seq} ({record.name}) cannot be read: {error}") from error
        if isinstance(entry, QuarantineEntry):
            out.append((record.seq, record.time_ns, entry))
    return out


async def _told_of_run(config: Config, folder: Path | None, group: str) -> list[Told]:
    async with served(config, folder) as reachable:
        bus = await connect(reachable, Role.OBSERVER, f"quarantine-{os.getpid()}")
        try:
            return await gather(bus, Question("group", group))
        finally:
            await bus.close()
