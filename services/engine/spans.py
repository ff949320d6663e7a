"""Version spans: which tokens of one generation were sampled under which weights."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.trajectory import VersionSpan


def spans_of(versions: Iterable[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    """Run-length encode one `(version, incarnation)` per token. `[(3,0),(3,0),(4,0)]` → `[0,2)@3, [2,3)@4`."""
    spans: list[VersionSpan] = []
    for position, (version, incarnation) in enumerate(versions):
        if spans and (spans[-1].version, spans[-1].incarnation) == (version, incarnation):
            spans[-1] = VersionSpan(spans[-1].start, position + 1, version, incarnation)
        else:
            spans.append(VersionSpan(position, position + 1, version, incarnation))
    return tuple(spans)


def check_cover(spans: tuple[VersionSpan, ...], length: int) -> tuple[VersionSpan, ...]:
    """`spans` unchanged if they tile `[0, length)` in order; raises `ValueError` otherwise (no token without a version)."""
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            raise ValueError(f"version spans {spans} must tile [0, {length}) without a hole or an overlap")
        position = span.end
    if position != length:
        raise ValueError(f"version spans {spans} must cover exactly {length} tokens")
    return spans
