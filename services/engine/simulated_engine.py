"""A simulated engine, for load tests only: it computes nothing and invents every token and log-probability.

What is real: the contract (versions, modes, digests, aborts, refusals) and the time that things take, from a service model:
one step produces one token for every running sequence and lasts
`step_s + sequence_s * running + prefill_token_s * (prompt tokens newly computed in it)`.
"""

from __future__ import annotations

import asyncio
import heapq
import time
import zlib
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.trajectory import SamplingConfig, VersionSpan
from services.engine.contract import aborted_before_start, checked_request, is_greedy, is_identity, starts_over
from services.engine.protocol import (
    AppliedWeights,
    EngineCapabilities,
    EngineLoad,
    FinishReason,
    Generation,
    Mode,
    WeightState,
    WeightUpdate,
)
from services.engine.simulated_engine_options import SimulatedOptions
from services.engine.simulated_weights import SimulatedWeights
from services.engine.weight_switch import Loaded, WeightSwitch

SESSIONS = 4096  # conversations whose prefix is taken to be cached


@dataclass(eq=False)
class _Turn:
    """One simulated generation; its tokens are only made when it ends."""

    request_id: str
    prompt_size: int
    sampling: SamplingConfig
    session: str
    random: np.random.Generator
    ids: npt.NDArray[np.int32]  # all that it will ever say
    stops: bool
    done: asyncio.Future[Generation]
    cached: int = 0
    began: int = -1  # step at which it started; -1 while it waits
    starts: list[tuple[int, int, int]] = field(default_factory=list)  # (first token, version, incarnation)


