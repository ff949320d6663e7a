"""Who each sandbox of a host belongs to: one per slot, that of its newest attempt."""

from __future__ import annotations

from services.sandbox.refusals import SandboxConflict

_CLOSED_KEPT = 4096  # groups; a holder that wakes up later than so many ends leaves its sandbox to the idle limit


class Owners:
    """Owner labels `<group>/<slot>/<attempt>` by sandbox. A sandbox with another label, or none, belongs to nobody here."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, int]] = {}  # sandbox -> slot, attempt
        self._closed: dict[str, None] = {}  # groups, oldest first

    def admit(self, sandbox_id: str, owner: str) -> tuple[str, ...]:
        """Note a new sandbox; gives those of older attempts at its slot, whose owners are gone.

        Raises `SandboxConflict` if the slot has gone on to a newer attempt, or its group has ended: whoever asks has lost it.
        """
        slot, _, number = owner.rpartition("/")
        if not slot or not number.isascii() or not number.isdigit():
            return ()
        if (group := slot.partition("/")[0]) in self._closed:
            raise SandboxConflict(f"sandbox {sandbox_id}: all episodes of {group} are sealed")
        attempt = int(number)
        same = {name: held for name, (of, held) in self._held.items() if of == slot and name != sandbox_id}
        if newer := [held for held in same.values() if held > attempt]:
            raise SandboxConflict(f"sandbox {sandbox_id}: slot {slot} is in attempt {max(newer)} here, beyond {attempt}")
        self._held[sandbox_id] = (slot, attempt)
        return tuple(name for name, held in same.items() if held < attempt)

    def close(self, group: str) -> tuple[str, ...]:
        """No sandbox is made for this group any more; gives those that there are."""
        self._closed[group] = None
        while len(self._closed) > _CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]
        return tuple(name for name, (slot, _) in self._held.items() if slot.partition("/")[0] == group)

    def drop(self, sandbox_id: str) -> None:
        """The sandbox is gone. Idempotent."""
        self._held.pop(sandbox_id, None)
