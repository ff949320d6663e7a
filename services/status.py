"""`headrace status`: a table of services with what they wait for, one of engines with their versions, and the group counts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from schemas.codec import decode_any
from schemas.health import Heartbeat, Wait
from schemas.policy import EngineState, FleetVersions
from schemas.table import Role, Stream
from services.bus import BusError
from services.config import Config
from services.consume import read_all, read_latest
from services.runtime import connect
from services.summary import groups_line
from services.tally import Tally

_CONNECT_S = 5.0
_COUNTED = (Stream.TASKS, Stream.READY, Stream.LEDGER)


async def show(config: Config) -> int:
    """Print the state of a run. Raises `BusError` when there is no server or no such run."""
    bounded = config.nats.model_copy(update={"connect_timeout_s": min(_CONNECT_S, config.nats.connect_timeout_s)})
    bus = await connect(config.model_copy(update={"nats": bounded}), Role.OBSERVER, f"status-{os.getpid()}")
    try:
        try:
            latest = [decode_any(item.data) for item in await read_latest(bus, Stream.REGISTRY)]
        except BusError as error:
            raise BusError(f"no run {bus.run!r} on {config.nats.url} ({error}); is run.name right?") from error
        tally = Tally()
        for stream in _COUNTED:
            for item in await read_all(bus, stream):
                tally.add(decode_any(item.data), item.time_ns)
        last = await bus.last(bus.subjects.active())
    finally:
        await bus.close()
    now_ns = time.time_ns()
    console = Console(highlight=False, emoji=False)
    console.print(
        services_table([beat for beat in latest if isinstance(beat, Heartbeat)], now_ns, 4 * config.telemetry.heartbeat_s)
    )
    console.print(engines_table([state for state in latest if isinstance(state, EngineState)], now_ns))
    if last is not None:
        fleet = last.decode(FleetVersions)
        console.print(f"target version {fleet.target}, engines serve {fleet.oldest} to {fleet.newest}", soft_wrap=True)
    console.print(f"groups: {groups_line(tally)}", soft_wrap=True)
    return 0


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
        "engine", "phase", "version", "running", "waiting", "generator", "error", title="engines", title_justify="left"
    )
    for state in sorted(states, key=lambda state: state.engine):
        running = f"{state.running}/{state.max_running}"
        table.add_row(
            state.engine, state.phase, str(state.version), running, str(state.waiting), state.generator, state.error or "-"
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
