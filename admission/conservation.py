"""Conservation: leased = consumed + quarantined(reason) + abandoned(reason) + open, counted from the streams alone.

A group may be closed once; one that the trainer found lost, and left out of its batch's step, is then abandoned instead of
consumed. Whatever breaks that is listed as a violation with the group's name, never corrected in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, LedgerEntry, QuarantineEntry


@dataclass(frozen=True, slots=True)
class Account:
    """Where every leased training group is. `holds` is true when the sum is exact and nothing is violated."""

    leased: int
    consumed: int
    quarantined: dict[str, int]
    abandoned: dict[str, int]
    open: tuple[str, ...]
    violations: tuple[str, ...]

    @property
    def holds(self) -> bool:
        closed = self.consumed + sum(self.quarantined.values()) + sum(self.abandoned.values())
        return not self.violations and self.leased == closed + len(self.open)

    def line(self) -> str:
        """One line for a report."""
        quarantined = ", ".join(f"{reason} {n}" for reason, n in sorted(self.quarantined.items())) or "none"
        abandoned = ", ".join(f"{reason} {n}" for reason, n in sorted(self.abandoned.items())) or "none"
        return (
            f"leased {self.leased} = consumed {self.consumed} + quarantined ({quarantined}) + abandoned ({abandoned})"
            f" + open {len(self.open)}{'' if self.holds else '; VIOLATED: ' + '; '.join(self.violations)}"
        )


def account(leases: Iterable[GroupLease], ledger: Iterable[LedgerEntry]) -> Account:
    """The account of all training groups. Evaluation groups are never consumed and are not part of it."""
    leased: dict[str, GroupLease] = {}
    violations: list[str] = []
    for lease in leases:
        if lease.group in leased and leased[lease.group] != lease:
            violations.append(f"{lease.group} is leased twice, differently")
        if lease.purpose == "train":
            leased[lease.group] = lease
    closed: dict[str, str] = {}
    steps: dict[int, BatchEntry] = {}

    def close(group: str, how: str) -> None:
        if group not in leased:
            violations.append(f"{group} is closed ({how}) but was never leased for training")
        elif group in closed:
            violations.append(f"{group} is closed twice: {closed[group]}, {how}")
        closed.setdefault(group, how)

    for entry in ledger:
        if isinstance(entry, BatchEntry):
            if entry.step in steps:
                violations.append(f"step {entry.step} has two batches")
            steps[entry.step] = entry
            for member in entry.groups:
                close(member.group, f"consumed by step {entry.step}")
                if member.lag > entry.max_lag:
                    violations.append(f"{member.group} entered step {entry.step} with lag {member.lag} > {entry.max_lag}")
        elif isinstance(entry, QuarantineEntry):
            close(entry.group, f"quarantined: {entry.reason}")
        elif isinstance(entry, AbandonEntry):
            how = f"abandoned: {entry.reason}"
            if isinstance(entry.step, int) and closed.get(entry.group) == f"consumed by step {entry.step}":
                closed[entry.group] = how
            elif isinstance(entry.step, int):
                violations.append(f"{entry.group} is taken out of batch {entry.step}, which does not hold it")
            else:
                close(entry.group, how)
    ways = Counter(how for group, how in closed.items() if group in leased)
    return Account(
        leased=len(leased),
        consumed=sum(n for how, n in ways.items() if how.startswith("consumed")),
        quarantined=_reasons(ways, "quarantined: "),
        abandoned=_reasons(ways, "abandoned: "),
        open=tuple(group for group in leased if group not in closed),
        violations=tuple(violations),
    )


def _reasons(ways: Counter[str], prefix: str) -> dict[str, int]:
    return {how.removeprefix(prefix): n for how, n in ways.items() if how.startswith(prefix)}
