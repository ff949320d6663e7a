"""`headrace status`: a table of services with what they wait for, one of engines with their versions, group counts, alarms;
who is missing, and which streams are full."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from schemas.codec import CodecError, decode_any
from schemas.health import ALARM, Heartbeat, Wait
from schemas.message import Message
from schemas.permissions import visible_streams
from schemas.policy import EngineState, FleetVersions
from schemas.table import STREAMS, Role, Stream
from services.bus import Bus, BusError, IntegrityError, Item
from services.config import Config
from services.consume import read_events
from services.continuity import Hole
from services.health import RAISE_LIMIT
from services.high_water import cut_short
from services.outages import GoneNote, utc
from services.pull import Damaged
from services.registry import instances
from services.runtime import connect
from services.stopped_run import has_ended
from services.summary import groups_line
from services.tally import Tally

_CONNECT_S = 5.0
_NEARLY_FULL = 0.95
_COUNTED = (Stream.TASKS, Stream.READY, Stream.LEDGER)


async def show(config: Config, folder: Path | None = None) -> int:
    """Print the state of a run. Raises `BusError` when there is no server or no such run, unless its folder has ended."""
    console = Console(highlight=False, emoji=False)
    bounded = config.nats.model_copy(update={"connect_timeout_s": min(_CONNECT_S, config.nats.connect_timeout_s)})
    try:
        bus = await connect(config.model_copy(update={"nats": bounded}), Role.OBSERVER, f"status-{os.getpid()}")
    except BusError as error:
        if folder is None or not has_ended(folder):
            raise _since_when(error, folder) from error
        console.print(ended(config.run.name, folder), soft_wrap=True)
        return 0
    try:
        try:
            latest = [message for _, message in await _readable(bus, Stream.REGISTRY)]
        except BusError as error:
            raise BusError(
                f"no run {bus.run!r} on {config.nats.url} ({error}); is run.name right? `headrace provision` makes its streams"
            ) from error
        tally = Tally()
        for stream in _COUNTED:
            for item, message in await _readable(bus, stream):
                tally.add(message, item.time_ns)
        fleet = await _fleet(bus)
        dead = await bus.last_sequence(Stream.DEAD)
        shorter = await cut_short(bus)
        rooms = await full_lines(bus)
    finally:
        await bus.close()
    now_ns = time.time_ns()
    beats = [beat for beat in latest if isinstance(beat, Heartbeat)]
    console.print(services_table(beats, now_ns, 4 * config.telemetry.heartbeat_s))
    console.print(engines_table([state for state in latest if isinstance(state, EngineState)], now_ns))
    if fleet is not None:
        vector = " ".join(f"{name}:{version}" for name, version in sorted(fleet.engines.items()))
        console.print(
            f"target version {fleet.target}, engines serve {fleet.oldest} to {fleet.newest} ({vector})", soft_wrap=True
        )
    console.print(f"groups: {groups_line(tally)}", soft_wrap=True)
    absent = missing({role for role, _ in instances(config)}, beats, now_ns, 4 * config.telemetry.heartbeat_s)
    for line in [*absent, *rooms, *alarms(beats, bus.alarms), *(f"alarm: {hole}" for hole in shorter)]:
        console.print(line, soft_wrap=True)
    if dead:
        console.print(f"dead letters: {dead}; `headrace dead-letters list` shows them", soft_wrap=True)
    return 0


def _since_when(error: BusError, folder: Path | None) -> BusError:
    """The same error with what the run's own folder knows of an outage."""
    since_ns = GoneNote(folder).since_ns() if folder is not None else None
    if since_ns is None:
        return error
    rest = "services hold what they have, lease nothing, and go on when it is back"
    return BusError(f"{error}; the run has missed it since {utc(since_ns)}; {rest}")


async def full_lines(bus: Bus) -> list[str]:
    """One line for each stream of which little is left, with its limit and when it took its last item."""
    lines = []
    for spec in STREAMS:
        if spec.stream in visible_streams(bus.role) and spec.discard == "new":
            name = bus.subjects.stream(spec.stream)
            reply = await bus.request(f"STREAM.INFO.{name}", {})
            held, limit = int(reply["state"]["bytes"]), int(reply["config"].get("max_bytes", -1))
            if limit > 0 and held >= _NEARLY_FULL * limit:
                last = f"its last item came {reply['state']['last_ts'].partition('.')[0]}Z"
                lines.append(f"full: {name} holds {held} bytes of max_bytes {limit}; {last}; {RAISE_LIMIT}")
    return lines


