"""Which rank owns which elements of which tensor, and where a tensor that several own is put together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slice:
    """The elements `start` to `start + elements` of a flat tensor, which `rank` owns."""

    name: str
    start: int
    elements: int
    rank: int


def cut(layout: Iterable[tuple[str, int, int]], partition: int) -> Iterator[Slice]:
    """Tensors that lie in one flat buffer, as (name, offset, elements), of which each rank owns `partition` elements."""
    for name, offset, elements in layout:
        at = offset
        while at < offset + elements:
            rank = at // partition
            end = min(offset + elements, (rank + 1) * partition)
            yield Slice(name, at - offset, end - at, rank)
            at = end


def deal(sizes: Iterable[tuple[str, int]], ranks: int) -> Iterator[Slice]:
    """Whole tensors, as (name, elements), to ranks that hold nearly equal amounts: largest first, to the one with the least."""
    held = [0] * ranks
    for name, size in sorted(sizes, key=lambda item: (-item[1], item[0])):
        rank = min(range(ranks), key=lambda index: (held[index], index))
        held[rank] += size
        yield Slice(name, 0, size, rank)


def homes(slices: Sequence[Slice], ranks: int) -> Mapping[str, int]:
    """The rank at which each tensor is whole: its owner, or of several the one that is home to the least."""
    owners: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for part in slices:
        owners.setdefault(part.name, set()).add(part.rank)
        sizes[part.name] = sizes.get(part.name, 0) + part.elements
    held, found = [0] * ranks, dict[str, int]()
    for name in sorted(owners, key=lambda name: (len(owners[name]) > 1, -sizes[name], name)):  # those without a choice first
        found[name] = min(owners[name], key=lambda rank: (held[rank], rank))
        held[found[name]] += sizes[name]
    return found
