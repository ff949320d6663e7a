"""What became of every leased training group, and how the trained ones differ from the leased.

A fold over TASKS, READY and LEDGER. Only stored messages count, at the server's times, so the answer for a span of time is the
same whenever it is asked for. A group that the trainer found lost, out of a batch, was not trained on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, QuarantineEntry
from schemas.message import Message
from services.series import Series

ALWAYS = (1 << 63) - 1
UNKNOWN = "unknown"
AXES = ("family", "length", "reward")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a group is counted under: its family, sampled tokens of a sibling, and mean reward, the latter two in buckets."""

    family: str
    length: str = UNKNOWN
    reward: str = UNKNOWN


@dataclass(frozen=True, slots=True, order=True)
class Untrained:
    """Why a group was not trained on, and what it was; `lag` at the decision, `UNKNOWN` where no version was asked of it."""

    reason: str
    family: str
    length: str
    reward: str
    lag: str


class Fates:
    """Groups by name. READY and LEDGER may come before the lease, and in any order to each other."""

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {}
        self.leased_ns: dict[str, int] = {}
        self.ready_ns: dict[str, int] = {}
        self.closed_ns: dict[str, int] = {}
        self._trained: dict[str, tuple[int, int]] = {}  # group -> when, lag
        self._untrained: list[tuple[str, str, int | None]] = []  # group, reason, lag; by time
        self._untrained_ns: list[int] = []
        self._leases, self._whole, self._closed, self._taken = Series(), Series(), Series(), Series()
        self._mix: dict[bool, dict[str, Series]] = {False: defaultdict(Series), True: defaultdict(Series)}  # trained: by family

    def add(self, message: Message, time_ns: int) -> None:
        """Take one message in; other kinds than the three logs hold are passed over."""
        match message:
            case GroupLease(purpose="train"):
                self.leased_ns[message.group] = time_ns
                self._leases.add(time_ns)
                self._mix[False][message.family].add(time_ns)
                self.kinds.setdefault(message.group, Kind(message.family))
            case ReadyGroup(purpose="train"):
                self.ready_ns[message.group] = time_ns
                self._whole.add(time_ns)
                self.kinds[message.group] = kind_of(message)
            case BatchEntry():
                for member in message.groups:
                    self._close(member.group, time_ns, ready=True)
                    self._trained[member.group] = (time_ns, member.lag)
                    self._mix[True][self._family(member.group)].add(time_ns)
            case QuarantineEntry():
                self._close(message.group, time_ns, ready=True)
                self.kinds.setdefault(message.group, Kind(message.family))
                self._give_up(message.group, str(message.reason), message.lag, time_ns)
            case AbandonEntry():
                self.kinds.setdefault(message.group, Kind(message.family))
                if isinstance(message.step, int):  # out of a batch
                    self._mix[True][self._family(message.group)].add(time_ns, -1)
                    self._trained.pop(message.group, None)
                else:
                    self._close(message.group, time_ns, ready=bool(message.ready_seq))
                self._give_up(message.group, str(message.reason), None, time_ns)
            case _:
                pass

    def _close(self, group: str, time_ns: int, *, ready: bool) -> None:
        self.closed_ns[group] = time_ns
        self._closed.add(time_ns)
        if ready:
            self._taken.add(time_ns)

    def _give_up(self, group: str, reason: str, lag: int | None, time_ns: int) -> None:
        self._untrained.append((group, reason, lag))
        self._untrained_ns.append(max(time_ns, self._untrained_ns[-1]) if self._untrained_ns else time_ns)

    def _family(self, group: str) -> str:
        return self.kinds[group].family if group in self.kinds else UNKNOWN

    def untrained(self, after_ns: int = -1, until_ns: int = ALWAYS) -> Counter[Untrained]:
        """What was given up in that time, by all that it is counted under."""
        first, last = bisect_right(self._untrained_ns, after_ns), bisect_right(self._untrained_ns, until_ns)
        found: Counter[Untrained] = Counter()
        for group, reason, lag in self._untrained[first:last]:
            kind = self.kinds[group]
            found[Untrained(reason, kind.family, kind.length, kind.reward, UNKNOWN if lag is None else str(lag))] += 1
        return found

    def mix(self, until_ns: int = ALWAYS) -> dict[str, tuple[int, int]]:
        """Leased and trained groups of each family."""
        families = sorted({*self._mix[False], *self._mix[True]})
        counted = {f: (int(self._mix[False][f].at(until_ns)), int(self._mix[True][f].at(until_ns))) for f in families}
        return {family: counts for family, counts in counted.items() if any(counts)}

    def mix_of_whole(self, axis: str) -> dict[str, tuple[int, int]]:
        """Whole and trained groups by `length` or `reward`, which only whole ones have; of the closed, since the rest waits."""
        whole, trained = Counter[str](), Counter[str]()
        for group in self.ready_ns:
            if group in self.closed_ns:
                whole[getattr(self.kinds[group], axis)] += 1
                trained[getattr(self.kinds[group], axis)] += group in self._trained
        return {name: (whole[name], trained[name]) for name in sorted(whole)}

    def trained(self) -> dict[str, int]:
        """Trained groups with their lag at hand-over."""
        return {group: lag for group, (_, lag) in self._trained.items()}

    def most_ready(self, after_ns: int = -1, until_ns: int = ALWAYS) -> tuple[int, int]:
        """The most ready groups that lay in the bank at once in that time, and when."""
        return self._whole.most(self._taken, after_ns, until_ns)

    def most_open(self) -> tuple[int, int]:
        """The most groups that were open at once, and when."""
        return self._leases.most(self._closed, -1, ALWAYS)

    def bank_waits_s(self, groups: Iterable[str]) -> list[float]:
        """Seconds from readiness to the decision, of those groups that have both."""
        return [seconds(self.ready_ns[g], self.closed_ns[g]) for g in groups if g in self.ready_ns and g in self.closed_ns]

    def makes_s(self, groups: Iterable[str]) -> list[float]:
        """Seconds from the lease to readiness, of those groups that have both."""
        return [seconds(self.leased_ns[g], self.ready_ns[g]) for g in groups if g in self.leased_ns and g in self.ready_ns]

    def row(self, groups: Iterable[str], after_ns: int, until_ns: int) -> dict[str, Any]:
        """What a step's row says: `groups` are those of its batch."""
        waits_s = self.bank_waits_s(groups)
        return {
            "untrained": as_rows(self.untrained(after_ns, until_ns)),
            "bank_wait_s": {"mean": mean(waits_s), "max": max(waits_s, default=None)},
            "bank_depth_max": self.most_ready(after_ns, until_ns)[0],
            "mix_bias": bias(self.mix(until_ns)),
        }