class SimulatedEngine:
    """Implements `Engine` without a model."""

    kind = "simulated"

    def __init__(self, options: SimulatedOptions) -> None:
        self._options = options
        self._switch = WeightSwitch(options.drain_timeout_s, options.audit_every)
        self._wake = asyncio.Event()
        self._waiting: deque[_Turn] = deque()
        self._running: dict[str, _Turn] = {}
        self._ends: list[tuple[int, int, _Turn]] = []  # heap of (last step, order, turn)
        self._step = self._order = 0
        self._frozen = False  # no step ends while weights change
        self._debt_s = 0.0  # prefill time to be spent in the next step
        self._sessions: OrderedDict[str, tuple[int, int]] = OrderedDict()  # session → (version, cached tokens)
        self._weights = SimulatedWeights("", False)
        self._loop: asyncio.Task[None] | None = None
        self._queries = self._hits = self._generated = 0

    @property
    def build(self) -> str:
        return "simulated: no model, invented tokens"

    @property
    def capabilities(self) -> EngineCapabilities:
        options = self._options
        return EngineCapabilities(
            max_model_len=options.max_model_len,
            vocab_size=options.vocab_size,
            max_num_seqs=options.max_num_seqs,
            real_tokens=False,
            whole_tensors=self.whole_tensors,
        )

    @property
    def weights(self) -> WeightState:
        return self._switch.state

    async def start(self) -> None:
        if self._loop is not None:
            return
        options = self._options
        self._weights = SimulatedWeights(options.model, options.trust_updates)
        self._switch.verified(options.initial_version, options.initial_incarnation, self._weights.digest())
        self._loop = asyncio.create_task(self._run(), name="simulated-engine")

    async def stop(self) -> None:
        loop, self._loop = self._loop, None
        self._switch.unserviceable("stopped")
        await self._switch.gate.abort_all_waiting()
        self._abort_everything("engine stopped")
        if loop is not None:
            loop.cancel()
            await asyncio.wait([loop])

    async def generate(
        self, request_id: str, prompt_ids: npt.NDArray[np.int32], sampling: SamplingConfig, session: str = ""
    ) -> Generation:
        prompt = checked_request(request_id, prompt_ids, sampling, self.capabilities)
        discarded = 0
        while True:
            async with self._switch.gate.admit(request_id) as admitted:
                if not admitted:
                    return aborted_before_start(request_id, sampling)
                self._switch.check()
                turn = self._turn(request_id, prompt, sampling, session)
                self._waiting.append(turn)
                self._wake.set()
                try:
                    out = await turn.done
                finally:
                    self._forget(turn)
            if not starts_over(out.finish_reason, out.stop_reason, out.ids.size):
                return msgspec.structs.replace(out, discarded_tokens=discarded)
            discarded += out.ids.size

    async def abort(self, request_id: str) -> None:
        if await self._switch.gate.abort_waiting(request_id):
            return
        for turn in [*self._waiting, *self._running.values()]:
            if turn.request_id == request_id:
                self._finish(turn, "abort", "aborted by request")

    async def stage(self, update: WeightUpdate) -> None:
        await self._switch.stage(update, self)

    async def apply(self, update: WeightUpdate, mode: Mode, grace_s: float = 0.0) -> AppliedWeights:
        return await self._switch.apply(update, mode, grace_s, self)

    async def audit(self) -> None:
        await self._switch.audit(self)

    async def weight_digest(self) -> str:
        return self._weights.digest()

    async def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting) + self._switch.gate.outside,
            kv_usage=len(self._running) / self._options.max_num_seqs,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            generated_tokens=self._generated,
        )

    async def _run(self) -> None:
        """Steps while there is work. Waits for: a request, or the end of a weight switch. Stops by cancellation.

        Steps keep their own timetable: one that ends late on a busy machine does not move those after it.
        """
        options, clock = self._options, asyncio.get_running_loop().time
        due_s = clock()
        while True:
            if self._frozen or not (self._waiting or self._running):
                self._wake.clear()
                await self._wake.wait()
                due_s = clock()
                continue
            while self._waiting and len(self._running) < options.max_num_seqs:
                self._admit(self._waiting.popleft())
            debt_s, self._debt_s = self._debt_s, 0.0
            due_s += options.step_s + options.sequence_s * len(self._running) + debt_s
            await asyncio.sleep(max(0.0, due_s - clock()))
            if not self._frozen:  # else the weights change first, and this step's tokens come after them
                self._advance()

    def _advance(self) -> None:
        """One token for everything that runs."""
        self._step += 1
        while self._ends and self._ends[0][0] <= self._step:
            _, _, turn = heapq.heappop(self._ends)
            if not turn.done.done():
                self._finish(turn, "stop" if turn.stops else "length", str(turn.ids[-1]) if turn.stops else "")

    def _turn(self, request_id: str, prompt: npt.NDArray[np.int32], sampling: SamplingConfig, session: str) -> _Turn:
        """Decide what it will say; equal seeds say equal things."""
        options = self._options
        seed = sampling.seed if sampling.seed is not None else zlib.crc32(request_id.encode())
        random = np.random.default_rng([options.seed, seed % 2**32])
        done: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        if options.replies:
            said = np.array(options.replies[int(random.integers(len(options.replies)))], dtype=np.int32)
        else:
            length = int(random.geometric(1.0 / options.mean_tokens)) if sampling.stop_token_ids else sampling.max_tokens
            said = random.integers(0, options.vocab_size, min(length, sampling.max_tokens), dtype=np.int32)
            if sampling.stop_token_ids:
                said = said[~np.isin(said, sampling.stop_token_ids)]
                said = np.append(said, np.int32(sampling.stop_token_ids[0]))
        at = np.flatnonzero(np.isin(said, sampling.stop_token_ids))
        stops = at.size > 0 and int(at[0]) < sampling.max_tokens
        ids = said[: int(at[0]) + 1] if stops else said[: sampling.max_tokens]
        return _Turn(request_id, prompt.size, sampling, session, random, ids, stops, done)

    def _admit(self, turn: _Turn) -> None:
        version, held = self._sessions.get(turn.session, (-1, 0))
        turn.cached = min(turn.prompt_size - 1, held) if turn.session and version == self.weights.version else 0
        self._queries, self._hits = self._queries + turn.prompt_size, self._hits + turn.cached
        self._debt_s += self._options.prefill_token_s * (turn.prompt_size - turn.cached)
        turn.began = self._step
        turn.starts = [(0, self.weights.version, self.weights.incarnation)]
        self._order += 1
        self._running[turn.request_id] = turn
        heapq.heappush(self._ends, (self._step + turn.ids.size, self._order, turn))

    def _finish(self, turn: _Turn, reason: FinishReason, stop_reason: str) -> None:
        count = 0 if turn.began < 0 else min(turn.ids.size, self._step - turn.began)
        if reason != "abort" and turn.session:
            self._sessions[turn.session] = (self.weights.version, turn.prompt_size + count)
            self._sessions.move_to_end(turn.session)
            while len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        self._generated += count
        self._forget(turn)
        if not turn.done.done():
            turn.done.set_result(self._ended(turn, count, reason, stop_reason))

    def _forget(self, turn: _Turn) -> None:
        if self._running.get(turn.request_id) is turn:
            del self._running[turn.request_id]
        elif turn in self._waiting:
            self._waiting.remove(turn)

    def _ended(self, turn: _Turn, count: int, reason: FinishReason, stop_reason: str) -> Generation:
        raw = -turn.random.exponential(1.0, count).astype(np.float32)
        starts = [start for start in turn.starts if start[0] < count]
        ends = [start[0] for start in starts[1:]] + [count]
        greedy, plain = is_greedy(turn.sampling), is_identity(turn.sampling)
        return Generation(
            request_id=turn.request_id,
            ids=turn.ids[:count],
            logprobs=np.zeros(count, dtype=np.float32) if greedy else raw,
            raw_logprobs=None if plain else raw,
            versions=tuple(VersionSpan(s, e, v, i) for (s, v, i), e in zip(starts, ends, strict=True)) if count else (),
            finish_reason=reason,
            stop_reason=stop_reason,
            cached_prompt_tokens=turn.cached,
            weight_digest=self._switch.digests.get((starts[-1][1], starts[-1][2]), "") if starts else "",
        )

    def _abort_everything(self, reason: str) -> int:
        unfinished = [*self._waiting, *self._running.values()]
        for turn in unfinished:
            self._finish(turn, "abort", reason)
        return len(unfinished)

    # -- the backend's side of a weight change ------------------------------------------------------------------------------

    @property
    def whole_tensors(self) -> str:
        return "updates are trusted unseen" if self._options.trust_updates else ""

    async def lay_out(self, update: WeightUpdate) -> None:
        for change in update.changes() if update.changes is not None else ():
            self._weights.stage(change)
            await asyncio.sleep(0)

    async def clear_away(self) -> None:
        self._weights.drop()

    async def read_back(self) -> str:
        return self._weights.digest()

    async def cut(self, reason: str) -> int:
        return self._abort_everything(reason)

    async def freeze(self, mode: Mode) -> None:
        self._frozen = True

    async def write(self, update: WeightUpdate) -> Loaded:
        began = time.monotonic()
        await asyncio.sleep(self._options.load_s)
        tensors, size = self._weights.commit()
        return Loaded(digest=update.digest, tensors=tensors, bytes=size, load_s=time.monotonic() - began)

    async def replace(self, update: WeightUpdate) -> Loaded:
        began = time.monotonic()
        await asyncio.sleep(self._options.load_s)
        count, size = self._weights.replace(update)
        digest = self._weights.digest()
        return Loaded(digest=digest, tensors=count, bytes=size, load_s=time.monotonic() - began)

    async def show(self, update: WeightUpdate, mode: Mode, digest: str) -> None:
        for turn in self._running.values():
            at = self._step - turn.began
            if turn.starts[-1][0] == at:
                turn.starts.pop()  # nothing was sampled under the version that is replaced
            turn.starts.append((at, update.version, update.incarnation))
            if mode == "continue_recompute":
                self._debt_s += self._options.prefill_token_s * (turn.prompt_size + at)

    async def discard(self) -> None:
        self._abort_everything("weights rejected")

    async def thaw(self) -> None:
        self._frozen = False
        self._wake.set()
