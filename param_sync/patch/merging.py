"""One patch over several versions, for a receiver that is behind: smaller than its links, which change the same elements."""

from __future__ import annotations

from collections.abc import Sequence

from param_sync.patch.bits import Bits
from param_sync.patch.codec import DEFAULT_LIMITS, Limits, check_base
from param_sync.patch.container import Encoded, Header, assemble, decode_header
from param_sync.patch.decoding import TensorPlan, carry_out, check_entry, each, plan_tensor
from param_sync.patch.digest import Entry, state_digest
from param_sync.patch.errors import DigestMismatch, PatchError
from param_sync.patch.snapshot import Snapshot
from param_sync.patch.tensor import TensorEntry, TensorPatch, encode_tensor

Link = tuple[Header, memoryview, dict[str, tuple[TensorEntry, int]]]
"""A patch: its header, its bytes, and each tensor's entry with the offset of its frames."""


def merge(
    base: Snapshot, chain: Sequence[bytes | memoryview], *, level: int = 1, workers: int = 1, limits: Limits = DEFAULT_LIMITS
) -> Encoded:
    """The patch from `base` to where a chain of patches leads, each link verified. `base` is only read.

    Takes memory for one tensor and worker, not for a second state. With both ends at hand, `codec.encode` does the same. Raises
    as `codec.apply` does for each link, and `PatchError` when the chain is empty or holds an anchor.
    """
    links, target = _links(base, chain, limits)

    def one(name: str) -> TensorPatch | None:
        old, plan = base.tensors.get(name), None
        held: Bits | None = old
        for header, view, places in links:
            if name in header.removed:
                held, plan = None, None
            elif name in places:
                plan = plan_tensor(*places[name], view, held, in_place=plan is not None)
                carry_out([plan], 1, ordered=False)
                plan.edits.clear()
                held = Bits(plan.entry.dtype, plan.entry.shape, plan.words)
        return None if held is None else _over(name, old, held, base, plan, level)

    touched = {name for _, _, places in links for name in places}
    parts = each(one, sorted(touched), workers)
    end = links[-1][0]
    return assemble(
        [part for part in parts if part is not None],
        version=end.version,
        incarnation=end.incarnation,
        digest=end.digest,
        base_version=base.version,
        base_digest=base.digest,
        removed=[name for name in base.entries if name not in target],
    )


def _over(name: str, old: Bits | None, new: Bits, base: Snapshot, plan: TensorPlan | None, level: int) -> TensorPatch | None:
    """The tensor's patch from the base, past everything between."""
    if plan is None:
        return None
    before = base.entries[name][2] if name in base.entries else None
    return encode_tensor(name, old, new, old_digest=before, digest=plan.entry.digest, level=level)


def _links(base: Snapshot, chain: Sequence[bytes | memoryview], limits: Limits) -> tuple[list[Link], dict[str, Entry]]:
    """The links, each checked to start where the one before ends, and the entries at the end."""
    links: list[Link] = []
    here = Snapshot(base.version, base.incarnation, {}, dict(base.entries), base.digest)
    for file in chain:
        view = memoryview(file).cast("B")
        header, at = decode_header(view)
        if header.is_anchor:
            raise PatchError(f"version {header.version} is an anchor; merge what comes after it")
        check_base(here, header)
        places = {}
        for entry in header.tensors:
            check_entry(entry, limits.tensor_bytes)
            places[entry.name] = (entry, at)
            at += entry.body_bytes
        entries = {name: entry for name, entry in here.entries.items() if name not in header.removed}
        entries.update({entry.name: (entry.dtype, entry.shape, entry.digest) for entry in header.tensors})
        if state_digest(entries) != header.digest:
            raise DigestMismatch(f"the link to version {header.version} does not give the state that it announces")
        here = Snapshot(header.version, header.incarnation, {}, entries, header.digest)
        links.append((header, view, places))
    if not links:
        raise PatchError("there is nothing to merge")
    return links, dict(here.entries)
