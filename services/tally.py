"""What a run's streams add up to: groups, rewards, lag, tokens, versions. Pure; one moment gives one answer.

Every count is taken at the server's time of an item, so that a step's row is the same whether it is made live or a day later.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, QuarantineEntry
from schemas.lineage import Lineage
from schemas.message import Message
from schemas.policy import FleetVersions
from schemas.training import EvalResult, StepCommit
from services.fates import Fates
from services.series import Series


class Tally:
    """A fold over TASKS, READY, LEDGER, TRAIN and `policy.active`. `steps` are those of the line that training stands on."""

    def __init__(self) -> None:
        self.steps: dict[int, StepCommit] = {}
        self.evaluations: dict[str, EvalResult] = {}
        self.fleet: FleetVersions | None = None
        self.quarantined_by: dict[str, int] = {}
        self.abandoned_by: dict[str, int] = {}
        self.fates = Fates()
        self._line = Lineage()
        self._step_times: dict[int, int] = {}
        self._batches: dict[int, BatchEntry] = {}
        self._rewards: dict[str, tuple[float, int]] = {}  # group -> sum and number of rewards
        self._fleets: list[tuple[int, dict[str, int]]] = []
        self._leased, self._ready, self._consumed = Series(), Series(), Series()
        self._quarantined, self._abandoned, self._closed_unready = Series(), Series(), Series()
        self._tokens = Series()

    def add(self, message: Message, time_ns: int) -> None:
        """Take one message in, with the server's time of it."""
        self.fates.add(message, time_ns)
        match message:
            case GroupLease(purpose="train"):
                self._leased.add(time_ns)
            case ReadyGroup():
                self._tokens.add(time_ns, sum(sibling.sampled_tokens for sibling in message.siblings))
                if message.purpose == "train":
                    rewards = [reward for reward in message.rewards() if reward is not None]
                    self._rewards[message.group] = (sum(rewards), len(rewards))
                    self._ready.add(time_ns)
            case BatchEntry():
                self._batches[message.step] = message
                self._consumed.add(time_ns, len(message.groups))
            case QuarantineEntry():
                self.quarantined_by[str(message.reason)] = self.quarantined_by.get(str(message.reason), 0) + 1
                self._quarantined.add(time_ns)
            case AbandonEntry():
                self.abandoned_by[str(message.reason)] = self.abandoned_by.get(str(message.reason), 0) + 1
                self._abandoned.add(time_ns)
                if isinstance(message.step, int):  # lost out of a batch
                    self._consumed.add(time_ns, -1)
                if not message.ready_seq:
                    self._closed_unready.add(time_ns)
            case StepCommit():
                self._step(message, time_ns)
            case EvalResult():
                self.evaluations[message.point] = message
            case FleetVersions():
                self.fleet = message
                self._fleets.append((time_ns, message.engines))

    def _step(self, commit: StepCommit, time_ns: int) -> None:
        """A new incarnation takes the place of the steps from its first on; what a dead branch still says is not counted."""
        if not self._line.add(commit):
            return
        if self._line.began_with(commit):
            for dead in [step for step in self.steps if step > commit.step]:
                del self.steps[dead], self._step_times[dead]
        self.steps[commit.step] = commit
        self._step_times[commit.step] = time_ns

    def groups(self, time_ns: int | None = None) -> dict[str, int]:
        """Training groups: leased = consumed + quarantined + abandoned + open; `ready` is how many of the open are ready."""
        now = (1 << 63) - 1 if time_ns is None else time_ns
        leased, consumed = self._leased.at(now), self._consumed.at(now)
        quarantined, abandoned = self._quarantined.at(now), self._abandoned.at(now)
        return {
            "leased": int(leased),
            "consumed": int(consumed),
            "quarantined": int(quarantined),
            "abandoned": int(abandoned),
            "open": int(leased - consumed - quarantined - abandoned),
            "ready": int(self._ready.at(now) - consumed - quarantined - (abandoned - self._closed_unready.at(now))),
        }

    def step_row(self, step: int) -> dict[str, Any]:
        """Everything that the progress line and `metrics.jsonl` say of a committed step."""
        commit, at = self.steps[step], self._step_times[step]
        first_ns = self._leased.first_ns()
        before = self._step_times.get(step - 1, at if first_ns is None else first_ns)
        elapsed_s = max(1e-9, (at - before) / 1e9)
        batch = [member.group for member in self._batches[step].groups] if step in self._batches else []
        lags = [group.lag for group in self._batches[step].groups] if step in self._batches else []
        sums = [self._rewards[group] for group in commit.groups if group in self._rewards]
        rewarded = sum(count for _, count in sums)
        fleets_before = bisect_right(self._fleets, at, key=lambda fleet: fleet[0])
        return {
            "kind": "step",
            "step": step,
            "version": commit.version,
            "incarnation": commit.incarnation,
            "at_ns": at,
            "reward_mean": sum(total for total, _ in sums) / rewarded if rewarded else None,
            "rewarded": rewarded,
            "groups": self.groups(at),
            **self.fates.row(batch, before if step - 1 in self._step_times else -1, at),
            "lag_mean": sum(lags) / len(lags) if lags else None,
            "lag_max": max(lags, default=None),
            "tokens_per_s": (self._tokens.at(at) - self._tokens.at(before)) / elapsed_s,
            "step_s": elapsed_s,
            "wait_s": commit.wait_s,
            "train_s": commit.train_s,
            "publish_s": commit.publish_s,
            "rows": commit.rows,
            "trained_tokens": commit.trained_tokens,
            "patch_bytes": commit.patch_bytes,
            "engines": self._fleets[fleets_before - 1][1] if fleets_before else {},
            "metrics": commit.metrics,
        }

    def eval_row(self, point: str) -> dict[str, Any]:
        """One evaluation point, both splits apart."""
        result = self.evaluations[point]
        return {
            "kind": "eval",
            "point": point,
            "step": result.step,
            "seconds": result.seconds,
            "splits": {
                score.split: {
                    "successes": score.successes,
                    "attempts": score.attempts,
                    "censored": score.censored,
                    "tasks": score.tasks,
                    "versions": [score.oldest_version, score.newest_version],
                    "by_task": {task: list(counts) for task, counts in score.by_task.items()},
                }
                for score in result.splits
            },
        }

    def train_reward(self, steps: list[int]) -> float | None:
        """Mean training reward over the groups of these steps."""
        sums = [self._rewards[group] for step in steps for group in self.steps[step].groups if group in self._rewards]
        rewarded = sum(count for _, count in sums)
        return sum(total for total, _ in sums) / rewarded if rewarded else None

    def seconds(self) -> float:
        """From the first lease to the last committed step."""
        first = self._leased.first_ns()
        return (max(self._step_times.values()) - first) / 1e9 if first is not None and self._step_times else 0.0
