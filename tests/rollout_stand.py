"""What the rollouter's tests stand on: contexts on a real server, leases, and a scripted engine with the real protocol."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from examples.terminal.suite import suite
from rollouter import service as rollouter_service
from rollouter.chat import ChatRenderer
from rollouter.manifest import policy_manifest
from schemas.actions import Finish
from schemas.arrays import Array
from schemas.attempts import AttemptOpened
from schemas.codec import decode_any
from schemas.generation import AbortRequest, GenerateRequest, GenerateResult
from schemas.lease import GroupLease, group_id
from schemas.policy import EnginePhase, EngineState
from schemas.sandbox import SandboxCleanup, SandboxResult
from schemas.table import Role, Stream
from schemas.trajectory import Episode, SamplingConfig, TurnRecord, Verdict, VersionSpan
from services.bus import Bus, Item
from services.config import Config, check
from services.consume import read_all
from services.health import Health, pause
from services.provision import provision
from services.runtime import Serve, ServiceContext
from services.sandbox import service as sandbox_service
from services.verifier import service as verifier_service
from services.work import WorkConsumer

RENDERER = ChatRenderer(Path("examples/terminal/model"))
TASKS = suite.task_ids("train")
END = RENDERER.token_id("<|end|>")
ASSISTANT = RENDERER.token_id("<|assistant|>")
# Tokens; or `refused`, `error`, `aborted`, `cut` (for new weights) or
# `damaged` for an answer without usable tokens; or None for no answer at all.
Words = Sequence[int] | str | None
Speech = Callable[["Ask"], Words | Awaitable[Words]]


def say(mark: str, text: str = "") -> list[int]:
    """The ids of one well-formed turn."""
    return [RENDERER.token_id(f"<|{mark}|>"), *RENDERER.encode_text(text), END]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request as the script sees it."""

    session: str  # group-slot-attempt
    turn: int
    prompt: list[int]
    request: GenerateRequest

    @property
    def slot(self) -> int:
        return int(self.session.split("-")[1])

    @property
    def attempt(self) -> int:
        return int(self.session.split("-")[2])

    @property
    def group(self) -> str:
        return self.session.split("-")[0]