def kind_of(group: ReadyGroup) -> Kind:
    """What a whole group is counted under."""
    rewards = [reward for reward in group.rewards() if reward is not None]
    sampled = [s.sampled_tokens for s in group.siblings]
    return Kind(group.family, length_bucket(mean(sampled) or 0.0), reward_bucket(mean(rewards)))


def length_bucket(tokens: float) -> str:
    """`0`, `1-1`, `2-3`, `4-7`, and so on by powers of two; for the mean sampled tokens of a sibling."""
    if tokens < 1:
        return "0"
    low = 1 << (int(tokens).bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def reward_bucket(reward: float | None) -> str:
    """The mean reward in quarters, `0` and `1` on their own, `none` where every sibling is censored."""
    if reward is None:
        return "none"
    if reward < 0 or reward > 1:
        return "<0" if reward < 0 else ">1"
    if reward in (0, 1):
        return str(int(reward))
    low = int(reward * 4) / 4
    return f"{low:g}-{low + 0.25:g}"


def bias(mix: dict[str, tuple[int, int]]) -> float | None:
    """Half the summed differences of shares, second against first: 0 where both are alike, 1 where nothing is in common.

    `None` while either is empty. This is the total variation distance.
    """
    before, after = sum(a for a, _ in mix.values()), sum(b for _, b in mix.values())
    if not before or not after:
        return None
    return sum(abs(b / after - a / before) for a, b in mix.values()) / 2


def as_rows(counted: Counter[Untrained]) -> list[dict[str, Any]]:
    """One object for each, the most frequent first."""
    ordered = sorted(counted.items(), key=lambda held: (-held[1], held[0]))
    return [{name: getattr(one, name) for name in one.__slots__} | {"groups": n} for one, n in ordered]


def mean(values: list[float] | list[int]) -> float | None:
    return sum(values) / len(values) if values else None


def seconds(begin_ns: int, end_ns: int) -> float:
    """Never negative, whatever two clocks say."""
    return max(0, end_ns - begin_ns) / 1e9
