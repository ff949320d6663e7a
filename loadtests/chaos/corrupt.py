"""A published patch whose bytes rot in the object store before an engine has read them, by a real write there.

The version has an anchor beside its patch, so an engine must refuse the patch, keep what it serves, be led through the anchor,
and return. It may serve nothing under a digest that was not published; at the end `loadtests/chaos/checks.py` looks at that for
all engines. While the patch is being spoiled the engines stand still, so that none has read it before.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

from loadtests.chaos.local_run import LocalRun
from loadtests.chaos.observer import Event, Observer
from loadtests.chaos.processes import Process
from loadtests.chaos.recovery import Recovery
from loadtests.chaos.schedule import service_of
from schemas.policy import EngineState, WeightsManifest


@dataclass
class Spoiled:
    """One damaged patch, and what the engines said since."""

    at_s: float
    manifest: WeightsManifest
    engines: tuple[str, ...]
    refused: dict[str, float] = field(default_factory=dict)  # engine -> when it said so
    serves: dict[str, float] = field(default_factory=dict)  # engine -> since when it serves this version or a newer one
    _all_serve: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: Event) -> None:
        """Listen to engines."""
        if event.words[:2] not in (("policy", "engine"), ("reg", "engine")):
            return
        state = event.message()
        if not isinstance(state, EngineState):
            return
        wanted = (self.manifest.incarnation, self.manifest.version)
        if state.error and state.phase in ("failed", "serving"):  # it may serve on as it was
            self.refused.setdefault(state.engine, event.at_s)
        elif state.phase == "serving" and (state.incarnation, state.version) >= wanted:
            self.serves.setdefault(state.engine, event.at_s)
            if not set(self.engines) - self.serves.keys():
                self._all_serve.set()

    async def outcome(self, within_s: float) -> list[tuple[Recovery, str]]:
        """Wait until every engine serves the version; each engine's time, and whether it met the damage."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self.at_s + within_s):  # the loop's clock is the monotonic one
                await self._all_serve.wait()
        found = []
        for engine in self.engines:
            since, until = self.refused.get(engine), self.serves.get(engine)
            note = "never read it" if since is None else f"refused it after {since - self.at_s:.1f} s"
            unit_s = None if until is None else round(until - self.at_s, 3)
            found.append((Recovery(f"engine-{engine}", started_s=0.0, unit_s=unit_s), note))
        return found


async def spoil_a_patch(run: LocalRun, observer: Observer, within_s: float) -> Spoiled | None:
    """Damage the patch of the next version that gets an anchor; `None` when there was none in time."""
    frozen: list[Process] = []

    def freeze() -> None:
        for label in run.labels():
            process = run.signal(label, signal.SIGSTOP) if service_of(label) == "engine" else None
            frozen.extend([process] if process is not None else [])

    try:
        event = await observer.first(_is_later_anchor, within_s, freeze)
        manifest = None if event is None else await observer.message_at("policy", "staged", event.words[2])
        if event is None or not isinstance(manifest, WeightsManifest) or manifest.form != "patch":
            return None
        engines = tuple(label.removeprefix("engine-") for label in run.labels() if service_of(label) == "engine")
        spoiled = Spoiled(time.monotonic(), manifest, engines)
        observer.listen(spoiled.take)
        await observer.spoil_object(manifest.objects[-1].name)
        return spoiled
    finally:
        for process in frozen:
            process.signal(signal.SIGCONT)


def _is_later_anchor(event: Event) -> bool:
    """An anchor beside a patch; version 0 and the first version of an incarnation come without one."""
    return event.words[:2] == ("policy", "anchor") and event.words[2] != "0"