@dataclass
class ScriptedEngine:
    """The tests' scripted engine: answers real generate requests with the words of its script."""

    name: str
    speech: Speech
    phase: EnginePhase = "serving"
    version: int = 3
    mixed: bool = True  # the version changes within each turn
    mute: bool = False  # sends no heartbeats, as after a crash
    answered: dict[str, list[GenerateResult]] = field(default_factory=dict)  # session -> results in order
    asked: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    async def serve(self, context: ServiceContext) -> None:
        self._bus = context.bus
        requests = WorkConsumer(context.bus, "engine-{x}", x=self.name, capacity=64, drain_s=0.2)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat(context.stop))
            await requests.run(self._on_item, context.stop)

    async def announce(self) -> None:
        state = EngineState(
            run=self._bus.run,
            engine=self.name,
            generator="scripted",
            phase=self.phase,
            version=self.version,
            incarnation=0,
            digest="d",
            at_ns=time.time_ns(),
        )
        await self._bus.publish(self._bus.subjects.engine_heartbeat(self.name), state)

    async def _beat(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            if not self.mute:
                await self.announce()
            await pause(stop, 0.5)

    async def _on_item(self, item: Item) -> None:
        message = decode_any(item.data)
        if isinstance(message, AbortRequest):
            self.aborted.append(message.request_id)
            return
        assert isinstance(message, GenerateRequest)
        self.asked.append(message)
        prompt = message.prompt_ids.of_kind("prompt_ids", "int32", 1).tolist()
        ask = Ask(session=message.session, turn=prompt.count(ASSISTANT) - 1, prompt=prompt, request=message)
        words = self.speech(ask)
        if isinstance(words, Awaitable):
            words = await words
        if words is None:
            return
        result = self._failure(message, words) if isinstance(words, str) else self._result(message, words, ask.turn)
        if not isinstance(words, str):
            self.answered.setdefault(message.session, []).append(result)
        await self._bus.publish(self._bus.subjects.generated(message.requester), result)

    def _failure(self, request: GenerateRequest, status: str) -> GenerateResult:
        if status == "damaged":
            result = self._result(request, [1, 2, END], 0)
            return msgspec.structs.replace(result, logprobs=Array.of(np.full(3, np.nan, dtype=np.float32)))
        if status == "cut":
            result = self._result(request, [1, 2, END], 0)
            return msgspec.structs.replace(result, status="aborted", finish_reason="abort", stop_reason="restart")
        return GenerateResult(
            request_id=request.request_id, engine=self.name, generator="scripted", status=status, error="scripted"
        )  # type: ignore[arg-type]

    def _result(self, request: GenerateRequest, words: Sequence[int], turn: int) -> GenerateResult:
        """Log-probabilities that tell tokens apart, and a version that changes within the turn."""
        ids = list(words)[: request.sampling.max_tokens]
        size = len(ids)
        logprobs = -np.linspace(0.01, 1.0, size, dtype=np.float32) - turn
        cut = size // 2 if self.mixed else size
        spans = [VersionSpan(0, cut, self.version), VersionSpan(cut, size, self.version + 1)]
        return GenerateResult(
            request_id=request.request_id,
            engine=self.name,
            generator="scripted",
            status="ok",
            sampled_ids=Array.of(np.asarray(ids, dtype=np.int32)),
            logprobs=Array.of(logprobs),
            raw_logprobs=Array.of(logprobs - 1),
            versions=tuple(span for span in spans if span.end > span.start),
            finish_reason="stop" if ids[-1] in request.sampling.stop_token_ids else "length",
        )


def configuration(url: str, run: str, **sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": run},
        "nats": {"url": url, "store_bytes": 512 * 2**20},
        "rollout": {"group_size": 4, "generate_timeout_s": 20.0, "sandbox_timeout_s": 30.0},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return check(tree)


def lease(config: Config, ordinal: int, task_id: str, size: int = 4, **changes: Any) -> GroupLease:
    task = suite.task(task_id)
    fields: dict[str, Any] = {
        "run": config.run.name,
        "group": group_id("train", ordinal),
        "ordinal": ordinal,
        "purpose": "train",
        "task_id": task_id,
        "family": task.family,
        "template": task.template,
        "split": "train",
        "group_size": size,
        "manifest": policy_manifest(config, suite).hash(),
        "environment": "terminal",
        "base_snapshot": "",
        "sampling": SamplingConfig(),
        "seed": 7,
    }
    return GroupLease(**{**fields, **changes})


def rival_turn(of: GroupLease, slot: int, attempt: int) -> TurnRecord:
    """A first turn that another rollouter has journalled."""
    return TurnRecord(
        run=of.run,
        group=of.group,
        slot=slot,
        attempt=attempt,
        turn=0,
        task_id=of.task_id,
        manifest=of.manifest,
        prompt_ids=Array("int32", (0,), b""),
        sampled_ids=Array("int32", (0,), b""),
        logprobs=Array("float32", (0,), b""),
        action=Finish(),
    )


@asynccontextmanager
async def context_of(config: Config, role: Role, instance: str) -> AsyncIterator[ServiceContext]:
    """A service's context, without the process around it."""
    bus = await Bus.connect(config.nats.url, config.run.name, role, instance)
    await provision(bus, config.nats.store_bytes)
    try:
        yield ServiceContext(config, bus, role, instance, asyncio.Event(), Health(bus, 2.0))
    finally:
        await bus.close()


@asynccontextmanager
async def serving(config: Config, role: Role, instance: str, serve: Serve) -> AsyncIterator[ServiceContext]:
    """A service that works while the block runs; its error ends the block, and it drains at the block's end."""
    async with context_of(config, role, instance) as context, asyncio.TaskGroup() as group:
        group.create_task(_call(serve, context), name=f"{role}-{instance}")
        try:
            yield context
        finally:
            context.stop.set()


async def _call(serve: Serve, context: ServiceContext) -> None:
    await serve(context)


async def eventually(what: str, check_it: Callable[[], Coroutine[Any, Any, bool]], timeout_s: float = 30.0) -> None:
    """Wait until a condition holds; fails naming it at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not await check_it():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        await asyncio.sleep(0.05)


def oracle_speech(tasks: dict[str, str]) -> Speech:
    """Solves each group's task (`group id -> task id`) with its oracle, then finishes."""

    def speak(ask: Ask) -> list[int]:
        commands = suite.oracle(tasks[ask.group])
        return say("shell", commands[ask.turn]) if ask.turn < len(commands) else say("finish", "done")

    return speak


@pytest.fixture(name="sandbox_root")
def make_sandbox_root() -> Iterator[str]:
    """A folder that a sandbox's own user can reach, unlike pytest's."""
    root = tempfile.mkdtemp(prefix="hr-sbx-")
    os.chmod(root, 0o711)
    yield root
    shutil.rmtree(root, ignore_errors=True)


@asynccontextmanager
async def stand(config: Config, *engines: ScriptedEngine) -> AsyncIterator[ServiceContext]:
    """Engines, sandboxes, a verifier and a rollouter; gives the rollouter's context."""
    async with surroundings(config, *engines), serving(config, Role.ROLLOUTER, "r0", rollouter_service.serve) as context:
        yield context


@asynccontextmanager
async def surroundings(config: Config, *engines: ScriptedEngine) -> AsyncIterator[ServiceContext]:
    """Everything but the rollouter; gives the sandbox service's context."""
    services: list[tuple[Role, str, Serve]] = [(Role.ENGINE, engine.name, engine.serve) for engine in engines]
    services += [(Role.VERIFIER, "v0", verifier_service.serve), (Role.SANDBOX, "x0", sandbox_service.serve)]
    async with AsyncExitStack() as stack:
        contexts = [await stack.enter_async_context(serving(config, *service)) for service in services]
        try:
            yield contexts[-1]
        finally:
            for context in contexts:
                context.stop.set()  # all at once, since none needs another to stop


async def episodes_of(bus: Bus, count: int, timeout_s: float = 40.0) -> list[Episode]:
    async def sealed() -> bool:
        return len(await read_all(bus, Stream.EPISODES, "episode.*.*")) >= count

    await eventually(f"{count} sealed episodes", sealed, timeout_s)
    return [item.decode(Episode) for item in await read_all(bus, Stream.EPISODES, "episode.*.*")]


async def verdicts_of(bus: Bus, count: int, timeout_s: float = 40.0) -> dict[tuple[str, int], Verdict]:
    async def given() -> bool:
        return len(await read_all(bus, Stream.EPISODES, "verdict.*.*")) >= count

    await eventually(f"{count} verdicts", given, timeout_s)
    verdicts = [item.decode(Verdict) for item in await read_all(bus, Stream.EPISODES, "verdict.*.*")]
    return {(v.group, v.slot): v for v in verdicts}


async def turns_of(bus: Bus) -> list[TurnRecord]:
    records = [decode_any(item.data) for item in await read_all(bus, Stream.TURNS)]
    return [record for record in records if isinstance(record, TurnRecord)]


async def lose_sandbox(bus: Bus, ask: Ask) -> None:
    """Remove the sandbox of a conversation behind its rollouter's back."""

    item = await bus.last(bus.subjects.turn(ask.group, ask.slot, ask.attempt, "open"))
    assert item is not None
    opened = item.decode(AttemptOpened)
    requester = f"thief-{ask.session}"
    request = SandboxCleanup(command_id=f"{opened.sandbox}.lost", requester=requester, sandbox=opened.sandbox)
    await bus.publish(bus.subjects.sandbox("cleanup", opened.executor), request)

    async def gone() -> bool:
        answer = await bus.last(bus.subjects.sandbox_result(requester))
        return answer is not None and answer.decode(SandboxResult).status == "ok"

    await eventually("the sandbox's removal", gone)
