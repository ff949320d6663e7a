"""The client side of generation: one turn's tokens from whichever engine delivers them whole."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from uuid import uuid4

import structlog

from rollouter.fleet import Fleet, NoEngine
from rollouter.replies import NoAnswer, Replies, RequestLost
from rollouter.rows import Ids, Sampled, SampleError
from schemas.arrays import Array, ArrayError
from schemas.generation import AbortRequest, GenerateRequest, GenerateResult
from schemas.trajectory import SamplingConfig
from services.bus import Bus, BusError
from services.health import Health

log = structlog.get_logger()
MAX_ISSUES = 8  # times that one turn is issued before its slot is given up
ENGINE_WAIT_S = 900.0
RESTART = "restart"  # why an engine cancelled a turn, where the in-flight mode is to play its episode anew
_PAUSE_S = 0.2
_ABORT_S = 3.0


class GenerationFailed(Exception):
    """No engine delivered this turn; the slot is an infrastructure abort."""


class WeightsReplaced(Exception):
    """The policy changed under an episode whose tokens are to be of one version: its attempt begins anew."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Whose turns these are: `session` keeps an engine's prefix, `group` is what siblings share, `name` is for people.

    `restarts`: a turn that is cancelled with in-flight mode `restart` ends the attempt; else it is only issued again.
    """

    session: str
    group: str
    name: str
    restarts: bool = False


class Generation:
    """Issues turns to engines and takes only whole, consistent answers.

    Consumes: `gen.out.<requester>`. Produces: `gen.req.<engine>`. Waits for: an engine that serves, then for its answer, both
    bounded. On error (time-out, silent engine, error, abort, inconsistent answer): the turn is issued again, to another engine
    if there is one, under a new request id; no token of a lost turn is kept, and an answer that comes late is ignored.
    """

    def __init__(self, bus: Bus, requester: str, timeout_s: float, health: Health) -> None:
        self._bus = bus
        self._requester = requester
        self._timeout_s = timeout_s
        self._health = health
        self._issued: dict[str, str] = {}  # request id -> engine
        self._replies = Replies(bus, "genout-{x}", requester, GenerateResult, lambda result: result.request_id, health)
        self.fleet = Fleet(bus, health, self._engine_gone)

    async def run(self, stop: asyncio.Event) -> None:
        """Receive answers and watch engines until `stop`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._replies.run(stop))
            group.create_task(self.fleet.watch(stop))

    async def sample(self, who: Conversation, prompt: Ids, sampling: SamplingConfig) -> Sampled:
        """The next turn after `prompt` (int32 [P]). Raises `GenerationFailed` or `WeightsReplaced`."""
        avoid: frozenset[str] = frozenset()
        reasons: list[str] = []
        for issue in range(MAX_ISSUES):
            try:
                engine = await self.fleet.engine_for(who.session, who.group, avoid, ENGINE_WAIT_S)
            except NoEngine as error:
                raise GenerationFailed(str(error)) from error
            try:
                return await self._issue(engine, who, prompt, sampling)
            except _Lost as error:
                self._health.count(f"turns_reissued_{error.kind}")
                reasons.append(f"{engine}: {error}")
                log.warning("turn is issued again", session=who.session, engine=engine, kind=error.kind, reason=str(error))
            finally:
                self.fleet.release(engine)
            avoid = avoid | {engine}
            if avoid >= self.fleet.serving().keys():
                avoid = frozenset({engine})
                await asyncio.sleep(_PAUSE_S * (issue + 1))
        raise GenerationFailed(f"{MAX_ISSUES} issues failed; {'; '.join(reasons[-3:])}")

    def wasted(self, tokens: int) -> None:
        """Turns that were kept so far are thrown away after all."""
        self._health.count("tokens_kept", -tokens)
        self._health.count("tokens_wasted", tokens)

    async def _issue(self, engine: str, who: Conversation, prompt: Ids, sampling: SamplingConfig) -> Sampled:
        request = GenerateRequest(
            request_id=f"{who.session}-{uuid4().hex[:12]}",
            requester=self._requester,
            session=who.session,
            prompt_ids=Array.of(prompt),
            sampling=sampling,
            deadline_ns=time.time_ns() + int(self._timeout_s * 1e9),
        )
        self._issued[request.request_id] = engine
        settled = False
        try:
            at_deadline = "the turn is issued to another engine"
            with self._health.waiting(f"tokens of {who.name}", engine, self._timeout_s, at_deadline):
                result = await self._replies.ask(
                    request.request_id,
                    lambda: self._bus.publish(self._bus.subjects.generate(engine), request),
                    self._timeout_s,
                )
            settled = True
        except NoAnswer as error:
            raise _Lost("timeout", str(error)) from error
        except RequestLost as error:
            raise _Lost("engine_gone", str(error)) from error
        finally:
            del self._issued[request.request_id]
            if not settled:
                await self._abort(engine, request.request_id)
        wasted = result.discarded_tokens
        if result.status != "ok" and result.sampled_ids is not None:
            wasted += result.sampled_ids.shape[0]
        self._health.count("tokens_wasted", wasted)
        if result.stop_reason == RESTART and result.status == "aborted" and who.restarts:
            raise WeightsReplaced(f"{engine} changed its weights under {who.name}")
        sampled = sampled_of(result)
        self._health.count("tokens_kept", sampled.ids.shape[0])
        return sampled

    async def _abort(self, engine: str, request_id: str) -> None:
        """A courtesy that spares the engine work; the answer would be ignored anyway, so it may fail."""
        abort = AbortRequest(request_id=request_id, requester=self._requester, reason="the requester no longer waits")
        try:
            async with asyncio.timeout(_ABORT_S):
                await self._bus.publish(self._bus.subjects.generate(engine), abort)
        except (BusError, TimeoutError) as error:
            log.info("abort not delivered", request=request_id, error=repr(error))

    def _engine_gone(self, engine: str, reason: str) -> None:
        for request_id, where in self._issued.items():
            if where == engine:
                self._replies.lose(request_id, reason)


class _Lost(Exception):
    """This issue of the turn brought nothing; `kind` is a counter."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def sampled_of(result: GenerateResult) -> Sampled:
    """A whole and consistent answer. Raises `_Lost` for any other."""
    if result.status != "ok":
        raise _Lost(result.status, result.error or f"status {result.status}")
    if result.finish_reason not in ("stop", "length"):
        raise _Lost("aborted", f"finish reason {result.finish_reason!r}")
    if result.sampled_ids is None or result.logprobs is None:
        raise _Lost("inconsistent", "the answer has no tokens or no log-probabilities")
    try:
        return Sampled(
            ids=result.sampled_ids.of_kind("sampled_ids", "int32", 1),
            logprobs=result.logprobs.of_kind("logprobs", "float32", 1),
            raw_logprobs=None if result.raw_logprobs is None else result.raw_logprobs.of_kind("raw_logprobs", "float32", 1),
            versions=result.versions,
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            engine=result.engine,
            generator=result.generator,
            weight_digest=result.weight_digest,
            cached_prompt_tokens=result.cached_prompt_tokens,
        ).checked()
    except (ArrayError, SampleError) as error:
        raise _Lost("inconsistent", str(error)) from error
