"""Error rates of the verifier: the denominators are those of the truth, and intervals hold what they promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.verifier.audit import AuditCase, audit, audit_by_family

pytestmark = pytest.mark.timeout(30)
CASES = st.lists(st.builds(AuditCase, truth=st.booleans(), graded=st.none() | st.booleans(), family=st.sampled_from("ab")))


def test_rates_have_the_denominators_of_the_truth() -> None:
    cases = [AuditCase(truth=False, graded=True)] * 2 + [AuditCase(truth=False, graded=False)] * 18
    cases += (
        [AuditCase(truth=True, graded=False)] + [AuditCase(truth=True, graded=True)] * 9 + [AuditCase(truth=True, graded=None)]
    )
    report = audit(cases)
    assert (report.false_positives.errors, report.false_positives.cases, report.false_positives.rate) == (2, 20, 0.1)
    assert (report.false_negatives.errors, report.false_negatives.cases) == (1, 10)
    assert (report.ungraded.errors, report.ungraded.cases) == (1, 31)
    # Wilson's interval for 2 of 20 at 95 %, from the closed formula.
    assert report.false_positives.low == pytest.approx(0.02787, abs=1e-4)
    assert report.false_positives.high == pytest.approx(0.30103, abs=1e-4)


def test_nothing_audited_proves_nothing() -> None:
    empty = audit([]).false_positives
    assert (empty.rate, empty.low, empty.high) == (None, 0.0, 1.0)


@given(CASES)
def test_rates_lie_in_their_intervals_and_families_add_up(cases: list[AuditCase]) -> None:
    whole, parts = audit(cases), audit_by_family(cases)
    for rate in (whole.false_positives, whole.false_negatives, whole.ungraded):
        middle = rate.low if rate.rate is None else rate.rate
        assert 0.0 <= rate.low <= middle + 1e-12 <= rate.high + 2e-12 <= 1.0 + 3e-12
    assert sum(part.false_positives.errors for part in parts.values()) == whole.false_positives.errors
    assert sum(part.ungraded.cases for part in parts.values()) == len(cases)
