"""How often the verifier is wrong, on an audit set whose truth is known some other way (oracles, planted failures, people)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from services.intervals import wilson


class AuditCase(msgspec.Struct, frozen=True, kw_only=True):
    """One audited episode: what is true, and what the verifier said (None: it gave no verdict)."""

    truth: bool
    graded: bool | None
    family: str = ""


class ErrorRate(msgspec.Struct, frozen=True, kw_only=True):
    """`errors` of `cases`, with Wilson's 95 % interval; without cases the interval is all of [0, 1]."""

    errors: int
    cases: int
    low: float
    high: float

    @property
    def rate(self) -> float | None:
        return self.errors / self.cases if self.cases else None


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """False positives are among the truly failed, false negatives among the truly solved; the ungraded are in neither."""

    false_positives: ErrorRate
    false_negatives: ErrorRate
    ungraded: ErrorRate  # of all cases


def audit(cases: Iterable[AuditCase]) -> AuditReport:
    """Error rates with their denominators."""
    known = list(cases)
    failed = [case for case in known if not case.truth and case.graded is not None]
    solved = [case for case in known if case.truth and case.graded is not None]
    return AuditReport(
        false_positives=_rate(sum(case.graded is True for case in failed), len(failed)),
        false_negatives=_rate(sum(case.graded is False for case in solved), len(solved)),
        ungraded=_rate(sum(case.graded is None for case in known), len(known)),
    )


def audit_by_family(cases: Iterable[AuditCase]) -> dict[str, AuditReport]:
    """The same for every task family, in order of name."""
    groups: dict[str, list[AuditCase]] = {}
    for case in cases:
        groups.setdefault(case.family, []).append(case)
    return {family: audit(groups[family]) for family in sorted(groups)}


def _rate(errors: int, cases: int) -> ErrorRate:
    low, high = wilson(errors, cases)
    return ErrorRate(errors=errors, cases=cases, low=low, high=high)
