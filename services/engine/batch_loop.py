"""The scheduler thread of the embedded engine: continuous batching over a slot cache.

Consumes: submitted sequences and calls to run at a token boundary. Produces: finished sequences, through their `done` callback.
Waits for: its mailbox, when nothing runs (no deadline: an idle engine is idle). On error: every sequence fails with it and
the loop ends. On stop: sequences in flight finish as aborted.

One pass of the loop: mailbox → admit → prefill (each prefilled sequence samples one token) → one decode step for all.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from schemas.trajectory import SamplingConfig
from services.engine.causal_model import CausalModel
from services.engine.protocol import EngineError, FinishReason
from services.engine.slot_rows import SlotRows
from services.engine.token_sampler import draw

T = TypeVar("T")
PREFILL_TOKENS = 2048  # padded tokens of one prefill batch


@dataclass(eq=False)
class Sequence:
    """One generation while it runs. `ids` starts as the prompt and grows; `computed` columns of its row hold valid KV."""

    request_id: str
    prompt: npt.NDArray[np.int32]
    sampling: SamplingConfig
    session: str
    done: Callable[[Sequence], None]
    ids: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    pure: bool = True  # all of its KV is of the current weights
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str = ""
    error: BaseException | None = None
    digest: str = ""  # of the weights that sampled the last token
    random: np.random.Generator = field(default_factory=np.random.default_rng)

    def __post_init__(self) -> None:
        self.ids = self.prompt.tolist()
        if self.sampling.seed is not None:
            self.random = np.random.default_rng(self.sampling.seed % 2**64)

    @property
    def sampled(self) -> list[int]:
        return self.ids[self.prompt.size :]

    def take(self, token: int, logprob: float, raw: float, version: tuple[int, int]) -> None:
        """Append one sampled token; sets `finish` when it ends the generation."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.raw_logprobs.append(raw)
        self.versions.append(version)
        if token in self.sampling.stop_token_ids:
            self.finish, self.stop_reason = "stop", str(token)
        elif len(self.logprobs) >= self.sampling.max_tokens:
            self.finish = "length"


