"""What decisions take from the logs beside the messages of READY and TRAIN: when the server stored them, and the manifests
that leases carry.

A replay has all of it before it begins; an admission at work learns it as it reads, and asks the server how far it has come.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import msgspec

from schemas.lease import GroupLease
from schemas.manifest import PolicyManifest


class Background:
    """Times are the server's, in nanoseconds; 0 stands for one that is not known, and nothing is aged by it.

    READY's times are taken never to go back: an entry counts as stored no earlier than those before it.
    """

    def __init__(self) -> None:
        self.manifests: dict[str, PolicyManifest] = {}  # by hash
        self._leased_ns: dict[str, int] = {}
        self._demanded_ns: dict[int, int] = {}
        self._ready_ns: list[int] = []
        self._ready_seqs: list[int] = []
        self._known_until_ns = 0

    @classmethod
    def recorded(
        cls,
        leases: Iterable[tuple[int, GroupLease]],
        ready: Iterable[tuple[int, int]],
        demands: Iterable[tuple[int, int]],
    ) -> Background:
        """Of logs that are there as a whole: leases with their times, and sequences with times of READY and of the demands."""
        known = cls()
        for time_ns, lease in leases:
            known.lease(lease, time_ns)
        for seq, time_ns in ready:
            known.ready(seq, time_ns)
        for seq, time_ns in demands:
            known.demand(seq, time_ns)
        known.is_known_until(1 << 63)
        return known

    def lease(self, lease: GroupLease, time_ns: int) -> None:
        """A training group was leased."""
        self._leased_ns[lease.group] = time_ns
        if not isinstance(lease.policy, msgspec.UnsetType) and lease.manifest not in self.manifests:
            self.manifests[lease.policy.hash()] = lease.policy

    def ready(self, seq: int, time_ns: int) -> None:
        """A training group stands in READY; in the order of the log."""
        self._ready_ns.append(max(time_ns, self._ready_ns[-1]) if self._ready_ns else time_ns)
        self._ready_seqs.append(seq)

    def demand(self, seq: int, time_ns: int) -> None:
        """A demand stands in TRAIN."""
        self._demanded_ns[seq] = time_ns

    def is_known_until(self, time_ns: int) -> None:
        """Every lease of what READY holds has been told, and what READY gets from now on is stored no earlier than this."""
        self._known_until_ns = max(self._known_until_ns, time_ns)

    def demanded_ns(self, demand_seq: int) -> int:
        """When the demand was stored."""
        return self._demanded_ns.get(demand_seq, 0)

    def age_ns(self, group: str, at_ns: int) -> int:
        """From a group's lease until `at_ns`."""
        leased_ns = self._leased_ns.get(group, 0)
        return at_ns - leased_ns if leased_ns else 0

    def last_ready_by(self, time_ns: int) -> int | None:
        """The last READY sequence stored up to this time, 0 for none; `None` while more may come that was."""
        if self._known_until_ns <= time_ns:
            return None
        count = bisect_right(self._ready_ns, time_ns)
        return self._ready_seqs[count - 1] if count else 0
