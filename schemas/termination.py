"""Why an episode ended, and what that means for its reward (invariant 6: censored is not failed)."""

from __future__ import annotations

from enum import StrEnum


class Termination(StrEnum):
    """The first five carry a reward; the last six are censored: they have none, and none is ever invented."""

    AGENT_FINISH = "agent_finish"
    AGENT_ABSTAIN = "agent_abstain"
    TERMINAL_SUCCESS = "terminal_success"
    TERMINAL_FAILURE = "terminal_failure"
    TASK_BUDGET = "task_budget"
    STEP_TRUNCATION = "step_truncation"
    TOKEN_TRUNCATION = "token_truncation"
    TOOL_TIMEOUT = "tool_timeout"
    INFRA_ABORT = "infra_abort"
    SCHEDULER_CANCEL = "scheduler_cancel"
    POISON = "poison"  # took down one rollouter after the other


CENSORED = frozenset(
    {
        Termination.STEP_TRUNCATION,
        Termination.TOKEN_TRUNCATION,
        Termination.TOOL_TIMEOUT,
        Termination.INFRA_ABORT,
        Termination.SCHEDULER_CANCEL,
        Termination.POISON,
    }
)
RETRYABLE = frozenset({Termination.INFRA_ABORT, Termination.SCHEDULER_CANCEL})
UNPLAYED = RETRYABLE | {Termination.POISON}  # a group with such a sibling is abandoned


def is_censored(code: Termination) -> bool:
    """True when an episode that ended so has no reward."""
    return code in CENSORED