def missing(expected: Iterable[Role], beats: Sequence[Heartbeat], now_ns: int, silent_after_s: float) -> list[str]:
    """One line for each role that nobody works in now."""
    lines = []
    for role in sorted(expected):
        known = sorted((beat for beat in beats if beat.service == role), key=lambda beat: beat.at_ns)
        silent_s = (now_ns - known[-1].at_ns) / 1e9 if known else 0.0
        if not known:
            lines.append(f"missing: {role}: none has announced itself; `headrace run {role}` starts one")
        elif all(beat.phase == "stopped" for beat in known):
            lines.append(
                f"missing: {role}: {known[-1].instance} stopped {seconds(silent_s)} ago; `headrace run {role}` starts one"
            )
        elif silent_s > silent_after_s:
            lines.append(f"missing: {role}: {known[-1].instance} is silent for {seconds(silent_s)}")
    return lines


async def _fleet(bus: Bus) -> FleetVersions | None:
    try:
        item = await bus.last(bus.subjects.active())
        return item.decode(FleetVersions) if item is not None else None
    except (IntegrityError, CodecError):
        bus.alarm("unreadable", subject=bus.subjects.active())
        return None


async def _readable(bus: Bus, stream: Stream) -> list[tuple[Item, Message]]:
    """What a stream holds, as far as it can be read; the rest is the alarms' business."""
    found: list[tuple[Item, Message]] = []
    for event in await read_events(bus, stream):
        if isinstance(event, Damaged):
            bus.alarm("unreadable", subject=event.item.subject, seq=event.item.seq)
        if not isinstance(event, Damaged | Hole):
            try:
                found.append((event, decode_any(event.data)))
            except CodecError:
                bus.alarm("unreadable", subject=event.subject, seq=event.seq)
    return found


def alarms(beats: Sequence[Heartbeat], seen_here: dict[str, int]) -> list[str]:
    """One line for each service that met damage or loss, and one for what this look itself met."""
    lines = []
    for beat in sorted(beats, key=lambda beat: (beat.service, beat.instance)):
        found = {name.removeprefix(ALARM): count for name, count in beat.counters.items() if name.startswith(ALARM) and count}
        if found:
            told = ", ".join(f"{name} {count:g}" for name, count in sorted(found.items()))
            lines.append(f"alarm: {beat.service} {beat.instance}: {told}; see its log")
    if seen_here:
        lines.append(f"alarm: this look: {', '.join(f'{name} {count}' for name, count in sorted(seen_here.items()))}")
    return lines


def ended(run: str, folder: Path) -> str:
    """What the folder of a run that has ended tells of it."""
    file, last = folder / "metrics.jsonl", ""
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        row = json.loads(line)
        if row["kind"] == "step":
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["at_ns"] / 1e9))
            last = f"; its last step was {row['step']}, at {when}"
    look = f"`headrace audit --run-folder {folder}` checks it, `headrace up` goes on with it"
    return f"run {run} has ended{last}; folder {folder}; {look}"


def services_table(beats: Sequence[Heartbeat], now_ns: int, silent_after_s: float) -> Table:
    """Services by name; one that has been silent for longer than `silent_after_s` is marked so."""
    table = Table("service", "instance", "phase", "up", "seen", "loop lag", "waits for", title="services", title_justify="left")
    for beat in sorted(beats, key=lambda beat: (beat.service, beat.instance)):
        silent_s = (now_ns - beat.at_ns) / 1e9
        phase = beat.phase if beat.phase == "stopped" or silent_s <= silent_after_s else f"{beat.phase}? silent"
        waits = "\n".join(wait_text(wait, now_ns) for wait in beat.waits) or "-"
        up_s, lag = (beat.at_ns - beat.started_ns) / 1e9, f"{beat.loop_lag_s * 1e3:.0f} ms"
        table.add_row(beat.service, beat.instance, phase, seconds(up_s), f"{seconds(silent_s)} ago", lag, waits)
    return table


def engines_table(states: Sequence[EngineState], now_ns: int) -> Table:
    table = Table(
        "engine",
        "phase",
        "version",
        "running",
        "waiting",
        "paused",
        "weights come as",
        "generator",
        "error",
        title="engines",
        title_justify="left",
    )
    for state in sorted(states, key=lambda state: state.engine):
        running = f"{state.running}/{state.max_running}"
        paused = f"{state.paused_s * 1e3:.0f} ms, all {seconds(state.paused_total_s)}"
        table.add_row(
            state.engine,
            state.phase,
            str(state.version),
            running,
            str(state.waiting),
            paused,
            state.weight_path or "-",
            state.generator,
            state.error or "-",
        )
    return table


def wait_text(wait: Wait, now_ns: int) -> str:
    """A wait with its culprit, its age, and what happens when."""
    left_s = (wait.deadline_ns - now_ns) / 1e9
    when = f"in {seconds(left_s)}" if left_s > 0 else f"{seconds(-left_s)} overdue"
    return f"{wait.what} from {wait.culprit} for {seconds((now_ns - wait.since_ns) / 1e9)}; {when}: {wait.at_deadline}"


def seconds(value: float) -> str:
    """A duration in the largest two units."""
    whole = max(0, round(value))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} m"
