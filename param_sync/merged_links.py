"""Merged patches in the store. They are named only in orders; the object's own name and header say the rest after a restart."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from param_sync.patch.container import decode_header
from schemas.policy import WeightsManifest
from schemas.training import ObjectRef
from services import blobs
from services.bus import Bus
from services.ownership import Ownership

_NAME = re.compile(r"merged-(\d+)-(\d+)-(\d+)-([0-9a-f]{16})")


def name_of(link: WeightsManifest) -> str:
    """What a merged link and its object are called."""
    return f"merged-{link.incarnation}-{link.base_version}-{link.version}-{link.digest[:16]}"


async def store(bus: Bus, ownership: Ownership, data: bytes) -> WeightsManifest:
    """Store a merged patch; gives the link that it is. One that is there already is taken as it is."""
    header, _ = decode_header(data)
    link = WeightsManifest(
        run=bus.run,
        version=header.version,
        incarnation=header.incarnation,
        digest=header.digest,
        form="patch",
        base_version=-1 if header.base_version is None else header.base_version,
        base_digest=header.base_digest or "",
        objects=(),
        step=header.version - 1,
    )
    await ownership.confirm()
    reference = await blobs.find(bus, name_of(link)) or await blobs.put(bus, name_of(link), data)
    return _with(link, reference)


async def found(bus: Bus, links: Collection[WeightsManifest], stored: Collection[str]) -> list[WeightsManifest]:
    """The merged links whose objects an owner before us left in the store; `links`: everything that was published."""
    digests = {(link.incarnation, link.base_version): link.base_digest for link in links if link.form == "patch"}
    digests |= {(link.incarnation, link.version): link.digest for link in links}
    made = []
    for name in sorted(stored):
        if (match := _NAME.fullmatch(name)) is None:
            continue
        incarnation, base, version = (int(number) for number in match.groups()[:3])
        before, digest = digests.get((incarnation, base)), digests.get((incarnation, version), "")
        reference = await blobs.find(bus, name) if before and digest.startswith(match[4]) else None
        if before is None or reference is None:
            continue
        link = WeightsManifest(
            run=bus.run,
            version=version,
            incarnation=incarnation,
            digest=digest,
            form="patch",
            base_version=base,
            base_digest=before,
            objects=(),
            step=version - 1,
        )
        made.append(_with(link, reference))
    return made


def _with(link: WeightsManifest, reference: ObjectRef) -> WeightsManifest:
    return msgspec.structs.replace(link, objects=(reference,))
