"""A trainer that kills itself with SIGKILL at a named point of a step, `POINT:STEP`, or stops itself with SIGSTOP,
`POINT:STEP:stop`.

Points, in the order of a step: `trained` (before anything is stored), `uploading` (chunks of the weights' object stored, its
meta message not), `stored` (the object is there), `writing` (in the middle of the checkpoint's files), `renamed` (the
checkpoint is there, nothing announced), `announced`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import services.blobs
import trainer.checkpoint
import trainer.service
from trainer.learner import Learner
from trainer.step_log import StepLog


def die() -> None:
    """Here, at once and once."""
    global _fatal
    if _fatal is not None:
        now, _fatal = _fatal, None
        os.kill(os.getpid(), now)


_fatal: signal.Signals | None = signal.SIGKILL


def arm(point: str, step: int) -> None:
    """Wrap the function at whose end, or in whose middle, the process dies."""
    now = {"step": -1}
    train = Learner.train

    def counted(self: Learner, number: int, *rest: Any, **named: Any) -> Any:
        now["step"] = number
        outcome = train(self, number, *rest, **named)
        if point == "trained" and number == step:
            die()
        return outcome

    Learner.train = counted  # type: ignore[method-assign]

    def after(holder: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(holder, name)

        async def wrapped(*given: Any, **named: Any) -> Any:
            result = await function(*given, **named)
            if now["step"] == step:
                die()
            return result

        setattr(holder, name, wrapped)

    if point == "uploading":
        after(services.blobs, "_store_chunks")
    elif point == "stored":
        after(trainer.service, "put_weights")
    elif point == "announced":
        after(StepLog, "announce")
    elif point == "writing":
        sync, calls = trainer.checkpoint._sync, {"n": 0}

        def some(path: Any) -> None:
            sync(path)
            calls["n"] += now["step"] == step
            if calls["n"] == 3:
                die()

        trainer.checkpoint._sync = some
    elif point == "renamed":
        commit = trainer.checkpoint.commit

        def committed(*given: Any, **named: Any) -> Any:
            result = commit(*given, **named)
            if now["step"] == step:
                die()
            return result

        trainer.checkpoint.commit = committed
    else:
        assert point == "trained", point


def arm_at(text: str) -> None:
    """`POINT:STEP` or `POINT:STEP:stop`."""
    global _fatal
    where, number, *how = text.split(":")
    if how == ["stop"]:
        _fatal = signal.SIGSTOP
    arm(where, int(number))