class BatchLoop:
    """Owns the model and its cache; everything that touches them runs on its thread."""

    def __init__(self, model: CausalModel, rows: SlotRows, version: tuple[int, int], digest: str) -> None:
        self.model = model
        self.rows = rows
        self.version = version
        self.digest = digest
        self.waiting: deque[Sequence] = deque()
        self.generated_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = self._frozen = self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-batch-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the loop after the current step. Raises `EngineError` if the step does not end in time."""
        self._mailbox.put(self._stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EngineError(f"the batch loop did not stop within {timeout_s} s; a model step is stuck")

    def submit(self, sequence: Sequence) -> None:
        self._post(lambda: self._submit(sequence))

    def abort(self, request_id: str, reason: str) -> None:
        self._post(lambda: self._abort(request_id, reason))

    def at_boundary(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the loop's thread between two steps; its result or exception comes through the future.

        Cancelled before its turn, it does not run; once it runs it cannot be cancelled any more.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # handed to the caller, who owns it
                future.set_exception(error)

        self._post(run)
        return future

    def freeze(self, frozen: bool) -> None:
        """While frozen, mail is read but nothing is computed. Only for work that runs at a boundary."""
        self._frozen = frozen

    def discard_all(self, reason: str) -> int:
        """Finish everything as aborted and forget all KV; how many. Only for work that runs at a boundary."""
        unfinished = [*self.rows.active, *self.waiting]
        for sequence in unfinished:
            self._finish(sequence, "abort", reason)
        self.waiting.clear()
        self.rows.forget_parked()
        return len(unfinished)

    def new_weights(self, version: tuple[int, int], digest: str, recompute: bool) -> None:
        """From now on tokens are sampled under `version`. Only for work that runs at a boundary."""
        self.version, self.digest = version, digest
        self.rows.forget_parked()
        for sequence in self.rows.active:
            sequence.pure = recompute
            if recompute:
                sequence.computed = 0

    def _run(self) -> None:
        with torch.inference_mode():
            try:
                while not self._stopping:
                    self._read_mail()
                    if self._frozen or self._stopping:
                        continue
                    self._admit()
                    self._prefill()
                    while self._admit():  # those that waited for a sibling's prefix
                        self._prefill()
                    self._decode()
            except BaseException as error:  # the model is broken: say so to everyone who waits, then end
                self._failure = error
        self.discard_all("engine stopped")
        self._ended = True
        self._open_late_mail()

    def _read_mail(self) -> None:
        idle = self._frozen or not (self.rows.active or self.waiting)
        while not self._stopping:
            try:
                message = self._mailbox.get(block=idle)
            except queue.Empty:
                return
            message()
            idle = False

    def _post(self, message: Callable[[], None]) -> None:
        self._mailbox.put(message)
        if self._ended:  # set before the thread's last look into the mailbox, so nothing falls between the two
            self._open_late_mail()

    def _open_late_mail(self) -> None:
        """After the end mail is still opened, so that nobody waits for ever; submissions come back aborted or failed."""
        while True:
            try:
                self._mailbox.get_nowait()()
            except queue.Empty:
                return

    def _stop(self) -> None:
        self._stopping = True

    def _submit(self, sequence: Sequence) -> None:
        if self._stopping or self._failure is not None:
            self._finish(sequence, "abort", "engine stopped")
        else:
            self.waiting.append(sequence)

    def _abort(self, request_id: str, reason: str) -> None:
        for sequence in [*self.rows.active, *self.waiting]:
            if sequence.request_id == request_id:
                if sequence in self.waiting:
                    self.waiting.remove(sequence)
                self._finish(sequence, "abort", reason)

    def _admit(self) -> int:
        """Give waiting sequences a row, reusing the KV of a parked or running one with a common prefix; how many got one."""
        before = len(self.rows.active)
        while self.waiting and self.rows.has_room():
            if self.rows.shares_unfinished_prefill(self.waiting[0]):
                break  # its sibling is about to compute the very prefix that it can then copy
            sequence = self.waiting.popleft()
            sequence.cached = sequence.computed = self.rows.place(sequence)
            self.prefix_queries += sequence.prompt.size
            self.prefix_hits += sequence.cached
        return len(self.rows.active) - before

    def _prefill(self) -> None:
        """Bring every sequence that lacks more than its last token up to date, and sample its next token."""
        lacking = sorted((s for s in self.rows.active if len(s.ids) - s.computed > 1), key=lambda s: len(s.ids) - s.computed)
        while lacking:
            batch = [lacking.pop()]  # the longest decides the padded width
            width = len(batch[0].ids) - batch[0].computed
            while (
                lacking
                and (len(batch) + 1) * width <= PREFILL_TOKENS
                and 2 * (len(lacking[-1].ids) - lacking[-1].computed) >= width
            ):
                batch.append(lacking.pop())
            self._step(batch)

    def _decode(self) -> None:
        if self.rows.active:
            self._step(list(self.rows.active))

    def _step(self, batch: list[Sequence]) -> None:
        """One forward over the missing tokens of `batch` and one sampled token each; finished ones leave their row."""
        logits = self.model.next_logits(
            self.rows.cache,
            [self.rows.row_of(s) for s in batch],
            [s.computed for s in batch],
            [s.ids[s.computed :] for s in batch],
        )
        tokens, logprobs, raw = draw(logits, [s.sampling for s in batch], [s.random for s in batch])
        for index, sequence in enumerate(batch):
            sequence.computed = len(sequence.ids)
            sequence.take(int(tokens[index]), float(logprobs[index]), float(raw[index]), self.version)
        self.generated_tokens += len(batch)
        for sequence in batch:
            if sequence.finish is not None:
                self._finish(sequence, sequence.finish, sequence.stop_reason)

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str) -> None:
        sequence.finish, sequence.stop_reason = reason, stop_reason
        sequence.error, sequence.digest = self._failure, self.digest
        self.rows.release(sequence)
        sequence.done(sequence)
